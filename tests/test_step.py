# SPDX-License-Identifier: Apache-2.0
"""One decode step for a batch: against one plain-loop oracle a sequence, and in isolation."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import LayerRecord, OracleSequence
from steps import (
    CONFIG,
    INF,
    LAYERS,
    NAN,
    RATIO,
    SLOTS,
    make,
    noise,
    once,
    referee,
    rows,
    same,
    snapshot,
)
from torch import Tensor

from spin_trtllm.reference.averages import read_averages


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
        wanted = self.expect(ids, positions, scores, accepted)
        for group in self.groups:
            self.run_group(group, ids, positions, scores, accepted, wanted)
        for sequence_id, a in zip(ids, accepted, strict=True):
            if sequence_id is not None:
                self.position[sequence_id] += a + 1

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
            v, d = read_averages(state.v[:, lane]), read_averages(state.d[:, lane])
            assert v.tolist() == [[float(x) for x in v] for v in oracle.v]
            assert d.tolist() == [[float(x) for x in d] for d in oracle.d]
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
        {"state_dtype": "log8", "ema_decay": 0.7},
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
