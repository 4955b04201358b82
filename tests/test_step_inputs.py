# SPDX-License-Identifier: Apache-2.0
"""Decode steps at the edges of their input, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from steps import (
    BLOCK,
    BLOCKS,
    CONFIG,
    LAYERS,
    RATIO,
    SLOTS,
    TOP_K,
    make,
    noise,
    once,
    rows,
    same,
    snapshot,
)
from torch import Tensor

from spin_trtllm.errors import SpinError
from spin_trtllm.state import SpinState
from spin_trtllm.step import SpinStep


# ---------------------------------------------------------------- edges
@pytest.mark.parametrize("width", [1, 3])
def test_no_sequences(width: int) -> None:
    step = make()
    plan = step.plan(LAYERS, [], torch.zeros(0, width, dtype=torch.int64))
    assert plan.selection.blocks.shape == (0, BLOCKS)
    assert plan.selection.row_blocks.shape == (0, width, BLOCKS)
    assert plan.warm.shape == plan.lanes.shape == plan.drafts.shape == (0,)
    z = torch.zeros(0, width, SLOTS)
    assert step.top_k(plan, z).shape == (0, width, TOP_K)
    step.observe(plan, z, torch.zeros(0, dtype=torch.int64))
    step.defer(plan, z)
    assert step.plan(LAYERS, [1], rows([5])).selection.blocks.shape == (3, BLOCKS)


def test_no_layers() -> None:
    step = make()
    once(step, 150)
    before = snapshot(step)
    plan = step.plan([], [1], rows([151]))
    assert plan.selection.blocks.shape == (0, BLOCKS)
    assert plan.warm.shape == plan.lanes.shape == plan.drafts.shape == (0,)
    z = torch.zeros(0, 1, SLOTS)
    assert step.top_k(plan, z).shape == (0, 1, TOP_K)
    step.observe(plan, z, torch.zeros(0, dtype=torch.int64))
    step.defer(plan, z)
    step.plan([], [1], rows([152]))
    assert same(step, before)
    assert once(step, 151).warm.all()


def test_a_plan_of_no_sequences_leaves_what_was_deferred_waiting() -> None:
    step = make()
    step.defer(once(step, 150, accepted=None), noise(1, 3, 1, SLOTS))
    step.plan(LAYERS, [], torch.zeros(0, 1, dtype=torch.int64))
    assert step.plan(LAYERS, [1], rows([151])).warm.all()


def test_positions_up_to_capacity() -> None:
    step = make()
    last = (SLOTS + 1) * RATIO - 2  # 178: 44 visible slots; 179 would complete slot 44
    plan = once(step, last - 1)
    assert plan.selection.blocks.all()
    assert once(step, last).warm.all()
    for bad in ([last + 1], [last, last + 1], [2**40], [2**63 - 1]):
        with pytest.raises(SpinError) as caught:
            step.plan(LAYERS, [1], rows(bad))
        expected = "allowed: positions up to 178 (44 slots of capacity)"
        assert str(caught.value) == f"positions_tokens: got {bad[-1]}, {expected}"


@pytest.mark.parametrize("position", [0, 1, 2])
def test_before_the_first_slot_there_is_nothing(position: int) -> None:
    step = make()
    plan = once(step, position)
    assert not plan.selection.blocks.any()
    assert step.state.warm[:, 0].all()  # observed, so the next step may be sparse
    assert not step.state.v.any()
    following = once(step, position + 1)
    assert following.warm.all()
    assert following.selection.blocks.sum(1).tolist() == [int(position == 2)] * 3


def test_sparsity_0_keeps_everything_and_reads_what_dense_reads() -> None:
    step = make(replace(CONFIG, target_sparsity=0.0))
    for t in range(6):
        plan = step.plan(LAYERS, [1], rows([130 + t, 131 + t]))
        z = noise(t, 3, 2, SLOTS)
        z = torch.where(noise(50 + t, 3, 2, SLOTS) < 0, 0.0, z)  # ties
        counts = [(130 + t + 1) // 4, (131 + t + 1) // 4]
        assert plan.selection.blocks.sum(1).tolist() == [-(-counts[1] // BLOCK)] * 3
        found = step.top_k(plan, z)
        for layer in range(3):
            for row, n in enumerate(counts):
                values = z[layer, row, :n].tolist()
                dense = sorted(range(n), key=lambda i: (-values[i], i))[:TOP_K]
                assert found[layer, row].tolist() == dense
        step.observe(plan, z, torch.zeros(3, dtype=torch.int64))
        assert bool(plan.warm.all()) == (t > 0)


def test_top_k_may_exceed_the_context() -> None:
    step = make(replace(CONFIG, top_k=1000, target_sparsity=0.99))
    once(step, 50)
    plan = step.plan(LAYERS, [1], rows([51]))  # 13 slots
    found = step.top_k(plan, noise(1, 3, 1, SLOTS))
    assert found.shape == (3, 1, 1000)
    for layer in range(3):
        assert sorted(found[layer, 0, :13].tolist()) == list(range(13))
    assert (found[:, :, 13:] == -1).all()


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("changes", "argument", "word"),
    [
        ({"top_k": None}, "config.top_k", "with_top_k"),
        ({"reduction": "A0"}, "reduction", "A1"),
        ({"reduction": "A2"}, "reduction", "A1"),
        ({"exploration_policy": "age"}, "exploration_policy", "none, random"),
        ({"exploration_policy": "staleness"}, "exploration_policy", "none, random"),
        ({"state_dtype": "bf16"}, "state", "a state of bf16"),
    ],
)
def test_configurations_that_a_host_cannot_run(
    changes: dict[str, Any], argument: str, word: str
) -> None:
    state = SpinState(LAYERS, sequences=1, slots=SLOTS)
    with pytest.raises(SpinError) as caught:
        SpinStep(replace(CONFIG, **changes), state, ratio=RATIO)
    message = str(caught.value)
    assert message.startswith(f"{argument}: got ")
    assert word in message
    assert "\n" not in message


@pytest.mark.parametrize("ratio", [0, -4, True, 4.0, "4", None, 2**31])
def test_ratio_is_an_integer_from_one_on(ratio: Any) -> None:
    state = SpinState(LAYERS, sequences=1, slots=SLOTS)
    with pytest.raises(SpinError) as caught:
        SpinStep(CONFIG, state, ratio=ratio)
    assert str(caught.value) == f"ratio: got {ratio!r}, allowed: an integer in 1 .. 2147483647"


@pytest.mark.parametrize(
    ("layers", "ids", "positions", "argument"),
    [
        ([4], [1], [[5]], "layers"),
        ([3, 4], [1], [[5]], "layers"),
        ([3, 3], [1], [[5]], "layers"),
        ([3], [1, 1], [[5], [6]], "sequence_ids"),
        ([3], [1], [[5], [6]], "positions_tokens"),
        ([3], [1, 2], [[5]], "positions_tokens"),
        ([3], [1], [[]], "positions_tokens"),
        ([3], [1], [5], "positions_tokens"),
        ([3], [1], [[[5]]], "positions_tokens"),
        ([3], [1], [[5, 7]], "positions_tokens"),
        ([3], [1], [[5, 5]], "positions_tokens"),
        ([3], [1], [[6, 5]], "positions_tokens"),
        ([3], [1], [[-1, 5]], "positions_tokens"),
        ([3], [1], [[-1, 0]], "positions_tokens"),
        ([3], [1], [[5, -1, 7]], "positions_tokens"),
        ([3], [1], [[-2]], "positions_tokens"),
        ([3], [1], [[-(2**63)]], "positions_tokens"),
        ([3], [1, 2], [[5, 6], [5, 8]], "positions_tokens"),
        ([3], [1], [[2**63 - 1]], "positions_tokens"),
        ([3], [1], [[2**63 - 2, 2**63 - 1]], "positions_tokens"),
        ([3], [True], [[5]], "sequence_ids"),
        ([3], [-1], [[5]], "sequence_ids"),
        ([3], [2**64], [[5]], "sequence_ids"),
        ([3], [1.0], [[5]], "sequence_ids"),
        ([3], [1, "2"], [[5], [5]], "sequence_ids"),
        (["3"], [1], [[5]], "layers"),
        ([None], [1], [[5]], "layers"),
    ],
)
def test_plans_that_are_refused(layers: Any, ids: Any, positions: Any, argument: str) -> None:
    step = make()
    before = snapshot(step)
    with pytest.raises(SpinError) as caught:
        step.plan(layers, ids, torch.tensor(positions, dtype=torch.int64))
    assert str(caught.value).startswith(f"{argument}: got ")
    assert "\n" not in str(caught.value)
    assert same(step, before)
    assert step.state.lanes([11, 12, 13, 14]) == [0, 1, 2, 3]  # nobody has taken a lane


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bool])
def test_positions_must_be_int64(dtype: torch.dtype) -> None:
    with pytest.raises(SpinError, match=r"^positions_tokens: got 'torch\..* allowed: int64 \["):
        make().plan([3], [1], torch.tensor([[5]], dtype=dtype))


def test_positions_must_be_a_tensor() -> None:
    expected = r"^positions_tokens: got 'list', allowed: an int64 tensor$"
    with pytest.raises(SpinError, match=expected):
        make().plan([3], [1], [[5]])  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["top_k", "observe", "defer"])
@pytest.mark.parametrize(
    "spoil",
    [
        Tensor.double,
        Tensor.half,
        Tensor.int,
        lambda z: z[:2],
        lambda z: z.repeat(2, 1, 1),
        lambda z: z[:, :1],
        lambda z: z.repeat(1, 2, 1),
        lambda z: z[:, :, :36],  # one less than position 150 sees
        lambda z: torch.cat([z, z], -1),
        lambda z: z[0],
        lambda z: z[None],
        lambda z: z[:0],
    ],
)
def test_scores_of_another_kind_are_refused_first(call: str, spoil: Any) -> None:
    step = make()
    once(step, 148)
    plan = step.plan(LAYERS, [1], rows([149, 150]))
    z = noise(1, 3, 2, SLOTS)
    wrong = spoil(z)
    before = snapshot(step)
    rest = [torch.zeros(3, dtype=torch.int64)] if call == "observe" else []
    with pytest.raises(SpinError) as caught:
        getattr(step, call)(plan, wrong, *rest)
    given = f"{wrong.dtype} {list(wrong.shape)}"
    assert str(caught.value) == f"scores: got {given!r}, allowed: float32 [3, 2, 37 .. 44]"
    assert same(step, before)
    step.observe(plan, z, torch.ones(3, dtype=torch.int64))  # the plan is still open
    assert once(step, 151).warm.all()


def test_scores_may_end_where_the_last_row_does() -> None:
    steps = [make(), make()]
    z = noise(1, 3, 2, SLOTS)
    for step, width in zip(steps, (37, SLOTS), strict=True):
        plan = step.plan(LAYERS, [1], rows([149, 150]))
        step.observe(plan, z[:, :, :width].contiguous(), torch.ones(3, dtype=torch.int64))
    assert same(steps[0], snapshot(steps[1]))


@pytest.mark.parametrize(
    "accepted",
    [
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(3),
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        torch.zeros((), dtype=torch.int64),
        torch.zeros(3, 1, dtype=torch.int64),
    ],
    ids=lambda x: f"{x.dtype} {list(x.shape)}",
)
def test_accepted_of_another_kind_is_refused_first(accepted: Tensor) -> None:
    step = make()
    once(step, 148)
    plan = step.plan(LAYERS, [1], rows([149, 150]))
    before = snapshot(step)
    with pytest.raises(SpinError) as caught:
        step.observe(plan, noise(1, 3, 2, SLOTS), accepted)
    given = f"{accepted.dtype} {list(accepted.shape)}"
    assert str(caught.value) == f"accepted: got {given!r}, allowed: int64 [3]"
    assert same(step, before)


@pytest.mark.parametrize("accepted", [[-1, 0], [0, 2], [3, 0], [0, 2**40]])
def test_accepted_counts_outside_the_draft_are_refused(accepted: list[int]) -> None:
    step = make()
    once(step, 150)
    plan = step.plan([3], [1, 2], rows([151, 152, 153], [90, 91, -1]))
    before = snapshot(step)
    with pytest.raises(SpinError) as caught:
        step.observe(plan, noise(1, 2, 3, SLOTS), torch.tensor(accepted))
    assert str(caught.value) == f"accepted: got {accepted}, allowed: 0 .. drafts, drafts = [2, 1]"
    assert same(step, before)


def test_a_padding_entry_accepts_nothing() -> None:
    step = make()
    plan = step.plan([3], [None], rows([-1, -1]))
    with pytest.raises(SpinError, match=r"^accepted: got \[1\], allowed: "):
        step.observe(plan, noise(1, 1, 2, SLOTS), torch.tensor([1]))
