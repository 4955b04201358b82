# SPDX-License-Identifier: Apache-2.0
"""What SPIN does in each decode step of the host; the hooks call it, `SpinSession` owns it.

A step that keeps all blocks leaves the host's scores and picks alone, so that at sparsity 0 not a
bit of the logits differs from the untouched model. Whatever goes wrong, the host serves the step
densely, and its sequences are cold afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from spin_trtllm.geometry import count_blocks, visible_slots
from spin_trtllm.hosts.transformers.call import (
    ABSENT,
    Call,
    gather_keys,
    head_weights,
    miss_rates,
    scatter_scores,
)
from spin_trtllm.hosts.transformers.capture import Capture
from spin_trtllm.hosts.transformers.sequences import CacheRows, SequenceBook
from spin_trtllm.hosts.transformers.stats import SpinStats
from spin_trtllm.reference import pool_keys, score_blocks
from spin_trtllm.reference.pool_keys import pooled_keys_read
from spin_trtllm.reference.topk_slots import best_slots, expand_blocks
from spin_trtllm.step import SpinStep, StepPlan

logger = logging.getLogger(__name__)


class SpinDecoder:
    """SPIN for the indexers of one model.

    Args:
        step: configuration and averages.
        scorers: the host's scorer module of every layer.
        probe: also score all blocks, to measure what was missed.
        capture: where to record scores and decisions, or None.
        strict: let unexpected exceptions through.
    """

    def __init__(
        self,
        step: SpinStep,
        scorers: dict[int, torch.nn.Module],
        *,
        probe: bool,
        capture: Capture | None,
        strict: bool,
    ) -> None:
        self.book = SequenceBook()
        self.stats = SpinStats()
        self.capture = capture
        self._step = step
        self._scorers = scorers
        self._measures = probe or capture is not None
        self._queries = step.config.query_share_ppm > 0
        self._strict = strict
        self._logged: set[str] = set()

    # ---- the three moments of a decode step in one layer ----

    def enter(self, layer: int, hidden: Tensor, position_ids: Tensor, cache: Any) -> Call | None:
        """Find out whose step this is. None when it is no decode step: the host goes on alone.

        Args:
            layer: decoder-layer index.
            hidden: `[S, tokens, hidden]`; position_ids: `[1 or S, tokens]`.
            cache: the host's cache, or None.

        Raises:
            SpinError: the names given to this cache's sequences do not fit it.
        """
        if cache is None:
            return None
        sequences, tokens = hidden.shape[:2]
        opens = layer == self._step.state.layers[0]
        if opens:
            self.release_departed()
        rows = self.book.rows(cache, sequences)
        if tokens > 1:
            if opens:
                self._restart(rows)
            return None
        call = Call(layer, rows, position_ids.to(torch.int64).expand(sequences, 1))
        if opens:
            self.stats.steps += sequences
            rows.dense = False
            with self._falling_back(call):
                past = cache.layers[self._step.state.layers[-1]].compressed_kv["indexer"]
                self.make_cold(rows.follow(cache.layers[layer].keys, past))
        call.dense = rows.dense
        return call

    @torch.no_grad()
    def narrow(self, call: Call, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor | None:
        """The keys to score, `[S, n, D]`; None for all of them.

        Args:
            inputs: what the host gave to its scorer, see `Call.inputs`.
        """
        call.inputs = inputs
        if call.layer == self._step.state.layers[-1]:
            call.rows.past = inputs[1]
        narrowed = None
        if not call.dense:
            with self._falling_back(call):
                narrowed = self._plan(call, inputs)
        slots = inputs[1].shape[0] * inputs[1].shape[1]
        self.stats.dense_slots_scored += slots
        self.stats.spin_slots_scored += slots if call.kept is None else int(call.kept.sum())
        return narrowed

    @torch.no_grad()
    def widen(self, call: Call, scores: Tensor) -> Tensor | None:
        """Decide what the attention reads, and learn.

        Args:
            scores: fp32 `[S, 1, n]` of the narrowed keys.

        Returns:
            fp32 `[S, 1, T]`, -inf where nothing was scored; None to leave the scores alone.
        """
        if call.dense:
            return None
        narrowed = call.slots is not None
        with self._falling_back(call):
            return self._decide(call, scores)
        return self._score_all(call) if narrowed else None

    # ---- whose averages ----

    def release_departed(self) -> None:
        """Free the lanes of caches that went away."""
        for sequence_id in self.book.take_departed():
            self._step.state.release(sequence_id)

    def make_cold(self, sequence_ids: Sequence[int]) -> None:
        """Let the next step of these sequences keep all blocks."""
        for sequence_id in sequence_ids:
            self._step.state.reset(sequence_id)

    def _restart(self, rows: CacheRows) -> None:
        """A prefill: what was learnt before it is no longer trusted (SPEC 3)."""
        rows.forget_keys()
        self.make_cold(rows.sequence_ids)

    # ---- how a step runs ----

    def _plan(self, call: Call, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor | None:
        """Choose the blocks. Returns the kept keys, None when nothing is skipped."""
        keys = inputs[1]
        reason = self._unserved(call, keys.shape[1])
        if reason is not None:
            self._give_up(call, reason)
            return None
        query_scores = self._score_blocks(call, inputs) if self._queries else None
        plan = self._step.plan(
            [call.layer], call.rows.sequence_ids, call.positions_tokens, query_scores
        )
        kept = expand_blocks(plan.selection.blocks, keys.shape[1], self._step.config.block_size)
        call.plan, call.kept = plan, kept
        self._count(call, plan, keys.shape[1])
        if bool(kept.all()):
            return None
        call.slots, narrowed = gather_keys(keys, kept)
        return narrowed

    def _score_blocks(self, call: Call, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """What the current query says of every whole block: fp32 `[S, 1, T // block size]`."""
        query, keys, hidden = inputs
        config, known = self._step.config, call.rows.pooled_keys
        known[call.layer] = pooled = pool_keys(
            keys,
            block_size_slots=config.block_size,
            query_pooling=config.query_pooling,
            known=known.get(call.layer),
        )
        self.stats.pooled_keys_read += keys.shape[0] * pooled_keys_read(
            keys.shape[1],
            block_size_slots=config.block_size,
            query_pooling=config.query_pooling,
        )
        return score_blocks(query, head_weights(self._scorers[call.layer], hidden), pooled)

    def _unserved(self, call: Call, slots: int) -> str | None:
        """Why SPIN cannot serve a step: a reason to count, or None."""
        if slots > self._step.state.slots:
            return "too_long"
        if bool((visible_slots(call.positions_tokens, self._step.ratio) != slots).any()):
            return "padded"  # positions and slots disagree, as in a left-padded batch
        return None

    def _decide(self, call: Call, scores: Tensor) -> Tensor | None:
        plan, kept = call.plan, call.kept
        assert plan is not None
        assert kept is not None
        full = scores
        if call.slots is not None:
            full = scatter_scores(scores, call.slots, kept)
            call.picks = self._step.top_k(plan, full).long()
        self._step.observe(plan, full, torch.zeros_like(plan.lanes))
        if self._measures:
            with self.stats.probing(scores.device):
                self._measure(call, plan, kept, full)
        return None if call.slots is None else full

    def _score_all(self, call: Call) -> Tensor:
        """Scores of all visible slots by the host's scorer, past the hooks: fp32 `[S, 1, T]`."""
        assert call.inputs is not None
        scores: Tensor = self._scorers[call.layer].forward(*call.inputs)
        return scores

    # ---- counting and measuring ----

    def _count(self, call: Call, plan: StepPlan, slots: int) -> None:
        blocks = count_blocks(slots, self._step.config.block_size)
        kept_blocks = plan.selection.blocks.sum(1)
        self.stats.add_warm(plan.warm, kept_blocks, blocks)
        if call.layer == self._step.state.layers[0]:  # all layers of a step are alike in these
            homeless = int((plan.lanes == self._step.state.scratch).sum())  # lanes of layer 0
            self.stats.cold_steps += int((~plan.warm).sum()) - homeless
            self.stats.sparse_steps += int((kept_blocks < blocks).sum())
            if homeless:
                self.stats.fallbacks["no_free_lane"] += homeless

    def _measure(self, call: Call, plan: StepPlan, kept: Tensor, full: Tensor) -> None:
        """Compare with all scores: SPIN's own in kept slots, the dense scorer's in the others."""
        if call.slots is not None:
            full = torch.where(kept.unsqueeze(1), full, self._score_all(call))
        full = full.masked_fill(full.isnan(), ABSENT)  # NaN counts as -inf (SPEC 4)
        if full.shape[-1]:
            visible = torch.ones_like(full, dtype=torch.bool)
            truth = best_slots(full, visible, self._step.top_k_slots)
            self.stats.add_misses(call.layer, miss_rates(truth[:, 0], kept)[plan.warm])
        if self.capture is not None:
            self.capture.add(call.layer, call.rows.sequence_ids, plan, full[:, 0])

    # ---- the serving rule ----

    @contextmanager
    def _falling_back(self, call: Call) -> Iterator[None]:
        """An unexpected exception must not break a generation: the call runs dense instead."""
        try:
            yield
        except Exception as error:
            if self._strict:
                raise
            reason = type(error).__name__
            if reason not in self._logged:
                self._logged.add(reason)
                logger.warning(
                    "SPIN: a step runs dense from layer %d on; logged once for %s, always counted",
                    call.layer,
                    reason,
                    exc_info=error,
                )
            self._give_up(call, reason)

    def _give_up(self, call: Call, reason: str) -> None:
        """Serve the rest of this step densely, and trust nothing that was learnt so far."""
        self.stats.fallbacks[reason] += len(call.rows.sequence_ids)
        self.make_cold(call.rows.sequence_ids)
        call.rows.pooled_keys.clear()
        if self.capture is not None:
            self.capture.forget(call.rows.sequence_ids)
        call.rows.dense = call.dense = True
        call.plan = call.kept = call.slots = call.picks = None
