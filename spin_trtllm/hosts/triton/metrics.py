# SPDX-License-Identifier: Apache-2.0
"""SPIN's counters among Triton's own metrics, under the names that they have everywhere else."""

from __future__ import annotations

from typing import Any

from spin_trtllm.hosts.trtllm.counters import Snapshot
from spin_trtllm.hosts.trtllm.metrics import COUNTERS, STATE_BYTES, values_of


class TritonMetrics:
    """Custom metrics of one model; gone from the endpoint when this object is.

    Args:
        pb_utils: Triton's `triton_python_backend_utils`.
        model: label of all of them.
    """

    def __init__(self, pb_utils: Any, model: str) -> None:
        family = pb_utils.MetricFamily
        self._model = model
        self._counters = {
            # Triton shows a counter under the very name it is given.
            name: family(name=f"{name}_total", description=text, kind=family.COUNTER)
            for name, text, _ in COUNTERS
        }
        self._label_of = {name: label for name, _, label in COUNTERS}
        name, text = STATE_BYTES
        self._state_family = family(name=name, description=text, kind=family.GAUGE)
        self._state_bytes = self._state_family.Metric(labels={"model": model})
        self._metrics: dict[tuple[str, str], Any] = {}
        self._shown: dict[tuple[str, str], int] = {}

    def show(self, counts: Snapshot) -> None:
        """Add what was counted since the last call; what never was has no series."""
        for name, by_label in values_of(counts).items():
            for value, count in by_label.items():
                self._add(name, value, count)
        self._state_bytes.set(counts.state_bytes)

    def _add(self, name: str, value: str, count: int) -> None:
        key = (name, value)
        new = count - self._shown.get(key, 0)
        if not new:
            return
        if key not in self._metrics:
            label = self._label_of[name]
            labels = {"model": self._model} | ({label: value} if label else {})
            self._metrics[key] = self._counters[name].Metric(labels=labels)
        self._metrics[key].increment(new)
        self._shown[key] = count
