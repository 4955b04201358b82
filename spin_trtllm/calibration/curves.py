# SPDX-License-Identifier: Apache-2.0
"""What each layer skips and misses at several targets, from replays of traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from spin_trtllm.calibration.allocate import Curve
from spin_trtllm.errors import refuse
from spin_trtllm.geometry import visible_slots
from spin_trtllm.replay.trace import Trace
from spin_trtllm.report.record import FloatArray, Record


def slots_of(trace: Trace) -> FloatArray:
    """Slots that each step's last row sees: float64 `[T]`."""
    return visible_slots(trace.positions_tokens[:, -1], trace.ratio).double().numpy()


def skipped_slots(records: Sequence[Record], slots: Sequence[FloatArray]) -> FloatArray:
    """Share of the slots of all warm steps that was not scored: float64 `[L]`.

    Args:
        records: one a trace; slots: `slots_of` each.

    Raises:
        SpinError: no warm step.
    """
    sparsity = np.concatenate([record.sparsity for record in records])
    weights = np.concatenate(slots)[:, None] * np.isfinite(sparsity)
    if not weights.sum(0).all():
        refuse("traces", "no step that follows another", "traces of two steps or more")
    skipped: FloatArray = (weights * np.nan_to_num(sparsity)).sum(0) / weights.sum(0)
    return skipped


def mean_miss(records: Sequence[Record]) -> FloatArray:
    """Mean miss of each layer over the rows of all traces: float64 `[L]`."""
    misses = [record.miss.swapaxes(0, 1).reshape(record.miss.shape[1], -1) for record in records]
    missed: FloatArray = np.nanmean(np.concatenate(misses, 1), 1)
    return missed


def layer_curves(
    records: Mapping[float, Sequence[Record]], slots: Sequence[FloatArray]
) -> list[Curve]:
    """A curve for each layer; at 0, which need not be replayed, nothing is skipped or missed.

    Args:
        records: by target above 0, ascending, one a trace; slots: `slots_of` each trace.
    """
    targets = np.array([0.0, *records])
    skipped = np.stack([skipped_slots(of_target, slots) for of_target in records.values()])
    missed = np.stack([mean_miss(of_target) for of_target in records.values()])
    return [
        Curve(targets, np.append(0.0, skipped[:, layer]), np.append(0.0, missed[:, layer]))
        for layer in range(skipped.shape[1])
    ]
