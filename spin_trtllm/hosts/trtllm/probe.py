# SPDX-License-Identifier: Apache-2.0
"""The shadow probe: now and then, what would dense scoring have chosen?

One layer of one in N steps is also run by the host's own method, untouched, before SPIN's run of
it; the slots it chose are looked up among the blocks that SPIN kept. Layers take turns. The answer
is not used for anything but the miss rate of SPEC 8.

Only steps that run in Python can be probed: batches with prefills in them, or all where CUDA graphs
are off. A step that is replayed from a graph has no place for a second scoring, unless every graph
carried one, and that would be the cost that SPIN is there to save.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spin_trtllm.gpu_step import LayerView
from spin_trtllm.hosts.trtllm.counters import Counters


class ShadowProbe:
    """Chooses what to probe, and hands the counters what was found once the device is done.

    Args:
        every: one in so many of the steps that can be probed; layers: of the engine.

    Attributes:
        layer: index of the layer to probe in this step; None for none.
    """

    def __init__(self, every: int, layers: int, counters: Counters) -> None:
        self._every, self._layers, self._counters = every, layers, counters
        self._seen = 0
        self._waiting: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self.layer: int | None = None

    def next_step(self, metadata: Any, *, is_sparse: bool) -> None:
        """Decide on the step that was prepared; eager, once a step.

        Args:
            is_sparse: whether the step may run SPIN.
        """
        self._collect()
        self.layer = None
        if is_sparse and not metadata.is_cuda_graph:
            self._seen += 1
            if self._seen % self._every == 0:
                self.layer = (self._seen // self._every - 1) % self._layers

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
    missed = is_slot & ~kept.gather(1, slots.clamp(min=0) // block_size_slots)
    visible_blocks = (view.visible_slots + (block_size_slots - 1)) // block_size_slots
    skips = (view.block_count < visible_blocks).view(-1, 1, 1)
    both = torch.stack([missed, is_slot]).unflatten(2, (-1, truth.shape[1]))
    return (both.sum(3).permute(1, 2, 0) * skips).flatten(0, 1).int()
