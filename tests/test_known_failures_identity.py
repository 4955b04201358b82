# SPDX-License-Identifier: Apache-2.0
"""Known failures of other engines: whose state is it?

Each test names the public issue of the failure that it keeps out, and covers the whole class.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import OracleSequence
from sequence_model import (
    NEVER_SEEN,
    changed_lanes,
    indices,
    new_step,
    positions_of,
    run,
    snapshot,
    tensors_of,
)
from torch import Tensor

from spin_trtllm.state import SpinState
from spin_trtllm.step import SpinStep

NO_EXPLORATION = {"exploration_policy": "none"}


def constant_rows(*values: float, slots: int = 64) -> Tensor:
    """Scores `[len(values), 1, slots]`, each entry one constant."""
    return torch.tensor(values).view(-1, 1, 1).expand(-1, 1, slots).contiguous()


def averages(step: SpinStep, sequence_id: int) -> list[float]:
    """The distinct values of V over the slots that a sequence has seen."""
    exported = step.state.export(sequence_id)
    assert exported is not None
    seen = exported["v"][exported["v"] != 0]
    return sorted(set(seen.tolist()))


def test_sequences_keep_their_state_when_the_batch_moves() -> None:
    """NVIDIA/TensorRT-LLM #18359: hints are read from a neighbour's row."""
    step = new_step(sparsity=0.0)
    run(step, [7, 8, 9], [20] * 3, constant_rows(16.0, 32.0, 64.0))
    run(step, [7, 9], [21] * 2, constant_rows(16.0, 64.0))
    plan = run(step, [9, 7, 10], [22, 22, 20], constant_rows(64.0, 16.0, 128.0))
    assert plan.warm.tolist() == [True, True, False]
    # Slots 0..20 saw the constant c three times (7/8 c), slot 21 twice, slot 22 once.
    assert averages(step, 7) == [8.0, 12.0, 14.0]
    assert averages(step, 9) == [32.0, 48.0, 56.0]
    assert averages(step, 8) == [16.0]
    assert averages(step, 10) == [64.0]


def test_row_counts_of_one_step_do_not_leak_into_the_next() -> None:
    """NVIDIA/TensorRT-LLM #16925, #17240: acceptance falls with batch size."""
    layers, ids, starts = (3, 5), [7, 8, 9, 10], [30, 21, 33, 26]
    step = new_step(layers=layers)
    oracles = {i: OracleSequence(1, 8, layers, i, 64, 8, 0.5, **NO_EXPLORATION) for i in ids}
    rng = np.random.default_rng(3)
    for rows in ([3, 1, 4, 1], [1, 1, 1, 1]):
        scores = rng.standard_normal((2, 4, max(rows), 64)).astype(np.float32)
        accepted = [count - 1 for count in rows]
        plan = run(
            step, ids, starts, torch.from_numpy(scores).flatten(0, 1), rows=rows, accepted=accepted
        )
        for s, i in enumerate(ids):
            places = list(range(starts[s], starts[s] + rows[s]))
            records = oracles[i].step(places, scores[:, s, : rows[s]], accepted[s])
            for layer, record in enumerate(records):
                assert indices(plan.selection.blocks[layer * 4 + s]) == record.blocks
            assert_equal_state(step.state, i, oracles[i])
        starts = [start + count for start, count in zip(starts, rows, strict=True)]


def assert_equal_state(state: SpinState, sequence_id: int, oracle: OracleSequence) -> None:
    exported = state.export(sequence_id)
    assert exported is not None
    assert exported["v"].tolist() == oracle.v
    assert exported["d"].tolist() == oracle.d


def test_dummy_rows_leave_every_lane_alone() -> None:
    """vllm-project/vllm #49757: dummy runs overwrite real state through a stale table row."""
    step = new_step(layers=(3, 5))
    ids = [7, 8, 9, 10]
    run(step, ids, [20] * 4, constant_rows(*[4.0] * 8))
    step.state.release(9)
    step.state.lanes([11])  # a lane changes hands
    before = snapshot(step.state)
    # Rows that the scheduler only pads with still carry the positions of whoever was there.
    plan = run(step, [7, None, None, None], [21, 21, 20, 63], constant_rows(*[9.0] * 8))
    assert plan.warm.view(2, 4).tolist() == [[True, False, False, False]] * 2
    lane_of_7 = step.state.lanes([7])[0]
    assert changed_lanes(step.state, before) == {lane_of_7}


def test_padding_between_rows_does_not_shift_what_is_committed() -> None:
    """NVIDIA/TensorRT-LLM #13151: written by batch position, committed by slot id."""
    step = new_step(sequences=6)
    ids = [100, 101, 102, 103, 104, 105]
    assert step.state.lanes(ids) == [0, 1, 2, 3, 4, 5]
    before = snapshot(step.state)
    scores = torch.zeros(4, 3, 64)
    scores[0], scores[2] = 8.0, 2.0
    batch = [104, None, 102, None]
    run(step, batch, [20, -1, 30, -1], scores, rows=[3, 0, 2, 0], accepted=[2, 0, 1, 0])
    assert changed_lanes(step.state, before) == {4, 2}
    assert averages(step, 104) == [4.0, 6.0, 7.0]  # three rows of 8
    assert averages(step, 102) == [1.0, 1.5]  # two rows of 2
    assert step.state.next_tokens[0].tolist() == [-1, -1, 32, -1, 23, -1, -1]


def interrupt(step: SpinStep, how: str) -> None:
    """Ways in which sequence 7 loses its state."""
    if how == "reset":
        step.state.reset(7)
    elif how == "preempted":
        step.state.release(7)
    elif how == "resumed":
        step.state.release(7)
        step.plan((3,), [7], positions_of([21], [1]))
    elif how == "lane taken":
        step.state.release(7)
        step.state.lanes([8, 9, 10, 11])
    elif how == "moved":
        step.state.adopt(7, step.state.export(7))
    elif how == "jumped":
        step.plan((3,), [7], positions_of([40], [1]))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("how", ["reset", "preempted", "resumed", "lane taken", "moved", "jumped"])
def test_a_late_result_of_a_discarded_step_is_dropped(how: str, deferred: bool) -> None:
    """tenstorrent/vllm-tt-plugin #37, vllm-project/vllm #49620: a preempted request revives."""
    step = new_step()
    run(step, [7], [20], constant_rows(4.0))
    late = step.plan((3,), [7], positions_of([21], [1]))
    assert late.warm.tolist() == [True]
    interrupt(step, how)
    before = snapshot(step.state)
    if deferred:
        step.defer(late, constant_rows(9.0))
    else:
        step.observe(late, constant_rows(9.0), torch.tensor([0]))
    assert changed_lanes(step.state, before) == set()
    resumed = step.plan((3,), [7], positions_of([22], [1]))  # where the late step would have led
    assert resumed.warm.tolist() == [False]
    assert not step.state.v.any()


def test_a_step_is_learned_once() -> None:
    """vllm-project/vllm #49620: the result of a step is delivered again."""
    step = new_step()
    plan = run(step, [7], [20], constant_rows(4.0))
    step.observe(plan, constant_rows(9.0), torch.tensor([0]))
    step.defer(plan, constant_rows(9.0))
    step.plan((3,), [7], positions_of([21], [1]))
    assert averages(step, 7) == [2.0]


def test_every_state_tensor_is_known_here() -> None:
    """local-inference-lab/vllm #426, NVIDIA/Megatron-LM #7033: a parallel array is forgotten."""
    state = SpinState((2, 4), sequences=3, slots=65, dtype=torch.bfloat16)
    tensors = tensors_of(state)
    assert set(tensors) == set(NEVER_SEEN)
    assert all(tensor.shape[:2] == (2, 4) for tensor in tensors.values())
    # (65 + 66) bf16, a bool and an int64, in 2 layers and 3 lanes plus scratch
    assert state.state_bytes == 2 * 4 * (131 * 2 + 1 + 8)
    assert SpinState.estimate_bytes(2, 3, 65, torch.bfloat16) == state.state_bytes


@pytest.mark.parametrize("how", ["reset", "released", "adopted without state", "jumped"])
def test_a_recycled_lane_holds_nothing_of_its_past(how: str) -> None:
    """local-inference-lab/vllm #426, NVIDIA/Megatron-LM #7033: a recycled block inherits data."""
    step = new_step(layers=(3, 5), sequences=1, ratio=4)
    state = step.state
    state.lanes([9])
    for tensor in tensors_of(state).values():
        tensor[:, 0] = torch.ones((), dtype=tensor.dtype)  # poison: warm, and at position 1
    heir = 9
    if how == "reset":
        state.reset(9)
    elif how == "adopted without state":
        state.adopt(9, None)
    elif how == "jumped":
        step.plan((3, 5), [9], positions_of([50], [1]))
    else:
        state.release(9)
        heir = 10
    assert state.lanes([heir]) == [0]
    for name, tensor in tensors_of(state).items():
        assert (tensor[:, 0] == NEVER_SEEN[name]).all(), name


@pytest.mark.parametrize("known", [False, True])
def test_a_prefix_hit_starts_dense(known: bool) -> None:
    """ROCm/ATOM #1417: output collapses when a long prefix comes from the cache."""
    slots = 1030
    step = new_step(ratio=4, slots=slots, block_size=64, sparsity=0.9)
    if known:  # a short turn before must not pass for averages of the long context
        run(step, [7], [400], constant_rows(4.0, slots=slots))
    scores = constant_rows(2.0, slots=slots)
    plan = run(step, [7], [4097], scores)
    assert plan.warm.tolist() == [False]
    assert indices(plan.selection.blocks[0]) == set(range(16))  # 1024 slots
    assert averages(step, 7) == [1.0]


def corrupted(exported: dict[str, Tensor], how: str) -> dict[str, Tensor] | None:
    """Exports that a transfer may leave behind."""
    if how == "nothing":
        return None
    if how == "a tensor missing":
        return {name: tensor for name, tensor in exported.items() if name != "d"}
    if how == "an unknown tensor":
        return exported | {"age": exported["v"]}
    if how == "another capacity":
        return exported | {"v": exported["v"][:, :-1]}
    return exported | {"d": exported["d"].bfloat16()}


@pytest.mark.parametrize(
    "how",
    ["nothing", "a tensor missing", "an unknown tensor", "another capacity", "another dtype"],
)
def test_an_import_without_whole_state_is_cold(how: str) -> None:
    """sgl-project/sglang #23539, #30839: decode elsewhere starts from missing or stale seeds."""
    source, target = new_step(), new_step()
    run(source, [7], [20], constant_rows(4.0))
    run(target, [7], [20], constant_rows(8.0))  # stale state under the same id
    exported = source.state.export(7)
    assert exported is not None
    target.state.adopt(7, corrupted(exported, how))
    plan = target.plan((3,), [7], positions_of([21], [1]))
    assert plan.warm.tolist() == [False]
    assert indices(plan.selection.blocks[0]) == {0, 1, 2}
    assert averages(target, 7) == []


def test_an_import_continues_as_if_it_had_stayed() -> None:
    """sgl-project/sglang #23539, #30839: a valid import must round-trip bit for bit."""
    layers, rng = (3, 5), np.random.default_rng(9)
    oracle = OracleSequence(1, 8, layers, 7, 64, 8, 0.5, **NO_EXPLORATION)
    here, there = new_step(layers=layers), new_step(layers=layers)
    there.state.lanes([1, 2])  # so that the lane differs
    for position in range(40, 46):
        scores = rng.standard_normal((2, 1, 64)).astype(np.float32)
        plan = run(here, [7], [position], torch.from_numpy(scores))
        records = oracle.step([position], scores, 0)
        assert [indices(blocks) for blocks in plan.selection.blocks] == [r.blocks for r in records]
        assert plan.warm.tolist() == [r.warm for r in records]
        there.state.adopt(7, here.state.export(7))
        here.state.release(7)
        here, there = there, here
    assert_equal_state(here.state, 7, oracle)
