# SPDX-License-Identifier: Apache-2.0
"""One decode step for a batch of sequences: the only place that orders the operations (SPEC 4, 5).

A host calls `plan`, scores the kept blocks in its own way, then `top_k` and `observe`:

    plan = step.plan([layer], sequence_ids, positions_tokens)
    scores = ...                       # fp32 [S, R, N], only plan.selection.blocks are read
    slots = step.top_k(plan, scores)   # what the attention reads
    step.observe(plan, scores, accepted)

When the accepted drafts are not known yet, `defer` replaces `observe`: the next `plan` of each
sequence reads them off its positions. With a `query_share`, `plan` takes what `score_blocks` found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spin_trtllm import reference
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import check_integer, refuse
from spin_trtllm.geometry import accepted_drafts, count_blocks, last_position, visible_slots
from spin_trtllm.reference import Selection
from spin_trtllm.reference.predict_blocks import NEVER
from spin_trtllm.reference.select_blocks import as_int64
from spin_trtllm.state import NOWHERE, SpinState


@dataclass(frozen=True, eq=False)
class StepPlan:
    """What one step of one or several layers decided before scoring.

    The batch is flat: `S` entries, each one sequence in one layer.

    Attributes:
        layers: decoder-layer indices it covers.
        positions_tokens: int64 `[S, R]`; -1 marks a padding row.
        lanes: int64 `[S]`, row of the flat state `[layers * (sequences + 1), ...]`.
        generations: generation of each entry's lane when planned.
        warm: bool `[S]`; entries that are not warm keep every block.
        selection: the kept blocks.
        query_scores: fp32 `[S, R, blocks]`, what the current query said; None without a share.
    """

    layers: tuple[int, ...]
    positions_tokens: Tensor
    lanes: Tensor
    generations: tuple[int, ...]
    warm: Tensor
    selection: Selection
    query_scores: Tensor | None = None

    @property
    def drafts(self) -> Tensor:
        """Draft rows of each entry: int64 `[S]`, -1 for an entry that is only padding."""
        return (self.positions_tokens >= 0).sum(1) - 1


class SpinStep:
    """Runs the product's variant of SPIN (A1) over a `SpinState`.

    Args:
        config: `top_k` must be settled (`SpinConfig.with_top_k`).
        state: averages; its dtype is the configuration's.
        ratio: raw tokens a slot.

    Raises:
        SpinError: a configuration that this state or class cannot run.
    """

    reductions: tuple[str, ...] = ("A1",)
    exploration_policies: tuple[str, ...] = ("none", "random")

    def __init__(self, config: SpinConfig, state: SpinState, *, ratio: int) -> None:
        if config.top_k is None:
            refuse("config.top_k", None, "an integer; settle it with with_top_k(model's top-k)")
        if config.reduction not in self.reductions:
            refuse("reduction", config.reduction, ", ".join(self.reductions))
        if config.exploration_policy not in self.exploration_policies:
            allowed = ", ".join(self.exploration_policies)
            refuse("exploration_policy", config.exploration_policy, allowed)
        if config.storage_dtype != state.dtype:
            refuse("state", str(state.dtype), f"a state of {config.state_dtype}")
        config.check_layers(state.layers)
        check_integer("ratio", ratio, 1, 2**31 - 1)
        self.config = config
        self.state = state
        self.ratio = ratio
        self.top_k_slots = config.top_k
        self._open: dict[int, StepPlan] = {}  # last plan of each lane, until it is observed
        self._waiting: dict[int, tuple[StepPlan, Tensor]] = {}  # what was deferred, by lane

    def plan(
        self,
        layers: Sequence[int],
        sequence_ids: Sequence[int | None],
        positions_tokens: Tensor,
        query_scores: Tensor | None = None,
    ) -> StepPlan:
        """Predict and select the blocks of one step.

        Entries are layer-major: entry `l * len(sequence_ids) + s` is sequence `s` in layer `l`.

        Args:
            layers: decoder-layer indices that run this step, usually one.
            sequence_ids: request ids; None for a padding row.
            positions_tokens: int64 `[len(sequence_ids), R]`, consecutive in each row; -1 pads.
            query_scores: fp32 `[entries, R, blocks]` from `score_blocks`, at least all whole blocks
                that a row sees; given exactly when `query_share` is not 0.

        Raises:
            SpinError: unknown layer, repeated sequence, positions that no draft can have, or
                query scores that do not fit.
        """
        self._check(layers, sequence_ids, positions_tokens)
        self._check_query_scores(len(layers), positions_tokens, query_scores)
        state, positions = self.state, positions_tokens.to(self.state.device)
        homes = [self._layer_index(layer) * (state.sequences + 1) for layer in layers]
        lanes = state.lanes(sequence_ids)
        flat = torch.tensor(
            [home + lane for home in homes for lane in lanes],
            dtype=torch.int64,
            device=state.device,
        )
        positions = positions.repeat(len(layers), 1)
        generations = tuple(state.generation(n) for n in lanes) * len(layers)
        self._settle(flat, positions[:, 0])
        warm = self._continue_or_reset(flat, positions)
        ids = [0 if i is None else as_int64(i) for i in sequence_ids]
        selection = self._select(
            flat,
            positions,
            warm,
            torch.tensor(ids * len(layers), dtype=torch.int64, device=state.device),
            torch.tensor(layers, dtype=torch.int64, device=state.device).repeat_interleave(
                len(lanes)
            ),
            query_scores,
        )
        plan = StepPlan(tuple(layers), positions, flat, generations, warm, selection, query_scores)
        self._open.update(dict.fromkeys(flat[positions[:, 0] >= 0].tolist(), plan))
        return plan

    def top_k(self, plan: StepPlan, scores: Tensor) -> Tensor:
        """The slots that each row's attention reads: int32 `[S, R, K]` (`topk_slots`).

        Raises:
            SpinError: scores of another shape or dtype than the plan needs.
        """
        self._check_scores(plan, scores)
        return reference.topk_slots(
            scores,
            plan.selection.blocks,
            plan.positions_tokens,
            top_k=self.top_k_slots,
            ratio=self.ratio,
            block_size_slots=self.config.block_size,
        )

    def observe(self, plan: StepPlan, scores: Tensor, accepted: Tensor) -> None:
        """Let the averages learn from the accepted rows, and expect the next step after them.

        A plan whose sequence was reset, released or moved since is ignored: its result is late.

        Args:
            scores: fp32 `[S, R, N]`; accepted: int64 `[S]`, 0 .. drafts of that entry.

        Raises:
            SpinError: a count outside 0 .. drafts, or tensors of another shape or dtype.
        """
        self._check_scores(plan, scores)
        if not isinstance(accepted, Tensor):
            refuse("accepted", type(accepted).__name__, "an int64 tensor")
        if accepted.dtype != torch.int64 or accepted.shape != plan.lanes.shape:
            given = f"{accepted.dtype} {list(accepted.shape)}"
            refuse("accepted", given, f"int64 {list(plan.lanes.shape)}")
        accepted = accepted.to(self.state.device)
        drafts = plan.drafts
        if bool(((accepted < 0) | (accepted > drafts.clamp(min=0))).any()):
            refuse("accepted", accepted.tolist(), f"0 .. drafts, drafts = {drafts.tolist()}")
        self._observe_where(plan, scores, accepted, self._current(plan))

    def defer(self, plan: StepPlan, scores: Tensor) -> None:
        """Keep a copy of the scores until each sequence's next step shows what was accepted.

        A sequence may sit out any number of plans. One that comes back at a position that no
        accepted count explains is cold; one that runs the same step again stays as it was before
        it.

        Raises:
            SpinError: scores of another shape or dtype than the plan needs.
        """
        self._check_scores(plan, scores)
        lanes = plan.lanes[plan.positions_tokens[:, 0] >= 0].tolist()
        self._waiting.update(dict.fromkeys(lanes, (plan, scores.clone())))

    def drop_deferred(self) -> None:
        """Forget every step that still waits for its acceptance: these sequences are cold next."""
        self._waiting.clear()

    # ---- how the product's variant decides; replay's variants replace these ----

    def _select(
        self,
        lanes: Tensor,
        positions: Tensor,
        warm: Tensor,
        sequence_ids: Tensor,
        layers: Tensor,
        query_scores: Tensor | None,
    ) -> Selection:
        config = self.config
        block_scores = self._block_scores(lanes, positions)
        if query_scores is not None:
            missing = block_scores.shape[-1] - query_scores.shape[-1]
            query_scores = torch.nn.functional.pad(query_scores, (0, missing), value=NEVER)
        return reference.select_blocks(
            block_scores,
            positions,
            warm,
            sequence_ids,
            layers,
            ratio=self.ratio,
            block_size_slots=config.block_size,
            top_k=self.top_k_slots,
            sparsity_ppm=self._sparsity_ppm(layers),
            exploration_ppm=config.exploration_ppm,
            seed=config.seed,
            mask_policy=config.mask_policy,
            priorities=self._priorities(lanes, block_scores),
            query_scores=query_scores,
            query_share_ppm=config.query_share_ppm,
            query_merge=config.query_merge,
        )

    def _sparsity_ppm(self, layers: Tensor) -> int | Tensor:
        """`rho_ppm` of every entry, or one for all; layers: int64 `[S]`."""
        if not self.config.layer_sparsity:
            return self.config.sparsity_ppm
        return layers.new_tensor([self.config.layer_ppm(layer) for layer in layers.tolist()])

    def _block_scores(self, lanes: Tensor, positions: Tensor) -> Tensor:
        return reference.predict_blocks(
            self.state.v.flatten(0, 1),
            self.state.d.flatten(0, 1),
            lanes,
            positions,
            ratio=self.ratio,
            block_size_slots=self.config.block_size,
            pooling=self.config.pooling,
        )

    def _priorities(self, lanes: Tensor, block_scores: Tensor) -> Tensor | None:
        """Exploration priorities `[S, R, B]`, lowest first; None takes SPEC 6's."""
        return None

    def _update(
        self, lanes: Tensor, plan: StepPlan, scores: Tensor, rows: Tensor, accepted: Tensor
    ) -> None:
        """Update the averages of entries `rows` (int64 indices into the plan)."""
        reference.observe_scores(
            self.state.v.flatten(0, 1),
            self.state.d.flatten(0, 1),
            lanes,
            scores[rows],
            plan.selection.blocks[rows],
            plan.positions_tokens[rows],
            accepted,
            ratio=self.ratio,
            block_size_slots=self.config.block_size,
            ema_decay=self.config.ema_decay,
            update_policy=self.config.update_policy,
        )

    # ---- lifecycle ----

    def _continue_or_reset(self, lanes: Tensor, positions: Tensor) -> Tensor:
        """Warm entries whose step starts where the last one ended; all others are made cold.

        Entries that are only padding take no step: they are neither warm nor touched.
        """
        state = self.state
        warm = state.warm.view(-1)[lanes] & (state.next_tokens.view(-1)[lanes] == positions[:, 0])
        self._make_cold(lanes[~warm & (positions[:, 0] >= 0)])
        return warm

    def _make_cold(self, lanes: Tensor) -> None:
        state = self.state
        state.v.flatten(0, 1)[lanes] = 0
        state.d.flatten(0, 1)[lanes] = 0
        state.warm.view(-1)[lanes] = False
        state.next_tokens.view(-1)[lanes] = NOWHERE

    def _settle(self, lanes: Tensor, first_tokens: Tensor) -> None:
        """Observe what waits for these lanes, now that positions tell what was accepted."""
        pairs = zip(lanes.tolist(), first_tokens.tolist(), strict=True)
        starts = {lane: first for lane, first in pairs if first >= 0}
        waiting = [self._waiting.pop(lane) for lane in starts if lane in self._waiting]
        for plan, scores in {id(plan): (plan, scores) for plan, scores in waiting}.values():
            following = torch.tensor(
                [starts.get(lane, NOWHERE) for lane in plan.lanes.tolist()],
                dtype=torch.int64,
                device=lanes.device,
            )
            accepted = accepted_drafts(plan.positions_tokens[:, 0], following)
            explained = (accepted >= 0) & (accepted <= plan.drafts)
            self._observe_where(plan, scores, accepted, explained & self._current(plan))

    def _observe_where(
        self, plan: StepPlan, scores: Tensor, accepted: Tensor, where: Tensor
    ) -> None:
        rows = where.nonzero().squeeze(-1)
        lanes, accepted = plan.lanes[rows], accepted[rows]
        for lane in lanes.tolist():
            del self._open[lane]  # a step is observed once
        self._update(lanes, plan, scores, rows, accepted)
        self.state.warm.view(-1)[lanes] = True
        self.state.next_tokens.view(-1)[lanes] = plan.positions_tokens[rows, 0] + accepted + 1

    def _current(self, plan: StepPlan) -> Tensor:
        """Entries that nothing has overtaken: no later plan, reset, release; never the scratch."""
        state = self.state
        stride = state.sequences + 1
        fresh = [
            lane % stride != state.scratch
            and state.generation(lane % stride) == generation
            and self._open.get(lane) is plan
            for lane, generation in zip(plan.lanes.tolist(), plan.generations, strict=True)
        ]
        return torch.tensor(fresh, dtype=torch.bool, device=state.device)

    # ---- checks ----

    def _layer_index(self, layer: int) -> int:
        if type(layer) is not int or layer not in self.state.layers:
            refuse("layers", layer, f"indexer layers {list(self.state.layers)}")
        return self.state.layers.index(layer)

    def _check(
        self, layers: Sequence[int], sequence_ids: Sequence[int | None], positions: Tensor
    ) -> None:
        if len({self._layer_index(layer) for layer in layers}) != len(layers):
            refuse("layers", list(layers), "each layer once")
        if not isinstance(positions, Tensor):
            refuse("positions_tokens", type(positions).__name__, "an int64 tensor")
        if positions.dtype != torch.int64 or positions.dim() != 2:
            given = f"{positions.dtype} {list(positions.shape)}"
            refuse("positions_tokens", given, "int64 [sequences, rows]")
        if positions.shape[0] != len(sequence_ids) or positions.shape[1] < 1:
            allowed = f"[{len(sequence_ids)}, rows >= 1]"
            refuse("positions_tokens", list(positions.shape), allowed)
        check_positions(positions, self.state.slots, self.ratio)

    def _check_query_scores(
        self, layers: int, positions: Tensor, query_scores: Tensor | None
    ) -> None:
        share, block_size = self.config.query_share, self.config.block_size
        if not self.config.query_share_ppm:
            if query_scores is not None:
                refuse("query_scores", "a tensor", f"None, with a query_share of {share}")
            return
        if query_scores is None:
            refuse("query_scores", None, f"scores of blocks, with a query_share of {share}")
        entries, rows = layers * positions.shape[0], positions.shape[1]
        seen = int(visible_slots(positions, self.ratio).amax()) if positions.numel() else 0
        low, high = seen // block_size, count_blocks(self.state.slots, block_size)
        shape = tuple(query_scores.shape)
        fits = query_scores.dtype == torch.float32 and shape[:-1] == (entries, rows)
        if not fits or not low <= shape[-1] <= high:
            given = f"{query_scores.dtype} {list(shape)}"
            refuse("query_scores", given, f"float32 [{entries}, {rows}, {low} .. {high}]")

    def _check_scores(self, plan: StepPlan, scores: Tensor) -> None:
        low = int(visible_slots(plan.positions_tokens, self.ratio).amax()) if len(plan.lanes) else 0
        given = f"{scores.dtype} {list(scores.shape)}"
        wanted = plan.positions_tokens.shape
        fits = scores.dim() == 3 and scores.shape[:2] == wanted and scores.dtype == torch.float32
        if not fits or not low <= scores.shape[2] <= self.state.slots:
            allowed = f"float32 [{wanted[0]}, {wanted[1]}, {low} .. {self.state.slots}]"
            refuse("scores", given, allowed)


def check_positions(positions: Tensor, slots: int, ratio: int) -> None:
    """Refuse rows that no decode step can have: gaps, padding before real rows, past capacity.

    Args:
        positions: int64 `[S, R]`, each row `p0, p0 + 1, ...`, then only -1.
        slots: capacity `N`; ratio: raw tokens a slot.
    """
    if not positions.numel():
        return
    rows = torch.arange(positions.shape[1], device=positions.device)
    wanted = torch.where(positions >= 0, positions[:, :1] + rows, -1)
    trailing = (positions >= 0).long().diff(dim=1) <= 0
    legal = (positions == wanted).all() & trailing.all()
    if not bool(legal):
        refuse("positions_tokens", positions.tolist(), "p0, p0 + 1, ... and then -1 in each row")
    last = last_position(slots, ratio)
    if int(positions.amax()) > last:
        allowed = f"positions up to {last} ({slots} slots of capacity)"
        refuse("positions_tokens", int(positions.amax()), allowed)
