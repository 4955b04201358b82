# SPDX-License-Identifier: Apache-2.0
"""Batches as a serving engine forms them, step by step."""

from __future__ import annotations

import random
from typing import Any

import torch


class Batch:
    """Sequences that join, leave, jump, stall and accept drafts, as a serving engine has them."""

    def __init__(self, seed: int, rows: int, slots: int, ratio: int) -> None:
        self.rng, self.rows = random.Random(seed), rows
        self.limit = (slots + 1) * ratio - 1 - 2 * rows
        self.next: dict[int, int] = {}
        self.fresh = 100

    def events(self, *states: Any) -> None:
        rng = self.rng
        while len(self.next) < 2 or (len(self.next) < 6 and rng.random() < 0.3):
            self.next[self.fresh] = rng.randrange(self.limit)
            self.fresh += 1
        for i in list(self.next):
            roll = rng.random()
            if roll < 0.03:
                del self.next[i]
                for state in states:
                    state.release(i)
            elif roll < 0.06:
                for state in states:
                    state.reset(i)
            elif roll < 0.09:
                self.next[i] = rng.randrange(self.limit)
            elif roll < 0.12:
                self.next[i] = max(0, self.next[i] - 1)

    def step(self) -> tuple[list[int | None], torch.Tensor]:
        ids: list[int | None] = [i for i in self.next if self.rng.random() < 0.9]
        ids += [None] * self.rng.randrange(3)
        self.rng.shuffle(ids)
        positions = torch.full((len(ids), self.rows), -1, dtype=torch.int64)
        for s, i in enumerate(ids):
            first = self.rng.randrange(3) if i is None else self.next[i]
            if first > self.limit:
                first = self.limit // 2  # runs out of room: jump back
            count = self.rng.randint(1, self.rows)
            if self.rng.random() < (0.5 if i is None else 0.95):  # else it takes no step
                positions[s, :count] = first + torch.arange(count)
                if i is not None:
                    self.next[i] = first + self.rng.randint(1, count)
        return ids, positions
