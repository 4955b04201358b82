# SPDX-License-Identifier: Apache-2.0
"""The decode step of one layer's indexer in DeepSeek-V4 as an ONNX network with SPIN inside.

    query latent -> projection -> RoPE -> rotation -+
    hidden state -> head weights -------------------+-> SpinIndexer -> slots for the attention
    paged keys, lanes, positions, state ------------+              \\-> the state, in place

The keys of the current tokens are in their pages before the network runs: the compressor that
makes them belongs to the attention, which needs it in prefill, too. One network is one layer,
because between two indexers lies the rest of the model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spin_trtllm.build.checkpoint import IndexerGeometry
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import refuse
from spin_trtllm.hosts.tensorrt.nodes import node_fields
from spin_trtllm.hosts.tensorrt.onnx_graph import Graph, Shape
from spin_trtllm.hosts.tensorrt.onnx_nodes import make_onnx_node
from spin_trtllm.hosts.tensorrt.rope import Rope
from spin_trtllm.hosts.tensorrt.sizes import (
    PAGE_WORDS_PER_SLOT,
    PAGES,
    SEQUENCES,
    TABLE_PAGES,
    IndexerSizes,
    check_elements,
    state_shapes,
)
from spin_trtllm.hosts.tensorrt.weights import IndexerWeights, check_weights

KERNEL_HEADS = (32, 64)
KERNEL_HEAD_DIM = 128

# What the projections are computed in, and what their weights are kept in.
PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "fp32": (torch.float32, torch.float32),
    "fp16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp8": (torch.bfloat16, torch.float8_e4m3fn),
}


def indexer_network(
    weights: IndexerWeights,
    rope: Rope,
    geometry: IndexerGeometry,
    config: SpinConfig,
    sizes: IndexerSizes,
    *,
    precision: str = "bf16",
    rotate: bool = True,
    exact: bool = True,
    aliased: bool = True,
) -> Any:
    """The network of one layer.

    Inputs: `hidden` `[S, R, hidden]` and `query_latent` `[S, R, q_lora_rank]` (the attention's
    normalised query latent), both of the precision's dtype; `pages`, `page_table`, `lanes`,
    `positions`, `sequence_ids` as `SpinIndexer` takes them, and the state (`state_shapes`).
    Outputs: `slots` int32 `[S, R, K]`, ascending, -1 pads; `block_count` int32 `[S]`; the state as
    `<name>_out`, for which the input's own buffer is bound.

    Heads and dimensions that the kernels have and the model has not are zero, which changes no
    score.

    Args:
        weights: of the layer.
        rope: of the model.
        geometry: of the model's indexer.
        config: `top_k` must be settled.
        sizes: what it is made for.
        precision: of `PRECISIONS`; `fp8` keeps the query projection's weights in e4m3, with a
            scale an output, and computes in bf16.
        rotate: whether the cached keys went through a Hadamard rotation, as DeepSeek's own code
            and TensorRT-LLM do before they quantise; Transformers does not.
        exact: products as good as fp32, or fp8 tensor cores where they are quicker.
        aliased: state in place; otherwise the state outputs are copies.

    Returns:
        An ONNX `ModelProto`.

    Raises:
        SpinError: an argument out of range, a model that the kernels do not fit, weights that the
            precision cannot hold, tensors too large for TensorRT, or no `onnx`.
    """
    if precision not in PRECISIONS:
        refuse("precision", precision, ", ".join(PRECISIONS))
    if config.top_k != geometry.top_k:
        refuse("config.top_k", config.top_k, f"{geometry.top_k}, the model's index_topk")
    heads = _kernel_heads(geometry, rope)
    check_weights(weights, geometry, PRECISIONS[precision][0])
    shapes = state_shapes(config, sizes)
    for name, width in (("hidden", weights.heads.shape[1]), ("query", heads * KERNEL_HEAD_DIM)):
        check_elements(name, (sizes.max_sequences, sizes.rows, width))
    graph = Graph(*PRECISIONS[precision])
    fields = node_fields(
        "SpinIndexer",
        config,
        ratio=geometry.ratio,
        slots=sizes.slots,
        layer=weights.layer,
        page_slots=sizes.page_slots,
        exact=exact,
        aliased=aliased,
    )
    rows: Shape = (SEQUENCES, sizes.rows)
    graph.input("hidden", graph.dtype, (*rows, weights.heads.shape[1]))
    graph.input("query_latent", graph.dtype, (*rows, weights.query.shape[2]))
    graph.input("pages", torch.int32, (PAGES, sizes.page_slots * PAGE_WORDS_PER_SLOT))
    graph.input("page_table", torch.int32, (SEQUENCES, TABLE_PAGES))
    graph.input("lanes", torch.int64, (SEQUENCES,))
    graph.input("positions", torch.int64, rows)
    graph.input("sequence_ids", torch.int64, (SEQUENCES,))
    dtypes = _state_dtypes(config)
    for name, shape in shapes.items():
        graph.input(name, dtypes[name], shape)

    scale = _query(graph, weights, rope, heads, rotate)
    _head_weights(graph, weights, heads, scale)
    node, outputs = make_onnx_node(
        "SpinIndexer",
        {name: name for name in ("query", "weights", *graph.input_names[2:])},
        fields,
    )
    graph.nodes.append(node)
    graph.output(outputs["slots"], torch.int32, (*rows, geometry.top_k))
    graph.output(outputs["block_count"], torch.int32, (SEQUENCES,))
    for name, shape in shapes.items():
        graph.output(outputs[name], dtypes[name], shape)
    return graph.model(f"spin_indexer_layer_{weights.layer}")


def _state_dtypes(config: SpinConfig) -> dict[str, torch.dtype]:
    return {
        "v": config.storage_dtype,
        "d": config.storage_dtype,
        "scores": torch.float32,
        "compact_of_block": torch.int32,
        "books": torch.int64,
    }


def _kernel_heads(geometry: IndexerGeometry, rope: Rope) -> int:
    """The number of heads to compute: the model's, filled up to what the kernels have."""
    if geometry.index_heads > KERNEL_HEADS[-1]:
        refuse("index_n_heads", geometry.index_heads, f"at most {KERNEL_HEADS[-1]}")
    if not rope.dim <= geometry.index_head_dim <= KERNEL_HEAD_DIM:
        refuse("index_head_dim", geometry.index_head_dim, f"{rope.dim} .. {KERNEL_HEAD_DIM}")
    return next(heads for heads in KERNEL_HEADS if heads >= geometry.index_heads)


# ---- the parts ----


def _query(graph: Graph, weights: IndexerWeights, rope: Rope, heads: int, rotate: bool) -> float:
    """`query` `[S, R, heads, 128]`: projected, rotated by position and, maybe, by Hadamard.

    The projection's outputs are put in the order plain, even, odd, so that RoPE needs no
    interleaving; one product with a constant restores the order, rotates and fills up to 128.

    Returns:
        What the query has to be multiplied with for its true length.
    """
    head_dim = weights.query.shape[1]
    order, plain, half = _rope_order(head_dim, rope), head_dim - rope.dim, rope.dim // 2
    ordered = weights.query[:, order]
    filled = torch.zeros(heads, head_dim, ordered.shape[2])
    filled[: len(ordered)] = ordered
    matrix = graph.weight("query_projection", filled.flatten(0, 1).T)
    projected = graph.node("MatMul", ["query_latent", matrix], "query_projected")
    by_head = graph.reshape(projected, (0, 0, heads, head_dim), "query_heads")

    cosine, sine = _angles(graph, rope)
    wide = graph.cast(by_head, torch.float32)
    parts = [plain, half, half] if plain else [half, half]
    names = ["query_plain", "query_even", "query_odd"][-len(parts) :]
    graph.split(wide, parts, names)
    turned = {
        "query_even_turned": ("Sub", cosine, sine),
        "query_odd_turned": ("Add", sine, cosine),
    }
    for name, (operation, of_even, of_odd) in turned.items():
        left = graph.node("Mul", ["query_even", of_even], f"{name}_left")
        right = graph.node("Mul", ["query_odd", of_odd], f"{name}_right")
        graph.node(operation, [left, right], name)
    joined = graph.node("Concat", [*names[:-2], *turned], "query_turned", axis=-1)
    narrow = graph.cast(joined, graph.dtype)

    basis, scale = _basis(head_dim, order, rotate)
    rotated = graph.node("MatMul", [narrow, graph.constant("query_basis", basis)], "query_rotated")
    # the kernels quantise to fp8 themselves and know no fp32 query
    graph.cast(rotated, torch.float16 if graph.dtype == torch.float32 else graph.dtype, "query")
    return scale


def _angles(graph: Graph, rope: Rope) -> tuple[str, str]:
    """Cosine and sine of every row's position: fp32 `[S, R, 1, rope_dim / 2]`."""
    position = graph.cast("positions", torch.float32)
    column = graph.node("Unsqueeze", [position, graph.integers((-1, -2))], "position_column")
    frequencies = graph.constant("inverse_frequencies", rope.inverse_frequencies, torch.float32)
    angle = graph.node("Mul", [column, frequencies], "angle")
    both = []
    for operation in ("Cos", "Sin"):
        value = graph.node(operation, [angle], f"angle_{operation.lower()}")
        if rope.scaling != 1.0:
            factor = graph.constant(f"{value}_scaling", torch.tensor(rope.scaling), torch.float32)
            value = graph.node("Mul", [value, factor], f"{value}_scaled")
        both.append(value)
    return both[0], both[1]


def _head_weights(graph: Graph, weights: IndexerWeights, heads: int, query_scale: float) -> None:
    """`weights` fp32 `[S, R, heads]`, all factors of the score included."""
    filled = torch.zeros(heads, weights.heads.shape[1])
    filled[: len(weights.heads)] = weights.heads
    # a tenth of a per cent of the weights, and the scores are proportional to them: never fp8
    matrix = graph.constant("head_projection", filled.T)
    projected = graph.node("MatMul", ["hidden", matrix], "head_weights")
    count, head_dim = weights.query.shape[:2]
    factor = torch.tensor(query_scale * (count * head_dim) ** -0.5)
    scale = graph.constant("score_scale", factor, torch.float32)
    graph.node("Mul", [graph.cast(projected, torch.float32), scale], "weights")


def _rope_order(head_dim: int, rope: Rope) -> Tensor:
    """Dimensions of a head in the order plain, even, odd; the rotated ones are the last."""
    dims = torch.arange(head_dim)
    turned = dims[head_dim - rope.dim :]
    return torch.cat((dims[: head_dim - rope.dim], turned[0::2], turned[1::2]))


def _basis(head_dim: int, order: Tensor, rotate: bool) -> tuple[Tensor, float]:
    """What turns ordered dimensions into those of the cached keys, zeros up to 128.

    A Hadamard matrix is orthogonal but for its length, so its entries are left at a power of two,
    which every precision holds exactly, and the rest of the length is given back: a score is
    proportional to the length of its query.

    Returns:
        `[head_dim, 128]`, and the factor that is left.
    """
    basis = torch.zeros(head_dim, KERNEL_HEAD_DIM)
    if not rotate:
        basis[torch.arange(head_dim), order] = 1.0
        return basis, 1.0
    if head_dim & (head_dim - 1):
        refuse("index_head_dim", head_dim, "a power of two, for a Hadamard rotation")
    entry = 2.0 ** -(head_dim.bit_length() // 2)
    basis[:, :head_dim] = hadamard(head_dim)[order] * entry
    return basis, head_dim**-0.5 / entry


def hadamard(size: int) -> Tensor:
    """Sylvester's Hadamard matrix: fp32 `[size, size]` of 1 and -1; `size` is a power of two."""
    matrix = torch.ones(1, 1)
    for _ in range(int(math.log2(size))):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix
