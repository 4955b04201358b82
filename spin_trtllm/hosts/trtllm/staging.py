# SPDX-License-Identifier: Apache-2.0
"""Small tables that the host writes and every step on the device reads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

DEPTH = 4  # copies under way at once; a host that runs ahead further waits for the oldest


class StagedTable:
    """A device tensor at a fixed address, written by asynchronous copies.

    A copy reads its pinned source when the device comes to it, so a source may not be written again
    until then. There are `DEPTH` of them, each with an event that says when it is free.

    Attributes:
        table: int64 on the device, what captured graphs read.
        unsigned: the table that `open` returned last, as uint64.
    """

    def __init__(self, rows: int, columns: int, fill: int, device: torch.device) -> None:
        self.table = torch.full((rows, columns), fill, dtype=torch.int64, device=device)
        self._is_cuda = self.table.is_cuda
        depth = DEPTH if self._is_cuda else 1  # a copy on a CPU is over when it returns
        self._sources = [self._source(rows, columns) for _ in range(depth)]
        self._arrays = [source.numpy() for source in self._sources]
        self._unsigned = [array.view(np.uint64) for array in self._arrays]
        self._events: list[torch.cuda.Event | None] = [None] * depth
        self._turn = 0
        self.unsigned = self._unsigned[0]

    def open(self) -> np.ndarray:
        """The host's table to write for the next `send`; what it holds is of some earlier one."""
        self._turn = (self._turn + 1) % len(self._sources)
        event = self._events[self._turn]
        if event is not None:  # pragma: no cover - needs a GPU
            event.synchronize()
        self.unsigned = self._unsigned[self._turn]
        return self._arrays[self._turn]

    def send(self) -> None:
        """Copy what was written, in order with the current stream."""
        self.table.copy_(self._sources[self._turn], non_blocking=True)
        if self._is_cuda:  # pragma: no cover - needs a GPU
            event = self._events[self._turn] or torch.cuda.Event()
            event.record()
            self._events[self._turn] = event

    def _source(self, rows: int, columns: int) -> Tensor:
        return torch.zeros(rows, columns, dtype=torch.int64, pin_memory=self._is_cuda)
