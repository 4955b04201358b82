# SPDX-License-Identifier: Apache-2.0
"""Sink and recent: the oldest block and the newest ones."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.study.methods.rule import BudgetRule
from benchmarks.study.methods.step import Step


class Streaming(BudgetRule):
    """After StreamingLLM (Xiao et al., 2023). Nothing is predicted and nothing learnt."""

    def keep(self, step: Step) -> Tensor:
        """The budget's blocks: the first, and as many of the last as it leaves."""
        blocks = step.blocks(self.block_size_slots)
        index = torch.arange(blocks, device=step.keys.device)
        kept = (index == 0) | (index > blocks - self.kept_blocks(step))
        return kept.expand(step.sequences, -1)
