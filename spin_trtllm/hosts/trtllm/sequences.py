# SPDX-License-Identifier: Apache-2.0
"""Which lane each row of a TensorRT-LLM batch owns, on the host and on the device.

A lane belongs to a *request id*, never to a batch row: rows move whenever a request finishes,
joins or is suspended. Nor does it belong to the slot of the KV-cache manager's index mapper: that
one has spare slots for requests that wait, older managers have none, and a recycled slot would have
to be checked against the request id anyway. A map from id to lane with as many lanes as a batch has
rows always finds room, since whoever is not in the batch can give way: he comes back cold.

Where requests do not take turns, whoever is missing from a batch is gone or suspended, and comes
back cold, too. The micro-batches of pipeline stages take turns, and stay warm.

What a lane holds of an earlier owner is not cleared here, for that would be launches: a *tenancy*,
a number that no two owners share, goes to the device with the lane, and is compared there.

This runs in every step on the host's critical path, so it does in Python only what changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np
import torch

from spin_trtllm.gpu_step import NO_LANE
from spin_trtllm.hosts.trtllm.staging import StagedTable

# `llm_request.py`: CUDA_GRAPH_DUMMY_REQUEST_ID is 2**64 - 1, less the draft length and, in newer
# releases, more; guard pages take ids near it, too.
FIRST_DUMMY = 2**64 - 2**32
FREE = 2**63 - 1  # later than any step


def is_dummy(request_id: int, first_real: int = 1) -> bool:
    """Whether a request only pads or warms up.

    Padding has attention-DP's id 0, or one of the ids just below 2**64. Warm-up forwards count
    theirs from 0, one a row. Real ids count up from `first_real`, the largest batch
    (`ExecutorRequestQueue.next_request_id`), or are the large ones of disaggregated serving.
    """
    return not first_real <= request_id < FIRST_DUMMY


class SequenceLanes:
    """Hands out the lanes of a state and keeps the device's copy of who sits where.

    Args:
        sequences: most rows of a batch.
        micro_batches: batches that take turns, each with lanes of its own; with one, a request that
            is not in a batch is gone or suspended.

    Attributes:
        lanes: int64 `[sequences]`, lane of each generation row, `NO_LANE` for padding; one fixed
            buffer that every captured graph of the KV-cache manager reads.
        ids: int64 `[sequences]`, request id of each generation row (unsigned ids wrap).
        tenants: int64 `[sequences]`, tenancy of each generation row.
        lane_of: lane of each request that has one.
        is_known: bool `[G]`, rows that had a lane before this step: what the counters call sparse.
            The device decides by positions, and may find such a row cold.
        known_rows: how many these are; real_rows: rows that are no dummies; warm_up_rows: rows that
            pass for a warm-up's.
    """

    def __init__(self, sequences: int, device: torch.device, *, micro_batches: int = 1) -> None:
        self.sequences, self.micro_batches = sequences, micro_batches
        lanes = sequences * micro_batches
        self._sent = StagedTable(3, sequences, NO_LANE, device)
        self.lanes, self.ids, self.tenants = self._sent.table.unbind()
        self.lane_of: dict[int, int] = {}
        self._free = list(range(lanes))[::-1]
        self._owner = [0] * lanes  # request id of each lane that is taken
        self._clock = 0
        # Of each lane, and of one more for rows at NO_LANE, which is the last index: when it was
        # last in a batch (or FREE), and its owner's tenancy.
        self._used = np.full(lanes + 1, FREE, dtype=np.int64)
        self._tenancy = np.zeros(lanes + 1, dtype=np.int64)
        self._tenancies = 0
        self._rows: list[int] = []  # what the device holds
        self._is_stale = False  # one of them has lost its lane since
        self._seats = np.zeros(0, dtype=np.int64)  # lanes of these rows
        self.is_known = np.zeros(0, dtype=bool)
        self.known_rows = self.real_rows = self.warm_up_rows = 0

    def place(self, context_ids: Sequence[int], rows: list[int]) -> bool:
        """Refresh the device's table for a step; eager, once a step.

        Args:
            context_ids: requests in prefill: whatever is known of them is void.
            rows: request ids of the generation rows; dummies may repeat. The list is kept.

        Returns:
            Whether every row has its own place; if not, no row has a lane. A captured graph may
            run even then, dense, and remember nothing.
        """
        for request_id in context_ids:
            self.forget(request_id)
        if rows == self._rows and not self._is_stale:
            if self.known_rows < self.real_rows:  # who was new is known now
                self.is_known, self.known_rows = self._seats != NO_LANE, self.real_rows
            return True
        if len(rows) > self.sequences or self._repeats(rows):
            self.leave(rows)
            return False
        lanes = np.fromiter(map(self.lane_of.get, rows, repeat(NO_LANE)), np.int64, len(rows))
        self.is_known = lanes != NO_LANE
        self.known_rows = self.real_rows = int(np.count_nonzero(self.is_known))
        self._clock, self.warm_up_rows = self._clock + 1, 0
        self._used[lanes] = self._clock
        if self.known_rows < len(self.lane_of) and self.micro_batches == 1:
            for missing in (self._used[:-1] < self._clock).nonzero()[0].tolist():
                self.forget(self._owner[missing])
        if self.known_rows < len(rows):
            self.real_rows += self._seat(rows, lanes, np.flatnonzero(~self.is_known))
        self._send(rows, lanes)
        return True

    def leave(self, request_ids: Sequence[int]) -> None:
        """Let a step run dense: its requests are cold next time, and no row has a lane until then.

        Their tokens go by unseen, and must not be taken for drafts of the step before.
        """
        for request_id in request_ids:
            self.forget(request_id)
        self.clear()

    def clear(self) -> None:
        """Leave no row a lane until the next `place`."""
        if self._rows != []:
            self.lanes.fill_(NO_LANE)
            self._rows = []
        self.warm_up_rows = 0

    def forget(self, request_id: int) -> None:
        """Free the lane of a request: its next step is cold. Unknown requests are ignored."""
        lane = self.lane_of.pop(request_id, None)
        if lane is not None:
            self._free.append(lane)
            self._used[lane] = FREE
            self._is_stale = True

    def tenancy_of(self, request_id: int) -> int | None:
        """Tenancy of a request's lane, None where it has none: another one means a cold start."""
        lane = self.lane_of.get(request_id)
        return None if lane is None else int(self._tenancy[lane])

    def _repeats(self, rows: list[int]) -> bool:
        """Whether a row other than a dummy is there twice."""
        if len(set(rows)) == len(rows):
            return False
        real = [i for i in rows if not is_dummy(i, self.sequences)]
        return len(set(real)) != len(real)

    def _seat(self, rows: list[int], lanes: np.ndarray, standing: np.ndarray) -> int:
        """Give standing rows a lane, in the place of who waited longest if none is left.

        Returns:
            How many got one: all but dummies.
        """
        before = self._tenancies
        for row in standing.tolist():
            request_id = rows[row]
            if is_dummy(request_id, self.sequences):
                self.warm_up_rows += 0 < request_id < self.sequences
                continue
            if not self._free:
                self.forget(self._owner[int(self._used[:-1].argmin())])
            lane = self._free.pop()
            self._tenancies += 1
            self.lane_of[request_id] = lanes[row] = lane
            self._owner[lane], self._used[lane] = request_id, self._clock
            self._tenancy[lane] = self._tenancies
        return self._tenancies - before

    def _send(self, rows: list[int], lanes: np.ndarray) -> None:
        table = self._sent.open()
        table[0, : len(rows)] = lanes
        self._sent.unsigned[1, : len(rows)] = rows
        self._tenancy.take(lanes, out=table[2, : len(rows)], mode="wrap")
        # Noted before it is so: then `clear` does not miss it.
        self._rows, self._seats, self._is_stale = rows, lanes, False
        self._sent.send()
