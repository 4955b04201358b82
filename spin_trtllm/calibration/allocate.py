# SPDX-License-Identifier: Apache-2.0
"""Which layer skips how much, for the fewest misses at the same number of slots scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spin_trtllm.report.record import FloatArray

STEP = 0.002  # share of a layer's slots that is handed out at a time
_EVEN = 1e-9  # weighs an uneven split only against equal misses: they come in steps of 1 / K


@dataclass(frozen=True)
class Curve:
    """What one layer skips and misses as its target rises, from 0 on.

    Attributes:
        targets: float64 `[P]`, target sparsities, ascending; the first is 0.
        skipped: float64 `[P]`, share of the slots that were not scored; the first is 0.
        missed: float64 `[P]`, mean miss; the first is 0.
    """

    targets: FloatArray
    skipped: FloatArray
    missed: FloatArray

    def rising(self) -> Curve:
        """Without points that skip no more than one before: there the top-k fills the budget."""
        most = np.maximum.accumulate(self.skipped)
        points = np.flatnonzero(np.diff(most, prepend=-1.0) > 0)
        return Curve(self.targets[points], self.skipped[points], self.missed[points])

    def skipped_at(self, target: float) -> float:
        """Share of the slots that a target skips, between the points on a straight line."""
        return float(np.interp(target, self.targets, self.skipped))


def allocate(curves: Sequence[Curve], target: float) -> list[float]:
    """Target sparsities that together skip as much as `target` in every layer does.

    The best split in steps of `STEP`, by dynamic programming over the layers: curves need be
    neither convex nor smooth. Of splits that miss the same, the more even one. Nothing is
    extrapolated: no layer gets more than the last point of its curve.

    Args:
        curves: one a layer; target: in [0, 1), within all of them.

    Returns:
        A target for each layer, in steps of 0.001.
    """
    even = [curve.skipped_at(target) / STEP for curve in curves]
    total = int(sum(even) + 1e-6)  # never more skipped in all than was asked for
    rising = [curve.rising() for curve in curves]
    best, taken = np.zeros(1), []
    for curve, middle in zip(rising, even, strict=True):
        costs = _costs(curve, middle)
        best, choice = _add_layer(best, costs, total)
        taken.append(choice)
    steps, left = [], min(total, len(best) - 1)
    for choice in reversed(taken):
        steps.append(int(choice[left]))
        left -= steps[-1]
    pairs = zip(rising, reversed(steps), strict=True)
    return [
        round(float(np.interp(n * STEP, curve.skipped, curve.targets)), 3) for curve, n in pairs
    ]


def _costs(curve: Curve, middle: float) -> FloatArray:
    """Misses of a layer that skips 0, 1, ... steps, as far as it was measured."""
    steps = np.arange(int(curve.skipped[-1] / STEP + 1e-6) + 1)
    missed = np.interp(steps * STEP, curve.skipped, curve.missed)
    return missed + _EVEN * (steps - middle) ** 2


def _add_layer(best: FloatArray, costs: FloatArray, total: int) -> tuple[FloatArray, FloatArray]:
    """Fewest misses by steps handed out, with one layer more, and how many of them it takes."""
    size = min(len(best) + len(costs) - 1, total + 1)
    sums = np.full((len(costs), size), np.inf)
    for taken, cost in enumerate(costs[:size]):
        end = min(taken + len(best), size)
        sums[taken, taken:end] = best[: end - taken] + cost
    return sums.min(0), sums.argmin(0)
