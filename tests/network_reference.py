# SPDX-License-Identifier: Apache-2.0
"""Runs an indexer network on the CPU: ONNX's own evaluator, with the reference as `SpinIndexer`."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import Tensor

from spin_trtllm import reference
from spin_trtllm.hosts.tensorrt.onnx_nodes import DOMAIN
from spin_trtllm.native import KEY_BYTES
from spin_trtllm.step import SpinStep

HEAD_DIM = 128
EXACT = "exact"  # keys as they are, instead of pages of fp8


def write_pages(keys: Tensor, page_slots: int) -> Tensor:
    """A page cache that holds the keys of one sequence, pages in reverse order.

    Args:
        keys: fp32 `[N, D]`, `D` up to 128.

    Returns:
        int32 `[pages, page_slots * 33]`: of each page e4m3 `[page_slots, 128]`, then fp32 scales.
    """
    count = -(-len(keys) // page_slots)
    filled = torch.zeros(count * page_slots, HEAD_DIM)
    filled[: len(keys), : keys.shape[1]] = keys
    scales = filled.abs().amax(1).clamp(min=1e-6) / 448
    data = (filled / scales[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    planes = (data.view(count, -1), scales.view(count, -1).view(torch.uint8))
    return torch.cat(planes, 1).flip(0).contiguous().view(torch.int32)


def page_table(slots: int, page_slots: int) -> Tensor:
    """Where `write_pages` put them: int32 `[1, pages]`."""
    count = -(-slots // page_slots)
    return torch.arange(count - 1, -1, -1, dtype=torch.int32)[None]


def read_pages(pages: Tensor, table: Tensor, page_slots: int) -> Tensor:
    """Keys of each sequence, fp32 `[S, N, 128]`; byte by byte, as the layout is written down."""
    raw = pages.contiguous().view(torch.uint8).view(len(pages), page_slots * KEY_BYTES)
    found = raw[table.long()]
    data, scales = found.split([page_slots * HEAD_DIM, page_slots * 4], dim=-1)
    keys = data.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (page_slots, HEAD_DIM))
    return (keys * scales.contiguous().view(torch.float32).unsqueeze(-1)).flatten(1, 2)


class NetworkReference:
    """A network of one layer, and the sequences that went through it.

    Args:
        model: an ONNX `ModelProto`.
        step: what stands for the plugin; its state is the network's.
    """

    def __init__(self, model: Any, step: SpinStep) -> None:
        self.step = step
        self.exact_keys: Tensor | None = None  # [S, N, D]: instead of those in the pages
        self.observed: dict[str, Tensor] = {}  # what went into the node last
        self._evaluator = ReferenceEvaluator(model, new_ops=[_spin_indexer(self)])

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name."""
        arrays = {name: _to_numpy(tensor) for name, tensor in inputs.items()}
        names = self._evaluator.output_names
        return {n: torch.as_tensor(v) for n, v in zip(names, self._run(arrays), strict=True)}

    def _run(self, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
        return self._evaluator.run(None, arrays)


def _spin_indexer(network: NetworkReference) -> type[OpRun]:
    class SpinIndexer(OpRun):
        op_domain = DOMAIN

        def _run(self, *inputs: np.ndarray, **fields: Any) -> tuple[np.ndarray, ...]:
            query, weights, pages, table, lanes, positions, ids, *state = map(_to_torch, inputs)
            network.observed = {"query": query, "weights": weights} | fields
            step, keys = network.step, network.exact_keys
            if keys is None:
                query, weights = reference.quantize_query(query, weights)
                keys = read_pages(pages, table, fields["page_slots"])
            else:
                keys = torch.nn.functional.pad(keys, (0, HEAD_DIM - keys.shape[-1]))
            missing = step.state.slots - keys.shape[1]
            keys = torch.nn.functional.pad(keys, (0, 0, 0, missing))
            assert (lanes >= 0).all()
            plan = step.plan([fields["layer"]], ids.tolist(), positions)
            scores = reference.score_slots(
                query.float(),
                keys,
                weights,
                plan.selection.blocks,
                positions,
                ratio=step.ratio,
                block_size_slots=fields["block_size"],
            )
            slots = step.top_k(plan, scores)
            step.defer(plan, scores)
            ascending = slots.masked_fill(slots < 0, 2**31 - 1).sort(-1).values
            ascending[ascending == 2**31 - 1] = -1
            count = plan.selection.blocks.sum(-1, dtype=torch.int32)
            outputs = [ascending, count, *state]
            return tuple(_to_numpy(tensor) for tensor in outputs)

    return SpinIndexer


def graph_without_plugin(model: Any, outputs: dict[str, int]) -> Any:
    """The part of a network before the plugin, with these tensors (by element type) as outputs."""
    part = onnx.ModelProto()
    part.CopyFrom(model)
    kept = [node for node in part.graph.node if node.domain != DOMAIN]
    wanted = [onnx.helper.make_tensor_value_info(n, kind, None) for n, kind in outputs.items()]
    used = {name for node in kept for name in node.input}
    inputs = [value for value in part.graph.input if value.name in used]
    for field, values in (("node", kept), ("output", wanted), ("input", inputs)):
        part.graph.ClearField(field)
        getattr(part.graph, field).extend(values)
    return part


def _to_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _to_torch(array: np.ndarray) -> Tensor:
    if array.dtype.name != "bfloat16":
        return torch.from_numpy(np.array(array))
    return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
