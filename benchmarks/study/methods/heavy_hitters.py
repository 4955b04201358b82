# SPDX-License-Identifier: Apache-2.0
"""Cumulative scores: blocks that scored high so far go on being scored."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.study.methods.rule import BudgetRule
from benchmarks.study.methods.step import Cost, Step
from spin_trtllm.reference.predict_blocks import NEVER, pool_blocks

SUM_BYTES = 4  # fp32: a bf16 sum soon stops growing


class HeavyHitters(BudgetRule):
    """H2O's rule (Zhang et al., 2023) on indexer scores, blocks in the place of tokens.

    Scores are added up without decay, negative ones as 0, as H2O adds attention weights.
    """

    def __init__(self, sparsity_ppm: int) -> None:
        super().__init__(sparsity_ppm)
        self._sums: dict[int, Tensor] = {}  # by layer, fp32 [S, slots]

    def forget(self) -> None:
        """Sums start at 0 again."""
        self._sums.clear()

    def keep(self, step: Step) -> Tensor | None:
        """The blocks with the highest sums; everything in the first step."""
        if step.layer not in self._sums:
            return None
        sums = _as_long(self._sums[step.layer], step.slots)
        return self.best_blocks(step, pool_blocks(sums, self.block_size_slots, "max"))

    def learn(self, step: Step, scores: Tensor, accepted: int) -> None:
        """Add the accepted rows' scores."""
        known = scores[:, : accepted + 1]
        added = torch.where(known > NEVER, known, 0.0).clamp(min=0).sum(1)
        sums = self._sums.get(step.layer, added.new_zeros(step.sequences, 0))
        self._sums[step.layer] = _as_long(sums, step.slots) + added

    def extra_cost(self, step: Step, kept_slots: int) -> Cost:
        """All sums to choose by, then those of the kept slots to add to."""
        return Cost(state_bytes=(step.sequences * step.slots + kept_slots) * SUM_BYTES)


def _as_long(sums: Tensor, slots: int) -> Tensor:
    """Sums `[S, n]` cut or filled up to `slots`."""
    return F.pad(sums[:, :slots], (0, max(slots - sums.shape[1], 0)))
