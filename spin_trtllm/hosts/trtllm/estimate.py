# SPDX-License-Identifier: Apache-2.0
"""What a step will do, from the host's lengths alone: figures for the counters, not for decisions.

A captured graph runs without Python, and the host may not wait for the device. So the counters take
the budget of SPEC 4 for the lengths that the host knows, which may be late by the drafts accepted
in the step before; what the union of draft rows keeps beyond one row's budget is left out. Where
layers have targets of their own, it is what they keep on average.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from spin_trtllm.config import SpinConfig
from spin_trtllm.geometry import block_budget, count_blocks
from spin_trtllm.hosts.trtllm.sequences import SequenceLanes


class StepEstimate:
    """The budget of every possible length, looked up instead of worked out in each step.

    Args:
        config: `top_k` must be settled.
        layer_sparsity_ppm: target of each layer.
        ratio: raw tokens a slot; slots: most slots of a sequence.
    """

    def __init__(
        self, config: SpinConfig, layer_sparsity_ppm: Sequence[int], *, ratio: int, slots: int
    ) -> None:
        assert config.top_k is not None
        self._ratio, self._layers = ratio, len(layer_sparsity_ppm)
        visible = torch.arange(slots + 1)
        kept_slots = torch.zeros_like(visible)  # of all layers
        for sparsity_ppm, layers in Counter(layer_sparsity_ppm).items():
            budget = block_budget(
                count_blocks(visible, config.block_size),
                top_k=config.top_k,
                block_size_slots=config.block_size,
                sparsity_ppm=sparsity_ppm,
                exploration_ppm=config.exploration_ppm,
            )
            kept = torch.as_tensor(budget.kept_blocks) * config.block_size
            kept_slots += layers * kept.minimum(visible)
        self._kept_slots = kept_slots.numpy()

    def figures(
        self, cached_tokens: Sequence[int], next_n: int, lanes: SequenceLanes
    ) -> dict[str, int]:
        """Arguments of `Counters.step` for a step that runs SPIN.

        Args:
            cached_tokens: of each generation row, before this step; padding counts for nothing.
            next_n: rows of each request.
        """
        rows, all_rows = lanes.known_rows, lanes.real_rows
        visible = np.fromiter(cached_tokens, np.int64, len(cached_tokens))
        if rows < len(cached_tokens):
            visible = visible[lanes.is_known]
        visible += next_n
        visible //= self._ratio
        kept = self._kept_slots.take(visible, mode="clip")
        return {
            "sparse_rows": rows * next_n,
            "cold_rows": (all_rows - rows) * next_n,
            "kept_slots": int(np.add.reduce(kept)) * next_n // self._layers,
            "visible_slots": int(np.add.reduce(visible)) * next_n,
        }
