# SPDX-License-Identifier: Apache-2.0
"""Fewer heads: every key is scored, by the query's heads of largest weight alone."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.study.methods.rule import Rule
from benchmarks.study.methods.step import Step


class HeadSubset(Rule):
    """After MISA (arXiv 2605.07363), without its second pass over the candidates.

    It reads all keys: what it saves is multiplications.

    Args:
        heads: that score, of each row.
    """

    def __init__(self, heads: int) -> None:
        self._heads = heads

    def queries(self, step: Step) -> Tensor:
        """Zero where a head is left out: its similarity, through the ReLU, then adds nothing."""
        best = step.head_weights.abs().topk(self.heads(step), dim=-1).indices
        chosen = torch.zeros(step.queries.shape[:3], device=best.device).scatter_(-1, best, 1.0)
        return step.queries * chosen.unsqueeze(-1).to(step.queries.dtype)

    def heads(self, step: Step) -> int:
        """No more than there are."""
        return min(self._heads, step.geometry.heads)
