# SPDX-License-Identifier: Apache-2.0
"""Which lane each row of a TensorRT-LLM batch owns, on the host and on the device.

A lane belongs to a *request id*, never to a batch row: rows move whenever a request finishes,
joins or is suspended. Nor does it belong to the slot of the KV-cache manager's index mapper: that
one has spare slots for requests that wait, older managers have none, and a recycled slot would have
to be checked against the request id anyway. A map from id to lane with as many lanes as a batch has
rows always finds room, since whoever is not in the batch can give way: he comes back cold.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from spin_trtllm.gpu_step import NO_LANE
from spin_trtllm.reference.select_blocks import as_int64
from spin_trtllm.state import SpinState

# `llm_request.py`: CUDA_GRAPH_DUMMY_REQUEST_ID is 2**64 - 1, less the draft length and, in newer
# releases, more; guard pages take ids near it, too. Real ids count up from the batch size.
FIRST_DUMMY = 2**64 - 2**32


def is_dummy(request_id: int) -> bool:
    """Whether a request only pads: attention-DP's 0, or one of the ids just below 2**64."""
    return not 0 < request_id < FIRST_DUMMY


class SequenceLanes:
    """Hands out the lanes of a state and keeps the device's copy of who sits where.

    Attributes:
        lanes: int64 `[sequences]`, lane of each generation row, `NO_LANE` for padding; one fixed
            buffer that every captured graph of the KV-cache manager reads.
        ids: int64 `[sequences]`, request id of each generation row (unsigned ids wrap).
        is_real: bool `[G]`, rows that are no dummies.
        is_known: bool `[G]`, real rows that were in the step before, too: what the counters call
            sparse. The device decides by positions, and may find such a row cold.
    """

    def __init__(self, state: SpinState, sequences: int) -> None:
        self.state, self.sequences = state, sequences
        self._table = torch.zeros(2, sequences, dtype=torch.int64, device=state.device)
        self._table[0] = NO_LANE
        self.lanes, self.ids = self._table[0], self._table[1]
        self._recent: dict[int, int] = {}  # lane of each id, least recently used first
        self._rows: tuple[int, ...] = ()  # of the last step
        self._is_sent = False  # whether the device holds them
        self.is_real = self.is_known = np.zeros(0, dtype=bool)

    def place(self, context_ids: Sequence[int], generation_ids: Sequence[int]) -> bool:
        """Refresh the device's table for a step; eager, once a step.

        Args:
            context_ids: requests in prefill: whatever is known of them is void.
            generation_ids: request ids in row order; dummies may repeat.

        Returns:
            Whether every row has its own place; if not, no row has a lane. A captured graph may
            run even then, dense, and remember nothing.
        """
        for request_id in context_ids:
            self.forget(request_id)
        rows = tuple(generation_ids)
        if rows == self._rows and self._is_sent:
            self.is_known = self.is_real
            return True
        real = [i for i in rows if 0 < i < FIRST_DUMMY]
        if len(rows) > self.sequences or len(set(real)) != len(real):
            self.clear()
            return False
        before, now = self._recent.keys() & self._rows, set(real)
        self.is_real = np.array([i in now for i in rows], dtype=bool)
        self.is_known = np.array([i in before for i in rows], dtype=bool)
        self._seat(real)
        self._send(rows)
        return True

    def clear(self) -> None:
        """Leave no row a lane until the next `place`."""
        self.lanes.fill_(NO_LANE)
        self._is_sent = False

    def forget(self, request_id: int) -> None:
        """Free the lane of a request: its next step is cold. Unknown requests are ignored."""
        if request_id in self._recent:
            del self._recent[request_id]
            self.state.release(request_id)
            self._is_sent = False

    def _seat(self, request_ids: Sequence[int]) -> None:
        """Give each of these a lane, in the place of who waited longest if there is none left."""
        for request_id in request_ids:
            lane = self._recent.pop(request_id, NO_LANE)
            self._recent[request_id] = lane
        while len(self._recent) > self.state.sequences:
            self.forget(next(iter(self._recent)))
        for request_id in request_ids:
            if self._recent[request_id] == NO_LANE:
                self._recent[request_id] = self.state.lanes([request_id])[0]

    def _send(self, rows: tuple[int, ...]) -> None:
        """Copy lanes and ids; pinned memory is fresh, for the device may still read the last."""
        seats = [self._recent.get(i, NO_LANE) for i in rows]
        entries = [seats, rows if max(rows, default=0) < 2**63 else [as_int64(i) for i in rows]]
        fresh = torch.tensor(entries, dtype=torch.int64, pin_memory=self._table.is_cuda)
        self._table[:, : len(rows)].copy_(fresh, non_blocking=True)
        self._rows, self._is_sent = rows, True
