# SPDX-License-Identifier: Apache-2.0
"""Decode steps one after another: warm and cold, late results, acceptance known later."""

from __future__ import annotations

import pytest
import torch
from steps import (
    INF,
    LAYERS,
    NAN,
    SLOTS,
    TOP_K,
    make,
    noise,
    once,
    referee,
    rows,
    same,
    snapshot,
)

from spin_trtllm.errors import SpinError
from spin_trtllm.state import NOWHERE


# ---------------------------------------------------------------- lifecycle
def test_the_first_step_is_dense_and_warms() -> None:
    step = make()
    plan = once(step, 150)
    assert not plan.warm.any()
    assert plan.selection.blocks.tolist() == [[True] * 5 + [False]] * 3
    assert not plan.selection.explored_blocks.any()
    assert step.state.warm[:, 0].all()
    assert (step.state.next_tokens[:, 0] == 151).all()
    assert once(step, 151).warm.all()


@pytest.mark.parametrize("start", [0, 100, 149, 150, 152, 170])
def test_any_other_start_than_the_expected_one_is_cold(start: int) -> None:
    step = make()
    once(step, 150)
    plan = once(step, start, accepted=None)
    assert not plan.warm.any()
    assert not step.state.v[:, 0].any()
    assert not step.state.d[:, 0].any()
    assert (step.state.next_tokens[:, 0] == NOWHERE).all()


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_the_next_start_follows_the_accepted_drafts(accepted: int) -> None:
    for start in range(150, 155):
        step = make()
        once(step, 150, drafts=2, accepted=accepted)
        assert bool(once(step, start).warm.all()) == (start == 150 + accepted + 1)


def test_row_counts_may_change_at_every_step() -> None:
    step, oracle = make(), referee(1)
    position = 120
    for t, (drafts, accepted) in enumerate([(0, 0), (3, 2), (0, 0), (1, 0), (2, 2), (0, 0)]):
        z = noise(t, 3, drafts + 1, SLOTS)
        positions = list(range(position, position + drafts + 1))
        plan = step.plan(LAYERS, [1], rows(positions))
        records = oracle.step(positions, z.numpy(), accepted)
        assert bool(plan.warm.all()) == (t > 0)
        for layer, record in enumerate(records):
            found = plan.selection.blocks[layer].nonzero().squeeze(-1).tolist()
            assert found == sorted(record.blocks)
        step.observe(plan, z, torch.full((3,), accepted))
        position += accepted + 1
    assert step.state.v[:, 0].tolist() == [[float(x) for x in v] for v in oracle.v]


@pytest.mark.parametrize("overtake", ["reset", "release", "revive", "adopt", "plan", "observe"])
def test_a_late_result_is_dropped(overtake: str) -> None:
    step = make()
    once(step, 150)
    plan = once(step, 151, accepted=None)
    state = step.state
    if overtake == "reset":
        state.reset(1)
    elif overtake == "release":
        state.release(1)
    elif overtake == "revive":  # preempted and resumed in the same lane
        for other in range(10, 14):
            state.lanes([other])
        state.release(1)
        assert state.lanes([1]) == [0]
    elif overtake == "adopt":
        state.adopt(1, state.export(1))
    elif overtake == "plan":
        once(step, 151, accepted=None)
    else:
        step.observe(plan, noise(3, 3, 1, SLOTS), torch.zeros(3, dtype=torch.int64))
    before = snapshot(step)
    step.observe(plan, noise(4, 3, 1, SLOTS), torch.zeros(3, dtype=torch.int64))
    assert same(step, before)
    if overtake in ("reset", "release", "revive"):
        assert not state.v.any()
        assert not once(step, 152).warm.any()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("how", ["observe", "defer"])
def test_a_sequence_that_is_only_padding_takes_no_step(known: bool, how: str) -> None:
    step = make()
    if known:
        once(step, 150)
    else:
        step.state.lanes([1])
    before = snapshot(step)
    plan = step.plan(LAYERS, [1], rows([-1, -1]))
    assert not plan.warm.any()
    assert not plan.selection.blocks.any()
    z = noise(1, 3, 2, SLOTS)
    if how == "observe":
        step.observe(plan, z, torch.zeros(3, dtype=torch.int64))
    else:
        step.defer(plan, z)
    assert same(step, before)
    following = once(step, 151 if known else 0, accepted=None)
    assert following.warm.tolist() == [known] * 3
    assert same(step, before)


def test_nan_scores_do_not_live_on() -> None:
    step = make()
    plan = step.plan(LAYERS, [1], rows([150]))
    z = torch.full((3, 1, SLOTS), NAN)
    z[1] = noise(1, 1, SLOTS)
    z[1, 0, :4] = torch.tensor([NAN, INF, -INF, 5.0])
    top_k = step.top_k(plan, z)
    assert top_k[0, 0].tolist() == list(range(TOP_K))  # all -inf: the lowest visible slots
    assert len(set(top_k[1, 0].tolist())) == TOP_K
    step.observe(plan, z, torch.zeros(3, dtype=torch.int64))
    assert step.state.v.isfinite().all()
    assert step.state.d.isfinite().all()
    assert step.state.v[1, 0, :4].tolist() == [0, 0, 0, 2.5]
    assert not step.state.v[0].any()
    assert once(step, 151).warm.all()


# ---------------------------------------------------------------- acceptance known later
@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_deferred_acceptance_equals_observing_it(accepted: int) -> None:
    told, deferred = make(), make()
    for step in (told, deferred):
        once(step, 120, seed=1)
        plan = once(step, 121, drafts=3, accepted=None)
        z = noise(2, 3, 4, SLOTS)
        if step is told:
            step.observe(plan, z, torch.full((3,), accepted))
        else:
            step.defer(plan, z)
    following = rows([122 + accepted])
    plans = [step.plan(LAYERS, [1], following) for step in (told, deferred)]
    assert plans[0].warm.all()
    assert plans[1].warm.all()
    assert torch.equal(plans[0].selection.blocks, plans[1].selection.blocks)
    assert same(deferred, snapshot(told))


@pytest.mark.parametrize("start", [0, 100, 120, 121, 126, 140])
def test_a_start_that_no_acceptance_explains_is_cold(start: int) -> None:
    step = make()
    once(step, 120, drafts=0)
    plan = once(step, 122, drafts=3, accepted=None)  # 122 is a jump: cold; may end at 123..126
    step.defer(plan, noise(2, 3, 4, SLOTS))
    following = step.plan(LAYERS, [1], rows([start]))
    assert bool(following.warm.all()) == (123 <= start <= 126)
    assert bool(step.state.v.any()) == (123 <= start <= 126)


def test_a_sequence_that_sits_out_a_plan_goes_on_where_it_stood() -> None:
    """As the micro-batches of pipeline stages do, and whoever waits for a draft."""
    alone, step = make(), make()
    buffer = torch.empty(6, 1, SLOTS)  # one for all steps, as a host may have it
    for start in (150, 151):
        buffer.copy_(noise(start, 6, 1, SLOTS))
        step.defer(step.plan(LAYERS, [1, 2], rows([start], [start - 50])), buffer)
        alone.defer(alone.plan(LAYERS, [1], rows([start])), buffer[::2].clone())
    for start in (102, 103):
        only_two = step.plan(LAYERS, [2], rows([start]))
        assert only_two.warm.all()
        buffer[:3] = noise(5, 3, 1, SLOTS)
        step.defer(only_two, buffer[:3])
    both = step.plan(LAYERS, [2, 1], rows([104], [152]))
    assert both.warm.all()
    assert alone.plan(LAYERS, [1], rows([152])).warm.all()
    lane = step.state.lanes([1])[0]
    assert torch.equal(step.state.v[:, lane], alone.state.v[:, alone.state.lanes([1])[0]])
    assert step.state.v[:, lane].any()


def test_a_sequence_that_sat_out_is_cold_if_it_moved_meanwhile() -> None:
    step = make()
    for start in (150, 151):
        plan = step.plan(LAYERS, [1, 2], rows([start], [start - 50]))
        step.defer(plan, noise(start, 6, 1, SLOTS))
    step.defer(step.plan(LAYERS, [2], rows([102])), noise(5, 3, 1, SLOTS))
    assert step.plan(LAYERS, [2, 1], rows([103], [153])).warm.tolist() == [True, False] * 3


@pytest.mark.parametrize("event", ["reset", "release", "revive"])
def test_a_deferred_result_is_dropped_when_its_sequence_is_gone(event: str) -> None:
    step = make(sequences=1)
    once(step, 150)
    step.defer(once(step, 151, accepted=None), noise(2, 3, 1, SLOTS))
    if event == "reset":
        step.state.reset(1)
    else:
        step.state.release(1)
    if event == "revive":
        step.state.lanes([9])
        step.state.release(9)
    plan = step.plan(LAYERS, [1], rows([152]))
    assert not plan.warm.any()
    assert not step.state.v.any()


def test_deferred_steps_of_different_groups_do_not_mix() -> None:
    """Layers one by one in any order, then together, then one by one again."""
    step, told = make(), make()
    for start in (150, 151):
        for group in ((12,), (3,), (7,)):
            z = noise(start + group[0], 1, 1, SLOTS)
            step.defer(step.plan(group, [1], rows([start])), z)
            told.observe(told.plan(group, [1], rows([start])), z, torch.zeros(1, dtype=torch.int64))
    together = step.plan(LAYERS, [1], rows([152]))
    assert together.warm.all()
    assert torch.equal(step.state.v, told.state.v)
    assert torch.equal(step.state.d, told.state.d)
    step.defer(together, noise(1, 3, 1, SLOTS))
    again = step.plan(LAYERS, [1], rows([153]))
    assert again.warm.all()
    # Results that an observed step has replaced must not be applied.
    before = step.state.v[:, 0].clone()
    step.observe(again, torch.full((3, 1, SLOTS), NAN), torch.zeros(3, dtype=torch.int64))
    for group in ((3,), (7,), (12,)):
        assert step.plan(group, [1], rows([154])).warm.all()
    assert torch.equal(step.state.v[:, 0], before)


def test_padding_does_not_overtake_an_open_plan() -> None:
    """An entry that takes no step leaves the one that is on its way alone."""
    step = make()
    plan = step.plan(LAYERS, [1], rows([150]))
    step.plan(LAYERS, [1], rows([-1]))
    step.observe(plan, noise(1, 3, 1, SLOTS), torch.zeros(3, dtype=torch.int64))
    assert step.plan(LAYERS, [1], rows([151])).warm.all()


@pytest.mark.parametrize("layer", [3.0, True, [3], "3", None])
def test_a_layer_of_another_kind_is_refused(layer: object) -> None:
    with pytest.raises(SpinError, match=r"^layers: got "):
        make().plan([layer], [1], rows([150]))
