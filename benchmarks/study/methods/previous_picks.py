# SPDX-License-Identifier: Apache-2.0
"""The last step's picks alone: a hint from one step to the next, taken as all there is."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.study.methods.index_cache import PICK_BYTES
from benchmarks.study.methods.rule import Rule
from benchmarks.study.methods.step import Cost, Step


class PreviousPicks(Rule):
    """Scores the blocks that the attention read last, the oldest and the newest.

    GVR (arXiv 2604.22312) takes the same hint for a threshold only, and stays exact.
    """

    def __init__(self) -> None:
        self._last: dict[int, Tensor] = {}  # by layer, int64 [S, K or less], -1 pads
        self._step: dict[int, Tensor] = {}  # the same of the running step, with rows

    def forget(self) -> None:
        """The next step scores everything."""
        self._last.clear()

    def keep(self, step: Step) -> Tensor | None:
        """Blocks that hold one of the last picks; everything in the first step."""
        if step.layer not in self._last:
            return None
        picks = self._last[step.layer]
        blocks = step.blocks(self.block_size_slots)
        kept = torch.zeros(step.sequences, blocks + 1, dtype=torch.bool, device=picks.device)
        # Padding goes to one block too many, which is cut off.
        where = torch.where(picks >= 0, picks // self.block_size_slots, blocks)
        kept.scatter_(1, where, True)
        kept[:, [0, blocks - 1]] = True
        return kept[:, :-1]

    def picked(self, step: Step, picks: Tensor) -> None:
        """Keep all rows' picks until it is known which is the last accepted."""
        self._step[step.layer] = picks

    def learn(self, step: Step, scores: Tensor, accepted: int) -> None:
        """Keep the last accepted row's picks."""
        self._last[step.layer] = self._step[step.layer][:, accepted]

    def extra_cost(self, step: Step, kept_slots: int) -> Cost:
        """The picks of the last step."""
        last = self._last.get(step.layer)
        return Cost(state_bytes=0 if last is None else last.numel() * PICK_BYTES)
