# SPDX-License-Identifier: Apache-2.0
"""Coarse to fine: one pooled key a block is scored first, then the slots of the best blocks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from benchmarks.study.methods.rule import BudgetRule
from benchmarks.study.methods.step import Cost, Step
from spin_trtllm.reference.pool_keys import pooled_keys_read


class Hisa(BudgetRule):
    """After HISA (arXiv 2603.28458). It knows this step's queries, and has no state."""

    def keep(self, step: Step) -> Tensor:
        """The blocks whose mean keys score best for any row."""
        pooled = step.score(block_means(step.keys, self.block_size_slots))
        return self.best_blocks(step, pooled.amax(1))

    def extra_cost(self, step: Step, kept_slots: int) -> Cost:
        """The pooled keys. Serving keeps them up to date slot by slot, at next to no cost."""
        pooled = step.sequences * pooled_keys_read(
            step.slots, block_size_slots=self.block_size_slots, query_pooling="mean"
        )
        products = pooled * step.geometry.heads * step.rows
        return Cost(pooled_keys=pooled, products=products)


def block_means(keys: Tensor, block_size_slots: int) -> Tensor:
    """Mean key of each block, the last one over the slots it has: `[S, T, D]` to `[S, B, D]`."""
    slots = keys.shape[1]
    missing = -slots % block_size_slots
    sums = F.pad(keys, (0, 0, 0, missing)).unflatten(1, (-1, block_size_slots)).sum(2)
    sizes = keys.new_full((sums.shape[1], 1), block_size_slots)
    sizes[-1] -= missing
    return sums / sizes
