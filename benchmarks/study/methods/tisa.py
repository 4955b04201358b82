# SPDX-License-Identifier: Apache-2.0
"""Rotating refresh: some blocks are scored anew in each step, the others keep cached scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.study.methods.rule import BudgetRule
from benchmarks.study.methods.step import Cost, Step
from spin_trtllm.reference.predict_blocks import NEVER
from spin_trtllm.reference.topk_slots import best_slots

SCORE_BYTES = 2  # bf16


class Tisa(BudgetRule):
    """Fixed groups in turn, in the manner of `spin_trtllm.replay.policies.Tisa`.

    Oldest and newest block are fresh in every step. The attention reads the best of fresh and
    cached scores together, whatever block they are in.
    """

    def __init__(self, sparsity_ppm: int) -> None:
        super().__init__(sparsity_ppm)
        self._cached: dict[int, Tensor] = {}  # by layer, bf16 [S, slots]
        self._cursor = 0

    def forget(self) -> None:
        """Scores of another question mean nothing."""
        self._cached.clear()
        self._cursor = 0

    def keep(self, step: Step) -> Tensor | None:
        """The blocks whose turn it is; everything in the first step."""
        if step.layer not in self._cached:
            return None
        blocks = step.blocks(self.block_size_slots)
        index = torch.arange(blocks, device=step.keys.device)
        inner = max(blocks - 2, 1)
        turn = (index - 1 - self._cursor) % inner
        kept = (index == 0) | (index == blocks - 1) | (turn < self.kept_blocks(step) - 2)
        return kept.expand(step.sequences, -1)

    def pick(self, step: Step, scores: Tensor) -> Tensor:
        """Best of fresh and cached scores."""
        cached = _as_long(self._cached[step.layer], step.slots).float().unsqueeze(1)
        mixed = torch.where(scores > NEVER, scores, cached.expand_as(scores))
        return best_slots(mixed, step.visible & (mixed > NEVER), step.geometry.top_k)

    def learn(self, step: Step, scores: Tensor, accepted: int) -> None:
        """Cache the fresh scores of the last accepted row, and move on."""
        fresh = scores[:, accepted].bfloat16()
        if step.layer in self._cached:
            fresh = torch.where(
                fresh > NEVER, fresh, _as_long(self._cached[step.layer], step.slots)
            )
        self._cached[step.layer] = fresh
        if step.number == 0:
            turns = max(step.blocks(self.block_size_slots) - 2, 1)
            self._cursor = (self._cursor + self.kept_blocks(step) - 2) % turns

    def extra_cost(self, step: Step, kept_slots: int) -> Cost:
        """Cached scores of what was not scored."""
        skipped = step.sequences * step.slots - kept_slots
        return Cost(state_bytes=skipped * SCORE_BYTES)


def _as_long(cached: Tensor, slots: int) -> Tensor:
    """Cached scores `[S, n]` cut or filled up to `slots`."""
    missing = max(slots - cached.shape[1], 0)
    return F.pad(cached[:, :slots], (0, missing), value=NEVER)
