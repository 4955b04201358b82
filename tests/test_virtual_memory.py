# SPDX-License-Identifier: Apache-2.0
"""Memory that grows, on a double of the CUDA driver; `tests/gpu` has the real one."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from driver_double import DEVICE, GRANULE, OUT_OF_MEMORY, DriverDouble, bindings, installed
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spin_trtllm import virtual_memory
from spin_trtllm.errors import SpinError
from spin_trtllm.virtual_memory import DriverError, GrowingMemory, OutOfMemory, is_supported


@pytest.fixture
def driver() -> Iterator[DriverDouble]:
    with installed(DriverDouble()) as double:
        yield double
        gc.collect()
        double.gone or double.assert_clean()


@pytest.fixture
def memory(driver: DriverDouble) -> Iterator[GrowingMemory]:
    memory = GrowingMemory(3, 4 * GRANULE + 1, DEVICE)
    driver.calls.clear()
    yield memory
    memory.close()


def content(memory: GrowingMemory, region: int) -> bytes:
    start = memory.address + region * memory.region_stride_bytes
    return ctypes.string_at(start, memory.mapped(region))


def fill(memory: GrowingMemory, region: int, value: int) -> None:
    start = memory.address + region * memory.region_stride_bytes
    ctypes.memset(start, value, memory.mapped(region))


# ---------------------------------------------------------------- the double
MODELLED = sorted(name for name in vars(DriverDouble) if name.startswith("cu"))


@pytest.mark.parametrize("name", MODELLED)
def test_the_double_takes_what_the_bindings_take(name: str) -> None:
    real = inspect.signature(getattr(bindings, name))
    assert list(inspect.signature(getattr(DriverDouble, name)).parameters)[1:] == list(
        real.parameters
    )


# ---------------------------------------------------------------- support
def test_support_is_the_device_s_word(driver: DriverDouble) -> None:
    assert is_supported(DEVICE)
    driver.supported = 0
    assert not is_supported(DEVICE)
    with pytest.raises(SpinError, match="device: got 'cuda:0'"):
        GrowingMemory(1, 1, DEVICE)
    driver.broken["cuDeviceGet"] = bindings.CUresult.CUDA_ERROR_INVALID_DEVICE
    assert not is_supported(DEVICE)


def test_no_support_without_cuda(driver: DriverDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_supported("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not is_supported(DEVICE)
    assert driver.calls == []


def test_the_module_imports_without_the_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n == "cuda" or n.startswith("cuda.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spec = importlib.util.spec_from_file_location("bare", virtual_memory.__file__)
    assert spec is not None
    assert spec.loader is not None
    bare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bare)
    assert not bare.is_supported(DEVICE)


# ---------------------------------------------------------------- reserve
def test_a_reservation_takes_addresses_only(driver: DriverDouble, memory: GrowingMemory) -> None:
    assert (memory.granularity_bytes, memory.region_stride_bytes) == (GRANULE, 5 * GRANULE)
    ((address, buffer),) = driver.reserved.items()
    assert (memory.address, 3 * memory.region_stride_bytes) == (address, len(buffer))
    assert memory.mapped_bytes == memory.mapped(2) == 0
    assert not driver.mappings


@pytest.mark.parametrize(
    ("regions", "region_bytes", "argument"),
    [(0, 1, "regions"), (2**21, 1, "regions"), (1, 0, "region_bytes"), (2, 2**48, "region_bytes")],
)
def test_sizes_have_bounds(
    driver: DriverDouble, regions: int, region_bytes: int, argument: str
) -> None:
    with pytest.raises(SpinError, match=f"^{argument}: got"):
        GrowingMemory(regions, region_bytes, DEVICE)


@pytest.mark.parametrize("call", ["cuMemAddressReserve", "cuMemGetAllocationGranularity"])
def test_a_failed_reservation_leaves_nothing(driver: DriverDouble, call: str) -> None:
    driver.broken[call] = OUT_OF_MEMORY
    with pytest.raises(OutOfMemory, match=call):
        GrowingMemory(1, 1, DEVICE)
    driver.assert_clean()


# ---------------------------------------------------------------- grow
def test_growth_maps_whole_zeroed_granules(memory: GrowingMemory) -> None:
    assert memory.grow(1, 1) == range(GRANULE)
    assert content(memory, 1) == bytes(GRANULE)
    fill(memory, 1, 9)
    assert memory.grow(1, 2 * GRANULE + 1) == range(GRANULE, 3 * GRANULE)
    assert content(memory, 1) == b"\x09" * GRANULE + bytes(2 * GRANULE)
    assert [memory.mapped(n) for n in range(3)] == [0, 3 * GRANULE, 0]
    assert memory.mapped_bytes == 3 * GRANULE


def test_a_region_that_is_large_enough_asks_the_driver_nothing(
    driver: DriverDouble, memory: GrowingMemory
) -> None:
    assert not memory.grow(0, 0)
    memory.grow(0, 2 * GRANULE)
    driver.calls.clear()
    new = memory.grow(0, GRANULE)
    assert (new.start, new.stop) == (2 * GRANULE, 2 * GRANULE)
    memory.trim(0, 2 * GRANULE)
    assert driver.calls == []


def test_a_region_grows_to_its_last_byte_and_no_further(memory: GrowingMemory) -> None:
    assert memory.grow(2, memory.region_bytes) == range(5 * GRANULE)
    with pytest.raises(SpinError, match=r"size_bytes: got 258, allowed: an integer in 0 .. 257"):
        memory.grow(2, memory.region_bytes + 1)
    with pytest.raises(SpinError, match="size_bytes"):
        memory.trim(2, memory.region_bytes + 1)


@pytest.mark.parametrize("region", [-1, 3, True])
def test_regions_have_bounds(memory: GrowingMemory, region: int) -> None:
    for use in (memory.mapped, memory.trim, lambda n: memory.grow(n, 1)):
        with pytest.raises(SpinError, match=r"region: got .*, allowed: an integer in 0 .. 2"):
            use(region)


@pytest.mark.parametrize("status", ["ACTIVE", "INVALIDATED"])
def test_nothing_is_captured(driver: DriverDouble, memory: GrowingMemory, status: str) -> None:
    memory.grow(0, 2 * GRANULE)
    kinds = bindings.CUstreamCaptureStatus
    driver.capture = getattr(kinds, f"CU_STREAM_CAPTURE_STATUS_{status}")
    driver.calls.clear()
    for change in (lambda: memory.grow(0, 3 * GRANULE), lambda: memory.trim(0)):
        with pytest.raises(SpinError, match="stream: got 'one under capture'"):
            change()
    assert memory.mapped(0) == 2 * GRANULE
    assert not any(name.startswith("cuMem") or name == "cuCtxSynchronize" for name in driver.calls)


# ---------------------------------------------------------------- errors
def test_out_of_memory_says_what_failed(driver: DriverDouble, memory: GrowingMemory) -> None:
    driver.free_granules = 2
    with pytest.raises(OutOfMemory) as caught:
        memory.grow(0, 3 * GRANULE)
    text = "cuMemCreate: the CUDA driver returned CUDA_ERROR_OUT_OF_MEMORY"
    assert str(caught.value) == str(pickle.loads(pickle.dumps(caught.value))) == text
    assert memory.mapped_bytes == 0
    assert memory.grow(0, 2 * GRANULE) == range(2 * GRANULE)


def test_other_failures_are_no_lack_of_memory(driver: DriverDouble, memory: GrowingMemory) -> None:
    driver.broken["cuMemMap"] = bindings.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DriverError, match=r"cuMemMap: .* CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        memory.grow(0, 1)
    assert not isinstance(caught.value, OutOfMemory)
    assert not driver.allocations
    driver.broken["cuMemMap"] = 99_999  # a driver newer than the bindings
    with pytest.raises(DriverError, match="cuMemMap: the CUDA driver returned 99999"):
        memory.grow(0, 1)
    driver.broken.clear()


# ---------------------------------------------------------------- trim
def test_trimming_waits_and_gives_back(driver: DriverDouble, memory: GrowingMemory) -> None:
    memory.grow(0, 4 * GRANULE)
    fill(memory, 0, 5)
    free = driver.free_granules
    driver.calls.clear()
    memory.trim(0, GRANULE + 1)
    assert driver.calls.index("cuCtxSynchronize") < driver.calls.index("cuMemUnmap")
    assert (driver.free_granules, memory.mapped(0)) == (free + 2, 2 * GRANULE)
    memory.grow(0, 3 * GRANULE)
    assert content(memory, 0) == b"\x05" * 2 * GRANULE + bytes(GRANULE)
    memory.trim(0)
    assert memory.mapped_bytes == 0


def test_a_failed_trim_keeps_the_books(driver: DriverDouble, memory: GrowingMemory) -> None:
    memory.grow(0, 2 * GRANULE)
    for call in ("cuCtxSynchronize", "cuMemUnmap"):
        driver.broken[call] = bindings.CUresult.CUDA_ERROR_UNKNOWN
        with pytest.raises(DriverError, match=call):
            memory.trim(0)
        driver.broken.clear()
        assert memory.mapped(0) == 2 * GRANULE


# ---------------------------------------------------------------- close
def test_closing_gives_everything_back_once(driver: DriverDouble, memory: GrowingMemory) -> None:
    memory.grow(0, GRANULE)
    memory.grow(2, 3 * GRANULE)
    memory.close()
    driver.assert_clean()
    driver.calls.clear()
    memory.close()
    assert driver.calls == []
    assert memory.mapped_bytes == 0
    for use in (
        lambda: memory.grow(0, 1),
        lambda: memory.trim(0),
        lambda: memory.tensor(0, 0, (1,), (1,), torch.float32),
    ):
        with pytest.raises(SpinError, match="memory: got 'closed'"):
            use()


@pytest.mark.parametrize("result", ["DEINITIALIZED", "CONTEXT_IS_DESTROYED", "INVALID_CONTEXT"])
def test_closing_after_the_context_is_quiet(result: str) -> None:
    with installed(DriverDouble()) as driver:
        memory = GrowingMemory(1, GRANULE, DEVICE)
        memory.grow(0, 1)
        if result == "DEINITIALIZED":
            driver.gone = True  # every call fails
        else:
            driver.broken["cuCtxPushCurrent"] = getattr(bindings.CUresult, f"CUDA_ERROR_{result}")
        memory.close()
        assert memory.mapped_bytes == 0


def test_closing_does_not_hide_other_failures() -> None:
    with installed(DriverDouble()) as driver:
        memory = GrowingMemory(1, GRANULE, DEVICE)
        driver.broken["cuCtxSynchronize"] = bindings.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            memory.close()
        assert not driver.stack


def test_memory_that_nobody_holds_is_given_back(driver: DriverDouble) -> None:
    memory = GrowingMemory(2, GRANULE, DEVICE)
    memory.grow(1, 1)
    del memory
    gc.collect()
    driver.assert_clean()


# ---------------------------------------------------------------- tensor
class _HostArray:
    def __init__(self, view: Any) -> None:
        self.view, self.__array_interface__ = view, view.__cuda_array_interface__


@pytest.fixture
def host_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors over the double's host memory, through the same interface without `cuda`."""

    def as_tensor(view: Any, device: torch.device) -> torch.Tensor:
        assert device == torch.device(DEVICE)
        return torch.from_numpy(np.asarray(_HostArray(view)))

    monkeypatch.setattr(torch, "as_tensor", as_tensor)


@pytest.mark.usefixtures("host_tensors")
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.float8_e4m3fn]
)
def test_a_tensor_is_the_mapped_bytes(memory: GrowingMemory, dtype: torch.dtype) -> None:
    memory.grow(1, 2 * GRANULE)
    item = dtype.itemsize
    view = memory.tensor(1, 2 * item, (2, 3), (4, 1), dtype)
    assert (view.dtype, view.shape, view.stride()) == (dtype, (2, 3), (4, 1))
    values = torch.tensor([[1, 2, 3], [4, 5, 6]])
    view.copy_(values.to(dtype))
    expected = torch.zeros(2 * GRANULE // item, dtype=dtype)
    expected[2:5], expected[6:9] = values[0].to(dtype), values[1].to(dtype)
    assert content(memory, 1) == expected.view(torch.uint8).numpy().tobytes()


@pytest.mark.usefixtures("host_tensors")
def test_a_tensor_reaches_the_last_mapped_byte_and_no_further(memory: GrowingMemory) -> None:
    memory.grow(0, GRANULE)
    assert memory.tensor(0, 0, (2, 8), (8, 1), torch.float32).numel() == 16
    assert memory.tensor(0, GRANULE - 2, (), (), torch.bfloat16).dim() == 0
    assert memory.tensor(0, GRANULE - 4, (9,), (0,), torch.float32).numel() == 9
    for offset, shape, strides in [(4, (2, 8), (8, 1)), (0, (2, 8), (9, 1)), (0, (17,), (1,))]:
        with pytest.raises(SpinError, match=r"shape: got .*, allowed: 64 mapped bytes, not 68"):
            memory.tensor(0, offset, shape, strides, torch.float32)
    with pytest.raises(SpinError, match="allowed: 0 mapped bytes"):
        memory.tensor(1, 0, (1,), (1,), torch.uint8)


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "dtype", "argument"),
    [
        (2, (1,), (1,), torch.float32, "offset_bytes"),
        (-4, (1,), (1,), torch.float32, "offset_bytes"),
        (0, (0,), (1,), torch.float32, "shape"),
        (0, (1.0,), (1,), torch.float32, "shape"),
        (0, (2,), (-1,), torch.float32, "strides"),
        (0, (2, 2), (1,), torch.float32, "strides"),
        (0, (1,), (1,), torch.complex128, "dtype"),
    ],
)
def test_a_tensor_is_refused(
    memory: GrowingMemory, offset: int, shape: Any, strides: Any, dtype: torch.dtype, argument: str
) -> None:
    memory.grow(0, GRANULE)
    with pytest.raises(SpinError, match=f"^{argument}: got"):
        memory.tensor(0, offset, shape, strides, dtype)


@pytest.mark.usefixtures("host_tensors")
def test_a_tensor_keeps_the_memory(driver: DriverDouble) -> None:
    memory = GrowingMemory(1, GRANULE, DEVICE)
    memory.grow(0, GRANULE)
    part = memory.tensor(0, 0, (16,), (1,), torch.float32)[3:]
    del memory
    gc.collect()
    assert len(driver.mappings) == 1
    del part
    gc.collect()
    driver.assert_clean()


# ---------------------------------------------------------------- whole lives
REGIONS, REGION_GRANULES, GPU_GRANULES = 3, 4, 7


class Lives(RuleBasedStateMachine):
    """Grow, write, trim and close in any order, with a small GPU and failures at any call."""

    def __init__(self) -> None:
        super().__init__()
        self.double = DriverDouble(GPU_GRANULES)
        self._installed = installed(self.double)
        self._installed.__enter__()
        self.memory = GrowingMemory(REGIONS, REGION_GRANULES * GRANULE, DEVICE)
        self.expected = [b""] * REGIONS
        self.closed = False

    @precondition(lambda self: not self.closed)
    @rule(
        region=st.integers(0, REGIONS - 1),
        size_bytes=st.integers(0, REGION_GRANULES * GRANULE),
        fail_in=st.none() | st.integers(1, 14),
    )
    def grow(self, region: int, size_bytes: int, fail_in: int | None) -> None:
        old = len(self.expected[region])
        granules = max(0, -(-size_bytes // GRANULE) - old // GRANULE)
        calls = 2 * granules + 4 if granules else 0  # create and map; push, capture, access, zero
        fails = granules > self.double.free_granules or (fail_in is not None and fail_in <= calls)
        self.double.fail_in = fail_in
        try:
            new = self.memory.grow(region, size_bytes)
        except OutOfMemory:
            assert fails
        else:
            assert not fails
            assert (new.start, new.stop) == (old, old + granules * GRANULE)
            self.expected[region] += bytes(len(new))
        self.double.fail_in = None

    @precondition(lambda self: not self.closed)
    @rule(region=st.integers(0, REGIONS - 1), value=st.integers(1, 255))
    def write(self, region: int, value: int) -> None:
        fill(self.memory, region, value)
        self.double.synchronised = False
        self.expected[region] = bytes([value]) * len(self.expected[region])

    @precondition(lambda self: not self.closed)
    @rule(region=st.integers(0, REGIONS - 1), size_bytes=st.integers(0, REGION_GRANULES * GRANULE))
    def trim(self, region: int, size_bytes: int) -> None:
        self.memory.trim(region, size_bytes)
        self.expected[region] = self.expected[region][: -(-size_bytes // GRANULE) * GRANULE]

    @rule()
    def close(self) -> None:
        self.memory.close()
        self.double.assert_clean()
        self.expected, self.closed = [b""] * REGIONS, True

    @invariant()
    def books_agree(self) -> None:
        memory, double = self.memory, self.double
        granules = [len(bytes_) // GRANULE for bytes_ in self.expected]
        assert set(double.mappings) == {
            memory.address + n * memory.region_stride_bytes + i * GRANULE
            for n in range(REGIONS)
            for i in range(granules[n])
        }
        assert all(mapping.accessible for mapping in double.mappings.values())
        assert not double.allocations
        assert not double.stack
        assert double.free_granules == GPU_GRANULES - sum(granules)
        assert memory.mapped_bytes == sum(granules) * GRANULE
        if not self.closed:
            assert [content(memory, n) for n in range(REGIONS)] == self.expected

    def teardown(self) -> None:
        self.memory.close()
        self.double.assert_clean()
        self._installed.__exit__(None, None, None)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
