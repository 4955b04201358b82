# SPDX-License-Identifier: Apache-2.0
"""The indexer network against Transformers' own indexer: the same queries, weights and slots."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import network_reference as nr
import onnx
import pytest
import torch
from checkpoints import FLASH, TINY
from tiny_models import CSA_LAYERS, RATIO, TOP_K, random_ids, save_checkpoint, tiny_model
from torch import Tensor
from transformers import DeepseekV4Config, DynamicCache
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as host

from spin_trtllm.build.checkpoint import Checkpoint, IndexerGeometry, read_checkpoint
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.generate import forward
from spin_trtllm.hosts.tensorrt import (
    PRECISIONS,
    IndexerSizes,
    IndexerWeights,
    Rope,
    indexer_network,
    indexer_rope,
    read_indexer_weights,
    state_shapes,
)
from spin_trtllm.hosts.tensorrt.indexer import hadamard
from spin_trtllm.hosts.transformers import enable
from spin_trtllm.state import SpinState
from spin_trtllm.step import SpinStep

PROMPT_TOKENS = 603
STEPS = 24
SLOTS = 192
DENSE = SpinConfig(target_sparsity=0.0, block_size=16, exploration=0.0, top_k=TOP_K)
SPARSE = replace(DENSE, target_sparsity=0.5, exploration=0.1, seed=7)


@dataclass
class Step:
    """What one decode step of one layer took and gave in Transformers."""

    hidden: Tensor
    latent: Tensor
    positions: Tensor
    query: Tensor
    keys: Tensor
    picks: Tensor


@dataclass
class Recording:
    """Decode steps of a model by layer."""

    checkpoint: Checkpoint
    steps: dict[int, list[Step]] = field(default_factory=dict)


def record(model: Any, checkpoint: Path, spin: SpinConfig | None = None) -> Recording:
    """Decode with hooks on every indexer, with SPIN if a configuration is given."""
    recording = Recording(read_checkpoint(checkpoint))
    session = nullcontext() if spin is None else enable(model, spin)
    with session, torch.no_grad():
        handles = []
        for layer in recording.checkpoint.geometry.layers:
            indexer = model.model.layers[layer].self_attn.compressor.indexer
            handles += _hooks(indexer, recording.steps.setdefault(layer, []))
        ids = random_ids(PROMPT_TOKENS + STEPS)
        cache = DynamicCache(config=model.config)
        forward(model, ids[:, :PROMPT_TOKENS], cache)
        for steps in recording.steps.values():
            steps.clear()
        for token in ids[0, PROMPT_TOKENS:]:
            forward(model, token.view(1, 1), cache)
        for handle in handles:
            handle.remove()
    return recording


def _hooks(indexer: Any, steps: list[Step]) -> Iterator[Any]:
    inner: dict[str, Tensor] = {}

    def scoring(module: Any, args: tuple[Tensor, ...]) -> None:
        inner.update(query=args[0], keys=args[1].clone())

    def indexed(module: Any, args: tuple[Tensor, ...], picks: Tensor) -> None:
        hidden, latent, positions = args[:3]
        steps.append(Step(hidden, latent, positions, **inner, picks=picks.clone()))

    # before SPIN takes keys away, and after it has replaced the picks
    yield indexer.scorer.register_forward_pre_hook(scoring, prepend=True)
    yield indexer.register_forward_hook(indexed)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), tiny_model())


@pytest.fixture(scope="module")
def dense(checkpoint: Path) -> Recording:
    return record(tiny_model(), checkpoint)


def rope_of(checkpoint: Checkpoint) -> Rope:
    return indexer_rope(json.loads((checkpoint.path / "config.json").read_text()))


def network_of(
    checkpoint: Checkpoint,
    layer: int,
    config: SpinConfig = DENSE,
    sizes: tuple[int, int] = (2, 1),
    **options: Any,
) -> Any:
    return indexer_network(
        read_indexer_weights(checkpoint, layer),
        rope_of(checkpoint),
        checkpoint.geometry,
        config,
        IndexerSizes(*sizes, SLOTS),
        **options,
    )


def reference_of(model: Any, config: SpinConfig, layer: int) -> nr.NetworkReference:
    state = SpinState([layer], sequences=2, slots=SLOTS)
    return nr.NetworkReference(model, SpinStep(config, state, ratio=RATIO))


def inputs_of(
    step: Step, config: SpinConfig, keys: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """A network's inputs for one recorded step."""
    shapes = state_shapes(config, IndexerSizes(2, step.positions.shape[1], SLOTS))
    dtypes = {"compact_of_block": torch.int32, "books": torch.int64}
    state = {n: torch.zeros(s, dtype=dtypes.get(n, torch.float32)) for n, s in shapes.items()}
    return {
        "hidden": step.hidden.to(dtype),
        "query_latent": step.latent.to(dtype),
        "pages": nr.write_pages(keys, 64),
        "page_table": nr.page_table(len(keys), 64),
        "lanes": torch.tensor([0]),
        "positions": step.positions,
        "sequence_ids": torch.tensor([0]),
    } | state


def rotated(keys: Tensor) -> Tensor:
    size = keys.shape[-1]
    return keys @ hadamard(size) * size**-0.5


def as_sets(slots: Tensor) -> list[set[int]]:
    return [set(row.tolist()) - {-1} for row in slots.flatten(0, -2)]


@pytest.mark.parametrize("layer", CSA_LAYERS)
def test_queries_are_the_hosts(dense: Recording, layer: int) -> None:
    model = network_of(dense.checkpoint, layer, precision="fp32", rotate=False)
    part = nr.graph_without_plugin(model, {"query_rotated": 1, "weights": 1})
    evaluator = nr.ReferenceEvaluator(part)
    scorer = tiny_model().model.layers[layer].self_attn.compressor.indexer.scorer
    for step in dense.steps[layer]:
        feeds = {"hidden": step.hidden, "query_latent": step.latent, "positions": step.positions}
        query, weights = evaluator.run(None, {n: t.numpy() for n, t in feeds.items()})
        expected = scorer.weights_proj(step.hidden).detach() * scorer.weights_scaling
        assert query.shape == (1, 1, 32, 128)
        torch.testing.assert_close(torch.tensor(query[..., :16, :16]), step.query)
        torch.testing.assert_close(torch.tensor(weights[..., :16]), expected * scorer.softmax_scale)
        assert not query[..., 16:, :].any()
        assert not query[..., 16:].any()
        assert not weights[..., 16:].any()


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("layer", CSA_LAYERS)
def test_slots_are_the_hosts(dense: Recording, layer: int, rotate: bool) -> None:
    """Without sparsity and with unquantised keys the slots are Transformers' own, every step."""
    model = network_of(dense.checkpoint, layer, precision="fp32", rotate=rotate)
    network = reference_of(model, DENSE, layer)
    assert len(dense.steps[layer]) == STEPS
    for step in dense.steps[layer]:
        keys = rotated(step.keys) if rotate else step.keys
        network.exact_keys = keys
        found = network.run(inputs_of(step, DENSE, keys[0], torch.float32))
        assert as_sets(found["slots"]) == as_sets(step.picks)
        assert found["block_count"].tolist() == [-(-keys.shape[1] // 16)]
        assert (found["slots"].diff() > 0).all()


def together(steps: list[Step], sequences: int, rows: int) -> Step:
    """Consecutive steps as one: `rows` tokens of each of `sequences` sequences; the last's keys."""

    def stacked(name: str) -> Tensor:
        parts = torch.cat([getattr(step, name) for step in steps])  # [S * R, 1, ...]
        return parts.reshape(sequences, rows, *parts.shape[2:])

    assert len(steps) == sequences * rows
    names = ("hidden", "latent", "positions", "query", "picks")
    return Step(keys=steps[-1].keys, **{name: stacked(name) for name in names})


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("layer", CSA_LAYERS)
def test_several_rows_of_several_sequences_are_the_hosts(
    dense: Recording, layer: int, rotate: bool
) -> None:
    """Every row has its own query, weights, position and slots, as if it came alone."""
    sequences, rows = 2, 3
    steps = dense.steps[layer]
    chosen = [*steps[2:5], *steps[-3:]]  # sequences at different places
    step = together(chosen, sequences, rows)
    model = network_of(
        dense.checkpoint, layer, precision="fp32", rotate=rotate, sizes=(sequences, rows)
    )
    state = SpinState([layer], sequences=sequences, slots=SLOTS)
    network = nr.NetworkReference(model, SpinStep(DENSE, state, ratio=RATIO))
    keys = rotated(step.keys) if rotate else step.keys
    network.exact_keys = keys.expand(sequences, -1, -1)
    found = network.run(
        inputs_of(step, DENSE, keys[0], torch.float32)
        | {
            "lanes": torch.tensor([0, 1]),
            "sequence_ids": torch.tensor([0, 1]),
            "page_table": nr.page_table(keys.shape[1], 64).expand(sequences, -1),
        }
    )
    assert found["slots"].shape == (sequences, rows, TOP_K)
    assert as_sets(found["slots"]) == as_sets(step.picks)
    assert len({frozenset(row) for row in as_sets(found["slots"])}) > 1
    if not rotate:
        part = nr.graph_without_plugin(model, {"query_rotated": 1})
        feeds = {"hidden": step.hidden, "query_latent": step.latent, "positions": step.positions}
        (query,) = nr.ReferenceEvaluator(part).run(None, {n: t.numpy() for n, t in feeds.items()})
        torch.testing.assert_close(torch.tensor(query[..., :16, :16]), step.query)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_a_rotation_of_keys_and_queries_changes_no_score(head_dim: int) -> None:
    generator = torch.Generator().manual_seed(head_dim)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weights = IndexerWeights(3, random(40, head_dim, 24), random(40, 48))
    feeds = {"hidden": random(1, 1, 48), "query_latent": random(1, 1, 24)}
    feeds["positions"] = torch.tensor([[977]])
    keys = random(50, head_dim)
    scores = []
    for rotate in (False, True):
        model = indexer_network(
            weights,
            Rope(torch.tensor([1.0, 0.1, 0.01, 0.001])),
            IndexerGeometry((3,), RATIO, 40, head_dim, TOP_K),
            DENSE,
            IndexerSizes(2, 1, SLOTS),
            precision="fp32",
            rotate=rotate,
        )
        part = nr.graph_without_plugin(model, {"query_rotated": 1, "weights": 1})
        found = nr.ReferenceEvaluator(part).run(None, {n: t.numpy() for n, t in feeds.items()})
        query, factors = map(torch.tensor, found)
        assert query.shape == (1, 1, 64, 128)  # 40 heads, filled up
        assert not query[..., head_dim:].any()
        cached = rotated(keys) if rotate else keys
        dots = (query[0, 0, :, :head_dim] @ cached.T).relu()
        scores.append(factors[0, 0] @ dots)
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-4, atol=1e-4)
    assert scores[0].std() > 0.1


def test_a_scaled_rope_scales_what_it_rotates(dense: Recording) -> None:
    weights = read_indexer_weights(dense.checkpoint, CSA_LAYERS[0])
    step = dense.steps[CSA_LAYERS[0]][-1]
    feeds = {"hidden": step.hidden, "query_latent": step.latent, "positions": step.positions}
    rope = replace(rope_of(dense.checkpoint), scaling=1.5)
    assert rope.dim == 8
    model = indexer_network(
        weights,
        rope,
        dense.checkpoint.geometry,
        DENSE,
        IndexerSizes(2, 1, SLOTS),
        precision="fp32",
        rotate=False,
    )
    part = nr.graph_without_plugin(model, {"query_rotated": 1})
    (found,) = nr.ReferenceEvaluator(part).run(None, {n: t.numpy() for n, t in feeds.items()})
    expected = torch.cat((step.query[..., :8], 1.5 * step.query[..., 8:]), -1)
    torch.testing.assert_close(torch.tensor(found[..., :16, :16]), expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fp8_keys_find_nearly_the_same(dense: Recording, precision: str) -> None:
    layer = CSA_LAYERS[0]
    network = reference_of(network_of(dense.checkpoint, layer, precision=precision), DENSE, layer)
    shared = 0.0
    for step in dense.steps[layer][::4]:
        inputs = inputs_of(step, DENSE, rotated(step.keys)[0], PRECISIONS[precision][0])
        (found,) = as_sets(network.run(inputs)["slots"])
        (expected,) = as_sets(step.picks)
        shared += len(found & expected) / len(expected) / len(dense.steps[layer][::4])
    assert shared > 0.9


@pytest.mark.parametrize("layer", CSA_LAYERS)
def test_with_spin_it_reads_what_the_embedded_host_reads(checkpoint: Path, layer: int) -> None:
    sparse = record(tiny_model(), checkpoint, SPARSE)
    model = network_of(sparse.checkpoint, layer, SPARSE, precision="fp32", rotate=False)
    network = reference_of(model, SPARSE, layer)
    counts = []
    for step in sparse.steps[layer]:
        network.exact_keys = step.keys
        found = network.run(inputs_of(step, SPARSE, step.keys[0], torch.float32))
        assert as_sets(found["slots"]) == as_sets(step.picks)
        counts += found["block_count"].tolist()
    assert counts[0] == 10  # cold: all of them
    assert set(counts[1:]) == {5}


def test_the_trained_model_has_all_its_networks() -> None:
    checkpoint = read_checkpoint(TINY)
    config = replace(DENSE, top_k=checkpoint.geometry.top_k)
    for layer in checkpoint.geometry.layers:
        model = network_of(checkpoint, layer, config)
        onnx.checker.check_model(model)
        (node,) = (node for node in model.graph.node if node.domain == "spin")
        fields = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert (fields["layer"], fields["slots"], fields["top_k"]) == (layer, SLOTS, 64)


def test_the_bytes_of_a_page_are_read_as_written_down() -> None:
    """Independent of `write_pages`: slot 65 of a sequence whose second page is page 3."""
    page = bytearray(64 * 132)
    page[1 * 128 + 5] = 0x38  # 1.0 in e4m3
    page[64 * 128 + 4 : 64 * 128 + 8] = b"\x00\x00\x00\x40"  # 2.0
    pages = torch.zeros(4, 64 * 132, dtype=torch.uint8)
    pages[3] = torch.frombuffer(page, dtype=torch.uint8)
    keys = nr.read_pages(pages.view(torch.int32), torch.tensor([[0, 3]], dtype=torch.int32), 64)
    assert keys.nonzero().tolist() == [[0, 65, 5]]
    assert keys[0, 65, 5] == 2.0


# -- the rotary embedding -------------------------------------------------------------------------

YARN = {
    "type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 65536,
    "beta_fast": 32,
    "beta_slow": 1,
}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"compress_rope_theta": 40000, "qk_rope_head_dim": 32},
        {"rope_scaling": YARN},
        {"rope_scaling": YARN | {"factor": 4, "beta_fast": 20}},
        {"rope_scaling": YARN | {"attention_factor": 1.5}},
    ],
)
def test_rope_is_the_hosts(config: dict[str, Any]) -> None:
    released = FLASH | {"rope_theta": 10000} | config
    own = DeepseekV4Config(**released)
    module = host.DeepseekV4RotaryEmbedding(own)
    # both spellings: as released, and as Transformers writes it again
    for spelling in (released, own.to_dict()):
        rope = indexer_rope(spelling)
        torch.testing.assert_close(rope.inverse_frequencies, module.compress_inv_freq)
        assert rope.scaling == module.compress_attention_scaling


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"rope_scaling": {"type": "linear"}}, "rope_type: got 'linear', allowed: default, yarn"),
        ({"rope_scaling": [1]}, "rope_scaling: got"),
        ({"rope_scaling": {"type": "yarn"}}, "factor: got None"),
        ({"compress_rope_theta": 0}, "rope_theta: got 0"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim: got 3"),
        ({"qk_rope_head_dim": 10**12}, "qk_rope_head_dim: got 1000000000000"),
        ({"compress_rope_theta": 10**400}, "rope_theta: got 1000000"),
        ({"compress_rope_theta": math.inf}, "rope_theta: got inf"),
        ({"compress_rope_theta": math.nan}, "rope_theta: got nan"),
        ({"compress_rope_theta": 1e-320}, "rope_theta: got 1e-320"),
        ({"compress_rope_theta": 1, "rope_scaling": YARN}, "rope_theta: got 1, allowed: a number"),
        ({"rope_scaling": YARN | {"factor": math.inf}}, "factor: got inf"),
        ({"rope_scaling": YARN | {"factor": 1e-320}}, "factor: got 1e-320"),
        ({"rope_scaling": YARN | {"beta_fast": 10**400}}, "beta_fast: got 1000000"),
        ({"rope_scaling": YARN | {"attention_factor": math.inf}}, "attention_factor: got inf"),
        ({"rope_parameters": {"compress": None}}, "rope_parameters.compress: got None"),
        ({"rope_parameters": {"compress": [1]}}, "rope_parameters.compress: got [1]"),
        ({"rope_parameters": {"compress": 1}}, "rope_parameters.compress: got 1"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor: got 'half'"),
        ({"partial_rotary_factor": math.inf}, "partial_rotary_factor: got inf"),
        ({"partial_rotary_factor": math.nan}, "partial_rotary_factor: got nan"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor: got 2"),
        ({"partial_rotary_factor": 0.5, "head_dim": 1e308}, "head_dim: got 1e+308"),
    ],
)
def test_a_bad_rope_is_one_line(config: dict[str, Any], line: str) -> None:
    with pytest.raises(SpinError) as error:
        indexer_rope(config)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_a_share_of_the_head_is_rotated() -> None:
    assert indexer_rope({"partial_rotary_factor": 0.25, "head_dim": 128}).dim == 32
