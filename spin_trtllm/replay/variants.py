# SPDX-License-Identifier: Apache-2.0
"""SPIN with the variants that exist for study: A0, A2, `age` and `staleness` (SPEC 6 and 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from spin_trtllm.config import EXPLORATION_POLICIES, REDUCTIONS, SpinConfig
from spin_trtllm.errors import refuse
from spin_trtllm.geometry import count_blocks, query_slot, visible_slots
from spin_trtllm.reference.observe_scores import accept_rows, observe_entries
from spin_trtllm.reference.predict_blocks import NEVER, pool_blocks, predict_entries
from spin_trtllm.reference.select_blocks import Selection, join_rows
from spin_trtllm.reference.topk_slots import best_slots, scored_slots
from spin_trtllm.state import SpinState
from spin_trtllm.step import SpinStep, StepPlan


class SpinVariant(SpinStep):
    """`SpinStep` for every reduction and exploration policy.

    A2 keeps its block-level averages in the first entries of the state's slot axis.
    """

    reductions = REDUCTIONS
    exploration_policies = EXPLORATION_POLICIES

    def __init__(self, config: SpinConfig, state: SpinState, *, ratio: int) -> None:
        super().__init__(config, state, ratio=ratio)
        if config.reduction == "A0" and config.query_share_ppm:
            refuse("query_share", config.query_share, "0 with reduction A0, which has no budget")
        if config.reduction == "A0" and config.layer_sparsity:
            given = dict(config.layer_sparsity)
            refuse("layer_sparsity", given, "{} with reduction A0, which has no budget")
        lanes = state.v.shape[0] * state.v.shape[1]
        # The clock counts observed steps; a block is as old as the steps since it was last scored.
        self._clock = torch.zeros(lanes, dtype=torch.int64)
        self._observed_at = torch.zeros(lanes, self._blocks, dtype=torch.int64)

    @property
    def _blocks(self) -> int:
        return count_blocks(self.state.slots, self.config.block_size)

    def predict(self, lanes: Tensor, positions: Tensor) -> Tensor | None:
        """Predicted slot scores fp32 `[S, R, n]`, or None where only blocks are predicted (A2)."""
        if self.config.reduction == "A2":
            return None
        return predict_entries(
            self.state.v.flatten(0, 1),
            self.state.d.flatten(0, 1),
            lanes,
            visible_slots(positions, self.ratio),
            query_slot(positions, self.ratio),
        )

    def _select(
        self,
        lanes: Tensor,
        positions: Tensor,
        warm: Tensor,
        sequence_ids: Tensor,
        layers: Tensor,
        query_scores: Tensor | None,
    ) -> Selection:
        if self.config.reduction != "A0":
            return super()._select(lanes, positions, warm, sequence_ids, layers, query_scores)
        predicted = self.predict(lanes, positions)
        assert predicted is not None
        return self._keep_best_slots(predicted, positions, warm)

    def _keep_best_slots(self, predicted: Tensor, positions: Tensor, warm: Tensor) -> Selection:
        """A0: every block that holds one of the predicted top-K slots, and the forced ones."""
        index = torch.arange(self._blocks)
        present = self._visible_blocks(positions)
        visible = index < present.unsqueeze(-1)
        best = best_slots(predicted, predicted > NEVER, self.top_k_slots).long()
        holds = torch.zeros(*best.shape[:2], self._blocks + 1, dtype=torch.bool)
        # Padding (-1) goes to one block too many, which is cut off.
        where = torch.where(best >= 0, best // self.config.block_size, self._blocks)
        holds = holds.scatter_(-1, where, True)[..., :-1]
        chosen = visible & (holds | (index == 0) | (index == present.unsqueeze(-1) - 1))
        chosen = torch.where(warm.view(-1, 1, 1), chosen, visible)
        return join_rows(chosen, torch.zeros_like(chosen), present, self.config.mask_policy)

    def _block_scores(self, lanes: Tensor, positions: Tensor) -> Tensor:
        if self.config.reduction != "A2":
            return super()._block_scores(lanes, positions)
        scores = predict_entries(
            self.state.v.flatten(0, 1),
            self.state.d.flatten(0, 1),
            lanes,
            self._visible_blocks(positions),
            self._query_block(positions),
        )
        missing = self._blocks - scores.shape[-1]
        return torch.nn.functional.pad(scores, (0, missing), value=NEVER)

    def _priorities(self, lanes: Tensor, block_scores: Tensor) -> Tensor | None:
        observed_at = self._observed_at[lanes].unsqueeze(1)
        if self.config.exploration_policy == "age":
            return observed_at
        if self.config.exploration_policy == "staleness":
            age = self._clock[lanes].view(-1, 1, 1) - observed_at
            return -(block_scores + self.config.staleness_weight * age)
        return None

    def _make_cold(self, lanes: Tensor) -> None:
        super()._make_cold(lanes)
        self._clock[lanes] = 0
        self._observed_at[lanes] = 0

    def _update(
        self, lanes: Tensor, plan: StepPlan, scores: Tensor, rows: Tensor, accepted: Tensor
    ) -> None:
        blocks = plan.selection.blocks[rows]
        self._clock[lanes] += 1
        self._observed_at[lanes] = torch.where(
            blocks, self._clock[lanes].unsqueeze(-1), self._observed_at[lanes]
        )
        if self.config.reduction != "A2":
            super()._update(lanes, plan, scores, rows, accepted)
            return
        positions = plan.positions_tokens[rows]
        scored = scored_slots(
            blocks,
            positions,
            scores.shape[-1],
            ratio=self.ratio,
            block_size_slots=self.config.block_size,
        )
        finite = torch.where(scored & scores[rows].isfinite(), scores[rows], NEVER)
        pooled = pool_blocks(finite, self.config.block_size, self.config.pooling)
        accepted_rows = accept_rows(accepted, scores.shape[1], self.config.update_policy)
        observe_entries(
            self.state.v.flatten(0, 1),
            self.state.d.flatten(0, 1),
            lanes,
            pooled,
            (pooled > NEVER) & accepted_rows.unsqueeze(-1),
            self._query_block(positions),
            ema_decay=self.config.ema_decay,
        )

    def _visible_blocks(self, positions: Tensor) -> Tensor:
        return count_blocks(visible_slots(positions, self.ratio), self.config.block_size)

    def _query_block(self, positions: Tensor) -> Tensor:
        return query_slot(positions, self.ratio) // self.config.block_size
