# SPDX-License-Identifier: Apache-2.0
"""Figures of every arm with intervals, and its difference from the baseline at equal bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.study.beyond.arms import ARMS, BASELINE, SPARSITIES
from benchmarks.study.beyond.measure import Figures
from spin_trtllm.calibration.allocate import Curve, allocate
from spin_trtllm.report.intervals import Estimate, interpolate, mean_of, p99_of
from spin_trtllm.report.record import FloatArray

EQUAL_AT = (0.2, 0.3, 0.4, 0.5)  # baseline's targets, whose bytes the others are given
PAPER = "block 64"  # the paper's block size: targets of EQUAL_AT, whose misses the others are given
STATISTICS: dict[str, tuple[str, Callable[[Sequence[FloatArray]], Estimate]]] = {
    "mean_miss": ("miss", mean_of),
    "p99_miss": ("miss", p99_of),
    "missed_mass": ("missed_mass", mean_of),
}

ByTarget = Sequence[Sequence[Figures]]  # figures by target sparsity, then by document


def find(figures: Mapping[str, ByTarget], tasks: Sequence[str]) -> dict[str, Any]:
    """All figures, as plain values for JSON.

    Args:
        figures: of every arm, the baseline's among them.
        tasks: of each document.

    Returns:
        By task, `all` first, then by arm: `targets`, `equal_bytes` and, where the paper's blocks
        are among the arms, `equal_misses`.
    """
    found = {}
    for task in ("all", *dict.fromkeys(tasks)):
        chosen = [n for n, one in enumerate(tasks) if task in ("all", one)]
        curves = {
            name: _curve([[of_target[n] for n in chosen] for of_target in by_target])
            for name, by_target in figures.items()
        }
        found[task] = {
            name: {
                "group": ARMS[name].group,
                **_describe(curve, curves[BASELINE]),
                "equal_misses": _as_good_as(curves[PAPER], curve) if PAPER in curves else [],
            }
            for name, curve in curves.items()
        }
    return found


def _curve(by_target: ByTarget) -> dict[str, list[Estimate]]:
    """An estimate of each statistic at each target."""

    def over(name: str, statistic: Callable[[Sequence[FloatArray]], Estimate]) -> list[Estimate]:
        return [statistic([getattr(one, name) for one in figures]) for figures in by_target]

    curve = {name: over(*source) for name, source in STATISTICS.items()}
    return curve | {"read": over("read", mean_of), "written": over("written", mean_of)}


def _describe(
    curve: Mapping[str, list[Estimate]], baseline: Mapping[str, list[Estimate]]
) -> dict[str, Any]:
    targets = [
        {"target_sparsity": target}
        | {name: _rounded(estimates[n]) for name, estimates in curve.items()}
        for n, target in enumerate(SPARSITIES)
    ]
    equal = []
    for target in EQUAL_AT:
        place = SPARSITIES.index(target)
        bytes_read = baseline["read"][place]
        row: dict[str, Any] = {"as_baseline_at": target, "read": _rounded(bytes_read)}
        # Fewer bytes come with more sparsity: turned round, they rise.
        read, sparsity = curve["read"][::-1], [_constant(s, bytes_read) for s in SPARSITIES[::-1]]
        row["target_sparsity"] = _rounded(interpolate(read, sparsity, bytes_read))
        for name in STATISTICS:
            here = interpolate(read, curve[name][::-1], bytes_read)
            row[name] = _rounded(here)
            row[f"{name}_difference"] = _rounded(here - baseline[name][place])
        equal.append(row)
    return {"targets": targets, "equal_bytes": equal}


def _as_good_as(
    paper: Mapping[str, list[Estimate]], curve: Mapping[str, list[Estimate]]
) -> list[dict[str, Any]]:
    """How much can be skipped, and what is read, where the mean miss is that of `PAPER`."""
    rows = []
    for target in EQUAL_AT:
        place = SPARSITIES.index(target)
        at, missed = paper["mean_miss"][place], curve["mean_miss"]
        read = interpolate(missed, curve["read"], at)
        skipped = interpolate(missed, [_constant(s, at) for s in SPARSITIES], at)
        rows.append(
            {
                "as_paper_at": target,
                "target_sparsity": _rounded(skipped),
                "read": _rounded(read),
                "read_difference": _rounded(read - paper["read"][place]),
            }
        )
    return rows


def _constant(value: float, like: Estimate) -> Estimate:
    return Estimate(value, np.full_like(like.by_trace, value), np.full_like(like.draws, value))


def _rounded(estimate: Estimate) -> dict[str, float | None]:
    return {
        name: None if value is None else round(value, 5)
        for name, value in estimate.to_json().items()
    }


def layer_targets(by_target: ByTarget, calibrate: Sequence[int], target: float) -> list[float]:
    """Target sparsity of each layer, least missed in the mean at this mean sparsity.

    Args:
        by_target: an arm's figures at `SPARSITIES`; calibrate: documents to look at.
        target: mean over the layers.
    """
    targets = np.array((0.0, *SPARSITIES))
    misses = [np.concatenate([of_target[n].miss for n in calibrate]) for of_target in by_target]
    missed = np.stack([np.nanmean(miss, 0) for miss in misses], 1)
    # Single rows all have the same budget at one target, so it stands for what is skipped.
    return allocate([Curve(targets, targets, np.append(0.0, layer)) for layer in missed], target)
