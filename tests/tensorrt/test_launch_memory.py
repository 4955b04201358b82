# SPDX-License-Identifier: Apache-2.0
"""What a launch asks of its device, and when again: CUDA is played by `cpp/device.cpp`."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest
from plugin_host import ROOT, SOURCES, compile_cpp

KERNELS = ROOT / "plugins" / "kernels"
SMALL, LARGE, KERNEL_COUNT = 48 * 1024, 90 * 1024, 40
HOPPER, RTX = 227 * 1024, 99 * 1024  # shared memory of a thread block on devices 0 and 1
ATTRIBUTES = 4  # that are asked of a device
CUDA = 5


class Device:
    """The launcher over the played runtime. Each test has a library of its own: nothing known."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.set, self.reset = library.device_set, library.device_reset
        self.launch, self.take_error = library.device_launch, library.device_take_error
        self.shared_bytes = library.device_shared_bytes
        self._counts = library.device_counts

    def counts(self) -> tuple[int, ...]:
        """Attributes asked for, permissions and attempts to launch since the last call."""
        counts = (ctypes.c_int * 3)()
        self._counts(counts)
        return tuple(counts)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("device") / "libdevice.so"
    flags = ["-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-x", "c++"]
    flags += [f"-I{ROOT / 'plugins' / 'include'}", f"-I{KERNELS}"]
    missing = compile_cpp(path, [KERNELS / "status.cu", SOURCES / "device.cpp"], *flags)
    if missing:
        pytest.skip(missing)
    return path.read_bytes()


@pytest.fixture
def device(built: bytes, tmp_path_factory: pytest.TempPathFactory) -> Device:
    path = tmp_path_factory.mktemp("device") / "libdevice.so"
    path.write_bytes(built)
    return Device(ctypes.CDLL(str(path)))


def in_another_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def test_a_small_launch_asks_nothing(device: Device) -> None:
    assert device.launch(0, SMALL) == 0
    assert device.counts() == (0, 0, 1)


def test_a_thread_asks_once(device: Device) -> None:
    assert [device.launch(n % 2, LARGE) for n in range(6)] == [0] * 6
    assert device.counts() == (ATTRIBUTES, 2, 6)
    assert [device.launch(n % 2, HOPPER) for n in range(6)] == [0] * 6  # the most is allowed
    assert device.counts() == (0, 0, 6)


def test_another_thread_asks_for_itself_and_takes_nothing_away(device: Device) -> None:
    assert device.launch(0, HOPPER) == 0
    device.counts()
    in_another_thread(lambda: device.launch(0, LARGE))
    assert device.counts() == (ATTRIBUTES, 1, 1)
    assert device.launch(0, HOPPER) == 0
    assert device.counts() == (0, 0, 1)


def test_a_second_device_is_asked_anew(device: Device) -> None:
    for id, most in ((0, HOPPER), (1, RTX), (0, HOPPER)):
        device.set(id)
        assert device.shared_bytes() == most
        assert device.launch(0, LARGE) == 0
        assert device.counts() == (ATTRIBUTES, 1, 1)
        assert device.launch(0, most) == 0
        assert device.counts() == (0, 0, 1)


def test_a_device_that_was_reset_is_asked_anew(device: Device) -> None:
    assert [device.launch(n, LARGE) for n in (0, 1)] == [0, 0]
    device.reset()
    device.counts()
    assert [device.launch(n, LARGE) for n in (0, 1, 0)] == [0, 0, 0]
    # The first launch fails and is tried again; by then the second kernel is forgotten, too.
    assert device.counts() == (ATTRIBUTES, 2, 4)
    assert device.take_error() == 0


def test_what_no_device_has_is_refused_after_one_more_attempt(device: Device) -> None:
    assert device.launch(0, HOPPER + 1) == CUDA
    assert device.counts() == (2 * ATTRIBUTES, 2, 2)
    assert device.take_error() == 0  # or the host's next check would find it
    assert device.launch(0, HOPPER) == 0


def test_more_kernels_than_are_remembered(device: Device) -> None:
    for _ in range(2):
        assert [device.launch(n, LARGE) for n in range(KERNEL_COUNT)] == [0] * KERNEL_COUNT
    asked, permissions, attempts = device.counts()
    assert (asked, attempts) == (ATTRIBUTES, 2 * KERNEL_COUNT)
    assert KERNEL_COUNT < permissions < 2 * KERNEL_COUNT
