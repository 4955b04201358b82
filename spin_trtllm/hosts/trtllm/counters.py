# SPDX-License-Identifier: Apache-2.0
"""What SPIN did in this process, counted on the host and shown by Prometheus or in the log.

A step of a captured graph runs without Python, so nothing here counts inside one: hooks call
`Counters.step` where the host prepares a step, with figures that follow from lengths alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from spin_trtllm.build.memory import human_bytes
from spin_trtllm.hosts.trtllm.settings import read_settings

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.registry import CollectorRegistry

MAX_CAUSES = 32  # a cause is a label, and a label with many values costs a metrics server dearly
OTHER_CAUSES = "other"

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
        state_bytes: GPU memory of the averages.
    """

    steps: int = 0
    sparse_rows: int = 0
    cold_rows: int = 0
    dense_rows: dict[str, int] = field(default_factory=dict)
    kept_slots: int = 0
    visible_slots: int = 0
    probed_slots: int = 0
    missed_slots: int = 0
    state_bytes: int = 0

    @property
    def realized_sparsity(self) -> float | None:
        """Share of the slots of sparse rows that was skipped; None before the first."""
        return 1 - self.kept_slots / self.visible_slots if self.visible_slots else None

    @property
    def miss(self) -> float | None:
        """Share of the dense top-k that was missed; None before the first probe."""
        return self.missed_slots / self.probed_slots if self.probed_slots else None


class Counters:
    """The counts of one process. Any thread may count; a call costs a lock and a few additions.

    Args:
        log_seconds: seconds between two lines in the log while steps go on; 0 for none.
        clock: seconds that only grow.
    """

    def __init__(
        self, *, log_seconds: float = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock = threading.Lock()
        self._steps = self._sparse = self._cold = 0
        self._kept = self._visible = self._probed = self._missed = self._bytes = 0
        self._dense: Counter[str] = Counter()
        self._log_seconds = log_seconds
        self._clock = clock
        self._last_log = clock()

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
            is_due = self._is_due()
        if is_due:
            _logger.info("%s", summary(self.snapshot()))

    def dense(self, cause: str, rows: int = 1) -> None:
        """Count rows that run dense. `cause` is one of few fixed words, never a value or a name."""
        with self._lock:
            known = cause in self._dense or len(self._dense) < MAX_CAUSES
            self._dense[cause if known else OTHER_CAUSES] += rows

    def probe(self, *, missed_slots: int, top_k_slots: int) -> None:
        """Count what a dense scoring found: slots of its top-k, and those that SPIN missed."""
        with self._lock:
            self._missed += missed_slots
            self._probed += top_k_slots

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
                state_bytes=self._bytes,
            )

    def _is_due(self) -> bool:
        if not self._log_seconds:
            return False
        now = self._clock()
        if now - self._last_log < self._log_seconds:
            return False
        self._last_log = now
        return True


class Collector:
    """`Counters` for prometheus_client: read when it is scraped, so counting stays as cheap.

    Whoever serves the process's registry serves these, too; this package opens no port.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        """All metrics, at their values of now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts = self._counters.snapshot()
        rows = CounterMetricFamily(
            "spin_rows", "Rows of decode steps by what SPIN did with them.", labels=["mode"]
        )
        for mode, count in (
            ("sparse", counts.sparse_rows),
            ("cold", counts.cold_rows),
            ("dense", sum(counts.dense_rows.values())),
        ):
            rows.add_metric([mode], count)
        yield rows
        causes = CounterMetricFamily(
            "spin_dense_rows", "Rows that ran dense for a reason other than cold.", labels=["cause"]
        )
        for cause, count in sorted(counts.dense_rows.items()):
            causes.add_metric([cause], count)
        yield causes
        for name, text, count in (
            ("spin_steps", "Decode steps prepared.", counts.steps),
            ("spin_kept_slots", "Slots scored for sparse rows.", counts.kept_slots),
            ("spin_visible_slots", "Slots of sparse rows, scored or not.", counts.visible_slots),
            ("spin_probed_slots", "Slots of the dense top-k, probed.", counts.probed_slots),
            ("spin_missed_slots", "Probed slots outside the kept blocks.", counts.missed_slots),
        ):
            yield CounterMetricFamily(name, text, value=count)
        yield GaugeMetricFamily(
            "spin_state_bytes", "GPU memory of the averages.", value=counts.state_bytes
        )


@cache
def process_counters() -> Counters:
    """The counters of this process, shown as its environment asks; made when first asked for."""
    settings = read_settings()
    if settings is None:
        return Counters()
    counters = Counters(log_seconds=settings.log_seconds)
    if settings.metrics:
        export(counters)
    return counters


def export(counters: Counters, registry: CollectorRegistry | None = None) -> None:
    """Add counters to a Prometheus registry, by default to the process's own."""
    from prometheus_client import REGISTRY

    (registry or REGISTRY).register(Collector(counters))


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
        parts.append(f"missed {counts.miss:.2%} of the dense top-k")
    parts.append(f"state {human_bytes(counts.state_bytes)}")
    return "SPIN: " + "; ".join(parts)
