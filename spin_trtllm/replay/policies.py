# SPDX-License-Identifier: Apache-2.0
"""What decides the slots a step scores: SPIN, predictors and rivals, on equal terms (SPEC 7)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import refuse
from spin_trtllm.geometry import PPM, Budget, block_budget, count_blocks, visible_slots
from spin_trtllm.reference.averages import read_averages
from spin_trtllm.reference.predict_blocks import NEVER, pool_blocks
from spin_trtllm.reference.select_blocks import (
    Selection,
    as_int64,
    choose_blocks,
    explore_priorities,
    join_rows,
)
from spin_trtllm.reference.topk_slots import best_slots, expand_blocks, topk_slots
from spin_trtllm.replay.metrics import correlate
from spin_trtllm.replay.trace import Trace, TraceStep
from spin_trtllm.replay.variants import SpinVariant
from spin_trtllm.state import NOWHERE, SpinState


@dataclass(frozen=True)
class Outcome:
    """What a policy did in one step; `L` layers, `R` rows, `B` blocks, `N` slots.

    Attributes:
        warm: bool `[L]`; a layer that is not warm scored everything and does not count.
        selection: scored blocks `[L, B]`, per row `[L, R, B]`, explored `[L, B]`.
        top_k: int32 `[L, R, K]`, slots the attention reads, -1 pads.
        predicted: fp32 `[L, R, n]` predicted slot scores, or None.
    """

    warm: Tensor
    selection: Selection
    top_k: Tensor
    predicted: Tensor | None = None


class Policy(ABC):
    """Decides and learns step by step; holds no more than one trace's state."""

    def __init__(self, config: SpinConfig, trace: Trace) -> None:
        config.check_layers(trace.layers)
        self.config = config.with_top_k(trace.top_k)
        self.ratio, self.layers, self.rows = trace.ratio, trace.layers, trace.rows
        self.sequence_id = trace.sequence_id
        self.slots = trace.slots
        self.top_k_slots: int = self.config.top_k or trace.top_k
        self.blocks = count_blocks(trace.slots, self.config.block_size)

    @abstractmethod
    def step(self, step: TraceStep) -> Outcome:
        """Decide on one step, then learn from it."""

    @property
    def final_state(self) -> tuple[Tensor, Tensor]:
        """`V` `[L, N]` and `D` `[L, N + 1]` in fp32; zero for policies without them."""
        layers = len(self.layers)
        return torch.zeros(layers, self.slots), torch.zeros(layers, self.slots + 1)


class SpinPolicy(Policy):
    """SPIN itself, in any variant of `SpinConfig`.

    Args:
        predictions: also predict slot scores.
        variant: the step to run, for studies that change more than the configuration.
    """

    def __init__(
        self,
        config: SpinConfig,
        trace: Trace,
        *,
        predictions: bool = False,
        variant: type[SpinVariant] = SpinVariant,
    ) -> None:
        super().__init__(config, trace)
        self._queries = config.query_share_ppm > 0
        if self._queries:
            _check_query_scores(config, trace)
        self._predictions = predictions
        self._state = SpinState(
            trace.layers, sequences=1, slots=max(trace.slots, 1), dtype=config.storage_dtype
        )
        self._spin = variant(self.config, self._state, ratio=trace.ratio)

    def step(self, step: TraceStep) -> Outcome:
        """One decode step of all layers, as a host runs it."""
        plan = self._spin.plan(
            self.layers,
            [self.sequence_id],
            step.positions_tokens[None],
            step.query_scores if self._queries else None,
        )
        predicted = None
        if self._predictions:
            predicted = self._spin.predict(plan.lanes, plan.positions_tokens)
        top_k = self._spin.top_k(plan, step.scores)
        self._spin.observe(plan, step.scores, torch.full(plan.warm.shape, step.accepted))
        return Outcome(plan.warm, self._cut(plan.selection), top_k, predicted)

    def _cut(self, selection: Selection) -> Selection:
        """Without the spare block of a state that must hold a slot even for an empty trace."""
        width = self.blocks
        return Selection(
            selection.blocks[..., :width],
            selection.row_blocks[..., :width],
            selection.explored_blocks[..., :width],
        )

    @property
    def final_state(self) -> tuple[Tensor, Tensor]:
        """The averages of the trace's one sequence."""
        v, d = (read_averages(a[:, 0]) for a in (self._state.v, self._state.d))
        return v[:, : self.slots], d[:, : self.slots + 1]


def _check_query_scores(config: SpinConfig, trace: Trace) -> None:
    """Refuse a share for the query that this trace cannot replay."""
    recorded = (trace.query_block_size_slots, trace.query_pooling)
    if recorded == (config.block_size, config.query_pooling):
        return
    kind = f"blocks of {recorded[0]} slots pooled by {recorded[1]}" if recorded[0] else "none"
    given = f"{config.query_share} with blocks of {config.block_size} by {config.query_pooling}"
    refuse("query_share", given, f"0, or what the trace has query_scores of: {kind}")


class _Stateless(Policy):
    """Shared by policies that know the scores of earlier steps or layers instead of averages."""

    def __init__(self, config: SpinConfig, trace: Trace) -> None:
        super().__init__(config, trace)
        self._next_token = NOWHERE
        self._last: Tensor | None = None  # scores of the last accepted row, [L, N]
        self.layer_ppm = torch.tensor([config.layer_ppm(layer) for layer in trace.layers])

    def step(self, step: TraceStep) -> Outcome:
        """Decide, then remember the last accepted row; a jump forgets what came before."""
        if int(step.positions_tokens[0]) != self._next_token:
            self.forget()
        outcome = self.decide(step)
        self._last = step.scores[:, step.accepted]
        self._next_token = int(step.positions_tokens[0]) + step.accepted + 1
        return outcome

    def forget(self) -> None:
        """The sequence jumped: nothing learned so far applies."""
        self._last = None

    @abstractmethod
    def decide(self, step: TraceStep) -> Outcome:
        """Decide on one step."""

    def present(self, step: TraceStep) -> Tensor:
        """Visible blocks of each row: int64 `[R]`."""
        return count_blocks(
            visible_slots(step.positions_tokens, self.ratio), self.config.block_size
        )

    def budget(self, step: TraceStep, exploration_ppm: int = 0) -> Budget:
        """SPIN's budget of each layer and row: int64 `[L, R]`."""
        return block_budget(
            self.present(step).expand(len(self.layers), -1),
            top_k=self.top_k_slots,
            block_size_slots=self.config.block_size,
            sparsity_ppm=self.layer_ppm.unsqueeze(-1),
            exploration_ppm=exploration_ppm,
        )

    def visible(self, step: TraceStep) -> Tensor:
        """Visible blocks: bool `[L, R, B]`."""
        mask = torch.arange(self.blocks) < self.present(step).unsqueeze(-1)
        return mask.expand(len(self.layers), -1, -1)

    def join(self, rows: Tensor, explored: Tensor, step: TraceStep) -> Selection:
        """Shared mask of all rows under the configured mask policy."""
        present = self.present(step).expand(len(self.layers), -1)
        return join_rows(rows, explored, present, self.config.mask_policy)

    def read(self, selection: Selection, step: TraceStep) -> Tensor:
        """The slots that attention reads when the selection is scored: int32 `[L, R, K]`."""
        return topk_slots(
            step.scores,
            selection.blocks,
            step.positions_tokens.expand(len(self.layers), -1),
            top_k=self.top_k_slots,
            ratio=self.ratio,
            block_size_slots=self.config.block_size,
        )


class Predictor(_Stateless):
    """Baselines that predict slot scores and keep blocks as SPIN's A1 does, at SPIN's budget."""

    @abstractmethod
    def predict(self, step: TraceStep) -> tuple[Tensor, Tensor]:
        """Predicted scores fp32 `[L, R, N]`, and which layers have one: bool `[L]`."""

    def decide(self, step: TraceStep) -> Outcome:
        """Predict, rank blocks, explore; layers without a prediction keep everything."""
        predicted, warm = self.predict(step)
        seen = visible_slots(step.positions_tokens, self.ratio).unsqueeze(-1)
        predicted = torch.where(torch.arange(self.slots) < seen, predicted, NEVER)
        layers = torch.tensor(self.layers)
        identity = as_int64(self.sequence_id)
        priorities = explore_priorities(
            torch.full_like(layers, identity),
            layers,
            step.positions_tokens[:1].expand(len(layers)),
            self.blocks,
            seed=self.config.seed,
        )
        visible = self.visible(step)
        chosen, explored = choose_blocks(
            pool_blocks(predicted, self.config.block_size, self.config.pooling),
            visible,
            self.budget(step, self.config.exploration_ppm),
            priorities.unsqueeze(1),
        )
        hot = warm.view(-1, 1, 1)
        selection = self.join(torch.where(hot, chosen, visible), explored & hot, step)
        return Outcome(warm, selection, self.read(selection, step), predicted)

    def all_layers(self, known: bool) -> Tensor:
        """One flag for every layer."""
        return torch.full((len(self.layers),), known)


class RandomScores(Predictor):
    """Scores drawn uniformly, anew for every layer and step; the rows of a step share them."""

    def predict(self, step: TraceStep) -> tuple[Tensor, Tensor]:
        """A pure function of seed, layer and position, as SPEC 6's priorities are."""
        layers = torch.tensor(self.layers)
        drawn = explore_priorities(
            torch.full_like(layers, as_int64(2**64 - 1)),
            layers,
            step.positions_tokens[:1].expand_as(layers),
            self.slots,
            seed=self.config.seed,
        )
        return (drawn.float() / 2**32).unsqueeze(1).expand_as(step.scores), self.all_layers(True)


class PreviousLayer(Predictor):
    """True scores of the indexer layer before, same step and row."""

    def predict(self, step: TraceStep) -> tuple[Tensor, Tensor]:
        """The first layer has none before it and keeps everything."""
        known = torch.arange(len(self.layers)) > 0
        return step.scores.roll(1, 0), known


class PreviousLayerBestOf5(Predictor):
    """Oracle: of the five layers before, the one that correlates best with the truth."""

    def predict(self, step: TraceStep) -> tuple[Tensor, Tensor]:
        """Chosen per layer and row, knowing the truth: an upper bound, not a method."""
        best = torch.zeros_like(step.scores)
        for layer in range(1, len(self.layers)):
            earlier = step.scores[max(0, layer - 5) : layer]
            match = correlate(earlier, step.scores[layer].expand_as(earlier)).nan_to_num(-2.0)
            row = torch.arange(self.rows)
            best[layer] = earlier[match.argmax(0), row]
        return best, torch.arange(len(self.layers)) > 0


class PreviousIteration(Predictor):
    """True scores of the last accepted row, slot by slot; new slots count as 0, as in SPIN."""

    shift_slots = 0

    def predict(self, step: TraceStep) -> tuple[Tensor, Tensor]:
        """Nothing is known after a jump."""
        if self._last is None:
            return torch.zeros_like(step.scores), self.all_layers(False)
        shifted = torch.zeros_like(self._last)
        kept = self.slots - self.shift_slots
        shifted[:, self.shift_slots :] = self._last[:, :kept]
        known = torch.where(shifted.isfinite(), shifted, 0.0)
        return known.unsqueeze(1).expand(-1, self.rows, -1), self.all_layers(True)


class PreviousIterationOffset1(PreviousIteration):
    """The last accepted row moved by one slot: what a purely diagonal pattern would do."""

    shift_slots = 1


class Streaming(_Stateless):
    """The sink block and the newest blocks, at SPIN's budget."""

    def decide(self, step: TraceStep) -> Outcome:
        """Needs no history, so it is always warm."""
        visible = self.visible(step)
        kept = torch.as_tensor(self.budget(step).kept_blocks)
        index = torch.arange(self.blocks)
        oldest = (self.present(step) - kept + 1).unsqueeze(-1)
        rows = visible & ((index == 0) | (index >= oldest))
        selection = self.join(rows, torch.zeros_like(rows), step)
        warm = torch.ones(len(self.layers), dtype=torch.bool)
        return Outcome(warm, selection, self.read(selection, step))


class Tisa(_Stateless):
    """Rotating refresh: a window of blocks is rescored each step, the rest keep cached scores.

    Sink and newest block are refreshed every step; the others in fixed order, as many as SPIN's
    budget leaves. The attention reads the top-k over fresh and cached scores together.
    """

    def __init__(self, config: SpinConfig, trace: Trace) -> None:
        super().__init__(config, trace)
        self._cursor = torch.zeros(len(self.layers), dtype=torch.int64)  # whose turn it is
        self._cache = torch.full((len(self.layers), self.slots), NEVER)

    def forget(self) -> None:
        """Cached scores of another context mean nothing."""
        super().forget()
        self._cursor.zero_()
        self._cache.fill_(NEVER)

    def decide(self, step: TraceStep) -> Outcome:
        """The first step after a jump scores everything."""
        warm = torch.full((len(self.layers),), self._last is not None)
        rows = self.visible(step) if self._last is None else self._refreshed(step)
        selection = self.join(rows, torch.zeros_like(rows), step)
        fresh = expand_blocks(selection.blocks, self.slots, self.config.block_size)
        seen = torch.arange(self.slots) < visible_slots(
            step.positions_tokens, self.ratio
        ).unsqueeze(-1)
        mixed = torch.where(fresh.unsqueeze(1), step.scores, self._cache.unsqueeze(1))
        top_k = best_slots(mixed, seen.expand_as(mixed), self.top_k_slots)
        # Slots no row may use stay -inf, so a rejected draft's slot is never cached as known.
        self._cache = torch.where(fresh, step.scores[:, step.accepted], self._cache)
        return Outcome(warm, selection, top_k)

    def _refreshed(self, step: TraceStep) -> Tensor:
        present = int(self.present(step)[-1])
        index = torch.arange(self.blocks)
        refreshed = ((index == 0) | (index == present - 1)).expand(len(self.layers), -1)
        inner = max(present - 2, 0)
        if inner:
            due = torch.as_tensor(self.budget(step).ranked_blocks)[:, -1]
            turn = (index - 1 - self._cursor.unsqueeze(-1)) % inner
            middle = (index > 0) & (index < present - 1)
            refreshed = refreshed | (middle & (turn < due.unsqueeze(-1)))
            self._cursor = (self._cursor + due) % inner
        return self.visible(step) & refreshed.unsqueeze(1)


class IndexCache(_Stateless):
    """Every n-th indexer layer scores everything; the layers between reuse its top-k.

    `n = round(1 / (1 - rho))`: the share of layers that score, 1 / n, is as near to SPIN's budget
    as a fixed period allows, 1/2 at rho = 0.4. Of layers that differ it takes the mean.
    """

    def decide(self, step: TraceStep) -> Outcome:
        """Layers that reuse score no block at all."""
        scoring = PPM - self.layer_ppm.double().mean().item()
        every = max(1, round(PPM / scoring))
        index = torch.arange(len(self.layers))
        source = index - index % every
        visible = self.visible(step)
        rows = visible & (index == source).view(-1, 1, 1)
        selection = Selection(rows.any(1), rows, torch.zeros_like(rows[:, 0]))
        dense = Selection(visible.any(1), visible, selection.explored_blocks)
        warm = torch.ones(len(self.layers), dtype=torch.bool)
        return Outcome(warm, selection, self.read(dense, step)[source])


_BASELINES: dict[str, type[_Stateless]] = {
    "random": RandomScores,
    "prev_layer": PreviousLayer,
    "prev_layer_best_of_5": PreviousLayerBestOf5,
    "prev_iter": PreviousIteration,
    "prev_iter_offset1": PreviousIterationOffset1,
    "streaming": Streaming,
    "tisa": Tisa,
    "index_cache": IndexCache,
}

POLICIES = ("spin", *_BASELINES)


def make_policy(
    name: str, config: SpinConfig, trace: Trace, *, predictions: bool = False
) -> Policy:
    """A fresh policy by name; `predictions` asks SPIN for its slot predictions too."""
    if name == "spin":
        return SpinPolicy(config, trace, predictions=predictions)
    if name not in _BASELINES:
        refuse("policy", name, ", ".join(POLICIES))
    return _BASELINES[name](config, trace)
