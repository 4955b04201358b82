# SPDX-License-Identifier: Apache-2.0
"""One thread in which requests take turns, so that none waits for another to finish."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.triton.reply import Failure

_logger = logging.getLogger("spin_trtllm")


class Job(Protocol):
    """A request that is served a step at a time."""

    def turn(self) -> bool:
        """Do one step. Whether there are more to do."""

    def fail(self, message: str, failure: Failure) -> None:
        """End it with an error."""


class Scheduler:
    """Gives each of up to `max_active` jobs a turn after the other; the rest wait in line.

    Args:
        max_active: jobs that take turns.
        max_waiting: jobs in line; more are refused.
        on_idle: called in the thread whenever all jobs are done.
    """

    def __init__(
        self,
        max_active: int,
        *,
        max_waiting: int,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._max_active = max_active
        self._max_waiting = max_waiting
        self._on_idle = on_idle
        self._waiting: deque[Job] = deque()
        self._active: list[Job] = []  # of the thread alone
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="spin-scheduler", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Put a job in line.

        Raises:
            SpinError: the line is full, or the scheduler closed.
        """
        with self._changed:
            if self._closed:
                raise SpinError("request: the model is being unloaded, allowed: another one")
            if len(self._waiting) >= self._max_waiting:
                raise SpinError(f"request: got one more than {self._max_waiting} in line")
            self._waiting.append(job)
            self._changed.notify()

    def close(self) -> None:
        """End all jobs with an error, and the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._admit():
            # A copy: a job that is done leaves the list.
            for job in list(self._active):
                if not _take_turn(job):
                    self._active.remove(job)
            if not self._active:
                self._tell_idle()
        for job in (*self._active, *self._waiting):
            _end(job, "the model was unloaded", Failure.UNAVAILABLE)

    def _tell_idle(self) -> None:
        try:
            self._on_idle()
        except Exception:  # whatever it was for, requests matter more
            _logger.exception("idle is told no more")
            self._on_idle = lambda: None

    def _admit(self) -> bool:
        """Let jobs in, waiting for one where there is none. False when closed."""
        with self._changed:
            while not (self._closed or self._active or self._waiting):
                self._changed.wait()
            while self._waiting and len(self._active) < self._max_active:
                self._active.append(self._waiting.popleft())
            return not self._closed


def _take_turn(job: Job) -> bool:
    """One step of one job; whatever goes wrong in it is that job's alone."""
    try:
        return job.turn()
    except SpinError as error:
        _end(job, str(error), Failure.INVALID_ARG)
    except Exception as error:
        _logger.exception("a request failed")
        _end(job, f"{type(error).__name__}: {error}", Failure.INTERNAL)
    return False


def _end(job: Job, message: str, failure: Failure) -> None:
    try:
        job.fail(message, failure)
    except Exception:  # nobody is there to be told
        _logger.exception("a request could not be answered")
