# SPDX-License-Identifier: Apache-2.0
"""GPU memory that grows in place: addresses for the longest context, pages for what is there.

Few sequences become as long as a model allows. `GrowingMemory` reserves addresses for all of them
at full length, which takes no memory, and maps pages behind the start of each, a granule (2 MiB
on most GPUs) at a time. Addresses never move: views, running kernels and captured CUDA graphs live
through a growth.

    memory = GrowingMemory(lanes, lane_bytes, "cuda")
    memory.grow(lane, needed_bytes)  # zeroed; OutOfMemory: let this sequence run dense
    view = memory.tensor(lane, 0, (layers, slots), (slots, 1), torch.bfloat16)
    memory.trim(lane)                # the sequence has left: its pages go back to the GPU

Source: the CUDA driver's virtual memory management, through cuda-bindings 12 or 13, imported when
first needed. A `GrowingMemory` is for one thread at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from spin_trtllm.errors import SpinError, check_integer, refuse

_MAX_REGIONS = 2**20
_MAX_BYTES = 2**48  # as many as a GPU can address

# The context died before the memory, as at the end of a process: nothing is left to give back.
_CONTEXT_GONE = (
    "CUDA_ERROR_DEINITIALIZED",
    "CUDA_ERROR_NOT_INITIALIZED",  # in a forked child
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_INVALID_CONTEXT",
)


class DriverError(SpinError):
    """A call of the CUDA driver failed.

    Attributes:
        call: the function, `cuMemCreate` for example; result: what it returned, as CUDA names it.
    """

    def __init__(self, call: str, result: str) -> None:
        super().__init__(call, result)  # both, so that it can be pickled
        self.call, self.result = call, result

    def __str__(self) -> str:
        return f"{self.call}: the CUDA driver returned {self.result}"


class OutOfMemory(DriverError):
    """The GPU has no room left, maybe because torch caches some (`torch.cuda.empty_cache`)."""


def is_supported(device: torch.device | str = "cuda") -> bool:
    """Whether `GrowingMemory` works on `device`; False without CUDA or its Python bindings."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return False
    try:
        attributes = _driver().CUdevice_attribute
        _call("cuInit", 0)
        handle = _call("cuDeviceGet", _index(device))
        supported = attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        return bool(_call("cuDeviceGetAttribute", supported, handle))
    except (ImportError, DriverError):
        return False


class GrowingMemory:
    """Regions of GPU memory that each grow from their start, at addresses that stay.

    Args:
        regions: how many, side by side in one reservation.
        region_bytes: most bytes of each.
        device: the CUDA device.

    Attributes:
        address: where region 0 starts; region `n` starts `n * region_stride_bytes` later.
        region_stride_bytes: `region_bytes` in whole granules.
        granularity_bytes: of a granule, the least that is mapped.

    Raises:
        SpinError: sizes below 1, or a device that cannot do this (`is_supported`).
        OutOfMemory: no address range of that size.
    """

    def __init__(
        self, regions: int, region_bytes: int, device: torch.device | str = "cuda"
    ) -> None:
        check_integer("regions", regions, 1, _MAX_REGIONS)
        check_integer("region_bytes", region_bytes, 1, _MAX_BYTES // regions)
        if not is_supported(device):
            refuse("device", str(device), "CUDA with virtual memory management and cuda-bindings")
        self.regions, self.region_bytes = regions, region_bytes
        self.device = torch.device("cuda", _index(device))
        torch.cuda.init()
        self._reservation = reservation = _Reservation(_index(device), regions, region_bytes)
        self.address = reservation.address
        self.region_stride_bytes = reservation.stride_bytes
        self.granularity_bytes = reservation.granule_bytes
        # Runs once: from `close`, when nobody holds the memory any more, or at interpreter exit.
        self._finalizer = weakref.finalize(self, reservation.free)

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped in all regions together: what this takes of the GPU."""
        return sum(self._reservation.granules) * self.granularity_bytes

    def mapped(self, region: int) -> int:
        """Bytes mapped at the start of `region`, a multiple of the granularity."""
        check_integer("region", region, 0, self.regions - 1)
        return self._reservation.granules[region] * self.granularity_bytes

    def grow(self, region: int, size_bytes: int) -> range:
        """Map whole granules until `region` has at least `size_bytes`.

        The new bytes are zeroed on the current stream: other streams wait for it before they use
        them. Kernels that run on the bytes mapped before are not disturbed.

        Returns:
            The new bytes, counted from the start of the region; empty if it was large enough.

        Raises:
            SpinError: more than `region_bytes`, a closed memory, or a stream under capture.
            OutOfMemory: no room on the GPU. Nothing has changed: the region keeps what it had.
        """
        granules = self._check(region, size_bytes)
        old = self._reservation.granules[region]
        if granules > old:
            self._reservation.map(region, granules, _stream(self.device))
        return range(old * self.granularity_bytes, max(old, granules) * self.granularity_bytes)

    def trim(self, region: int, size_bytes: int = 0) -> None:
        """Wait for the device, then give back the granules of `region` beyond `size_bytes`.

        Views of those bytes, and graphs that touch them, must not be used until they are mapped
        again. Waits only if there is something to give back.

        Raises:
            SpinError: more than `region_bytes`, a closed memory, or a stream under capture.
        """
        granules = self._check(region, size_bytes)
        if granules < self._reservation.granules[region]:
            self._reservation.unmap(region, granules, _stream(self.device))

    def tensor(
        self,
        region: int,
        offset_bytes: int,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
    ) -> Tensor:
        """A view of mapped bytes, which keeps this memory from being collected.

        Args:
            offset_bytes: of the first element in the region, a multiple of the element's size.
            shape: sizes, at least 1 each.
            strides: in elements, as torch counts them, at least 0 each.
            dtype: with elements of 1, 2, 4 or 8 bytes.

        Raises:
            SpinError: an element that is not mapped, or anything else that was not allowed.
        """
        self._check(region, 0)
        if dtype.itemsize not in (1, 2, 4, 8):
            refuse("dtype", dtype, "elements of 1, 2, 4 or 8 bytes")
        check_integer("offset_bytes", offset_bytes, 0, self.region_bytes)
        if offset_bytes % dtype.itemsize:
            refuse("offset_bytes", offset_bytes, f"a multiple of {dtype.itemsize} for {dtype}")
        if len(strides) != len(shape):
            refuse("strides", tuple(strides), f"one for each of the {len(shape)} dimensions")
        for size, stride in zip(shape, strides, strict=True):
            check_integer("shape", size, 1, _MAX_BYTES)
            check_integer("strides", stride, 0, _MAX_BYTES)
        last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        end_bytes = offset_bytes + (last + 1) * dtype.itemsize
        if end_bytes > self.mapped(region):
            refuse("shape", tuple(shape), f"{self.mapped(region)} mapped bytes, not {end_bytes}")
        start = self.address + region * self.region_stride_bytes + offset_bytes
        # The interface has no bfloat16 and no fp8: integers of the same size stand in for all.
        interface = {
            "version": 3,
            "data": (start, False),
            "shape": tuple(shape),
            "strides": tuple(stride * dtype.itemsize for stride in strides),
            "typestr": f"<i{dtype.itemsize}",
        }
        return torch.as_tensor(_View(self, interface), device=self.device).view(dtype)

    def close(self) -> None:
        """Wait for the device and give everything back; again, or after CUDA's end: no effect.

        No view may be used any more. Without this call it happens once neither the memory nor a
        view of it is referenced, or when the interpreter exits.
        """
        self._finalizer()

    def _check(self, region: int, size_bytes: int) -> int:
        """Refuse what no call takes; `size_bytes` in granules."""
        if not self._finalizer.alive:
            refuse("memory", "closed", "an open GrowingMemory")
        check_integer("region", region, 0, self.regions - 1)
        check_integer("size_bytes", size_bytes, 0, self.region_bytes)
        return _count_granules(size_bytes, self.granularity_bytes)


class _View:
    """What torch makes a tensor of, and holds as long as the tensor lives."""

    def __init__(self, memory: GrowingMemory, interface: dict[str, object]) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = interface


class _Reservation:
    """The driver's side: an address range, and how many granules each region has mapped.

    Each granule is an allocation of its own. What was mapped in one piece is unmapped in one piece,
    so larger allocations could not be trimmed at every granule. Handles are released as soon as
    they are mapped: the mapping alone keeps the memory, and unmapping frees it.
    """

    def __init__(self, device_index: int, regions: int, region_bytes: int) -> None:
        driver = _driver()
        self._allocation = driver.CUmemAllocationProp()
        self._allocation.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._allocation.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._allocation.location.id = device_index
        self._access = driver.CUmemAccessDesc()
        self._access.location = self._allocation.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM

        self.granules = [0] * regions
        self._device = _call("cuDeviceGet", device_index)
        self._context = _call("cuDevicePrimaryCtxRetain", self._device)  # the one torch uses
        try:
            with self._current():
                self.granule_bytes: int = _call(
                    "cuMemGetAllocationGranularity", self._allocation, minimum
                )
                granules = _count_granules(region_bytes, self.granule_bytes)
                self.stride_bytes = granules * self.granule_bytes
                self._size_bytes = regions * self.stride_bytes
                self.address = int(_call("cuMemAddressReserve", self._size_bytes, 0, 0, 0))
        except BaseException:
            _call("cuDevicePrimaryCtxRelease", self._device)
            raise

    def map(self, region: int, granules: int, stream: int) -> None:
        """Extend `region` to `granules` zeroed granules, or fail and leave it as it was."""
        start, end = self._at(region, self.granules[region]), self._at(region, granules)
        with self._current(stream):
            mapped = start
            try:
                for address in range(start, end, self.granule_bytes):
                    handle = _call("cuMemCreate", self.granule_bytes, self._allocation, 0)
                    try:
                        _call("cuMemMap", address, self.granule_bytes, 0, handle, 0)
                        mapped += self.granule_bytes
                    finally:
                        _call("cuMemRelease", handle)
                _call("cuMemSetAccess", start, end - start, [self._access], 1)
                _call("cuMemsetD8Async", start, 0, end - start, stream)
            except BaseException:
                if mapped > start:  # no work knows of these bytes yet: nothing to wait for
                    _call("cuMemUnmap", start, mapped - start)
                raise
        self.granules[region] = granules

    def unmap(self, region: int, granules: int, stream: int) -> None:
        """Shorten `region` to `granules`, once no work on the device can touch the rest."""
        with self._current(stream):
            _call("cuCtxSynchronize")
            self._unmap(region, granules)

    def free(self) -> None:
        """Give everything back. Quiet if the context is gone, and everything with it."""
        try:
            with self._current():
                _call("cuCtxSynchronize")
                for region in range(len(self.granules)):
                    self._unmap(region, 0)
                _call("cuMemAddressFree", self.address, self._size_bytes)
            _call("cuDevicePrimaryCtxRelease", self._device)
        except DriverError as error:
            if error.result not in _CONTEXT_GONE:
                raise
        self.granules = [0] * len(self.granules)

    def _unmap(self, region: int, granules: int) -> None:
        start, end = self._at(region, granules), self._at(region, self.granules[region])
        if end > start:
            _call("cuMemUnmap", start, end - start)
        self.granules[region] = granules

    def _at(self, region: int, granules: int) -> int:
        return self.address + region * self.stride_bytes + granules * self.granule_bytes

    @contextmanager
    def _current(self, stream: int | None = None) -> Iterator[None]:
        """Make the context current, on any thread; refuse a `stream` under capture.

        A captured growth would zero the bytes again at every replay.
        """
        _call("cuCtxPushCurrent", self._context)
        try:
            if stream is not None:
                idle = _driver().CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
                if _call("cuStreamIsCapturing", stream) != idle:
                    refuse("stream", "one under capture", "growing and trimming outside a capture")
            yield
        finally:
            _call("cuCtxPopCurrent")


def _call(name: str, *arguments: object) -> Any:
    """What a function of the driver returns beside its result, which must be success."""
    driver = _driver()
    result, *values = getattr(driver, name)(*arguments)
    if result == driver.CUresult.CUDA_SUCCESS:
        return values[0] if values else None
    known, spelled = driver.cuGetErrorName(result)
    shown = spelled.decode() if known == driver.CUresult.CUDA_SUCCESS else str(result)
    out_of_memory = result == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    raise (OutOfMemory if out_of_memory else DriverError)(name, shown)


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _index(device: torch.device | str) -> int:
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def _count_granules(size_bytes: int, granule_bytes: int) -> int:
    return -(-size_bytes // granule_bytes)
