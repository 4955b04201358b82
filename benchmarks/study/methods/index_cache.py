# SPDX-License-Identifier: Apache-2.0
"""Cross-layer reuse: some layers score everything, the layers after them read the same slots."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.study.methods.rule import Rule
from benchmarks.study.methods.step import Cost, Step

PICK_BYTES = 4  # int32


class IndexCache(Rule):
    """After IndexCache (arXiv 2603.12201), with a fixed period.

    Args:
        every: every how many layers with an indexer one scores.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._picks: Tensor | None = None

    def _scores(self, step: Step) -> bool:
        return step.number % self._every == 0

    def keep(self, step: Step) -> Tensor | None:
        """Everything, or nothing."""
        if self._scores(step):
            return None
        blocks = step.blocks(self.block_size_slots)
        return torch.zeros(step.sequences, blocks, dtype=torch.bool, device=step.keys.device)

    def pick(self, step: Step, scores: Tensor) -> Tensor:
        """What the layer before picked."""
        assert self._picks is not None
        return self._picks

    def picked(self, step: Step, picks: Tensor) -> None:
        """Keep the picks for the layers to come."""
        self._picks = picks

    def extra_cost(self, step: Step, kept_slots: int) -> Cost:
        """Picks that are read instead of keys."""
        if self._scores(step):
            return Cost()
        picks = min(step.geometry.top_k, step.slots)
        return Cost(state_bytes=step.sequences * step.rows * picks * PICK_BYTES)
