# SPDX-License-Identifier: Apache-2.0
"""Any rule on a model, through the same four hooks of each indexer as SPIN's embedded host.

with HookedRun(model, Streaming(400_000)) as run:
    ...                # decode steps
    run.commit(0)      # after each
run.cost
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from benchmarks.study.methods.misses import Misses
from benchmarks.study.methods.rule import Rule
from benchmarks.study.methods.step import Cost, Geometry, Step
from spin_trtllm.hosts.transformers.hooks import find_indexers, geometry_of, scorer_of
from spin_trtllm.reference.predict_blocks import NEVER
from spin_trtllm.reference.topk_slots import expand_blocks


def model_geometry(model: torch.nn.Module) -> Geometry:
    """Of a DeepSeek-V4's indexers, which are all alike."""
    indexer: Any = next(iter(find_indexers(model).values()))
    ratio, top_k = geometry_of(indexer)
    return Geometry(ratio, top_k, indexer.num_heads, indexer.head_dim)


class HookedRun:
    """A rule at work, from the construction on to the end of the `with` block."""

    def __init__(self, model: torch.nn.Module, rule: Rule) -> None:
        self.cost = Cost()
        self._rule = rule
        self._geometry = model_geometry(model)
        self._decodes = True
        self._again_rows: int | None = None  # rows of a step that is run again
        self._picks: dict[int, Tensor] = {}  # by layer, of the last step
        self._learnable: list[tuple[Step, Tensor]] = []  # of the last step, in layer order
        # Of the layer that is running:
        self._positions: Tensor | None = None
        self._step: Step | None = None
        self._kept: Tensor | None = None  # slots, bool [S, T]; None: all
        self._slots: Tensor | None = None  # int64 [S, n], see _narrow
        self._handles = []
        for number, (layer, indexer) in enumerate(find_indexers(model).items()):
            scorer = scorer_of(indexer)
            self._handles += [
                indexer.register_forward_pre_hook(self._enter),
                scorer.register_forward_pre_hook(partial(self._narrow, layer, number)),
                scorer.register_forward_hook(self._widen),
                indexer.register_forward_hook(partial(self._choose, layer)),
            ]

    def __enter__(self) -> HookedRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def misses(self) -> Misses:
        """What was skipped and missed so far; empty of a rule that does not measure it."""
        return self._rule.misses

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Calls in here read text; afterwards the rule starts anew."""
        self._decodes = False
        try:
            yield
        finally:
            self._decodes = True
            self._learnable = []
            self._rule.forget()

    @contextmanager
    def again(self, rows: int) -> Iterator[None]:
        """The call in here runs the first rows of the last step again: same picks, no cost."""
        self._again_rows = rows
        try:
            yield
        finally:
            self._again_rows = None

    def commit(self, accepted: int) -> None:
        """Let the rule learn from the last step.

        Args:
            accepted: drafts that were accepted, of every sequence.
        """
        for step, scores in self._learnable:
            self._rule.learn(step, scores, accepted)
        self._learnable = []

    # ---- the hooks, in the order in which a layer calls them ----

    def _enter(self, _: torch.nn.Module, args: Sequence[Any]) -> None:
        decides = self._decodes and self._again_rows is None
        self._positions = args[2] if decides else None

    @torch.no_grad()
    def _narrow(self, layer: int, number: int, scorer: torch.nn.Module, args: Any) -> Any:
        if self._positions is None:
            return None
        queries, keys, hidden = args
        positions = self._positions.expand(keys.shape[0], -1)
        step = Step(layer, number, positions, queries, keys, hidden, scorer, self._geometry)
        self._step, self._kept = step, self._kept_slots(step)
        if self._kept is not None:
            # Rows that keep fewer slots than others are filled up with slots that they skip.
            width = int(self._kept.sum(1).max())
            self._slots = (~self._kept).byte().sort(dim=1, stable=True).indices[:, :width]
            keys = keys.gather(1, self._slots.unsqueeze(-1).expand(-1, -1, keys.shape[-1]))
        self._count(step)
        return self._rule.queries(step), keys, hidden

    @torch.no_grad()
    def _widen(self, _: torch.nn.Module, args: Any, scores: Tensor) -> Tensor | None:
        step, kept = self._step, self._kept
        if step is None:
            return None
        full = scores
        if kept is not None:
            assert self._slots is not None
            full = scores.new_full((*scores.shape[:2], step.slots), NEVER)
            full.scatter_(-1, self._slots.unsqueeze(1).expand_as(scores), scores)
            full = full.masked_fill(~kept.unsqueeze(1), NEVER)
        self._learnable = self._learnable if step.number else []
        self._learnable.append((step, full.masked_fill(~step.visible, NEVER)))
        return full

    @torch.no_grad()
    def _choose(self, layer: int, _: torch.nn.Module, args: Any, picks: Tensor) -> Tensor | None:
        if self._again_rows is not None:
            return self._picks[layer][:, : self._again_rows]
        step, self._step = self._step, None
        if step is None:
            return None
        if self._kept is not None:
            picks = self._rule.pick(step, self._learnable[-1][1]).long()
        self._rule.picked(step, picks)
        self._picks[layer] = picks
        return picks

    # ---- what they have in common ----

    def _kept_slots(self, step: Step) -> Tensor | None:
        blocks = self._rule.keep(step)
        if blocks is None:
            return None
        kept = expand_blocks(blocks, step.slots, self._rule.block_size_slots)
        return None if bool(kept.all()) else kept  # then the host's own picks are left alone

    def _count(self, step: Step) -> None:
        everything = step.sequences * step.slots
        kept = everything if self._kept is None else int(self._kept.sum())
        heads = self._geometry.heads
        self.cost.add(
            Cost(
                dense_keys=everything,
                keys=kept,
                dense_products=everything * heads * step.rows,
                products=kept * self._rule.heads(step) * step.rows,
            )
        )
        self.cost.add(self._rule.extra_cost(step, kept))
