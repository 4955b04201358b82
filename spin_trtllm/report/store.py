# SPDX-License-Identifier: Apache-2.0
"""Replays that are done once: each leaves a file named after everything it depends on.

An interrupted report resumes from these files, and studies that need the same replay share it.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from spin_trtllm import __version__
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_file
from spin_trtllm.replay.trace import Trace
from spin_trtllm.report.drafts import DraftedTrace, Drafts
from spin_trtllm.report.record import Record, measure

MAX_JOBS = 1024

_LAYOUT = 1  # of the files; raise it when `Record` changes
_PIECE_BYTES = 2**20


@dataclass(frozen=True)
class Arm:
    """One way to decide, which a study replays over every trace.

    Attributes:
        config: SPIN's parameters.
        policy: a name of `policies.POLICIES`.
        predictions: also measure SPIN's own slot predictions.
        drafts: how to regroup the trace, or None to take it as it is.
    """

    config: SpinConfig
    policy: str = "spin"
    predictions: bool = False
    drafts: Drafts | None = None


@dataclass(frozen=True)
class TraceFile:
    """A trace by its content.

    Attributes:
        path: where it is.
        sha256: hex digest of the file.
    """

    path: Path
    sha256: str

    def open(self, drafts: Drafts | None = None) -> Trace:
        """The trace, regrouped if asked for."""
        return Trace(self.path) if drafts is None else DraftedTrace(self.path, drafts)


@dataclass(frozen=True)
class _Job:
    arm: Arm
    trace: TraceFile
    target: Path


class Store:
    """The records of a report.

    Args:
        folder: an existing directory, for one file a replay.
        traces: what every arm is replayed over.
    """

    def __init__(self, folder: Path, traces: Sequence[TraceFile]) -> None:
        self._folder, self._traces = folder, tuple(traces)

    def records(self, arm: Arm) -> list[Record]:
        """What `fill` measured: one record a trace."""
        return [Record.load(self._path(arm, trace)) for trace in self._traces]

    def missing_steps(self, arms: Iterable[Arm]) -> int:
        """Steps that `fill` has to replay."""
        return sum(_steps(job) for job in self._missing(arms))

    def fill(self, arms: Iterable[Arm], *, jobs: int, on_steps: Callable[[int], object]) -> None:
        """Replay what is not there yet.

        Args:
            jobs: processes; 1 stays in this one.
            on_steps: called with the number of steps just done.

        Raises:
            SpinError: NaN in a visible slot, a full disk, a worker killed from outside. Replays
                that were finished stay.
        """
        missing = self._missing(arms)
        if jobs == 1 or len(missing) < 2:
            for job in missing:
                _replay(job, lambda: on_steps(1))
            return
        # Not fork: it copies torch's locks but not the threads that would release them.
        pool = ProcessPoolExecutor(
            min(jobs, len(missing)), multiprocessing.get_context("spawn"), _start_worker
        )
        try:
            waiting = {pool.submit(_replay, job): job for job in missing}
            for done in as_completed(waiting):
                done.result()
                on_steps(_steps(waiting[done]))
        except BrokenProcessPool:
            refuse("--jobs", jobs, "fewer processes; one was killed, perhaps for want of memory")
        finally:
            pool.shutdown(cancel_futures=True)  # those under way are finished, and stay

    def _missing(self, arms: Iterable[Arm]) -> list[_Job]:
        """Jobs without a whole file; two arms that are equal are one job."""
        jobs = {
            self._path(arm, trace): _Job(arm, trace, self._path(arm, trace))
            for arm in arms
            for trace in self._traces
        }
        return [job for path, job in jobs.items() if not _is_whole(path)]

    def _path(self, arm: Arm, trace: TraceFile) -> Path:
        identity = [_LAYOUT, __version__, trace.sha256, asdict(arm)]
        text = json.dumps(identity, sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.safetensors"


def hash_trace(path: Path) -> TraceFile:
    """Read a trace file once, for its digest.

    Raises:
        SpinError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        raise SpinError(f"trace: cannot read {str(path)!r}: {error.strerror}") from error
    return TraceFile(path, digest.hexdigest())


def _start_worker() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the parent's, which ends the pool


def _replay(job: _Job, on_step: Callable[[], object] | None = None) -> None:
    arm = job.arm
    with atomic_file(job.target, argument="output") as temporary:
        measure(
            job.trace.open(arm.drafts),
            arm.config,
            policy=arm.policy,
            predictions=arm.predictions,
            on_step=on_step,
        ).save(temporary)


def _steps(job: _Job) -> int:
    return len(job.trace.open(job.arm.drafts))


def _is_whole(path: Path) -> bool:
    try:
        Record.load(path)
    except (OSError, SafetensorError, TypeError):
        return False
    return True
