# SPDX-License-Identifier: Apache-2.0
"""How sure a figure is: resampling of sequences, and of stretches of steps within them.

The rows and layers of a step share its fate, and so do neighbouring steps; what is drawn with
replacement is therefore first a trace, then runs of `RUN_STEPS` consecutive steps of that trace.
Two figures that are compared share their draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from spin_trtllm.report.record import FloatArray

CONFIDENCE = 0.95
RESAMPLES = 1_000
RUN_STEPS = 32
MINIMUM_RUNS = 8  # of fewer, any interval would be narrower than what is known
_SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A figure, and what it might have been.

    Attributes:
        value: of all steps of all traces; NaN of nothing.
        by_trace: float64 `[traces]`, of each trace alone.
        draws: float64 `[RESAMPLES]`.
    """

    value: float
    by_trace: FloatArray
    draws: FloatArray

    def __sub__(self, other: Estimate) -> Estimate:
        """The difference, draw by draw."""
        return Estimate(
            self.value - other.value, self.by_trace - other.by_trace, self.draws - other.draws
        )

    @property
    def interval(self) -> tuple[float, float] | None:
        """Percentile interval at `CONFIDENCE`; None of too few runs or a draw with no figure."""
        if not np.isfinite(self.draws).all():
            return None
        tail = 100 * (1 - CONFIDENCE) / 2
        low, high = np.percentile(self.draws, [tail, 100 - tail])
        return float(low), float(high)

    def to_json(self) -> dict[str, float | None]:
        """`value`, `low` and `high`; None where there is none."""
        low, high = self.interval or (None, None)
        value = self.value if np.isfinite(self.value) else None
        return {"value": value, "low": low, "high": high}


def mean_of(figures: Sequence[FloatArray]) -> Estimate:
    """Mean of all figures of all traces.

    Args:
        figures: one array `[T, ...]` a trace, NaN where there is no figure.
    """
    runs, values = _by_run(figures)
    weights = _weights(tuple(len(figure) for figure in figures))
    sums = np.bincount(runs, values, minlength=weights.shape[1])
    counts = np.bincount(runs, minlength=weights.shape[1])
    with np.errstate(invalid="ignore"):
        return _estimate((weights @ sums) / (weights @ counts), len(figures))


def p99_of(figures: Sequence[FloatArray]) -> Estimate:
    """99th percentile of all figures of all traces, with linear interpolation.

    Args:
        figures: one array `[T, ...]` a trace, NaN where there is no figure.
    """
    weights = _weights(tuple(len(figure) for figure in figures))
    return _estimate(_percentile_99(*_by_run(figures), weights), len(figures))


def p99_layer_mean_of(figures: Sequence[FloatArray]) -> Estimate:
    """The same of each layer of each trace by itself, then averaged (SPEC 8).

    Args:
        figures: one array `[T, L, ...]` a trace, NaN where there is no figure.
    """
    weights = _weights(tuple(len(figure) for figure in figures))
    total, count = np.zeros(len(weights)), np.zeros(len(weights))
    start = 0
    for figure in figures:
        runs = _count_runs(len(figure))
        own = weights[:, start : start + runs]
        start += runs
        for layer in range(figure.shape[1]):
            tail = _percentile_99(*_by_run([figure[:, layer]]), own)
            times = np.where(np.isfinite(tail), own.sum(1) / max(runs, 1), 0.0)
            total += times * np.nan_to_num(tail)
            count += times
    with np.errstate(invalid="ignore"):
        return _estimate(total / count, len(figures))


def _percentile_99(runs: NDArray[np.int64], values: FloatArray, weights: FloatArray) -> FloatArray:
    """For every line of `weights`, of values each counted as often as its run is; NaN of none."""
    if not len(values):
        return np.full(len(weights), np.nan)
    # Miss rates take few values, n / K: a percentile is read off how often each was drawn.
    levels, level = np.unique(values, return_inverse=True)
    counts = np.zeros((weights.shape[1], len(levels)))
    np.add.at(counts, (runs, level), 1.0)
    below = np.cumsum(weights @ counts, axis=1)
    rank = 0.99 * (below[:, -1] - 1)
    low = _ranked(levels, below, np.floor(rank))
    high = _ranked(levels, below, np.ceil(rank))
    result = low + (high - low) * (rank - np.floor(rank))
    return np.where(below[:, -1] > 0, result, np.nan)


def interpolate(x: Sequence[Estimate], y: Sequence[Estimate], at: Estimate) -> Estimate:
    """`y` where `x` is `at`, on the line through neighbouring points; NaN beyond the last ones.

    Args:
        x, y: the same points in order of rising `x`.
        at: draw by draw, since the points move from draw to draw.
    """
    xs = np.stack([_together(point) for point in x], 1)
    ys = np.stack([_together(point) for point in y], 1)
    places = zip(_together(at), xs, ys, strict=True)
    values = [np.interp(*place, left=np.nan, right=np.nan) for place in places]
    return _estimate(np.array(values), len(at.by_trace))


def halfway(one: Estimate, other: Estimate) -> Estimate:
    """The middle of two figures, draw by draw."""
    return _estimate((_together(one) + _together(other)) / 2, len(one.by_trace))


def _ranked(levels: FloatArray, below: FloatArray, rank: FloatArray) -> FloatArray:
    """The figure with this 0-based rank, for every draw."""
    index = (below <= rank[:, None]).sum(1)
    return levels[np.minimum(index, len(levels) - 1)]


def _by_run(figures: Sequence[FloatArray]) -> tuple[NDArray[np.int64], FloatArray]:
    """Every figure that is there, and the run of steps that it belongs to."""
    runs, values, before = [], [], 0
    for figure in figures:
        rows = figure.reshape(len(figure), -1) if len(figure) else figure.reshape(0, 1)
        run = before + np.arange(len(rows)) // RUN_STEPS
        there = np.isfinite(rows)
        runs.append(np.broadcast_to(run[:, None], rows.shape)[there])
        values.append(rows[there])
        before += _count_runs(len(rows))
    return np.concatenate(runs), np.concatenate(values)


@lru_cache(maxsize=32)
def _weights(steps: tuple[int, ...]) -> FloatArray:
    """How often each run of steps counts: `[1 + traces + RESAMPLES, runs]`.

    The first line is everything, the next ones are each trace alone, the rest are drawn; nothing
    is drawn of fewer than `MINIMUM_RUNS`, and such figures have no interval.
    """
    runs = [_count_runs(count) for count in steps]
    total, ends = sum(runs), np.cumsum(runs)
    alone = np.zeros((len(steps), total))
    drawn = np.zeros((RESAMPLES, total))
    generator = np.random.default_rng(_SEED)
    share = np.full(len(steps), 1 / len(steps))
    times = generator.multinomial(len(steps), share, size=RESAMPLES)
    for trace, (count, end) in enumerate(zip(runs, ends, strict=True)):
        alone[trace, end - count : end] = 1.0
        if count and total >= MINIMUM_RUNS:
            share = np.full(count, 1 / count)
            drawn[:, end - count : end] = generator.multinomial(times[:, trace] * count, share)
    return np.concatenate([np.ones((1, total)), alone, drawn])


def _count_runs(steps: int) -> int:
    return -(-steps // RUN_STEPS)


def _estimate(values: FloatArray, traces: int) -> Estimate:
    """Split figures in the order of `_weights`."""
    return Estimate(float(values[0]), values[1 : 1 + traces], values[1 + traces :])


def _together(estimate: Estimate) -> FloatArray:
    """The figures in the order of `_weights`."""
    return np.concatenate([[estimate.value], estimate.by_trace, estimate.draws])
