# SPDX-License-Identifier: Apache-2.0
"""What a method decides in a decode step. Without more, it is the dense indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.study.methods.misses import Misses
from benchmarks.study.methods.step import Cost, Step
from spin_trtllm.geometry import block_budget
from spin_trtllm.reference.predict_blocks import NEVER
from spin_trtllm.reference.select_blocks import choose_blocks
from spin_trtllm.reference.topk_slots import best_slots


class Rule:
    """Decides which blocks are scored, and what the attention reads of them.

    In every layer of a step comes `keep`, then `queries` where anything is to be scored, then
    `pick` where blocks were skipped, then `picked`. Once it is known how many drafts were
    accepted, `learn` is called for every layer.
    """

    block_size_slots = 16  # a quarter of the tiny model's top-k; in V4-Flash it is an eighth

    @property
    def misses(self) -> Misses:
        """What was skipped and missed so far; empty of a rule that does not measure it."""
        return Misses()

    def keep(self, step: Step) -> Tensor | None:
        """Blocks to score: bool `[S, B]`, or None for all."""
        return None

    def queries(self, step: Step) -> Tensor:
        """Queries to score with: `[S, R, H, D]`."""
        return step.queries

    def pick(self, step: Step, scores: Tensor) -> Tensor:
        """Slots that the attention reads, where blocks were skipped.

        Args:
            scores: fp32 `[S, R, T]`, -inf where nothing was scored.

        Returns:
            int `[S, R, K]`, -1 pads.
        """
        return best_slots(scores, step.visible & (scores > NEVER), step.geometry.top_k)

    def picked(self, step: Step, picks: Tensor) -> None:
        """Hear what the attention reads: int64 `[S, R, K or less]`."""

    def learn(self, step: Step, scores: Tensor, accepted: int) -> None:
        """Learn from rows `0 .. accepted`.

        Args:
            scores: fp32 `[S, R, T]`, -inf where a slot was not scored or is not visible.
        """

    def forget(self) -> None:
        """Text was read at once: what was learnt before it is no longer trusted."""

    def extra_cost(self, step: Step, kept_slots: int) -> Cost:
        """What is read besides keys.

        Args:
            kept_slots: scored slots, over all sequences.
        """
        return Cost()

    def heads(self, step: Step) -> int:
        """Heads that are multiplied with each key."""
        return step.geometry.heads


class BudgetRule(Rule):
    """A rule that keeps as many blocks as SPIN does at a target sparsity (SPEC 4)."""

    def __init__(self, sparsity_ppm: int) -> None:
        self.sparsity_ppm = sparsity_ppm

    def kept_blocks(self, step: Step) -> int:
        """`m` of SPEC 4."""
        budget = block_budget(
            step.blocks(self.block_size_slots),
            top_k=step.geometry.top_k,
            block_size_slots=self.block_size_slots,
            sparsity_ppm=self.sparsity_ppm,
            exploration_ppm=0,
        )
        return int(budget.kept_blocks)

    def best_blocks(self, step: Step, block_scores: Tensor) -> Tensor:
        """Oldest, newest and best blocks: fp32 `[S, B]` to bool `[S, B]`."""
        budget = block_budget(
            torch.full((step.sequences, 1), block_scores.shape[-1], device=block_scores.device),
            top_k=step.geometry.top_k,
            block_size_slots=self.block_size_slots,
            sparsity_ppm=self.sparsity_ppm,
            exploration_ppm=0,
        )
        scores = block_scores.unsqueeze(1)
        everything = torch.ones_like(scores, dtype=torch.bool)
        chosen, _ = choose_blocks(scores, everything, budget, torch.zeros_like(scores))
        return chosen[:, 0]
