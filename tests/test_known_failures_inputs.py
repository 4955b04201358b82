# SPDX-License-Identifier: Apache-2.0
"""Known failures of other engines: widths, layouts, bounds and what a buffer holds past its end.

Each test names the public issue of the failure that it keeps out, and covers the whole class.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strategies
import torch
from oracle import OracleSequence
from safetensors.numpy import load_file
from sequence_model import indices, new_step, positions_of, run, tiny_trace
from torch import Tensor

from spin_trtllm import reference as ops
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.geometry import count_blocks, query_slot, slot_byte_offset, visible_slots
from spin_trtllm.replay.run import replay
from spin_trtllm.replay.trace import Trace

INF, NAN = float("inf"), float("nan")

# ---------------------------------------------------------------- widths and layouts


def guarded(tensor: Tensor, poison: Any) -> Tensor:
    """The same values as a view: its last axis strided, its rows apart, poison all around."""
    shape = [size + 2 for size in tensor.shape[:-1]]
    buffer = torch.full((*shape, 2 * tensor.shape[-1] + 3), poison, dtype=tensor.dtype)
    view = buffer[tuple(slice(1, -1) for _ in shape)][..., 1:-2:2]
    view.copy_(tensor)
    assert not view.is_contiguous()
    return view


def around(view: Tensor) -> Tensor:
    """The allocation behind a `guarded` view, with the view itself blanked out."""
    buffer = view._base
    assert buffer is not None
    buffer = buffer.clone()
    buffer[tuple(slice(1, -1) for _ in view.shape[:-1])][..., 1:-2:2] = 0
    return buffer


def test_odd_widths_and_strided_views() -> None:
    """FlashInfer #4737: 257 slots in 5 pages; one column more is read, and strides are ignored."""
    rng = np.random.default_rng(4)
    oracle = OracleSequence(1, 8, [3], 7, 257, 64, 0.5, exploration_policy="none")
    v, d = guarded(torch.zeros(3, 257), NAN), guarded(torch.zeros(3, 258), NAN)
    sizes = {"ratio": 1, "block_size_slots": 64}
    lane, warm = torch.tensor([1]), False
    for position in (255, 256):  # then the fifth block has one slot
        z = rng.standard_normal((1, 1, 257)).astype(np.float32)
        (record,) = oracle.step([position], z, 0)
        places = positions_of([position], [1])
        block_scores = ops.predict_blocks(v, d, lane, places, **sizes)
        assert block_scores.shape == (1, 1, 5)
        selection = ops.select_blocks(
            guarded(block_scores, INF),
            places,
            torch.tensor([warm]),
            torch.tensor([7]),
            torch.tensor([3]),
            **sizes,
            top_k=8,
            sparsity_ppm=500_000,
            exploration_ppm=0,
            seed=0,
        )
        blocks, scores = guarded(selection.blocks, True), guarded(torch.from_numpy(z), INF)
        assert indices(blocks[0]) == record.blocks
        best = ops.topk_slots(scores, blocks, places, top_k=8, **sizes)
        assert best[0].tolist() == record.topk
        ops.observe_scores(
            v, d, lane, scores, blocks, places, torch.tensor([0]), ema_decay=0.5, **sizes
        )
        warm = True
    assert v[1].tolist() == oracle.v[0]
    assert d[1].tolist() == oracle.d[0]
    assert not v[[0, 2]].any()
    assert not d[[0, 2]].any()
    for view in (v, d):
        assert around(view).isnan().sum() == view._base.numel() - view.numel()


def test_scores_on_an_odd_width() -> None:
    """FlashInfer #4737: a table narrower than the tile, in the operation that scores."""
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(1, 2, 3, 16, generator=generator)
    keys = torch.randn(1, 20, 16, generator=generator)
    weights = torch.tensor([[[2.0, -1.0, 0.5]] * 2])
    blocks = torch.tensor([[True, False, True]])
    scores = ops.score_slots(
        guarded(query, NAN),
        guarded(keys, NAN),
        guarded(weights, NAN),
        guarded(blocks, True),
        torch.tensor([[18, 19]]),
        ratio=1,
        block_size_slots=8,
    )
    assert scores.shape == (1, 2, 20)
    for row, visible in enumerate((19, 20)):
        for slot in range(20):
            scored = slot < visible and slot // 8 != 1
            dots = [
                max(0.0, float(query[0, row, h].double() @ keys[0, slot].double()))
                for h in range(3)
            ]
            expected = 2 * dots[0] - dots[1] + dots[2] / 2 if scored else -INF
            assert float(scores[0, row, slot]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_lengths_count_whole_slots() -> None:
    """vllm-project/tpu-inference #3536, NVIDIA/TensorRT-LLM #13802: off by one compressed slot."""
    positions = torch.arange(10)
    assert visible_slots(positions, 4).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert query_slot(positions, 4).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert visible_slots(positions, 1).tolist() == list(range(1, 11))
    assert [count_blocks(slots, 64) for slots in (0, 1, 63, 64, 65)] == [0, 1, 1, 1, 2]
    with pytest.raises(SpinError, match="ratio"):
        new_step(ratio=0)


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize(("slots", "blocks"), [(1, 1), (63, 1), (64, 1), (65, 2), (129, 3)])
def test_the_newest_partial_block_is_always_kept(ratio: int, slots: int, blocks: int) -> None:
    """vllm-project/tpu-inference #3536, NVIDIA/TensorRT-LLM #13802: the open block is lost."""
    step = new_step(slots=1000, ratio=ratio, block_size=64, sparsity=0.99)
    step.state.lanes([7])
    # All that was learned speaks against the newest block, and the next step starts as expected.
    step.state.v[0, 0, : 64 * (blocks - 1)] = 5.0
    step.state.v[0, 0, 64 * (blocks - 1) :] = -5.0
    step.state.d[0, 0] = -9.0
    step.state.warm[0, 0] = True
    position = slots * ratio - 1  # the first that sees so many slots
    step.state.next_tokens[0, 0] = position
    plan = step.plan((3,), [7], positions_of([position], [1]))
    assert plan.warm.tolist() == [True]
    assert indices(plan.selection.blocks[0]) == {0, blocks - 1}
    scores = torch.zeros(1, 1, 1000)
    scores[..., slots - 1 :] = 7.0  # the newest slot, and whatever follows it
    assert int(step.top_k(plan, scores)[0, 0, 0]) == slots - 1


# ---------------------------------------------------------------- what lies in the buffer


def filled(value: float, z: Tensor, scored: Tensor) -> Tensor:
    """Scores where something was scored, `value` in the holes and past the end."""
    return torch.where(scored, z, value)


@pytest.mark.parametrize("poison", [INF, -INF, NAN, 1e30, -1e30])
def test_stale_scores_outside_the_kept_blocks_are_never_read(poison: float) -> None:
    """vllm-project/vllm #33568, NVIDIA/TensorRT-LLM #16789: stale logits after the valid end."""
    # More may be chosen than was scored, so that a reader without bounds would reach the rest.
    sizes, top_k = {"ratio": 4, "block_size_slots": 8}, 40
    blocks = torch.tensor([[True, False, True, False, True]])
    positions = torch.tensor([[127, 128, 131, -1]])  # 32, 32, 33 and no slots
    scored = torch.zeros(1, 4, 40, dtype=torch.bool)
    for row, visible in enumerate((32, 32, 33)):
        scored[0, row, :8] = scored[0, row, 16:24] = True
        scored[0, row, 32:visible] = True
    z = torch.arange(160).view(1, 4, 40) % 7 - 3.0
    results = []
    for buffer in (filled(0.0, z, scored), filled(poison, z, scored)):
        v, d = torch.full((1, 40), 0.25), torch.full((1, 41), 0.25)
        best = ops.topk_slots(buffer, blocks, positions, top_k=top_k, **sizes)
        lane, accepted = torch.tensor([0]), torch.tensor([3])
        ops.observe_scores(v, d, lane, buffer, blocks, positions, accepted, ema_decay=0.5, **sizes)
        results.append((best, v, d))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)
    best, v, _ = results[1]
    assert [int((row >= 0).sum()) for row in best[0]] == [16, 16, 17, 0]
    assert indices(v[0] != 0.25) == set(range(8)) | set(range(16, 24)) | {32}


@pytest.mark.parametrize("policy", ["spin", "prev_iter", "tisa"])
@pytest.mark.parametrize("poison", [INF, -INF, 1e30])
def test_a_replay_never_reads_what_a_row_cannot_see(
    policy: str, poison: float, tmp_path: Path
) -> None:
    """vllm-project/vllm #33568, NVIDIA/TensorRT-LLM #16789: the same, from a trace file."""
    scores = (np.arange(4 * 2 * 3 * 64) * 11 % 17).astype(np.float32).reshape(4, 2, 3, 64)
    positions = 40 + 2 * np.arange(4)[:, None] + np.arange(3)
    hidden = np.arange(64) > positions[:, None, :, None]
    config = SpinConfig(block_size=8, target_sparsity=0.5)
    dumps = []
    for name, value in (("clean", np.nan), ("poisoned", poison)):
        visible_only = np.where(hidden, np.float32(value), scores)
        accepted = np.ones(4, dtype=np.int64)
        trace = tiny_trace(visible_only, positions.tolist(), accepted=accepted, top_k=30)
        strategies.write_trace(tmp_path / name, trace)
        path = tmp_path / f"{name}.dump"
        metrics = replay(Trace(tmp_path / name), config, policy=policy, dump=path)
        dumps.append((metrics, load_file(path)))
    (clean_metrics, clean), (poisoned_metrics, poisoned) = dumps
    assert poisoned_metrics == clean_metrics
    for name, array in clean.items():
        np.testing.assert_array_equal(poisoned[name], array, err_msg=name)
    assert clean["topk"].max() == 48  # where the last row of the last step stands
    assert not clean["blocks"][1].all()


def test_nan_in_a_visible_slot_of_a_trace_is_an_error(tmp_path: Path) -> None:
    """vllm-project/vllm #50201, #49896: NaN must be seen, not sorted."""
    scores = np.zeros((2, 1, 1, 12), dtype=np.float32)
    scores[:, 0, 0, 11] = np.nan  # visible in step 1 only
    strategies.write_trace(tmp_path / "trace", tiny_trace(scores, [[10], [11]]))
    with pytest.raises(SpinError, match="NaN at step 1, layer 3, row 0, slot 11"):
        replay(Trace(tmp_path / "trace"), SpinConfig(block_size=8), dump=tmp_path / "dump")
    assert not (tmp_path / "dump").exists()


@pytest.mark.parametrize("bad", [1, 8, 20, 21], ids="{} not finite".format)
@pytest.mark.parametrize("value", [NAN, -INF, INF])
def test_scores_that_are_not_finite(bad: int, value: float) -> None:
    """vllm-project/vllm #50201, #49896: NaN scores give garbage indices, and stay in the state."""
    step = new_step()
    run(step, [7], [19], torch.full((1, 1, 64), 4.0))
    z = torch.arange(64.0).view(1, 1, 64)
    z[..., :bad] = value
    plan = step.plan((3,), [7], positions_of([20], [1]))
    scored = [*range(8), *range(16, 21)]  # the forced blocks
    assert indices(plan.selection.blocks[0]) == {0, 2}
    worse, better = [s for s in scored if s < bad], [s for s in scored[::-1] if s >= bad]
    if value == INF:
        worse, better = better, worse
    assert step.top_k(plan, z)[0, 0].tolist() == [*better, *worse][:8]
    step.observe(plan, z, torch.tensor([0]))
    v, d = step.state.v[0, 0], step.state.d[0, 0]
    for slot in range(64):
        old = 2.0 if slot < 20 else 0.0
        assert float(v[slot]) == (old / 2 + slot / 2 if slot in scored and slot >= bad else old)
    for offset in range(65):
        slot, old = 20 - offset, 2.0 if offset < 20 else 0.0
        assert float(d[offset]) == (old / 2 + slot / 2 if slot in scored and slot >= bad else old)
    # The next step is an ordinary one.
    plan = run(step, [7], [21], torch.full((1, 1, 64), 4.0))
    assert plan.warm.tolist() == [True]
    assert math.isfinite(float(step.state.v.sum() + step.state.d.sum()))


# ---------------------------------------------------------------- offsets past 2**31


@pytest.mark.parametrize(
    ("row", "stride", "slot", "slot_bytes", "expected"),
    [
        (8191, 262_144, 0, 1, 2_147_221_504),
        (8191, 262_144, 262_143, 1, 2_147_483_647),  # the last that 31 bits hold
        (8192, 262_144, 0, 1, 2_147_483_648),
        (8192, 262_656, 0, 1, 2_151_677_952),
        (8192, 262_144, 5, 4, 8_589_934_612),
        (16_384, 262_144, 1, 2, 8_589_934_594),
    ],
)
def test_byte_offsets_are_exact_past_31_bits(
    row: int, stride: int, slot: int, slot_bytes: int, expected: int
) -> None:
    """vllm-project/vllm #30754, cudnn-frontend #312, ROCm/aiter #4028: row * stride in 32 bits."""
    assert slot_byte_offset(row, stride, slot, slot_bytes) == expected
