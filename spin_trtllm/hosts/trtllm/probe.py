# SPDX-License-Identifier: Apache-2.0
"""The shadow probe: now and then, what would dense scoring have chosen?

One layer of one in N steps is also scored densely, and what dense scoring chooses is looked up
among the blocks that SPIN kept. Layers take turns. The answer is used for nothing but the miss rate
of SPEC 8.

A step that runs in Python asks the host's own method, untouched, before SPIN's run of it. A step
that is replayed from a graph has no place for a second scoring: there the graph keeps a copy of
each layer's queries, a thousandth of the keys, and the step is scored afterwards, before the next
one begins, while keys and decisions still are what they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spin_trtllm.hosts.trtllm.counters import Counters
from spin_trtllm.hosts.trtllm.sequences import is_dummy
from spin_trtllm.layer_view import LayerView
from spin_trtllm.ops import score_pages, topk_slots

PROBED_SEQUENCES = 8  # of a replayed step: their dense scores need memory that the host sized


@dataclass(frozen=True)
class Replayed:
    """A step from a graph that is to be probed: a layer's index, request ids of the rows."""

    layer: int
    request_ids: list[int]


class ShadowProbe:
    """Chooses what to probe, and hands the counters what was found once the device is done.

    Args:
        every: one in so many steps; layers: of the engine.

    Attributes:
        layer: index of the layer to probe in this step, where it runs in Python; None for none.
        replayed: the last step, if it came from a graph and is to be probed.
    """

    def __init__(self, every: int, layers: int, counters: Counters) -> None:
        self._every, self._layers, self._counters = every, layers, counters
        self._seen = 0
        self._waiting: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self._query: Tensor | None = None  # [layers, rows, heads, 128], as bytes
        self._weights: Tensor | None = None
        self.layer: int | None = None
        self.replayed: Replayed | None = None

    def next_step(self, metadata: Any, *, is_sparse: bool) -> None:
        """Decide on the step that was prepared; eager, once a step.

        Args:
            is_sparse: whether the step may run SPIN.
        """
        self._collect()
        self.layer = self.replayed = None
        if not is_sparse:
            return
        self._seen += 1
        if self._seen % self._every:
            return
        layer = (self._seen // self._every - 1) % self._layers
        if metadata.is_cuda_graph:
            self.replayed = Replayed(layer, metadata.request_ids[metadata.num_contexts :])
        else:
            self.layer = layer

    def keep_query(self, index: int, query: Tensor, weights: Tensor, most_rows: int) -> None:
        """Copy a layer's queries to where they outlive a replay; captured with the layer.

        Args:
            query: e4m3 `[rows, heads, 128]`; weights: fp32 `[rows, heads]`.
            most_rows: of any step.
        """
        if self._query is None or self._weights is None:
            if query.is_cuda and torch.cuda.is_current_stream_capturing():
                return  # pragma: no cover - the host runs a step before it captures one
            room = (self._layers, most_rows)
            self._query = query.new_zeros(*room, *query.shape[1:], dtype=torch.uint8)
            self._weights = weights.new_zeros(*room, weights.shape[1])
        self._query[index, : len(query)].copy_(query.view(torch.uint8))
        self._weights[index, : len(weights)].copy_(weights)

    def look_back(
        self,
        replayed: Replayed,
        view: LayerView,
        positions_tokens: Tensor,
        pages: Tensor,
        metadata: Any,
        *,
        top_k: int,
        ratio: int,
        block_size_slots: int,
    ) -> None:
        """Score a replayed step densely, before the next one begins.

        Args:
            view: what SPIN decided in it; positions_tokens: int64 `[G, rows]` of it.
            pages: the layer's key cache, uint8 `[pages, page_slots * 132]`.
            metadata: of the next step, whose block tables still name the pages of all requests
                that go on; those that do not are left out.
        """
        if self._query is None or self._weights is None:
            return
        contexts = metadata.num_contexts
        going_on = enumerate(metadata.request_ids[contexts:], contexts)  # on the pages they had
        now = {i: row for row, i in going_on if not is_dummy(i)}
        pairs = _some_of(replayed.request_ids, now, self._seen // self._every)
        if not pairs:
            return
        chosen = torch.tensor(pairs, pin_memory=pages.is_cuda)
        then, rows = chosen.to(pages.device, non_blocking=True).unbind(1)
        shape = positions_tokens.shape
        query = self._query[replayed.layer, : shape.numel()].view(torch.float8_e4m3fn)
        weights = self._weights[replayed.layer, : shape.numel()]
        part = replace(
            view,
            block_list=view.block_list[then],
            block_count=view.block_count[then],
            visible_slots=view.visible_slots[then],
        )
        blocks = torch.arange(view.block_list.shape[1], dtype=torch.int32, device=pages.device)
        listed = blocks.expand(len(pairs), -1)
        scores = score_pages(
            query.unflatten(0, shape)[then],
            weights.unflatten(0, shape)[then],
            pages,
            metadata.indexer_k_cache_block_offsets[rows],
            part.visible_slots,
            listed,
            block_size_slots=block_size_slots,
        )
        truth = topk_slots(
            scores,
            listed >= 0,
            positions_tokens[then],
            top_k=top_k,
            ratio=ratio,
            block_size_slots=block_size_slots,
        )
        self.note(truth.flatten(0, 1), part, block_size_slots)

    def note(self, truth: Tensor, view: LayerView, block_size_slots: int) -> None:
        """Count, without waiting for the device, what a layer misses.

        Args:
            truth: int32 `[G * rows, K]`, what dense scoring selects, -1 pads.
            view: what SPIN decided for these `G` sequences.
        """
        found = count_missed(truth, view, block_size_slots)
        if not found.is_cuda:
            self._waiting.append((found, None))
            return
        copy = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)  # pragma: no cover
        copy.copy_(found, non_blocking=True)  # pragma: no cover
        event = torch.cuda.Event()  # pragma: no cover
        event.record()  # pragma: no cover
        self._waiting.append((copy, event))  # pragma: no cover

    def _collect(self) -> None:
        while self._waiting:
            found, event = self._waiting[0]
            if event is not None and not event.query():  # pragma: no cover - needs a GPU
                return
            del self._waiting[0]
            self._counters.probe([(m, n) for m, n in found.tolist() if n])


def count_missed(truth: Tensor, view: LayerView, block_size_slots: int) -> Tensor:
    """Slots of each row's dense top-k that lie outside the kept blocks.

    Rows that skip nothing are not counted: SPEC 8 leaves cold steps out, and a short sequence has
    nothing to miss.

    Args:
        truth: int32 `[G * rows, K]`, -1 pads.

    Returns:
        int32 `[G * rows, 2]`, slots missed and looked for; zeros for rows that do not count.
    """
    sequences, blocks = view.block_list.shape
    kept = torch.zeros(sequences, blocks + 1, dtype=torch.bool, device=truth.device)
    kept.scatter_(1, view.block_list.long() % (blocks + 1), True)  # -1 goes to the last column
    slots = truth.view(sequences, -1).long()
    is_slot = slots >= 0
    block = slots // block_size_slots
    found = kept.gather(1, block.clamp(0, blocks - 1)) & (block < blocks)  # the host's may be wild
    missed = is_slot & ~found
    visible_blocks = (view.visible_slots + (block_size_slots - 1)) // block_size_slots
    skips = (view.block_count < visible_blocks).view(-1, 1, 1)
    both = torch.stack([missed, is_slot]).unflatten(2, (-1, truth.shape[1]))
    return (both.sum(3).permute(1, 2, 0) * skips).flatten(0, 1).int()


def _some_of(request_ids: Sequence[int], now: dict[int, int], turn: int) -> list[tuple[int, int]]:
    """Rows then and now of up to `PROBED_SEQUENCES` requests, another part of them each time."""
    pairs = [(row, now[i]) for row, i in enumerate(request_ids) if i in now]
    first = turn * PROBED_SEQUENCES % max(len(pairs), 1)
    return (pairs[first:] + pairs[:first])[:PROBED_SEQUENCES]
