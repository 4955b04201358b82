# SPDX-License-Identifier: Apache-2.0
"""What SPIN did in this process, counted on the host; a line in the log now and then.

A step of a captured graph runs without Python, so nothing here counts inside one: hooks call
`Counters.step` where the host prepares a step, with figures that follow from lengths alone.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spin_trtllm.build.memory import human_bytes

MAX_CAUSES = 32  # a cause is a label, and a label with many values costs a metrics server dearly
OTHER_CAUSES = "other"
MISS_BOUNDS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # upper bounds of a row's miss rate

_logger = logging.getLogger("spin_trtllm")


@dataclass(frozen=True)
class Snapshot:
    """All counts at one moment, since the process started.

    Attributes:
        steps: decode steps that were prepared.
        sparse_rows: rows of them that SPIN narrowed.
        cold_rows: rows that ran dense to fill a sequence's averages.
        dense_rows: rows that ran dense for another reason, by cause.
        kept_slots: slots scored for sparse rows.
        visible_slots: slots that dense scoring would have scored for them.
        probed_slots: slots of the dense top-k that the shadow probe looked for.
        missed_slots: how many of these lay outside the kept blocks.
        miss_rows: probed rows by miss rate: one count for each of `MISS_BOUNDS`, up to it and
            above the one before.
        state_bytes: GPU memory of the averages and of the buffers of a step.
        capture_steps: where traces are captured, steps of sequences that were `written`, and steps
            of which nothing was kept, by cause.
    """

    steps: int = 0
    sparse_rows: int = 0
    cold_rows: int = 0
    dense_rows: dict[str, int] = field(default_factory=dict)
    kept_slots: int = 0
    visible_slots: int = 0
    probed_slots: int = 0
    missed_slots: int = 0
    miss_rows: tuple[int, ...] = (0,) * len(MISS_BOUNDS)
    state_bytes: int = 0
    capture_steps: dict[str, int] = field(default_factory=dict)

    @property
    def realized_sparsity(self) -> float | None:
        """Share of the slots of sparse rows that was skipped; None before the first."""
        return 1 - self.kept_slots / self.visible_slots if self.visible_slots else None

    @property
    def miss(self) -> float | None:
        """Share of the dense top-k that was missed; None before the first probe."""
        return self.missed_slots / self.probed_slots if self.probed_slots else None


@dataclass
class _Periodic:
    """Something to do every `seconds`; `last`: when it was done."""

    seconds: float
    action: Callable[[Snapshot], None]
    last: float


class Counters:
    """The counts of one process. Any thread may count; a call costs a lock and a few additions.

    Args:
        log_seconds: seconds between two lines in the log while steps go on; 0 for none.
        clock: seconds that only grow.
    """

    def __init__(
        self, *, log_seconds: float = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # A collection may free a manager, and count its memory, while this thread holds the lock.
        self._lock = threading.RLock()
        self._steps = self._sparse = self._cold = 0
        self._kept = self._visible = self._probed = self._missed = self._bytes = 0
        self._dense: Counter[str] = Counter()
        self._captures: Counter[str] = Counter()
        self._miss_rows = [0] * len(MISS_BOUNDS)
        self._clock = clock
        self._periodic: list[_Periodic] = []
        if log_seconds:
            self.every(log_seconds, lambda counts: _logger.info("%s", summary(counts)))

    def every(self, seconds: float, action: Callable[[Snapshot], None]) -> None:
        """Hand the counts to an action every so many seconds, while steps go on."""
        self._periodic.append(_Periodic(seconds, action, self._clock()))

    def step(
        self,
        *,
        sparse_rows: int = 0,
        cold_rows: int = 0,
        kept_slots: int = 0,
        visible_slots: int = 0,
    ) -> None:
        """Count one prepared decode step; `kept_slots` of `visible_slots` are of sparse rows."""
        with self._lock:
            self._steps += 1
            self._sparse += sparse_rows
            self._cold += cold_rows
            self._kept += kept_slots
            self._visible += visible_slots
            due = self._due() if self._periodic else ()
        for action in due:
            try:
                action(self.snapshot())
            except Exception as error:  # a folder that is not there must not stop a step
                self._periodic = [each for each in self._periodic if each.action is not action]
                _logger.warning("SPIN: counters are shown no more: %s", error)

    def dense(self, cause: str, rows: int = 1) -> None:
        """Count rows that run dense. `cause` is one of few fixed words, never a value or a name."""
        with self._lock:
            known = cause in self._dense or len(self._dense) < MAX_CAUSES
            self._dense[cause if known else OTHER_CAUSES] += rows

    def probe(self, rows: Sequence[tuple[int, int]]) -> None:
        """Count what dense scoring found, row by row.

        Args:
            rows: slots of its top-k that SPIN missed, and all of them, at least one.
        """
        with self._lock:
            for missed, probed in rows:
                self._missed += missed
                self._probed += probed
                self._miss_rows[bisect_left(MISS_BOUNDS, missed / probed)] += 1

    def capture(self, outcome: str, steps: int = 1) -> None:
        """Count steps that were captured, or were not. `outcome` is one of few fixed words."""
        with self._lock:
            self._captures[outcome] += steps

    def add_state_bytes(self, size_bytes: int) -> None:
        """Count memory that was allocated, or freed if negative."""
        with self._lock:
            self._bytes += size_bytes

    def snapshot(self) -> Snapshot:
        """All counts of one moment."""
        with self._lock:
            return Snapshot(
                steps=self._steps,
                sparse_rows=self._sparse,
                cold_rows=self._cold,
                dense_rows=dict(self._dense),
                kept_slots=self._kept,
                visible_slots=self._visible,
                probed_slots=self._probed,
                missed_slots=self._missed,
                miss_rows=tuple(self._miss_rows),
                state_bytes=self._bytes,
                capture_steps=dict(self._captures),
            )

    def _due(self) -> list[Callable[[Snapshot], None]]:
        now = self._clock()
        due = [each for each in self._periodic if now - each.last >= each.seconds]
        for each in due:
            each.last = now
        return [each.action for each in due]


def summary(counts: Snapshot) -> str:
    """One line for the log."""
    parts = [
        f"{counts.steps} steps",
        f"rows sparse {counts.sparse_rows}, cold {counts.cold_rows}, "
        f"dense {sum(counts.dense_rows.values())}",
    ]
    if counts.dense_rows:
        causes = Counter(counts.dense_rows).most_common()
        parts.append("dense by cause: " + ", ".join(f"{cause} {n}" for cause, n in causes))
    if counts.realized_sparsity is not None:
        parts.append(f"skipped {counts.realized_sparsity:.1%} of the slots")
    if counts.miss is not None:
        rows = sum(counts.miss_rows)
        parts.append(f"missed {counts.miss:.2%} of the dense top-k of {rows} probed rows")
    if counts.capture_steps:
        outcomes = Counter(counts.capture_steps).most_common()
        parts.append("captured: " + ", ".join(f"{outcome} {n}" for outcome, n in outcomes))
    parts.append(f"state {human_bytes(counts.state_bytes)}")
    return "SPIN: " + "; ".join(parts)
