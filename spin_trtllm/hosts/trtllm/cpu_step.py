# SPDX-License-Identifier: Apache-2.0
"""`GpuStep`'s interface over `SpinStep`, for a host without a GPU.

The hook talks to one interface. On a CPU, where TensorRT-LLM's own kernels are replaced too, this
runs the reference behind it, so that everything above the kernels is the same code in production
and in tests. It reads tensors on the host and is therefore no fallback for a GPU without kernels.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from spin_trtllm.config import SpinConfig
from spin_trtllm.geometry import count_blocks, visible_slots
from spin_trtllm.gpu_state import NO_LANE
from spin_trtllm.layer_view import LayerView
from spin_trtllm.ops import score_pages
from spin_trtllm.reference import adopt_scores
from spin_trtllm.state import SpinState
from spin_trtllm.step import SpinStep, StepPlan


class PlacedState(SpinState):
    """A `SpinState` in whose steps rows sit where the host says, not where their ids are known."""

    _seats: list[int] | None = None

    def seat(self, lanes: list[int] | None) -> None:
        """Lanes of the rows of the next plan; None returns to the map of ids."""
        self._seats = lanes

    def evict(self, lane: int) -> None:
        """Make a lane cold."""
        self._clear(lane)

    def lanes(self, sequence_ids: Iterable[int | None]) -> list[int]:
        """The seats, or else what the map of ids says."""
        if self._seats is None:
            return super().lanes(sequence_ids)
        return [self.scratch if lane == NO_LANE else lane for lane in self._seats]


class CpuStep:
    """One step of all layers; attributes and methods equal `GpuStep`'s.

    Attributes:
        block_list: int32 `[layers * S, B]`; row_slots: int32 `[layers * S, rows]`; block_count,
            kept_slots, visible_slots: int32 `[layers * S]`; pages: int32 `[layers * S, pages]`;
            scores: fp32 `[layers * S, rows, B * b]`; see `LayerView`. All are new every step.
    """

    def __init__(
        self,
        config: SpinConfig,
        state: PlacedState,
        *,
        ratio: int,
        sequences: int,
        rows: int = 1,
        page_slots: int,
    ) -> None:
        self._steps = [SpinStep(config, state, ratio=ratio) for _ in state.layers]
        self.config, self.state, self.ratio = config, state, ratio
        self.sequences, self.rows, self.page_slots = sequences, rows, page_slots
        self.layers = len(state.layers)
        self.blocks = count_blocks(state.slots, config.block_size)
        self._live = 0
        self._plans: list[StepPlan] = []
        self._owned: list[bool] = []
        self._tenants: dict[int, int] = {}

    def begin(
        self,
        lanes: Tensor,
        sequence_ids: Tensor,
        positions_tokens: Tensor,
        page_table: Tensor,
        tenants: Tensor | None = None,
    ) -> None:
        """Observe the step before, predict and select; arguments are `GpuStep.begin`'s."""
        self._defer()
        self._live = lanes.shape[0]
        seats = lanes.tolist()
        for lane, tenant in zip(seats, [] if tenants is None else tenants.tolist(), strict=False):
            if lane != NO_LANE and self._tenants.get(lane) != tenant:
                self.state.evict(lane)
                self._tenants[lane] = tenant
        ids = [i % 2**64 for i in sequence_ids.tolist()]
        known = [None if lane == NO_LANE else i for lane, i in zip(seats, ids, strict=True)]
        self.state.seat(seats)
        self._plans = [
            step.plan([layer], known, positions_tokens)
            for step, layer in zip(self._steps, self.state.layers, strict=True)
        ]
        self.state.seat(None)
        self._owned = [True] * self.layers
        self._publish(page_table)

    def layer(self, index: int, sequences: int | None = None) -> LayerView:
        """Views of layer `index` of the current step; see `GpuStep.layer`."""
        live = self._live if sequences is None else sequences
        here = slice(index * live, (index + 1) * live)
        return LayerView(
            block_list=self.block_list[here],
            block_count=self.block_count[here],
            row_slots=self.row_slots[here],
            kept_slots=self.kept_slots[here],
            visible_slots=self.visible_slots[here],
            pages=self.pages[here],
            scores=self.scores,
            places=torch.arange(here.start, here.stop),
        )

    def disown(self, index: int | None = None) -> None:
        """Keep what waits of a layer, or of all, out of the averages: they are cold next."""
        for n in range(self.layers) if index is None else (index,):
            self._steps[n].drop_deferred()
            if self._owned:
                self._owned[n] = False

    def score(
        self, index: int, query: Tensor, weights: Tensor, pages: Tensor, page_table: Tensor
    ) -> None:
        """Score the kept blocks of a layer into its scores; arguments are `GpuStep.score`'s."""
        view = self.layer(index)
        scores = score_pages(
            query,
            weights,
            pages,
            page_table,
            view.visible_slots,
            view.block_list,
            block_size_slots=self.config.block_size,
        )
        view.put_scores(scores)

    def top_k(self, index: int, out: Tensor | None = None) -> Tensor:
        """Slots that attention reads: int32 `[S, rows, K]`, -1 pads; see `GpuStep.top_k`."""
        slots = self._steps[index].top_k(self._plans[index], self._expand(index))
        if out is None:
            return slots
        rows = out.shape[0] // max(self._live, 1)
        return out.copy_(slots[:, :rows].flatten(0, 1))

    def adopt(self, index: int, host_scores: Tensor, columns: Tensor | None = None) -> None:
        """Take over what the host scored and maybe chose in a layer; see `GpuStep.adopt`."""
        view = self.layer(index)
        adopt_scores(
            host_scores,
            columns,
            view.block_list,
            view.row_slots,
            view.places,
            view.scores,
            block_size_slots=self.config.block_size,
        )

    # ---- how ----

    def _defer(self) -> None:
        """Hand the finished step's scores to the steps, but for layers that were disowned."""
        for index, (step, plan) in enumerate(zip(self._steps, self._plans, strict=False)):
            if self._owned[index]:
                step.defer(plan, self._expand(index))

    def _expand(self, index: int) -> Tensor:
        """Scores of a layer by slot, fp32 `[S, rows, N]`; NaN where nothing was scored."""
        view, b = self.layer(index), self.config.block_size
        scores = view.get_scores()
        spread = scores.new_full((self._live, self.rows, self.blocks + 1, b), float("nan"))
        blocks = view.block_list.long() % (self.blocks + 1)  # -1 goes to a block of its own
        where = blocks[:, None, :, None].expand(-1, self.rows, -1, b)
        spread.scatter_(2, where, scores.unflatten(2, (self.blocks, b)))
        return spread.flatten(2)[..., : self.state.slots].contiguous()

    def _publish(self, page_table: Tensor) -> None:
        """Turn the plans into the tensors that the GPU's kernels write."""
        b = self.config.block_size
        kept = torch.cat([plan.selection.blocks for plan in self._plans])
        positions = torch.cat([plan.positions_tokens for plan in self._plans])
        visible = visible_slots(positions, self.ratio)
        order = kept.logical_not().int().argsort(dim=1, stable=True)
        self.block_count = kept.sum(1).int()
        places = torch.arange(self.blocks)
        self.block_list = torch.where(places < self.block_count.unsqueeze(1), order, -1).int()
        slots = (self.block_list.long()[:, :, None] * b + torch.arange(b)).flatten(1)
        seen = (slots >= 0).unsqueeze(1) & (slots.unsqueeze(1) < visible.unsqueeze(2))
        self.row_slots = seen.sum(2).int()
        self.visible_slots, self.kept_slots = visible.amax(1).int(), self.row_slots.amax(1)
        self.scores = torch.full((kept.shape[0], self.rows, self.blocks * b), float("nan"))
        first = slots[:, :: self.page_slots]
        inside = (first >= 0) & (first < self.visible_slots.unsqueeze(1))
        page = torch.where(inside, first // self.page_slots, 0)
        self.pages = page_table.repeat(self.layers, 1).gather(1, page) * inside
