# SPDX-License-Identifier: Apache-2.0
"""SPIN: through the embedded host's own session or, for several rows a step, as a rule.

The rule is `SpinStep` on the study's hooks. At one row a step both decide alike, bit for bit; a
test holds them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import NoReturn

import torch
from torch import Tensor

from benchmarks.study.methods.hooked import model_geometry
from benchmarks.study.methods.misses import Misses
from benchmarks.study.methods.rule import Rule
from benchmarks.study.methods.step import Cost, Step
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.geometry import count_blocks, visible_slots
from spin_trtllm.hosts.transformers import config_of, enable
from spin_trtllm.hosts.transformers.call import head_weights, miss_rates
from spin_trtllm.hosts.transformers.capture import Capture
from spin_trtllm.hosts.transformers.hooks import find_indexers
from spin_trtllm.reference import pool_keys, score_blocks
from spin_trtllm.reference.pool_keys import pooled_keys_read
from spin_trtllm.reference.topk_slots import best_slots, expand_blocks
from spin_trtllm.state import SpinState
from spin_trtllm.step import SpinStep, StepPlan


class SpinRun:
    """SPIN's own session at work; the same use as `HookedRun`, but one row a step.

    Args:
        capture: also record scores and decisions of every step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: SpinConfig,
        sequence_ids: Sequence[int],
        *,
        capture: bool = False,
    ) -> None:
        self._config = config
        self._geometry = model_geometry(model)
        self._session = enable(
            model,
            config,
            max_sequences=len(sequence_ids),
            sequence_ids=sequence_ids,
            probe=True,
            capture=capture,
            strict=True,
        )

    def __enter__(self) -> SpinRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session.close()

    @property
    def cost(self) -> Cost:
        """What was read so far.

        Raises:
            SpinError: a step ran dense, so that the cost would be another method's.
        """
        stats, heads = self._session.stats, self._geometry.heads
        if stats.fallbacks:
            raise SpinError(f"study: SPIN ran dense: {dict(stats.fallbacks)}")
        return Cost(
            dense_keys=stats.dense_slots_scored,
            keys=stats.spin_slots_scored,
            pooled_keys=stats.pooled_keys_read,
            state_bytes=_state_bytes(
                self._config, stats.dense_slots_scored, stats.spin_slots_scored
            ),
            dense_products=stats.dense_slots_scored * heads,
            products=(stats.spin_slots_scored + stats.pooled_keys_read) * heads,
        )

    @property
    def capture(self) -> Capture | None:
        """What was recorded; None unless it was asked for."""
        return self._session.capture

    @property
    def misses(self) -> Misses:
        """What was skipped and missed so far."""
        stats = self._session.stats
        entries = stats.warm_entries
        return Misses(entries, entries * (stats.realized_sparsity or 0.0), stats.misses)

    def reading(self) -> nullcontext[None]:
        """The session knows by itself that a call of several tokens reads text."""
        return nullcontext()

    def again(self, rows: int) -> NoReturn:
        """Refused.

        Raises:
            SpinError: always.
        """
        refuse("rows", rows, "one row a step in SPIN's session; drafts go through SpinRule")

    def commit(self, accepted: int) -> None:
        """The session learns by itself."""


class SpinRule(Rule):
    """SPIN for one sequence or several, and for drafts."""

    def __init__(
        self, model: torch.nn.Module, config: SpinConfig, sequence_ids: Sequence[int]
    ) -> None:
        geometry, indexers = model_geometry(model), find_indexers(model)
        self.block_size_slots = config.block_size
        self._misses = Misses()
        self._ids = list(sequence_ids)
        self._plans: dict[int, StepPlan] = {}
        self._state = SpinState(
            list(indexers),
            sequences=len(self._ids),
            slots=visible_slots(config_of(model).max_position_embeddings - 1, geometry.ratio),
            dtype=config.storage_dtype,
            device=next(model.parameters()).device,
        )
        self._step = SpinStep(config.with_top_k(geometry.top_k), self._state, ratio=geometry.ratio)

    @property
    def misses(self) -> Misses:
        """What was skipped and missed so far."""
        return self._misses

    def forget(self) -> None:
        """Every sequence is cold (SPEC 3)."""
        for sequence_id in self._ids:
            self._state.reset(sequence_id)

    def keep(self, step: Step) -> Tensor:
        """SPEC 4."""
        plan = self._step.plan(
            [step.layer], self._ids, step.positions_tokens, self._query_scores(step)
        )
        self._plans[step.layer] = plan
        return plan.selection.blocks

    def learn(self, step: Step, scores: Tensor, accepted: int) -> None:
        """SPEC 5."""
        plan = self._plans[step.layer]
        self._measure(step, plan, scores)
        self._step.observe(plan, scores, torch.full_like(plan.lanes, accepted))

    def extra_cost(self, step: Step, kept_slots: int) -> Cost:
        """The averages and, where the current query has a share, the pooled keys."""
        config = self._step.config
        pooled = step.sequences * pooled_keys_read(
            step.slots,
            block_size_slots=config.block_size,
            query_pooling=config.query_pooling if config.query_share_ppm else None,
        )
        return Cost(
            pooled_keys=pooled,
            products=pooled * step.geometry.heads * step.rows,
            state_bytes=_state_bytes(config, step.sequences * step.slots, kept_slots),
        )

    def _measure(self, step: Step, plan: StepPlan, scores: Tensor) -> None:
        """Compare with all scores: SPIN's own in kept slots, the dense scorer's in the others."""
        kept = expand_blocks(plan.selection.blocks, step.slots, self.block_size_slots)
        dense = torch.where(kept.unsqueeze(1), scores, step.score(step.keys))
        truth = best_slots(dense, step.visible, step.geometry.top_k)[plan.warm]
        rows = kept[plan.warm].repeat_interleave(step.rows, 0)
        blocks = count_blocks(step.slots, self.block_size_slots)
        kept_blocks = plan.selection.blocks[plan.warm].sum(1).double()
        self._misses.add(
            Misses(
                entries=len(kept_blocks),
                skipped=float((1 - kept_blocks / blocks).sum()),
                rates={step.layer: miss_rates(truth.flatten(0, 1), rows).tolist()},
            )
        )

    def _query_scores(self, step: Step) -> Tensor | None:
        config = self._step.config
        if not config.query_share_ppm:
            return None
        pooled = pool_keys(
            step.keys, block_size_slots=config.block_size, query_pooling=config.query_pooling
        )
        return score_blocks(step.queries, head_weights(step.scorer, step.hidden), pooled)


def _state_bytes(config: SpinConfig, slots: int, kept_slots: int) -> int:
    """Both averages of every slot to predict, then those of the kept slots to update."""
    return 2 * (slots + kept_slots) * config.storage_dtype.itemsize
