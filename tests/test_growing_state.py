# SPDX-License-Identifier: Apache-2.0
"""How a state that grows lays out its memory; the memory itself is the host's here.

`tests/gpu` runs the same state on real virtual memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from spin_trtllm import gpu_state, native
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.gpu_state import NO_LANE, GpuState, GrowingState
from spin_trtllm.gpu_step import GpuStep
from spin_trtllm.virtual_memory import OutOfMemory

LAYERS, SLOTS, GRANULE = (2, 5, 9), 1001, 8192
TILE_BYTES = len(LAYERS) * 2 * native.TILE_SLOTS * 2


class HostMemory:
    """`GrowingMemory`'s interface over one tensor, with room for `granules` in all."""

    granules = 100

    def __init__(self, regions: int, region_bytes: int, device: torch.device) -> None:
        self.region_bytes = region_bytes
        self.region_stride_bytes = -(-region_bytes // GRANULE) * GRANULE
        self.data = torch.full((regions, self.region_stride_bytes), 77, dtype=torch.uint8)
        self.address = self.data.data_ptr()
        self._mapped = [0] * regions

    @property
    def mapped_bytes(self) -> int:
        return sum(self._mapped)

    def mapped(self, region: int) -> int:
        return self._mapped[region]

    def grow(self, region: int, size_bytes: int) -> None:
        assert size_bytes <= self.region_bytes
        new = -(-size_bytes // GRANULE) * GRANULE
        if (self.mapped_bytes - self._mapped[region] + new) // GRANULE > self.granules:
            raise OutOfMemory("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY")
        self.data[region, self._mapped[region] : new] = 0
        self._mapped[region] = max(new, self._mapped[region])

    def trim(self, region: int) -> None:
        self.data[region] = 77
        self._mapped[region] = 0

    def tensor(
        self,
        region: int,
        offset_bytes: int,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
    ) -> Tensor:
        last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        assert offset_bytes + (last + 1) * dtype.itemsize <= self._mapped[region]
        whole = self.data[region].view(dtype)
        return torch.as_strided(whole, shape, strides, whole.storage_offset())


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_state, "GrowingMemory", HostMemory)


def growing(sequences: int = 2) -> GrowingState:
    return GrowingState(LAYERS, sequences=sequences, slots=SLOTS, device="cpu")


def filled(state: GpuState, sequence_id: int, slots: int) -> None:
    """Averages that tell layer, kind and slot apart, up to `slots`."""
    lane = state.lanes([sequence_id])[0]
    for layer in range(len(LAYERS)):
        state.v[layer, lane, :slots] = torch.arange(slots) % 97 + 100 * layer + 1
        state.d[layer, lane, :slots] = -(torch.arange(slots) % 89) - 100 * layer - 1
        state.warm[layer, lane] = True
        state.next_tokens[layer, lane] = 40 + layer


def test_a_sequence_takes_memory_as_it_grows() -> None:
    state = growing()
    books = state.state_bytes
    assert state.device_lanes([7, 8, 9]) == [0, 1, NO_LANE]
    assert state.lane_slots.tolist() == [0, 0, 0]
    assert state.grow(7, 1)
    first = int(state.lane_slots[0])
    assert first == GRANULE // TILE_BYTES * native.TILE_SLOTS
    assert state.state_bytes == books + GRANULE
    assert state.grow(7, first)
    assert state.state_bytes == books + GRANULE
    assert state.grow(7, first + 1)
    assert int(state.lane_slots[0]) > first
    assert state.grow(7, SLOTS + 1)
    assert int(state.lane_slots[0]) == 4 * native.TILE_SLOTS  # of whole tiles, the capacity
    assert not state.grow(9, 1)
    with pytest.raises(SpinError, match=r"^slots: got 1003"):
        state.grow(7, SLOTS + 2)


def test_without_memory_a_sequence_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    state = growing()
    state.device_lanes([7, 8])
    assert state.grow(7, 300)
    monkeypatch.setattr(HostMemory, "granules", state._memory.mapped_bytes // GRANULE)
    before = state.lane_slots.tolist()
    assert not state.grow(7, SLOTS)
    assert not state.grow(8, 1)
    assert state.lane_slots.tolist() == before


def test_memory_of_lanes_without_a_sequence_can_be_given_back() -> None:
    state = growing()
    state.device_lanes([7, 8])
    state.grow(7, SLOTS)
    state.grow(8, 300)
    state.release(7)
    assert int(state.lane_slots[0]) > 0  # the next owner may find it useful
    state.trim()
    assert state.lane_slots.tolist()[0] == 0
    assert state._memory.mapped_bytes == state._memory.mapped(1)


@pytest.mark.parametrize("slots", [3, 300, SLOTS])
def test_an_export_fits_either_kind_of_state(slots: int) -> None:
    dense = GpuState(LAYERS, sequences=2, slots=SLOTS, device="cpu")
    filled(dense, 7, slots)
    exported = dense.export(7)
    assert exported is not None
    state = growing()
    state.device_lanes([1])
    state.adopt(7, exported)
    assert state._memory.mapped(1) >= slots // native.TILE_SLOTS * TILE_BYTES
    moved = state.export(7)
    assert moved is not None
    assert exported.keys() == moved.keys()
    assert all(torch.equal(exported[name], moved[name]) for name in exported)


def test_an_export_that_finds_no_memory_leaves_its_sequence_cold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dense = GpuState(LAYERS, sequences=1, slots=SLOTS, device="cpu")
    filled(dense, 7, SLOTS)
    monkeypatch.setattr(HostMemory, "granules", 1)
    state = growing()
    state.adopt(7, dense.export(7))
    assert not state.warm.any()
    assert int(state.lane_slots[0]) == 0


def test_kernels_find_every_average_where_the_views_have_it() -> None:
    dense = GpuState(LAYERS, sequences=2, slots=SLOTS, device="cpu")
    filled(dense, 7, SLOTS)
    state = growing()
    state.device_lanes([1])
    state.adopt(7, dense.export(7))
    fields, tile = state.kernel_fields(), native.TILE_SLOTS
    memory = state._memory.data.flatten().view(torch.bfloat16)
    for kind in ("v", "d"):
        start = (fields[kind] - state._memory.address) // 2
        for layer in range(len(LAYERS)):
            for slot in (0, 1, 255, 256, 700, SLOTS - 1):
                at = start + fields[f"{kind}_stride"] + layer * fields[f"{kind}_layer_stride"]
                at += slot // tile * fields["tile_stride"] + slot % tile
                assert memory[at] == getattr(dense, kind)[layer, 0, slot]


def test_a_lane_that_changes_hands_is_zero() -> None:
    dense = GpuState(LAYERS, sequences=1, slots=SLOTS, device="cpu")
    filled(dense, 7, 600)
    state = growing(1)
    state.adopt(7, dense.export(7))
    assert state._averages(0).any()
    state.release(7)
    state.device_lanes([8])
    assert not state._averages(0).any()


def test_poolings_that_need_whole_rows_are_refused() -> None:
    config = SpinConfig(top_k=8, pooling="mean", state_dtype="bf16")
    with pytest.raises(
        SpinError, match=r"^pooling: got 'mean', allowed: max, with a state that grows"
    ):
        GpuStep(config, growing(), ratio=4, sequences=2)
