# SPDX-License-Identifier: Apache-2.0
"""Jobs that take turns in a thread: fairly, and each answered once."""

from __future__ import annotations

import threading

import pytest

from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.triton.reply import Failure
from spin_trtllm.hosts.triton.scheduler import Scheduler

SECONDS = 20.0  # longer than any of this takes, shorter than a hang


class Steps:
    """A job of some turns, which notes each of them in a common list."""

    def __init__(
        self, name: str, turns: int, log: list[str], error: Exception | None = None
    ) -> None:
        self.name, self.left, self.log, self.error = name, turns, log, error
        self.failed: list[tuple[str, Failure]] = []
        self.done = threading.Event()

    def turn(self) -> bool:
        self.log.append(self.name)
        self.left -= 1
        if self.left == 0 and self.error is not None:
            raise self.error
        if self.left == 0:
            self.done.set()
        return self.left > 0

    def fail(self, message: str, failure: Failure) -> None:
        self.failed.append((message, failure))
        self.done.set()


class Gate(Steps):
    """A job whose first turn waits, so that others can line up behind it."""

    def __init__(self, log: list[str]) -> None:
        super().__init__("gate", 1, log)
        self.reached, self.opened = threading.Event(), threading.Event()

    def turn(self) -> bool:
        self.reached.set()
        assert self.opened.wait(SECONDS)
        return super().turn()


def run(jobs: list[Steps], log: list[str], max_active: int = 8) -> None:
    """Submit jobs at one moment, and wait for all."""
    scheduler, gate = Scheduler(max_active, max_waiting=99), Gate(log)
    scheduler.submit(gate)
    assert gate.reached.wait(SECONDS)
    for job in jobs:
        scheduler.submit(job)
    gate.opened.set()
    assert all(job.done.wait(SECONDS) for job in jobs)
    scheduler.close()


def test_jobs_take_turns() -> None:
    log: list[str] = []
    run([Steps("a", 3, log), Steps("b", 2, log), Steps("c", 3, log)], log)
    assert log == ["gate", "a", "b", "c", "a", "b", "c", "a", "c"]


def test_a_job_in_line_gets_in_when_another_is_done() -> None:
    log: list[str] = []
    run([Steps("a", 2, log), Steps("b", 3, log), Steps("c", 1, log)], log, max_active=2)
    assert log == ["gate", "a", "b", "a", "b", "b", "c"]


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (SpinError("x: got 1"), ("x: got 1", Failure.INVALID_ARG)),
        (RuntimeError("broken"), ("RuntimeError: broken", Failure.INTERNAL)),
        (MemoryError(), ("MemoryError: ", Failure.INTERNAL)),
    ],
)
def test_a_job_that_breaks_harms_no_other(error: Exception, failure: tuple[str, Failure]) -> None:
    log: list[str] = []
    bad, good = Steps("bad", 2, log, error), Steps("good", 4, log)
    run([bad, good], log)
    assert bad.failed == [failure]
    assert good.failed == []
    assert log.count("good") == 4
    assert log.count("bad") == 2


def test_a_job_that_cannot_be_told_harms_no_other() -> None:
    log: list[str] = []

    class Gone(Steps):
        def fail(self, message: str, failure: Failure) -> None:
            super().fail(message, failure)
            raise RuntimeError("nobody is there")

    good = Steps("good", 3, log)
    run([Gone("gone", 1, log, RuntimeError("broken")), good], log)
    assert good.failed == []


def test_closing_answers_who_is_active_and_who_waits() -> None:
    log: list[str] = []
    scheduler, gate = Scheduler(1, max_waiting=9), Gate(log)
    waiting = Steps("waiting", 1, log)
    gate.left = 2
    scheduler.submit(gate)
    scheduler.submit(waiting)
    assert gate.reached.wait(SECONDS)
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    gate.opened.set()
    closing.join(SECONDS)
    expected = [("the model was unloaded", Failure.UNAVAILABLE)]
    assert waiting.failed == expected
    assert gate.failed in ([], expected)  # it may have had its second turn before
    with pytest.raises(SpinError, match="unloaded"):
        scheduler.submit(waiting)


def test_a_full_line_is_refused() -> None:
    log: list[str] = []
    scheduler, gate = Scheduler(1, max_waiting=1), Gate(log)
    scheduler.submit(gate)
    assert gate.reached.wait(SECONDS)
    scheduler.submit(Steps("first", 1, log))
    with pytest.raises(SpinError, match="one more than 1 in line"):
        scheduler.submit(Steps("second", 1, log))
    gate.opened.set()
    scheduler.close()


def test_idle_is_told_after_the_last_job() -> None:
    log: list[str] = []
    idle = threading.Event()
    scheduler = Scheduler(4, max_waiting=4, on_idle=idle.set)
    scheduler.submit(Steps("a", 2, log))
    assert idle.wait(SECONDS)
    assert log == ["a", "a"]
    scheduler.close()


def test_a_broken_listener_is_told_once_and_harms_no_job() -> None:
    log: list[str] = []
    told: list[None] = []

    def broken() -> None:
        told.append(None)
        raise RuntimeError("made up")

    scheduler = Scheduler(4, max_waiting=4, on_idle=broken)
    for _ in range(3):
        job = Steps("a", 1, log)
        scheduler.submit(job)
        assert job.done.wait(SECONDS)
    scheduler.close()
    assert len(told) == 1
    assert log == ["a"] * 3
