# SPDX-License-Identifier: Apache-2.0
"""Known failures of other engines, all at once: any schedule equals a dictionary by id.

The most valuable test of its kind: no event that a serving engine produces may let one sequence
read, overwrite or revive the averages of another.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from sequence_model import NEVER_SEEN, Entry, SequenceModel, indices, new_step, tensors_of
from torch import Tensor

from spin_trtllm.reference.averages import read_averages
from spin_trtllm.step import StepPlan

LAYERS = (2, 5)
SLOTS, CAPACITY, MOST_ROWS = 72, 5, 4
IDS = (7, 8, 9, 10, 0, 2**63, 2**64 - 1)

SCHEDULES: list[dict[str, Any]] = [
    {"ratio": 1, "exploration_policy": "random", "exploration": 0.3},
    {"ratio": 4, "mask_policy": "row0", "update_policy": "row0", "state_dtype": "bf16"},
    {"ratio": 4, "exploration_policy": "random", "exploration": 0.5, "state_dtype": "bf16"},
    {"ratio": 1, "mask_policy": "row0", "ema_decay": 0.9, "exploration_policy": "random"},
    {"ratio": 4, "ema_decay": 0.6, "state_dtype": "log8"},
]


@dataclass
class Delivery:
    """A planned step whose result is still to come."""

    plan: StepPlan
    entries: list[Entry]
    scores: Tensor
    accepted: list[int]


@dataclass
class Schedule:
    """Drives product and model with the same events, and compares them after each."""

    seed: int
    ratio: int
    params: dict[str, Any]
    starts: dict[int, int] = field(default_factory=dict)  # where each sequence goes on
    on_their_way: list[Delivery] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)  # how often what happened

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.numbers = np.random.default_rng(self.seed)
        shape = {"slots": SLOTS, "ratio": self.ratio, "top_k": 12}
        params = {"seed": self.seed, **self.params}
        self.step = new_step(layers=LAYERS, sequences=CAPACITY, **shape, **params)
        self.model = SequenceModel(LAYERS, capacity=CAPACITY, **shape, **params)

    def run(self, steps: int) -> None:
        """Random events, until that many decode steps have run."""
        layout = [LAYERS]
        for t in range(steps):
            if t % 20 == 0:
                layout = self.random.choice([[LAYERS], [LAYERS[::-1]], [(2,), (5,)], [(5,), (2,)]])
            self.disturb()
            self.decode(layout)
            self.compare_states()

    def count(self, what: str, times: int = 1) -> None:
        self.seen[what] = self.seen.get(what, 0) + times

    def disturb(self) -> None:
        """Preemption, reset, migration or a late result, sometimes."""
        sequence_id = self.random.choice(IDS)
        event = self.random.choices(
            ["nothing", "release", "reset", "migrate", "late"], [64, 8, 5, 5, 18]
        )[0]
        if event == "release":
            self.step.state.release(sequence_id)
            self.model.release(sequence_id)
        elif event == "reset":
            self.step.state.reset(sequence_id)
            self.model.reset(sequence_id)
        elif event == "migrate":
            self.step.state.adopt(sequence_id, self.step.state.export(sequence_id))
            self.model.migrate(sequence_id)
        elif event == "late" and self.on_their_way:
            chosen = self.random.randrange(len(self.on_their_way))
            self.deliver(self.on_their_way.pop(chosen))

    def decode(self, layout: list[tuple[int, ...]]) -> None:
        """One step of a random batch, in one plan or one a layer."""
        batch = self.random.sample(IDS, self.random.randint(0, 6))
        ids: list[int | None] = [*batch, *[None] * self.random.choice([0, 0, 1, 2])]
        self.random.shuffle(ids)
        positions = [self.next_positions(i) for i in ids]
        accepted = [self.random.randrange(len(p)) if p else 0 for p in positions]
        for layers in layout:
            self.decode_layers(layers, ids, positions, accepted)
        for i, places, count in zip(ids, positions, accepted, strict=True):
            if i is not None and self.random.random() < 0.97:  # else the step is run again
                self.starts[i] = places[0] + count + 1

    def next_positions(self, sequence_id: int | None) -> list[int]:
        """Where a row stands; padding stands nowhere, or where somebody stood before it."""
        rows = self.random.randint(1, MOST_ROWS)
        last = SLOTS * self.ratio - 1 + (self.ratio - 1)  # sees all slots
        anywhere = self.random.randint(0, last - MOST_ROWS + 1)
        if sequence_id is None:
            return self.random.choice([[], list(range(anywhere, anywhere + rows))])
        start = self.starts.get(sequence_id, anywhere)
        if self.random.random() < 0.03:
            start = max(0, start + self.random.randint(-9, 9))
        if start + rows - 1 > last:
            start = anywhere
        return list(range(start, start + rows))

    def decode_layers(
        self,
        layers: tuple[int, ...],
        ids: list[int | None],
        positions: list[list[int]],
        accepted: list[int],
    ) -> None:
        scores = self.draw_scores(len(layers) * len(ids))
        table = torch.full((len(ids), MOST_ROWS), -1, dtype=torch.int64)
        for s, places in enumerate(positions):
            table[s, : len(places)] = torch.tensor(places)
        plan = self.step.plan(layers, ids, table)
        entries = self.model.plan(layers, ids, positions, scores)
        delivery = Delivery(plan, entries, torch.from_numpy(scores), accepted * len(layers))
        self.compare_decisions(delivery)
        fate = self.random.choices(["observe", "defer", "late", "lost"], [50, 36, 10, 4])[0]
        if fate == "observe":
            self.deliver(delivery)
        elif fate == "defer":
            self.step.defer(plan, delivery.scores)
            self.model.defer(entries)
        elif fate == "late":
            self.on_their_way = [*self.on_their_way[-5:], delivery]

    def draw_scores(self, entries: int) -> np.ndarray:
        """Many ties, some non-finite, and no entry left unset, visible or not."""
        shape = (entries, MOST_ROWS, SLOTS)
        scores = (self.numbers.integers(-6, 7, shape) / 4).astype(np.float32)
        scores[self.numbers.random(shape) < 0.5] = 0.0
        odd = self.numbers.random(shape)
        for limit, value in ((0.03, np.nan), (0.02, np.inf), (0.01, -np.inf)):
            scores[odd < limit] = value
        return scores

    def deliver(self, delivery: Delivery) -> None:
        accepted = torch.tensor(delivery.accepted, dtype=torch.int64)
        self.step.observe(delivery.plan, delivery.scores, accepted)
        self.count("late", self.model.observe(delivery.entries, delivery.accepted))

    def compare_decisions(self, delivery: Delivery) -> None:
        plan, selection = delivery.plan, delivery.plan.selection
        top_k = self.step.top_k(plan, delivery.scores)
        for e, entry in enumerate(delivery.entries):
            record, rows = entry.record, len(entry.positions)
            assert bool(plan.warm[e]) == record.warm, entry.key
            assert indices(selection.blocks[e]) == record.blocks, entry.key
            assert indices(selection.explored_blocks[e]) == record.explored, entry.key
            chosen = [indices(row) for row in selection.row_blocks[e]]
            assert chosen[:rows] == record.row_blocks, entry.key
            assert chosen[rows:] == [set()] * (MOST_ROWS - rows)
            assert top_k[e, :rows].tolist() == record.topk, entry.key
            assert (top_k[e, rows:] == -1).all()
            self.count("warm", record.warm)
            self.count("homeless", entry.key[0] is not None and entry.track is None)

    def compare_states(self) -> None:
        state = self.step.state
        for sequence_id in IDS:
            exported = state.export(sequence_id)
            assert (exported is not None) == (sequence_id in self.model.sequence_ids)
            if exported is None:
                continue
            for index, layer in enumerate(LAYERS):
                track = self.model.tracks[sequence_id, layer]
                lane = {name: tensor[index] for name, tensor in exported.items()}
                assert read_averages(lane["v"]).tolist() == track.oracle.v[0]
                assert read_averages(lane["d"]).tolist() == track.oracle.d[0]
                assert bool(lane["warm"]) == track.oracle.warm
                assert int(lane["next_tokens"]) == track.next_tokens
        for name, tensor in tensors_of(state).items():
            assert (tensor[:, state.scratch] == NEVER_SEEN[name]).all(), name


@pytest.mark.parametrize("seed", range(len(SCHEDULES)))
def test_any_schedule_equals_a_dictionary_by_id(seed: int) -> None:
    """NVIDIA/TensorRT-LLM #18359, #13151, vllm-project/vllm #49757, tenstorrent/vllm-tt-plugin #37.

    2,500 steps in five configurations: sequences join, skip steps, are preempted, reset, moved,
    jump and outnumber the lanes; the batch is permuted, padded or empty; results come at once, with
    the next step, late, or never.
    """
    params = dict(SCHEDULES[seed])
    schedule = Schedule(seed, params.pop("ratio"), params)
    schedule.run(500)
    for what, least in (("warm", 600), ("late", 50), ("homeless", 100)):
        assert schedule.seen[what] > least, (what, schedule.seen)
