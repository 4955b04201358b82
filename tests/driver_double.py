# SPDX-License-Identifier: Apache-2.0
"""A double of the CUDA driver's virtual memory management that keeps books and fails on misuse.

Types and parameter names are those of cuda-bindings. The address space lies in host memory, so that
what is zeroed, kept and viewed can be read.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from spin_trtllm import virtual_memory

bindings = pytest.importorskip("cuda.bindings.driver")

DEVICE, STREAM, GRANULE = "cuda:0", 7, 64
SUCCESS, OUT_OF_MEMORY = bindings.CUresult.CUDA_SUCCESS, bindings.CUresult.CUDA_ERROR_OUT_OF_MEMORY
DEINITIALIZED = bindings.CUresult.CUDA_ERROR_DEINITIALIZED
FREE_OF_CONTEXT = ("cuInit", "cuGetErrorName", "cuDevice", "cuCtxPushCurrent")
GIVES_BACK = ("cuCtxPop", "cuMemRelease", "cuMemUnmap", "cuMemAddressFree", "cuDevicePrimaryCtxRel")


def driver_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Books of every call: its name, the context it needs, and the failure a test asked for."""
    name = function.__name__

    @functools.wraps(function)
    def wrapper(self: DriverDouble, *arguments: Any) -> tuple[Any, ...]:
        if name != "cuGetErrorName":
            self.calls.append(name)
            if self.gone:
                return (DEINITIALIZED, None)
            if name in self.broken:
                return (self.broken[name], None)
            if self.fail_in is not None and not name.startswith(GIVES_BACK):
                self.fail_in -= 1
                if self.fail_in == 0:
                    return (OUT_OF_MEMORY, None)
        assert name.startswith(FREE_OF_CONTEXT) or self.stack, f"{name} without a context"
        result = function(self, *arguments)
        return result if isinstance(result, tuple) else (SUCCESS, result)

    return wrapper


class Allocation:
    def __init__(self) -> None:
        self.open_handle, self.mappings = True, 0


class Mapping:
    def __init__(self, allocation: Allocation) -> None:
        self.allocation, self.accessible, self.used = allocation, False, False


class DriverDouble:
    """One device: a stack of contexts, reserved ranges, allocations, and mappings by address."""

    def __init__(self, granules: int = 1000) -> None:
        self.free_granules = granules
        self.stack: list[Any] = []
        self.retained, self.supported, self.synchronised = 0, 1, True
        self.reserved: dict[int, Any] = {}
        self.allocations: dict[int, Allocation] = {}
        self.mappings: dict[int, Mapping] = {}
        self.capture = bindings.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        self.calls: list[str] = []
        self.broken: dict[str, Any] = {}
        self.fail_in: int | None = None  # the n-th call from now on that takes something
        self.gone = False

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("CU"), f"{name} is not modelled"
        return getattr(bindings, name)

    # ---- device and context
    @driver_call
    def cuInit(self, Flags: int) -> None:
        assert Flags == 0

    @driver_call
    def cuGetErrorName(self, error: Any) -> tuple[Any, ...]:
        known = isinstance(error, bindings.CUresult)
        return (SUCCESS, error.name.encode()) if known else (OUT_OF_MEMORY, None)

    @driver_call
    def cuDeviceGet(self, ordinal: int) -> str:
        assert ordinal == 0
        return "device"

    @driver_call
    def cuDeviceGetAttribute(self, attrib: Any, dev: str) -> int:
        assert attrib.value == 102
        assert dev == "device"
        return self.supported

    @driver_call
    def cuDevicePrimaryCtxRetain(self, dev: str) -> str:
        self.retained += 1
        return "context"

    @driver_call
    def cuDevicePrimaryCtxRelease(self, dev: str) -> None:
        self.retained -= 1
        assert self.retained >= 0

    @driver_call
    def cuCtxPushCurrent(self, ctx: str) -> None:
        assert ctx == "context"
        assert self.retained
        self.stack.append(ctx)

    @driver_call
    def cuCtxPopCurrent(self) -> Any:
        return self.stack.pop()

    @driver_call
    def cuCtxSynchronize(self) -> None:
        self.synchronised = True

    @driver_call
    def cuStreamIsCapturing(self, hStream: int) -> Any:
        assert hStream == STREAM
        return self.capture

    # ---- memory
    @driver_call
    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> int:
        self._check_allocation(prop)
        assert option == bindings.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return GRANULE

    @driver_call
    def cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> Any:
        assert size % GRANULE == alignment == addr == flags == 0 < size
        buffer = ctypes.create_string_buffer(b"\xee" * size, size)
        self.reserved[ctypes.addressof(buffer)] = buffer
        return bindings.CUdeviceptr(ctypes.addressof(buffer))

    @driver_call
    def cuMemAddressFree(self, ptr: int, size: int) -> None:
        assert len(self.reserved.pop(ptr)) == size
        assert not any(ptr <= address < ptr + size for address in self.mappings), "still mapped"

    @driver_call
    def cuMemCreate(self, size: int, prop: Any, flags: int) -> tuple[Any, ...]:
        self._check_allocation(prop)
        assert size == GRANULE
        assert flags == 0
        if not self.free_granules:
            return (OUT_OF_MEMORY, None)
        self.free_granules -= 1
        handle = 1 + max(self.allocations, default=0)
        self.allocations[handle] = Allocation()
        return (SUCCESS, handle)

    @driver_call
    def cuMemRelease(self, handle: int) -> None:
        allocation = self.allocations.pop(handle)
        allocation.open_handle = False
        self._free(allocation)

    @driver_call
    def cuMemMap(self, ptr: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert size == GRANULE
        assert offset == flags == 0
        assert self._offset(ptr) % GRANULE == 0
        assert ptr not in self.mappings, "mapped twice"
        self.allocations[handle].mappings += 1
        self.mappings[ptr] = Mapping(self.allocations[handle])
        ctypes.memset(ptr, 0xAB, size)  # whatever the memory held last

    @driver_call
    def cuMemSetAccess(self, ptr: int, size: int, desc: list[Any], count: int) -> None:
        (access,) = desc
        assert count == 1
        assert access.flags == bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._check_location(access.location)
        for mapping in self._range(ptr, size):
            mapping.accessible = True

    @driver_call
    def cuMemsetD8Async(self, dstDevice: int, uc: int, N: int, hStream: int) -> None:
        assert hStream == STREAM
        for mapping in self._range(dstDevice, N):
            assert mapping.accessible, "no access"
            mapping.used = True
        self.synchronised = False
        ctypes.memset(dstDevice, uc, N)

    @driver_call
    def cuMemUnmap(self, ptr: int, size: int) -> None:
        for mapping in self._range(ptr, size):
            assert self.synchronised or not mapping.used, "unmapped under work"
            mapping.allocation.mappings -= 1
            self._free(mapping.allocation)
        for address in range(ptr, ptr + size, GRANULE):
            del self.mappings[address]

    # ---- books
    def _range(self, ptr: int, size: int) -> list[Mapping]:
        assert size > 0
        assert size % GRANULE == self._offset(ptr) % GRANULE == 0
        return [self.mappings[address] for address in range(ptr, ptr + size, GRANULE)]

    def _offset(self, ptr: int) -> int:
        (base,) = [a for a, buffer in self.reserved.items() if a <= ptr < a + len(buffer)]
        return ptr - base

    def _free(self, allocation: Allocation) -> None:
        if not allocation.open_handle and not allocation.mappings:
            self.free_granules += 1

    @staticmethod
    def _check_location(location: Any) -> None:
        assert location.type == bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        assert location.id == 0

    def _check_allocation(self, prop: Any) -> None:
        assert prop.type == bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._check_location(prop.location)

    def assert_clean(self) -> None:
        assert not self.reserved
        assert not self.mappings
        assert not self.allocations
        assert not self.stack
        assert self.retained == 0


@contextmanager
def installed(double: DriverDouble) -> Iterator[DriverDouble]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(virtual_memory, "_driver", lambda: double)
        patch.setattr(virtual_memory, "_stream", lambda device: STREAM)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "init", lambda: None)
        yield double
