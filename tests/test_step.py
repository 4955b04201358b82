# SPDX-License-Identifier: Apache-2.0
"""One decode step for a batch: against one plain-loop oracle a sequence, and at the edges."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import LayerRecord, OracleSequence
from torch import Tensor

from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.state import NOWHERE, SpinState
from spin_trtllm.step import SpinStep, StepPlan

LAYERS = (3, 7, 12)
SLOTS, RATIO, BLOCK, TOP_K = 44, 4, 8, 10
BLOCKS = 6  # ceil(44 / 8)
CONFIG = SpinConfig(block_size=BLOCK, target_sparsity=0.5, exploration=0.2, top_k=TOP_K, seed=5)
INF, NAN = float("inf"), float("nan")


def make(config: SpinConfig = CONFIG, sequences: int = 4, layers: Any = LAYERS) -> SpinStep:
    state = SpinState(layers, sequences=sequences, slots=SLOTS, dtype=config.storage_dtype)
    return SpinStep(config, state, ratio=RATIO)


def referee(sequence_id: int, layers: Any = LAYERS, **changes: Any) -> OracleSequence:
    parameters = {
        "block_size": BLOCK,
        "sparsity": 0.5,
        "exploration": 0.2,
        "seed": 5,
        **changes,
    }
    return OracleSequence(RATIO, TOP_K, layers, sequence_id, SLOTS, **parameters)


def rows(*positions: list[int]) -> Tensor:
    return torch.tensor(list(positions), dtype=torch.int64)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def once(
    step: SpinStep, position: int, drafts: int = 0, accepted: int | None = 0, seed: int = 0
) -> StepPlan:
    """One step of sequence 1 on all layers; accepted None leaves the result open."""
    positions = rows(list(range(position, position + drafts + 1)))
    plan = step.plan(LAYERS, [1], positions)
    scores = noise(seed, len(LAYERS), drafts + 1, SLOTS)
    if accepted is not None:
        step.observe(plan, scores, torch.full((len(LAYERS),), accepted))
    return plan


def snapshot(step: SpinStep) -> tuple[Tensor, ...]:
    s = step.state
    return s.v.clone(), s.d.clone(), s.warm.clone(), s.next_tokens.clone()


def same(step: SpinStep, before: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(snapshot(step), before, strict=True))


# ---------------------------------------------------------------- against the oracle
class Fleet:
    """A batch server with one oracle a request id: who is served, where, and what is accepted."""

    def __init__(self, seed: int, groups: list[tuple[int, ...]], *, defer: bool, **changes: Any):
        self.random = random.Random(seed)
        self.numpy = np.random.default_rng(seed)
        self.groups, self.defer, self.changes = groups, defer, changes
        renamed = {k.replace("sparsity", "target_sparsity"): v for k, v in changes.items()}
        self.step = make(replace(CONFIG, **renamed))
        self.oracles: dict[int, OracleSequence] = {}
        self.position: dict[int, int] = {}
        self.served_last: set[int] = set()
        self.warm_entries = 0
        self.checked = 0

    def join(self) -> None:
        sequence_id = self.random.choice((self.random.randrange(50), 2**64 - 1, 2**63))
        if sequence_id not in self.oracles and len(self.oracles) < 4:
            self.oracles[sequence_id] = referee(sequence_id, **self.changes)
            self.position[sequence_id] = self.random.randrange(0, 120)

    def leave(self, sequence_id: int) -> None:
        self.step.state.release(sequence_id)
        del self.oracles[sequence_id]
        del self.position[sequence_id]

    def disturb(self) -> None:
        for sequence_id in list(self.oracles):
            event = self.random.random()
            if event < 0.05 or self.position[sequence_id] > SLOTS * RATIO - 8:
                self.leave(sequence_id)
            elif event < 0.10:  # a new turn
                self.step.state.reset(sequence_id)
                self.oracles[sequence_id].reset()
            elif event < 0.15:  # a jump that nobody announces
                self.position[sequence_id] += self.random.choice((-7, 5, 9))
                self.position[sequence_id] = max(0, self.position[sequence_id])
                self.oracles[sequence_id].reset()

    def serve(self) -> None:
        ids: list[int | None] = [i for i in self.oracles if self.random.random() < 0.85]
        ids += [None] * self.random.randrange(3)
        self.random.shuffle(ids)
        width = self.random.randrange(1, 4)
        positions, accepted = torch.full((len(ids), width), -1), []
        for entry, sequence_id in enumerate(ids):
            real = 0 if sequence_id is None else self.random.randrange(1, width + 1)
            if sequence_id is not None:
                start = self.position[sequence_id]
                positions[entry, :real] = torch.arange(start, start + real)
            accepted.append(self.random.randrange(max(real, 1)))
        scores = self.numpy.standard_normal((len(LAYERS), len(ids), width, SLOTS))
        scores = np.where(self.numpy.random(scores.shape) < 0.3, 0.0, scores).astype(np.float32)
        if self.defer:  # a sequence that sat out since its last step is cold
            for sequence_id in set(self.oracles) - self.served_last:
                self.oracles[sequence_id].reset()
        wanted = self.expect(ids, positions, scores, accepted)
        for group in self.groups:
            self.run_group(group, ids, positions, scores, accepted, wanted)
        for sequence_id, a in zip(ids, accepted, strict=True):
            if sequence_id is not None:
                self.position[sequence_id] += a + 1
        self.served_last = {i for i in ids if i is not None}

    def expect(
        self, ids: list[int | None], positions: Tensor, scores: np.ndarray, accepted: list[int]
    ) -> list[list[LayerRecord] | None]:
        wanted: list[list[LayerRecord] | None] = []
        for entry, sequence_id in enumerate(ids):
            if sequence_id is None:
                wanted.append(None)
                continue
            real = [p for p in positions[entry].tolist() if p >= 0]
            z = scores[:, entry, : len(real)]
            wanted.append(self.oracles[sequence_id].step(real, z, accepted[entry]))
        return wanted

    def run_group(
        self,
        group: tuple[int, ...],
        ids: list[int | None],
        positions: Tensor,
        scores: np.ndarray,
        accepted: list[int],
        wanted: list[list[LayerRecord] | None],
    ) -> None:
        index = [LAYERS.index(layer) for layer in group]
        plan = self.step.plan(group, ids, positions)
        z = torch.from_numpy(scores[index]).flatten(0, 1)
        top_k = self.step.top_k(plan, z)
        if self.defer:
            self.step.defer(plan, z)
        else:
            self.step.observe(plan, z, torch.tensor(accepted * len(group), dtype=torch.int64))
        for flat, layer in enumerate(i for i in index for _ in ids):
            entry = flat % len(ids)
            records = wanted[entry]
            blocks = plan.selection.blocks[flat].nonzero().squeeze(-1).tolist()
            if records is None:
                assert blocks == []
                assert (top_k[flat] == -1).all()
                assert not plan.warm[flat]
                continue
            record = records[layer]
            assert bool(plan.warm[flat]) == record.warm
            assert blocks == sorted(record.blocks)
            explored = plan.selection.explored_blocks[flat].nonzero().squeeze(-1).tolist()
            assert explored == sorted(record.explored)
            for row, chosen in enumerate(record.row_blocks):
                found = plan.selection.row_blocks[flat, row].nonzero().squeeze(-1).tolist()
                assert found == sorted(chosen)
                assert top_k[flat, row].tolist() == record.topk[row]
            assert (top_k[flat, len(record.topk) :] == -1).all()
            self.warm_entries += record.warm
            self.checked += 1

    def check_state(self) -> None:
        state = self.step.state
        for sequence_id, oracle in self.oracles.items():
            lane = state._lane_of.get(sequence_id)
            if lane is None or not oracle.warm:
                continue
            assert state.v[:, lane].float().tolist() == [[float(x) for x in v] for v in oracle.v]
            assert state.d[:, lane].float().tolist() == [[float(x) for x in d] for d in oracle.d]
            assert (state.next_tokens[:, lane] == self.position[sequence_id]).all()
        assert not state.v[:, state.scratch].any()
        assert not state.warm[:, state.scratch].any()


ALONE = [(3,), (7,), (12,)]
TOGETHER = [LAYERS]
MIXED = [(12,), (3, 7)]


@pytest.mark.parametrize("defer", [False, True], ids=["observe", "defer"])
@pytest.mark.parametrize("groups", [ALONE, TOGETHER, MIXED], ids=["alone", "together", "mixed"])
def test_join_leave_permute_against_one_oracle_a_request(
    groups: list[tuple[int, ...]], defer: bool
) -> None:
    fleet = Fleet(11, groups, defer=defer)
    for _ in range(70):
        if fleet.random.random() < 0.5:
            fleet.join()
        fleet.serve()
        if not defer:
            fleet.check_state()
        fleet.disturb()
    assert fleet.checked > 200
    assert fleet.warm_entries > fleet.checked / 3


@pytest.mark.parametrize(
    "changes",
    [
        {"mask_policy": "row0"},
        {"update_policy": "row0"},
        {"state_dtype": "bf16", "ema_decay": 0.9},
        {"sparsity": 0.99, "exploration": 1.0},
        {"exploration_policy": "none", "sparsity": 0.7},
    ],
    ids=lambda c: "-".join(map(str, c.values())),
)
def test_the_same_for_other_parameters(changes: dict[str, Any]) -> None:
    fleet = Fleet(12, TOGETHER, defer=False, **changes)
    for _ in range(40):
        fleet.join()
        fleet.serve()
        fleet.check_state()
        fleet.disturb()
    assert fleet.warm_entries > 50


# ---------------------------------------------------------------- isolation
def test_predictions_never_read_other_lanes() -> None:
    steps = [make(), make()]
    plans = []
    for step in steps:
        once(step, 150, seed=1)
        step.state.lanes([2, 3])
        if step is steps[1]:  # everything that is not sequence 1's
            others = [n for n in range(5) if n != step.state.lanes([1])[0]]
            for poison, lane in zip((NAN, INF, 3e38, -INF), others, strict=True):
                step.state.v[:, lane] = poison
                step.state.d[:, lane] = poison
        plans.append(step.plan(LAYERS, [1], rows([151])))
    for name in ("blocks", "row_blocks", "explored_blocks"):
        assert torch.equal(getattr(plans[0].selection, name), getattr(plans[1].selection, name))
    assert plans[0].warm.all()
    assert not plans[0].selection.blocks.all()


def test_a_result_does_not_depend_on_the_batch_position_or_company() -> None:
    alone = make()
    crowd = make()
    for t in range(6):
        z = noise(t, 3, 1, 1, SLOTS)  # [layers, 1 sequence, 1 row, slots]
        plan = alone.plan(LAYERS, [1], rows([150 + t]))
        alone.observe(plan, z.flatten(0, 1), torch.zeros(3, dtype=torch.int64))
        order = [[1, 2, None], [None, 2, 1], [2, 1, None]][t % 3]
        positions = rows(*[{1: [150 + t], 2: [90 + t], None: [-1]}[i] for i in order])
        batch = noise(100 + t, 3, 3, 1, SLOTS)
        batch[:, order.index(1)] = z[:, 0]
        wide = crowd.plan(LAYERS, order, positions)
        mine = [layer * 3 + order.index(1) for layer in range(3)]
        for name in ("blocks", "row_blocks", "explored_blocks"):
            expected = getattr(plan.selection, name)
            assert torch.equal(getattr(wide.selection, name)[mine], expected)
        crowd.observe(wide, batch.flatten(0, 1), torch.zeros(9, dtype=torch.int64))
    lane = crowd.state.lanes([1])[0]
    assert torch.equal(crowd.state.v[:, lane], alone.state.v[:, 0])
    assert alone.state.v.any()


def test_more_sequences_than_lanes_run_dense_and_leave_no_trace() -> None:
    step = make(sequences=1)
    once(step, 150)
    before = snapshot(step)
    for t in range(3):
        plan = step.plan(LAYERS, [2], rows([150 + t]))
        assert not plan.warm.any()
        assert plan.selection.blocks[:, :5].all()  # 37 slots, 5 blocks
        step.observe(plan, noise(t, 3, 1, SLOTS), torch.zeros(3, dtype=torch.int64))
    assert same(step, before)


def test_padding_rows_keep_nothing_and_write_nothing() -> None:
    step = make()
    before = snapshot(step)
    plan = step.plan(LAYERS, [None, None], torch.full((2, 3), -1))
    assert plan.drafts.tolist() == [-1] * 6
    assert not plan.selection.blocks.any()
    z = torch.full((6, 3, SLOTS), NAN)
    assert (step.top_k(plan, z) == -1).all()
    step.observe(plan, z, torch.zeros(6, dtype=torch.int64))
    assert same(step, before)


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


def test_a_sequence_that_misses_the_next_plan_is_cold_when_it_returns() -> None:
    step = make()
    for start in (150, 151):
        plan = step.plan(LAYERS, [1, 2], rows([start], [start - 50]))
        step.defer(plan, noise(start, 6, 1, SLOTS))
    only_two = step.plan(LAYERS, [2], rows([102]))
    assert only_two.warm.all()
    step.defer(only_two, noise(5, 3, 1, SLOTS))
    both = step.plan(LAYERS, [2, 1], rows([103], [152]))
    assert both.warm.tolist() == [True, False] * 3
    assert not step.state.v[:, step.state.lanes([1])[0]].any()


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
    """Layer by layer in any order; a change of grouping costs a cold step, never a wrong one."""
    step = make()
    for start in (150, 151):
        for group in ((12,), (3,), (7,)):
            plan = step.plan(group, [1], rows([start]))
            step.defer(plan, noise(start + group[0], 1, 1, SLOTS))
    together = step.plan(LAYERS, [1], rows([152]))
    assert not together.warm.any()
    assert not step.state.v.any()
    step.defer(together, noise(1, 3, 1, SLOTS))
    again = step.plan(LAYERS, [1], rows([153]))
    assert again.warm.all()
    torch.testing.assert_close(
        step.state.v[:, 0, :38], 0.5 * noise(1, 3, 1, SLOTS)[:, 0, :38], rtol=0, atol=0
    )
    # Stale single-layer results that are still waiting must not be applied.
    before = step.state.v[:, 0].clone()
    step.observe(again, torch.full((3, 1, SLOTS), NAN), torch.zeros(3, dtype=torch.int64))
    for group in ((3,), (7,), (12,)):
        assert step.plan(group, [1], rows([154])).warm.all()
    assert torch.equal(step.state.v[:, 0], before)


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
    assert step.plan(LAYERS, [1], rows([5])).selection.blocks.shape == (3, BLOCKS)


def test_no_sequences_settles_what_was_deferred_as_missing() -> None:
    step = make()
    step.defer(once(step, 150, accepted=None), noise(1, 3, 1, SLOTS))
    step.plan(LAYERS, [], torch.zeros(0, 1, dtype=torch.int64))
    assert not step.plan(LAYERS, [1], rows([151])).warm.any()


def test_positions_up_to_capacity() -> None:
    step = make()
    last = (SLOTS + 1) * RATIO - 2  # 178: 44 visible slots; 179 would complete slot 44
    plan = once(step, last - 1)
    assert plan.selection.blocks.all()
    assert once(step, last).warm.all()
    for bad in ([last + 1], [last, last + 1], [2**40]):
        with pytest.raises(SpinError) as caught:
            step.plan(LAYERS, [1], rows(bad))
        message = str(caught.value)
        assert message.startswith(f"positions_tokens: got {bad[-1]}, allowed: positions below 179")
        assert "44 slots" in message


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


@pytest.mark.parametrize("ratio", [0, -4])
def test_ratio_is_at_least_one(ratio: int) -> None:
    state = SpinState(LAYERS, sequences=1, slots=SLOTS)
    with pytest.raises(SpinError, match=rf"^ratio: got {ratio}, allowed: an integer >= 1$"):
        SpinStep(CONFIG, state, ratio=ratio)


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


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bool])
def test_positions_must_be_int64(dtype: torch.dtype) -> None:
    with pytest.raises(SpinError, match=r"^positions_tokens: got 'torch\..* allowed: int64 \["):
        make().plan([3], [1], torch.tensor([[5]], dtype=dtype))


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
