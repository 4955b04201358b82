# SPDX-License-Identifier: Apache-2.0
"""Known failures of other engines: speculative decoding, accepted counts and padding rows.

Each test names the public issue of the failure that it keeps out, and covers the whole class.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import strategies
import torch
from safetensors.numpy import load_file
from sequence_model import (
    changed_lanes,
    indices,
    new_step,
    positions_of,
    run,
    snapshot,
    tiny_trace,
)
from torch import Tensor

from spin_trtllm import reference as ops
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.replay.run import replay
from spin_trtllm.replay.trace import Trace


def numbered_rows(sequences: int, rows: int, slots: int = 64) -> Tensor:
    """Every score of row `j` of sequence `i` is `10 * (i + 1) + j`."""
    number = 10.0 * torch.arange(1, sequences + 1).view(-1, 1) + torch.arange(rows)
    return number.unsqueeze(-1).expand(-1, -1, slots).contiguous()


# ---------------------------------------------------------------- which rows are learned


@pytest.mark.parametrize("deferred", [False, True])
def test_the_last_accepted_row_is_kept_not_the_last_row(deferred: bool) -> None:
    """NVIDIA/TensorRT-LLM #15806: the saved selection comes from a rejected row."""
    step = new_step(ema_decay=0.0)  # the averages are the scores of the last learned row
    ids, starts, accepted = [7, 8, 9], [20, 30, 40], [0, 3, 1]
    plan = step.plan((3,), ids, positions_of(starts, [4, 4, 4]))
    scores = numbered_rows(3, 4)
    if deferred:
        step.defer(plan, scores)
        step.plan((3,), ids, positions_of([21, 34, 42], [1, 1, 1]))
    else:
        step.observe(plan, scores, torch.tensor(accepted))
    for lane, (start, count, last) in enumerate(zip(starts, accepted, [10, 23, 31], strict=True)):
        seen = start + count + 1  # slots that the last accepted row sees
        assert step.state.v[0, lane].tolist() == [last] * seen + [0] * (64 - seen)
        # The first offset a row reaches is 0, the last is where it stands.
        assert step.state.d[0, lane].tolist() == [last] * seen + [0] * (65 - seen)
        assert int(step.state.next_tokens[0, lane]) == start + count + 1


def test_the_next_step_of_a_replay_predicts_from_the_last_accepted_row(tmp_path: Path) -> None:
    """NVIDIA/TensorRT-LLM #15806: the same failure in a predictor that knows one earlier row."""
    # 40 slots, 5 blocks, budget 3 = sink, newest and one ranked. Row 0 is accepted and points at
    # block 1, the rejected row 1 at block 3.
    scores = np.zeros((2, 1, 2, 40), dtype=np.float32)
    scores[0, 0, 0, 8], scores[0, 0, 1, 24] = 1.0, 9.0
    trace = tiny_trace(scores, [[36, 37], [37, 38]])
    strategies.write_trace(tmp_path / "trace", trace)
    config = SpinConfig(block_size=8, target_sparsity=0.4, exploration_policy="none")
    replay(Trace(tmp_path / "trace"), config, policy="prev_iter", dump=tmp_path / "dump")
    assert load_file(tmp_path / "dump")["blocks"][1, 0].tolist() == [True, True, False, False, True]


def test_a_draft_that_was_not_accepted_leaves_no_trace() -> None:
    """vllm-project/vllm #51508, #48475: zero accepted rows wrap around to the last one."""
    step = new_step(ema_decay=0.0)
    run(step, [7, 8], [20, 20], numbered_rows(2, 3), rows=[3, 3], accepted=[0, 2])
    assert step.state.v[0, 0, :22].tolist() == [10] * 21 + [0]
    assert step.state.v[0, 1, :24].tolist() == [22] * 23 + [0]


@pytest.mark.parametrize("update_policy", ["prefix", "row0"])
def test_a_count_below_zero_observes_nothing(update_policy: str) -> None:
    """vllm-project/vllm #51508, #48475: accepted - 1 is used unguarded and becomes row -1."""
    v, d = torch.full((2, 16), 3.0), torch.full((2, 17), 3.0)
    ops.observe_scores(
        v,
        d,
        torch.tensor([0, 1]),
        numbered_rows(2, 3, slots=16),
        torch.ones(2, 2, dtype=torch.bool),
        positions_of([10, 10], [3, 3]),
        torch.tensor([-1, 0]),
        ratio=1,
        block_size_slots=8,
        ema_decay=0.0,
        update_policy=update_policy,
    )
    assert v[0].tolist() == [3] * 16
    assert d[0].tolist() == [3] * 17
    assert v[1].tolist() == [20] * 11 + [3] * 5


@pytest.mark.parametrize("accepted", [[0, -1], [0, 3], [1, 0]])
def test_a_count_outside_the_draft_is_refused(accepted: list[int]) -> None:
    """vllm-project/vllm #51508, #48475: more accepted than drafted reads past the rows."""
    step = new_step()
    plan = step.plan((3,), [7, 8], positions_of([20, 20], [1, 3]))  # drafts 0 and 2
    before = snapshot(step.state)
    with pytest.raises(SpinError, match="accepted"):
        step.observe(plan, numbered_rows(2, 3), torch.tensor(accepted))
    assert changed_lanes(step.state, before) == set()


@pytest.mark.parametrize("accepted", [-1, 2])
def test_a_trace_accepts_no_more_than_it_drafts(accepted: int, tmp_path: Path) -> None:
    """vllm-project/vllm #51508, #48475: the same counts, read from a file."""
    trace = tiny_trace(np.zeros((2, 1, 2, 4), dtype=np.float32), [[0, 1], [1, 2]])
    trace["accepted"][1] = accepted
    strategies.write_trace(tmp_path / "trace", trace)
    with pytest.raises(SpinError, match=f"accepted: got '{accepted} at step 1'"):
        Trace(tmp_path / "trace")


@pytest.mark.parametrize(("start", "warm"), [(20, False), (21, True), (23, True), (24, False)])
def test_a_deferred_step_counts_only_if_the_positions_explain_it(start: int, warm: bool) -> None:
    """vllm-project/vllm #48475: an acceptance outside 0 .. drafts must not be guessed at."""
    step = new_step()
    plan = step.plan((3,), [7], positions_of([20], [3]))  # drafts: next step at 21, 22 or 23
    step.defer(plan, numbered_rows(1, 3))
    assert step.plan((3,), [7], positions_of([start], [1])).warm.tolist() == [warm]
    assert bool(step.state.v.any()) == warm


# ---------------------------------------------------------------- rows that are only padding


@pytest.mark.parametrize("mask_policy", ["union", "row0"])
def test_padding_rows_choose_nothing_and_read_nothing(mask_policy: str) -> None:
    """NVIDIA/TensorRT-LLM #12657: padding rows reach past the block table under graphs."""
    padded, alone = new_step(mask_policy=mask_policy), new_step(mask_policy=mask_policy)
    for position in (37, 39):  # the last row of the second step sees a sixth block
        scores = torch.full((1, 4, 64), float("inf"))  # what padding rows find in the buffer
        scores[0, :2] = torch.arange(128).view(2, 64) % 5
        plan = padded.plan((3,), [7], positions_of([position], [2], width=4))
        padded.observe(plan, scores, torch.tensor([1]))
        expected = run(alone, [7], [position], scores[:, :2], rows=[2], accepted=[1])
        assert plan.drafts.tolist() == [1]
        assert torch.equal(plan.selection.blocks, expected.selection.blocks)
        assert not plan.selection.row_blocks[0, 2:].any()
        best = padded.top_k(plan, scores)
        assert torch.equal(best[:, :2], alone.top_k(expected, scores[:, :2]))
        assert (best[0, 2:] == -1).all()
    assert int(plan.selection.blocks.sum()) < 6  # the second step was selective
    assert torch.equal(padded.state.v, alone.state.v)
    assert torch.equal(padded.state.d, alone.state.d)


@pytest.mark.parametrize("padding", [[7], [None]])
@pytest.mark.parametrize("ratio", [1, 4])
def test_a_position_past_the_capacity_is_refused_first(
    padding: list[int | None], ratio: int
) -> None:
    """NVIDIA/TensorRT-LLM #12657: a stale length implies block 7 of a table of 3."""
    step = new_step(slots=24, ratio=ratio)
    run(step, [7], [8 * ratio], torch.ones(1, 1, 24))
    before = snapshot(step.state)
    beyond = 25 * ratio - 1  # the first position that sees 25 slots
    with pytest.raises(SpinError, match="positions_tokens"):
        step.plan((3,), [*padding, 9], positions_of([beyond, 0], [1, 1]))
    assert changed_lanes(step.state, before) == set()
    last = step.plan((3,), [8], positions_of([beyond - 1], [1]))
    assert indices(last.selection.blocks[0]) == {0, 1, 2}


NO_DRAFT = [[20, 22, -1], [20, -1, 22], [-1, 0, 1], [20, 19, -1], [-2, -1, -1]]


@pytest.mark.parametrize("positions", NO_DRAFT)
def test_rows_that_no_draft_can_have_are_refused(positions: list[int]) -> None:
    """NVIDIA/TensorRT-LLM #12657: a stale row map hands over rows of another sequence."""
    with pytest.raises(SpinError, match="positions_tokens"):
        new_step().plan((3,), [7], torch.tensor([positions]))


@pytest.mark.parametrize("positions", [*NO_DRAFT, [20, 21, -1], [18, 20, 21], [22, 23, 24]])
def test_a_trace_holds_only_rows_of_a_draft(positions: list[int], tmp_path: Path) -> None:
    """NVIDIA/TensorRT-LLM #12657: the same rows, and a slot past the end, read from a file."""
    trace = tiny_trace(np.zeros((2, 1, 3, 24), dtype=np.float32), [[17, 18, 19], positions])
    strategies.write_trace(tmp_path / "trace", trace)
    with pytest.raises(SpinError, match=r"positions: got .* at step 1"):
        Trace(tmp_path / "trace")
