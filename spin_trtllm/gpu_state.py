# SPDX-License-Identifier: Apache-2.0
"""The averages of every sequence and layer on a GPU, as the kernels want them (SPEC 3).

`GpuState` holds room for the longest context from the start. `GrowingState` only reserves addresses
for it, and takes memory as its sequences grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from spin_trtllm import native
from spin_trtllm.errors import check_integer
from spin_trtllm.state import SpinState
from spin_trtllm.virtual_memory import GrowingMemory, OutOfMemory

NO_LANE = -1  # a padding row, or a sequence that found no free lane: dense, and remembers nothing


class GpuState(SpinState):
    """`SpinState` with rows padded for vector access, and a note of what waits for observation.

    Attributes:
        lane_waits: uint8 `[layers, sequences + 1]`, 1 where the step's buffers hold scores of the
            lane that the next step observes.
        lane_tenant: int64 `[layers, sequences + 1]`, `tenants` of the lane's last step, where the
            steps are given any.
    """

    def __init__(
        self,
        layers: Sequence[int],
        *,
        sequences: int,
        slots: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__(layers, sequences=sequences, slots=slots, dtype=dtype, device=device)
        self.lane_waits = torch.zeros(self.warm.shape, dtype=torch.uint8, device=device)
        self.lane_tenant = torch.zeros(self.warm.shape, dtype=torch.int64, device=device)

    @property
    def state_bytes(self) -> int:
        """Bytes of every tensor held, padding included."""
        held = [self.v, self.d, *self._books()]
        return sum(t.untyped_storage().nbytes() for t in held)

    def device_lanes(self, sequence_ids: Iterable[int | None]) -> list[int]:
        """`lanes`, with `NO_LANE` for padding rows and sequences that found no free lane."""
        return [NO_LANE if n == self.scratch else n for n in self.lanes(sequence_ids)]

    def kernel_fields(self) -> dict[str, Any]:
        """Where the averages lie: fields of the parameter structs of `spin/advance.h`."""
        return {
            "v": self.v,
            "d": self.d,
            "v_stride": self.v.stride(1),
            "v_layer_stride": self.v.stride(0),
            "d_stride": self.d.stride(1),
            "d_layer_stride": self.d.stride(0),
            "tile_stride": native.TILE_SLOTS,
        }

    def _books(self) -> list[Tensor]:
        return [self.warm, self.next_tokens, self.lane_waits, self.lane_tenant]

    def _make_averages(self, lanes: tuple[int, int]) -> None:
        width = (self.slots + 1 + 63) // 64 * 64  # every lane starts on a line of the cache
        v, d = (torch.zeros(*lanes, width, dtype=self.dtype, device=self.device) for _ in range(2))
        self.v, self.d = v[..., : self.slots], d[..., : self.slots + 1]

    def _clear(self, lane: int) -> None:
        super()._clear(lane)
        self.lane_waits[:, lane] = 0


class GrowingState(GpuState):
    """`GpuState` that has memory for as many slots of each sequence as it was asked for.

    A lane is a range of addresses, `[tiles, layers, V and D, 256]`, of which the front is mapped:
    pages of 2 MiB hold some 100,000 tokens of all layers of V4-Flash. A sequence that outgrows its
    memory, because `grow` was not called or found none, runs dense: kernels never touch what is
    not mapped. Addresses never change, so captured graphs stay valid.

    Attributes:
        lane_slots: int64 `[sequences + 1]`, slots of each lane that have memory.
    """

    def __init__(
        self,
        layers: Sequence[int],
        *,
        sequences: int,
        slots: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__(layers, sequences=sequences, slots=slots, dtype=dtype, device=device)
        self.lane_slots = torch.zeros(sequences + 1, dtype=torch.int64, device=device)

    @property
    def state_bytes(self) -> int:
        """Bytes that are mapped now, and those of the books."""
        return self._memory.mapped_bytes + sum(t.nbytes for t in [*self._books(), self.lane_slots])

    def grow(self, sequence_id: int, slots: int) -> bool:
        """Make room for a sequence up to `slots`; eager, before the step that needs it.

        Args:
            sequence_id: a sequence that has a lane.
            slots: the slot where its last query of the next step stands, or more, plus 1.

        Returns:
            Whether there is room; if not, the sequence runs dense.
        """
        check_integer("slots", slots, 0, self.slots + 1)
        lane = self._lane_of.get(sequence_id)
        if lane is None:
            return False
        return self._map(lane, slots)

    def trim(self) -> None:
        """Give back the memory of lanes without a sequence; waits for the device."""
        for lane in self._free:
            self._memory.trim(lane)
            self.lane_slots[lane] = 0

    def kernel_fields(self) -> dict[str, Any]:
        """Where the averages lie: fields of the parameter structs of `spin/advance.h`."""
        stride = self._memory.region_stride_bytes // self.dtype.itemsize
        layer = 2 * native.TILE_SLOTS
        return {
            "v": self._memory.address,
            "d": self._memory.address + native.TILE_SLOTS * self.dtype.itemsize,
            "v_stride": stride,
            "v_layer_stride": layer,
            "d_stride": stride,
            "d_layer_stride": layer,
            "tile_stride": len(self.layers) * layer,
            "lane_slots": self.lane_slots,
        }

    def _make_averages(self, lanes: tuple[int, int]) -> None:
        layers, tile_elements = lanes[0], 2 * native.TILE_SLOTS
        self._tile_bytes = layers * tile_elements * self.dtype.itemsize
        self._memory = GrowingMemory(
            self.sequences, self._tiles(self.slots + 1) * self._tile_bytes, self.device
        )

    def _zero_averages(self, lane: int) -> None:
        self._averages(lane).zero_()

    def _read(self, lane: int) -> dict[str, Tensor]:
        read: dict[str, Tensor] = {}
        for kind, (name, width) in enumerate((("v", self.slots), ("d", self.slots + 1))):
            mapped = self._averages(lane)[:, :, kind].transpose(0, 1).flatten(1)[:, :width]
            read[name] = torch.nn.functional.pad(mapped, (0, width - mapped.shape[1]))
        books = {name: getattr(self, name)[:, lane].clone() for name in ("warm", "next_tokens")}
        return read | books

    def _write(self, lane: int, tensors: dict[str, Tensor]) -> None:
        """Take over what an export holds; without memory for it, the lane stays cold."""
        used = torch.maximum(tensors["v"].abs().amax(0), tensors["d"][:, :-1].abs().amax(0))
        width = max([1, *(n + 1 for n in (used.nonzero().flatten()[-1:].tolist()))])
        if bool(tensors["d"][:, -1].any()):
            width = self.slots + 1
        if not self._map(lane, width):
            return
        home = self._averages(lane)
        width = home.shape[0] * native.TILE_SLOTS
        for kind, name in enumerate(("v", "d")):
            source = tensors[name][:, :width]
            source = torch.nn.functional.pad(source, (0, width - source.shape[1]))
            home[:, :, kind] = source.unflatten(1, (-1, native.TILE_SLOTS)).transpose(0, 1)
        self.warm[:, lane] = tensors["warm"]
        self.next_tokens[:, lane] = tensors["next_tokens"]

    def _map(self, lane: int, slots: int) -> bool:
        if self._tiles(slots) > self._mapped_tiles(lane):
            try:
                self._memory.grow(lane, self._tiles(slots) * self._tile_bytes)
            except OutOfMemory:
                return False
            self.lane_slots[lane] = self._mapped_tiles(lane) * native.TILE_SLOTS
        return True

    def _averages(self, lane: int) -> Tensor:
        """Mapped averages of a lane `[tiles, layers, 2, 256]`, V before D."""
        shape = (self._mapped_tiles(lane), len(self.layers), 2, native.TILE_SLOTS)
        if shape[0] == 0:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        strides = (self._tile_bytes // self.dtype.itemsize, 2 * shape[3], shape[3], 1)
        return self._memory.tensor(lane, 0, shape, strides, self.dtype)

    def _mapped_tiles(self, lane: int) -> int:
        return min(self._memory.mapped(lane) // self._tile_bytes, self._tiles(self.slots + 1))

    @staticmethod
    def _tiles(slots: int) -> int:
        return (slots + native.TILE_SLOTS - 1) // native.TILE_SLOTS


__all__ = ["NO_LANE", "GpuState", "GrowingState"]
