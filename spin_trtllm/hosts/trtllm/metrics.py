# SPDX-License-Identifier: Apache-2.0
"""The counters as Prometheus metrics, in whichever way the process's metrics are read.

Whoever serves the process's registry serves them, too; this package opens no port. The ranks of
`trtllm-serve` are processes of their own, and its `/prometheus/metrics` shows what processes leave
as files in `PROMETHEUS_MULTIPROC_DIR`: where that is set, so do these.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from spin_trtllm.hosts.trtllm.counters import MISS_BOUNDS, Counters, Snapshot
from spin_trtllm.hosts.trtllm.rank import rank_of_process
from spin_trtllm.hosts.trtllm.settings import read_settings

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Metric
    from prometheus_client.registry import CollectorRegistry

SHARED_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's own
SHARE_SECONDS = 5.0

# name, help, label if there is one
COUNTERS: tuple[tuple[str, str, str | None], ...] = (
    ("spin_rows", "Rows of decode steps by what SPIN did with them.", "mode"),
    ("spin_dense_rows", "Rows that ran dense for a reason other than cold.", "cause"),
    ("spin_steps", "Decode steps prepared.", None),
    ("spin_kept_slots", "Slots scored for sparse rows.", None),
    ("spin_visible_slots", "Slots of sparse rows, scored or not.", None),
    ("spin_probed_slots", "Slots of the dense top-k, probed.", None),
    ("spin_missed_slots", "Probed slots outside the kept blocks.", None),
    ("spin_miss_rows", "Probed rows by miss rate, up to a bound and above the last.", "up_to"),
    ("spin_capture_steps", "Steps by what became of their capture.", "outcome"),
)
STATE_BYTES = ("spin_state_bytes", "GPU memory of the averages and of the buffers of a step.")


_logger = logging.getLogger("spin_trtllm")


def values_of(counts: Snapshot) -> dict[str, dict[str, int]]:
    """The value of each of `COUNTERS` by its label; one without a label has the label ``."""
    return {
        "spin_rows": {
            "sparse": counts.sparse_rows,
            "cold": counts.cold_rows,
            "dense": sum(counts.dense_rows.values()),
        },
        "spin_dense_rows": dict(sorted(counts.dense_rows.items())),
        "spin_steps": {"": counts.steps},
        "spin_kept_slots": {"": counts.kept_slots},
        "spin_visible_slots": {"": counts.visible_slots},
        "spin_probed_slots": {"": counts.probed_slots},
        "spin_missed_slots": {"": counts.missed_slots},
        "spin_miss_rows": dict(zip(map(str, MISS_BOUNDS), counts.miss_rows, strict=True)),
        "spin_capture_steps": dict(sorted(counts.capture_steps.items())),
    }


class Collector:
    """The counters for a registry of this process: read when it is scraped."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        """All metrics, at their values of now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts = self._counters.snapshot()
        values = values_of(counts)
        for name, text, label in COUNTERS:
            family = CounterMetricFamily(name, text, labels=[label] if label else [])
            for value, count in values[name].items():
                family.add_metric([value] if label else [], count)
            yield family
        yield GaugeMetricFamily(*STATE_BYTES, value=counts.state_bytes)


class SharedMetrics:
    """The counters in files that another process reads, brought up to date now and then.

    That process adds up what all processes wrote, so each rank has a label of its own.

    Args:
        rank: label of this process.
    """

    def __init__(self, rank: str, registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge

        self._rank, registry = rank, registry or REGISTRY
        self._counters: dict[str, Counter] = {
            name: Counter(name, text, ["rank", *([label] if label else [])], registry=registry)
            for name, text, label in COUNTERS
        }
        self._bytes: Gauge = Gauge(
            *STATE_BYTES, ["rank"], registry=registry, multiprocess_mode="max"
        )
        self._shown: dict[tuple[str, str], int] = {}

    def show(self, counts: Snapshot) -> None:
        """Add what was counted since the last call."""
        for name, by_label in values_of(counts).items():
            for label, count in by_label.items():
                labels = (self._rank, label) if label else (self._rank,)
                new = count - self._shown.get((name, label), 0)
                self._counters[name].labels(*labels).inc(new)
                self._shown[name, label] = count
        self._bytes.labels(self._rank).set(counts.state_bytes)


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
    """Show counters where this process's metrics are read.

    Args:
        registry: by default the process's own.
    """
    from prometheus_client import REGISTRY

    folder = os.environ.get(SHARED_VARIABLE)
    if folder:
        counters.every(SHARE_SECONDS, SharedMetrics(rank_of_process(), registry).show)
    else:
        (registry or REGISTRY).register(Collector(counters))
    _logger.info("SPIN: metrics in %s", f"files in {folder}" if folder else "this process only")
