# SPDX-License-Identifier: Apache-2.0
"""A decode step of all layers on a GPU, without the host ever looking (SPEC 4 and 5).

`GpuStep` makes the decisions of `SpinStep.plan`, `top_k` and `defer` with the same results, but on
the device: whether a sequence goes on, jumped or is new, and how many drafts were accepted, is read
off the positions by kernels. Every buffer is made once, so a step can be captured in a CUDA graph
at small lengths and replayed at any length up to the capacity:

    step.begin(lanes, sequence_ids, positions)       # all layers: observe, predict, select
    for layer in range(step.layers):
        view = step.layer(layer)
        ...                                          # score view.block_list, view.put_scores
        slots = step.top_k(layer)                    # int32 [S, R, K], -1 pads
"""

from __future__ import annotations

import torch
from torch import Tensor

from spin_trtllm import native
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import refuse
from spin_trtllm.geometry import count_blocks
from spin_trtllm.gpu_state import NO_LANE, GpuState, GrowingState
from spin_trtllm.layer_view import LayerView
from spin_trtllm.ops.checks import check_tensor, row_stride


class GpuStep:
    """Runs the product's variant of SPIN (A1) on a GPU.

    Args:
        config: `top_k` must be settled.
        state: averages; its dtype is the configuration's.
        ratio: raw tokens a slot.
        sequences: most sequences of a step.
        rows: rows of every step (drafts + 1); a step with fewer drafts pads with -1.
        page_slots: slots of a page of the host's key cache, to compact its page table: 32 or 64.

    Raises:
        SpinError: a configuration or device that the kernels cannot run.
    """

    def __init__(
        self,
        config: SpinConfig,
        state: GpuState,
        *,
        ratio: int,
        sequences: int,
        rows: int = 1,
        page_slots: int | None = None,
    ) -> None:
        _check_config(config, state, ratio, rows)
        if sequences < 1:
            refuse("sequences", sequences, "an integer >= 1")
        if page_slots is not None and (
            page_slots not in (32, 64) or page_slots > config.block_size
        ):
            refuse("page_slots", page_slots, f"32, 64, at most block_size {config.block_size}")
        assert config.top_k is not None
        self.config, self.state, self.ratio = config, state, ratio
        self.sequences, self.rows, self.page_slots = sequences, rows, page_slots
        self.top_k_slots = config.top_k
        self.layers = len(state.layers)
        self.blocks = count_blocks(state.slots, config.block_size)
        self._live = 0  # sequences of the last step
        self._allocate()

    def begin(
        self,
        lanes: Tensor,
        sequence_ids: Tensor,
        positions_tokens: Tensor,
        page_table: Tensor | None = None,
        tenants: Tensor | None = None,
    ) -> None:
        """Observe the step before, predict and select the blocks of this one, in every layer.

        Args:
            lanes: int64 `[S]` from `GpuState.device_lanes`, distinct but for `NO_LANE`.
            sequence_ids: int64 `[S]`, request ids.
            positions_tokens: int64 `[S, rows]`: `p0, p0 + 1, ...`, then -1. An entry that is only
                -1 takes no step.
            page_table: int32 `[S, pages]` of the host, when `page_slots` was given.
            tenants: int64 `[S]`, for a host that hands out lanes itself: a number that changes
                whenever a lane changes hands, or its sequence must start cold.
        """
        check_tensor("lanes", lanes, (torch.int64,), ("sequences",))
        live = lanes.shape[0]
        if live > self.sequences:
            refuse("lanes", live, f"at most {self.sequences} sequences")
        check_tensor("sequence_ids", sequence_ids, (torch.int64,), (live,))
        check_tensor("positions_tokens", positions_tokens, (torch.int64,), (live, self.rows))
        if (page_table is None) != (self.page_slots is None):
            refuse("page_table", page_table, "given exactly when page_slots was")
        if page_table is not None:
            check_tensor("page_table", page_table, (torch.int32,), (live, "pages"))
        if tenants is not None:
            check_tensor("tenants", tenants, (torch.int64,), (live,))
            tenants = tenants.contiguous()
        self._live = live
        inputs = (lanes.contiguous(), sequence_ids.contiguous(), positions_tokens.contiguous())
        self._launch(*inputs, page_table, tenants)

    def layer(self, index: int, sequences: int | None = None) -> LayerView:
        """Views for layer `index` (0-based among the indexer layers) of the current step.

        Args:
            sequences: of the step; None for those of the last `begin`. A replayed graph has as
                many as it had when it was captured.
        """
        live = self._live if sequences is None else sequences
        here = slice(index * live, (index + 1) * live)
        return LayerView(
            block_list=self.block_list[here],
            block_count=self.block_count[here],
            row_slots=self.row_slots[here],
            kept_slots=self.kept_slots[here],
            visible_slots=self.visible_slots[here],
            pages=None if self.pages is None else self.pages[here],
            scores=self.scores,
            places=self.places[here],
        )

    def disown(self, index: int | None = None) -> None:
        """Keep what waits of layer `index`, or of all, out of the averages: they are cold next."""
        self.state.lane_waits[slice(None) if index is None else index] = 0

    def top_k(self, index: int, out: Tensor | None = None) -> Tensor:
        """Slots that attention reads in layer `index`: int32 `[S, rows, K]`, ascending, -1 pads.

        Args:
            out: int32 `[S * r, K]` without gaps, for the first `r` rows only, and returned then;
                None for a buffer of the step.
        """
        own = self.slots_out[self._entries(index)]
        if out is not None:
            check_tensor("out", out, (torch.int32,), ("rows", self.top_k_slots))
            if out.shape[0] < own.shape[0] * self.rows:
                rows = out.shape[0] // max(self._live, 1)
                out.unflatten(0, (-1, rows)).copy_(self.top_k(index)[:, :rows])
                return out
            if not out.is_contiguous():
                refuse("out", list(out.stride()), "rows without gaps")
        view, out = self.layer(index), own if out is None else out
        if self._live:  # pragma: no cover - needs a GPU
            native.call(
                "topk_slots",
                native.stream_of(out),
                scores=self.scores,
                places=view.places,
                block_list=view.block_list,
                row_slots=view.row_slots,
                slots_out=out,
                score_stride=self.scores.stride(1),
                entries=self._live,
                rows=self.rows,
                blocks=self.blocks,
                block_size=self.config.block_size,
                top_k=self.top_k_slots,
            )
        return out

    def score(
        self,
        index: int,
        query: Tensor,
        weights: Tensor,
        pages: Tensor,
        page_table: Tensor,
        *,
        exact: bool = True,
    ) -> None:
        """Score the kept blocks of layer `index` with this package's kernel, into `scores`.

        Args:
            query: e4m3 `[S, rows, heads, 128]`; weights: fp32 `[S, rows, heads]`.
            pages: uint8 `[num_pages, page_slots * 132]`, a page's keys and then its scales.
            page_table: int32 `[S, pages]` of the host, not compacted.
            exact: False takes SM90's fp8 tensor cores, as DeepGEMM does: they need less power, and
                round sums to some 14 bits.
        """
        view = self.layer(index)
        heads = query.shape[2]
        check_tensor("query", query, (torch.float8_e4m3fn,), (self._live, self.rows, "heads", 128))
        check_tensor("weights", weights, (torch.float32,), (self._live, self.rows, heads))
        check_tensor("pages", pages, (torch.uint8,), ("pages", "bytes"))
        check_tensor("page_table", page_table, (torch.int32,), (self._live, "pages"))
        if self._live:  # pragma: no cover - needs a GPU
            native.call(
                "score_slots",
                native.stream_of(query),
                query=query.contiguous(),
                weights=weights.contiguous(),
                pages=pages.contiguous(),
                page_table=page_table,
                visible_slots=view.visible_slots,
                block_list=view.block_list,
                block_count=view.block_count,
                places=view.places,
                scores=self.scores,
                num_pages=pages.shape[0],
                page_table_stride=row_stride(page_table),
                page_table_width=page_table.shape[1],
                block_list_stride=self.blocks,
                score_stride=self.scores.stride(1),
                blocks=self.blocks,
                sequences=self._live,
                rows=self.rows,
                heads=heads,
                page_slots=pages.shape[1] // native.KEY_BYTES,
                block_size=self.config.block_size,
                arithmetic=native.SCORE_EXACT if exact else native.SCORE_FAST,
            )

    def adopt(self, index: int, host_scores: Tensor, columns: Tensor | None = None) -> None:
        """Take over what the host's own kernels scored, and maybe chose, in layer `index`.

        Args:
            host_scores: fp32 `[S * r, width]` of the first `r` rows, in the order of the compacted
                page table; kept for the next step.
            columns: int32 `[S * r, K]`, contiguous; they become slots of the sequence, in place.
                None where `top_k` chooses.
        """
        if not self._live:
            return
        rows = host_scores.shape[0] // self._live
        check_tensor("host_scores", host_scores, (torch.float32,), (self._live * rows, "columns"))
        if host_scores.stride(1) != 1:
            refuse("host_scores", list(host_scores.stride()), "rows without gaps")
        if columns is not None:
            check_tensor("columns", columns, (torch.int32,), (self._live * rows, "top_k"))
            if not columns.is_contiguous():
                refuse("columns", list(columns.stride()), "rows without gaps")
        view = self.layer(index)  # pragma: no cover - needs a GPU
        native.call(  # pragma: no cover - needs a GPU
            "adopt_scores",
            native.stream_of(host_scores),
            host_scores=host_scores,
            block_list=view.block_list,
            row_slots=view.row_slots,
            places=view.places,
            scores=self.scores,
            columns=columns,
            host_stride=row_stride(host_scores),
            score_stride=self.scores.stride(1),
            host_columns=host_scores.shape[1],
            entries=self._live,
            host_rows=rows,
            rows=self.rows,
            blocks=self.blocks,
            block_size=self.config.block_size,
            top_k=0 if columns is None else columns.shape[1],
        )

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers between steps, scores waiting for observation included."""
        tensors = (value for value in vars(self).values() if isinstance(value, Tensor))
        return sum(t.untyped_storage().nbytes() for t in tensors)

    @classmethod
    def estimate_bytes(
        cls,
        config: SpinConfig,
        layers: int,
        *,
        ratio: int,
        sequences: int,
        slots: int,
        rows: int = 1,
        page_slots: int | None = None,
    ) -> int:
        """Bytes of a state and its step on a GPU, without making them."""
        room = {"sequences": sequences, "slots": slots}
        state = GpuState(range(layers), dtype=config.storage_dtype, device="meta", **room)
        config = config.of_layers(())  # any layers will do: targets change no size
        step = cls(
            config, state, ratio=ratio, sequences=sequences, rows=rows, page_slots=page_slots
        )
        return state.state_bytes + step.buffer_bytes

    # ---- how ----

    def _entries(self, index: int) -> slice:
        return slice(index * self._live, (index + 1) * self._live)

    def _allocate(self) -> None:
        device, entries = self.state.device, self.layers * self.sequences
        b, blocks, rows = self.config.block_size, self.blocks, self.rows

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self.tiles = self.state.slots // native.TILE_SLOTS + 1
        self.tile_blocks = native.TILE_SLOTS // b
        lanes = self.state.warm.numel()
        places = lanes + self.sequences
        self.block_list, self.compact_of_block = ints(entries, blocks), ints(places, blocks)
        self.block_count, self.kept_slots = ints(entries), ints(entries)
        self.visible_slots, self.row_slots = ints(entries), ints(entries, rows)
        self.observed_rows = ints(entries)
        self.warm = torch.zeros(entries, dtype=torch.bool, device=device)
        self.places = torch.zeros(entries, dtype=torch.int64, device=device)
        self.lane_positions = torch.full((lanes, rows), -1, dtype=torch.int64, device=device)
        self.scores = torch.zeros(places, rows, blocks * b, device=device)
        self.tile_scores = torch.zeros(
            entries, rows, self.tiles, self.tile_blocks + 2, device=device
        )
        self.block_scores = None
        if self.config.pooling != "max":
            self.block_scores = torch.zeros(entries, rows, blocks, device=device)
        self.slots_out = ints(entries, rows, self.top_k_slots)
        self.layer_ids = torch.tensor(self.state.layers, dtype=torch.int64, device=device)
        targets = [self.config.layer_ppm(layer) for layer in self.state.layers]
        self.layer_sparsity_ppm = torch.tensor(targets, dtype=torch.int32, device=device)
        self.pages: Tensor | None = None
        if self.page_slots is not None:
            self.pages = ints(entries, blocks * (b // self.page_slots))

    def _launch(
        self,
        lanes: Tensor,
        sequence_ids: Tensor,
        positions: Tensor,
        page_table: Tensor | None,
        tenants: Tensor | None,
    ) -> None:  # pragma: no cover - needs a GPU
        config, state = self.config, self.state
        stream = native.stream_of(lanes)
        if not self._live:
            return
        shared = {
            "positions": positions,
            "entries": self.layers * self._live,
            "sequences": self._live,
            "rows": self.rows,
            "blocks": self.blocks,
            "ratio": self.ratio,
            "block_size": config.block_size,
        }
        waiting = {
            "places": self.places,
            "lane_positions": self.lane_positions,
            "lane_waits": state.lane_waits,
            "lane_warm": state.warm,
            "lane_next": state.next_tokens,
            "lane_tenant": state.lane_tenant,
            "tenants": tenants,
            "lanes_total": state.warm.numel(),
        }
        home = {"lanes": lanes, "lane_stride": state.sequences + 1}
        averages = state.kernel_fields()
        dtype = native.STATE_DTYPES[state.dtype]
        native.call(
            "advance",
            stream,
            **shared,
            **waiting,
            **home,
            **averages,
            slots=state.slots,
            state_dtype=dtype,
            scores=self.scores,
            compact_of_block=self.compact_of_block,
            warm=self.warm,
            observed_rows=self.observed_rows,
            block_scores=self.tile_scores,
            score_stride=self.scores.stride(1),
            tiles=self.tiles,
            row0_update=int(config.update_policy == "row0"),
            decay=config.ema_decay,
            gain=1.0 - config.ema_decay,
        )
        ranked = {
            "block_scores": self.tile_scores,
            "tile_blocks": self.tile_blocks,
            "tiles": self.tiles,
        }
        if self.block_scores is not None:  # a pooling that does not split over tiles
            ranked = {"block_scores": self.block_scores}
            native.call(
                "predict_blocks",
                stream,
                **shared,
                **home,
                **ranked,
                **{name: averages[name] for name in ("v", "d", "v_stride", "d_stride")},
                slots=state.slots,
                state_dtype=dtype,
                pooling=native.POOLINGS[config.pooling],
            )
        paged = {}
        if page_table is not None and self.pages is not None:
            paged = {
                "page_table": page_table,
                "page_table_stride": row_stride(page_table),
                "page_table_width": page_table.shape[1],
                "compact_pages": self.pages,
                "compact_pages_stride": self.pages.shape[1],
                "page_slots": self.page_slots,
            }
        native.call(
            "select_blocks",
            stream,
            **shared,
            **waiting,
            **home,
            **ranked,
            **paged,
            warm=self.warm,
            sequence_ids=sequence_ids,
            layers=self.layer_ids,
            layer_sparsity_ppm=self.layer_sparsity_ppm,
            layer_entries=self._live,
            block_list=self.block_list,
            block_count=self.block_count,
            kept_slots=self.kept_slots,
            row_slots=self.row_slots,
            visible_slots=self.visible_slots,
            compact_of_block=self.compact_of_block,
            seed=config.seed,
            top_k=self.top_k_slots,
            exploration_ppm=config.exploration_ppm,
            row0_mask=int(config.mask_policy == "row0"),
        )


def _check_config(config: SpinConfig, state: GpuState, ratio: int, rows: int) -> None:
    native.check_config(config)
    config.check_layers(state.layers)
    if config.storage_dtype != state.dtype:
        refuse("state", str(state.dtype), f"a state of {config.state_dtype}")
    if config.pooling != "max" and isinstance(state, GrowingState):
        refuse("pooling", config.pooling, "max, with a state that grows")
    blocks = count_blocks(state.slots, config.block_size)
    if blocks > native.MAX_BLOCKS:
        refuse("slots", state.slots, f"at most {native.MAX_BLOCKS} blocks of {config.block_size}")
    if ratio < 1:
        refuse("ratio", ratio, "an integer >= 1")
    if not 1 <= rows <= native.MAX_ROWS:
        refuse("rows", rows, f"an integer in 1 .. {native.MAX_ROWS}")


__all__ = ["NO_LANE", "GpuState", "GpuStep", "LayerView"]
