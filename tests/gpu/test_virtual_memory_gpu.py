# SPDX-License-Identifier: Apache-2.0
"""Memory that grows, on a real driver: pages, zeros, views, running kernels, graphs, exits."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest
import torch
from cases import capturing
from torch import Tensor

from spin_trtllm.errors import SpinError
from spin_trtllm.virtual_memory import GrowingMemory, OutOfMemory, is_supported

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIB = 2**20
SLACK_BYTES = 32 * MIB  # what contexts and page tables may take beside


@pytest.fixture
def memory() -> Iterator[GrowingMemory]:
    pytest.importorskip("cuda.bindings.driver")
    memory = GrowingMemory(4, 2**36, "cuda")  # 256 GiB of addresses: more than the GPU has
    yield memory
    memory.close()


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what torch keeps for itself is not ours
    return torch.cuda.mem_get_info()[0]


def whole(memory: GrowingMemory, region: int) -> Tensor:
    """All mapped bytes of a region, as 32-bit integers."""
    return memory.tensor(region, 0, (memory.mapped(region) // 4,), (1,), torch.int32)


def delayed(seconds: float) -> None:
    """Keep the current stream busy, for about as long: GPUs run at 1 to 2.5 GHz."""
    torch.cuda._sleep(int(seconds * 2e9))


def test_this_driver_is_supported() -> None:
    pytest.importorskip("cuda.bindings.driver")
    assert is_supported("cuda")
    assert not is_supported(f"cuda:{torch.cuda.device_count()}")


def test_only_mapped_bytes_take_memory() -> None:
    pytest.importorskip("cuda.bindings.driver")
    before = free_bytes()
    memory = GrowingMemory(16, 2**36, "cuda")  # 1 TiB
    assert before - free_bytes() < SLACK_BYTES
    memory.grow(3, 1)
    assert memory.mapped(3) == memory.granularity_bytes
    memory.grow(3, 512 * MIB)
    memory.grow(9, 256 * MIB)
    assert memory.mapped_bytes == 768 * MIB
    assert abs(before - free_bytes() - 768 * MIB) < SLACK_BYTES
    memory.trim(3, 128 * MIB)
    assert abs(before - free_bytes() - 384 * MIB) < SLACK_BYTES
    memory.close()
    memory.close()
    assert abs(before - free_bytes()) < SLACK_BYTES


def test_new_bytes_are_zero_on_the_current_stream(memory: GrowingMemory) -> None:
    for _ in range(3):  # from the second round on, pages come back that were written
        with torch.cuda.stream(torch.cuda.Stream()):
            memory.grow(0, 64 * MIB)
            assert not whole(memory, 0).any()
            whole(memory, 0).fill_(-1)
            memory.grow(0, 96 * MIB)
            both = whole(memory, 0)
            assert (both[: 16 * MIB] == -1).all()
            assert not both[16 * MIB :].any()
            both.fill_(-1)
        memory.trim(0)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.float8_e4m3fn]
)
def test_views_read_and_write_the_memory(memory: GrowingMemory, dtype: torch.dtype) -> None:
    memory.grow(1, 4 * MIB)
    view = memory.tensor(1, MIB, (3, 1000), (2048, 1), dtype)
    assert (view.dtype, view.shape, view.stride()) == (dtype, (3, 1000), (2048, 1))
    assert view.device == memory.device
    assert view.data_ptr() == memory.address + memory.region_stride_bytes + MIB
    values = torch.arange(3000, device="cuda").reshape(3, 1000).remainder(7).to(dtype)
    view.copy_(values)
    raw = memory.tensor(1, 0, (4 * MIB,), (1,), torch.uint8).cpu()
    rows = torch.zeros(3, 2048, dtype=dtype)
    rows[:, :1000] = values.cpu()
    written = rows.view(torch.uint8).flatten()[: -1048 * dtype.itemsize]
    assert torch.equal(raw[MIB : MIB + len(written)], written)
    assert not raw[:MIB].any()
    assert not raw[MIB + len(written) :].any()


def test_views_do_not_reach_past_the_mapped_bytes(memory: GrowingMemory) -> None:
    memory.grow(0, 1)
    size = memory.granularity_bytes
    memory.tensor(0, 0, (size,), (1,), torch.uint8).fill_(1)
    with pytest.raises(SpinError, match="shape"):
        memory.tensor(0, 1, (size,), (1,), torch.uint8)


def test_a_view_outlives_its_name() -> None:
    pytest.importorskip("cuda.bindings.driver")
    memory = GrowingMemory(1, 64 * MIB, "cuda")
    memory.grow(0, 64 * MIB)
    view = whole(memory, 0)
    before = free_bytes()
    del memory
    view.fill_(3)
    assert (view == 3).all()
    del view
    assert free_bytes() - before > 48 * MIB


def test_growth_beside_a_running_kernel(memory: GrowingMemory) -> None:
    memory.grow(0, 64 * MIB)
    low, address = whole(memory, 0), memory.address
    busy, done = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        delayed(0.3)
        for _ in range(50):
            low.add_(1)
        done.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert not done.query()
        memory.grow(0, 256 * MIB)
        whole(memory, 0)[16 * MIB :].fill_(7)
        print(f"\nthe kernel {'was done after' if done.query() else 'still ran during'} growth")
    torch.cuda.synchronize()
    assert memory.address == address == low.data_ptr() == whole(memory, 0).data_ptr()
    assert (low == 50).all()
    assert (whole(memory, 0)[16 * MIB :] == 7).all()


def test_trimming_waits_for_the_device(memory: GrowingMemory) -> None:
    memory.grow(0, 64 * MIB)
    view, total = whole(memory, 0), torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        delayed(0.2)
        total += view.fill_(2).sum()
    del view
    memory.trim(0)  # without waiting, the kernels above would fault
    assert int(total) == 2 * 16 * MIB


def test_captured_graphs_live_through_growth_and_trim(memory: GrowingMemory) -> None:
    """The view of the graph is the full one; below, pages come and go behind its upper half."""
    memory.grow(0, 64 * MIB)
    view = whole(memory, 0)
    limit = torch.full((), 8 * MIB, dtype=torch.int64, device="cuda")
    index = torch.zeros(1024, dtype=torch.int64, device="cuda")
    steps = torch.arange(1024, device="cuda")

    def step() -> None:
        """Add 1 to the 1024 elements below `limit`, which the device reads."""
        torch.sub(limit - 1, steps, out=index)
        view.index_add_(0, index, torch.ones_like(index, dtype=torch.int32))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    with capturing() as graph:
        step()
    graph.replay()
    memory.trim(0, 32 * MIB)  # the graph touches the lower half only
    graph.replay()
    memory.grow(0, 128 * MIB)
    limit.fill_(16 * MIB)
    graph.replay()
    graph.replay()
    everything = whole(memory, 0)
    assert everything.data_ptr() == view.data_ptr()
    expected = torch.zeros_like(everything)
    expected[8 * MIB - 1024 : 8 * MIB] = 3  # once eagerly, twice by the graph
    expected[16 * MIB - 1024 : 16 * MIB] = 2
    assert torch.equal(everything, expected)


def test_growth_is_refused_under_capture(memory: GrowingMemory) -> None:
    memory.grow(0, 2 * MIB)
    counter = torch.zeros((), device="cuda")
    with capturing() as graph:
        counter.add_(1)
        with pytest.raises(SpinError, match="under capture"):
            memory.grow(0, 64 * MIB)
        with pytest.raises(SpinError, match="under capture"):
            memory.trim(0)
    graph.replay()  # the refusals have not spoiled the capture
    assert int(counter) == 1
    assert memory.mapped(0) == max(2 * MIB, memory.granularity_bytes)


def test_a_full_gpu_is_an_error_that_changes_nothing(memory: GrowingMemory) -> None:
    memory.grow(0, 64 * MIB)
    whole(memory, 0).fill_(5)
    ballast = torch.empty(free_bytes() - 1024 * MIB, dtype=torch.uint8, device="cuda")
    before = free_bytes()
    for region in (0, 1):
        with pytest.raises(OutOfMemory, match="CUDA_ERROR_OUT_OF_MEMORY"):
            memory.grow(region, before + 256 * MIB)
    assert abs(before - free_bytes()) < SLACK_BYTES
    assert (memory.mapped(0), memory.mapped(1)) == (64 * MIB, 0)
    assert (whole(memory, 0) == 5).all()
    del ballast
    assert free_bytes() > before + 1024 * MIB
    assert memory.grow(1, before + 256 * MIB).stop >= before + 256 * MIB
    assert not whole(memory, 1).any()


def test_a_fresh_thread_can_grow(memory: GrowingMemory) -> None:
    """A thread has no current context until something gives it one."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            memory.grow(2, 2 * MIB)
            memory.trim(2)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures


EXITS = {
    "open": "",
    "closed": "memory.close(); memory.close()",
    "busy": "torch.cuda._sleep(10**9); view.fill_(1)",
    "view only": "del memory",
    "context reset": "driver.cuDevicePrimaryCtxReset(0); memory.close()",
    "context reset, left open": "driver.cuDevicePrimaryCtxReset(0)",
}


@pytest.mark.parametrize("ending", EXITS)
def test_the_interpreter_exits_quietly(ending: str) -> None:
    pytest.importorskip("cuda.bindings.driver")
    start = textwrap.dedent("""
        import torch
        from cuda.bindings import driver
        from spin_trtllm.virtual_memory import GrowingMemory
        memory = GrowingMemory(2, 2**30, "cuda")
        memory.grow(1, 2**24)
        view = memory.tensor(1, 0, (2**24,), (1,), torch.uint8)
        torch.cuda.synchronize()
    """)
    done = subprocess.run(
        [sys.executable, "-c", start + EXITS[ending]], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
