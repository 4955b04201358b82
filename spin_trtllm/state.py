# SPDX-License-Identifier: Apache-2.0
"""The averages of every sequence and layer, and whose they are (SPEC 3).

State is a cache that may be lost: a lane that cannot be trusted is cold, and a cold step is simply
dense and warms it again. So there is no rebuild code, and doubt always resolves to cold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from spin_trtllm.errors import check_integer, refuse

MAX_LAYER = 2**20  # far beyond any model, small enough for SPEC 6 to shift it by 40 bits
DTYPES = (torch.float32, torch.bfloat16, torch.int8)  # int8 holds codes of `log8`
NOWHERE = -1  # next_tokens of a lane that no step has touched


class SpinState:
    """`V`, `D` and `warm` of up to `sequences` sequences in every indexer layer.

    A sequence owns one *lane*, in all layers, from its first step until `release`. One more lane,
    `scratch`, belongs to padding and dummy rows: always cold, never written.

    Attributes:
        layers: decoder-layer index of each indexer layer.
        v: `[layers, sequences + 1, slots]`; d: `[layers, sequences + 1, slots + 1]`.
        dtype, device: of the averages.
        warm: bool `[layers, sequences + 1]`.
        next_tokens: int64 `[layers, sequences + 1]`, position at which the next step must start.
    """

    def __init__(
        self,
        layers: Sequence[int],
        *,
        sequences: int,
        slots: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        layers = list(layers)
        if not layers or len(set(layers)) != len(layers):
            refuse("layers", layers, "distinct decoder-layer indices, at least one")
        for layer in layers:
            check_integer("layers", layer, 0, MAX_LAYER)
        check_integer("sequences", sequences, 1, 2**20)
        check_integer("slots", slots, 1, 2**31 - 1)
        if dtype not in DTYPES:
            refuse("dtype", dtype, ", ".join(map(str, DTYPES)))
        self.layers = tuple(layers)
        self.sequences = sequences
        self.slots = slots
        self.dtype = dtype
        self.device = torch.device(device)
        lanes = (len(self.layers), sequences + 1)
        self._make_averages(lanes)
        self.warm = torch.zeros(lanes, dtype=torch.bool, device=device)
        self.next_tokens = torch.full(lanes, NOWHERE, dtype=torch.int64, device=device)
        self._lane_of: dict[int, int] = {}
        self._free: deque[int] = deque(range(sequences))
        self._generation = [0] * (sequences + 1)

    @property
    def scratch(self) -> int:
        """The lane of padding and dummy rows, and of sequences that found no free lane."""
        return self.sequences

    @property
    def state_bytes(self) -> int:
        """Bytes of every tensor held."""
        return sum(t.numel() * t.element_size() for t in self._tensors())

    @staticmethod
    def estimate_bytes(layers: int, sequences: int, slots: int, dtype: torch.dtype) -> int:
        """`state_bytes` of a state that has not been made yet."""
        lanes = layers * (sequences + 1)
        return lanes * ((2 * slots + 1) * dtype.itemsize + 1 + 8)

    def lanes(self, sequence_ids: Iterable[int | None]) -> list[int]:
        """The lane of each sequence; a sequence seen for the first time gets a cold one.

        `None` marks a padding or dummy row. It, and any sequence for which no lane is left, is
        sent to `scratch`, where it runs dense.

        Raises:
            SpinError: one sequence twice in a batch.
        """
        ids = list(sequence_ids)
        real = [check_integer("sequence_ids", i, 0, 2**64 - 1) for i in ids if i is not None]
        if len(set(real)) != len(real):
            refuse("sequence_ids", ids, "each sequence once")
        return [self.scratch if i is None else self._lane(i) for i in ids]

    def generation(self, lane: int) -> int:
        """Counts up whenever a lane is reset or changes hands: marks late results as stale."""
        return self._generation[lane]

    def reset(self, sequence_id: int) -> None:
        """Make a sequence cold: after prefill, at a new turn, or whenever in doubt (SPEC 3)."""
        lane = self._lane_of.get(sequence_id)
        if lane is not None:
            self._clear(lane)

    def release(self, sequence_id: int) -> None:
        """Free the lane of a finished or preempted sequence; an unknown one is ignored."""
        lane = self._lane_of.pop(sequence_id, None)
        if lane is not None:
            self._clear(lane)
            self._free.append(lane)

    def export(self, sequence_id: int) -> dict[str, Tensor] | None:
        """Copies of a sequence's tensors, to move it to another process; None if it has none."""
        lane = self._lane_of.get(sequence_id)
        if lane is None:
            return None
        return self._read(lane) | {"layers": torch.tensor(self.layers)}

    def adopt(self, sequence_id: int, exported: dict[str, Tensor] | None) -> None:
        """Take over an exported sequence. Anything but a whole, fitting export leaves it cold."""
        check_integer("sequence_id", sequence_id, 0, 2**64 - 1)
        self.release(sequence_id)
        lane = self._lane(sequence_id)
        if lane == self.scratch or exported is None:
            return
        layers, slots = len(self.layers), self.slots
        wanted = {
            "v": ((layers, slots), self.dtype),
            "d": ((layers, slots + 1), self.dtype),
            "warm": ((layers,), torch.bool),
            "next_tokens": ((layers,), torch.int64),
        }
        fits = set(exported) == {*wanted, "layers"} and all(
            (tuple(exported[name].shape), exported[name].dtype) == shape_and_dtype
            for name, shape_and_dtype in wanted.items()
        )
        if fits and exported["layers"].tolist() == list(self.layers):
            self._write(lane, exported)

    def _make_averages(self, lanes: tuple[int, int]) -> None:
        self.v = torch.zeros(*lanes, self.slots, dtype=self.dtype, device=self.device)
        self.d = torch.zeros(*lanes, self.slots + 1, dtype=self.dtype, device=self.device)

    def _lane(self, sequence_id: int) -> int:
        if sequence_id not in self._lane_of:
            if not self._free:
                return self.scratch
            lane = self._free.popleft()
            self._clear(lane)
            self._lane_of[sequence_id] = lane
        return self._lane_of[sequence_id]

    def _clear(self, lane: int) -> None:
        self._generation[lane] += 1
        self._zero_averages(lane)
        self.warm[:, lane] = False
        self.next_tokens[:, lane] = NOWHERE

    def _zero_averages(self, lane: int) -> None:
        self.v[:, lane] = 0
        self.d[:, lane] = 0

    def _read(self, lane: int) -> dict[str, Tensor]:
        return {name: getattr(self, name)[:, lane].clone() for name in _LANE_TENSORS}

    def _write(self, lane: int, tensors: dict[str, Tensor]) -> None:
        for name in _LANE_TENSORS:
            getattr(self, name)[:, lane] = tensors[name]

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in _LANE_TENSORS]


_LANE_TENSORS = ("v", "d", "warm", "next_tokens")
