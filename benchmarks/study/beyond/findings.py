# SPDX-License-Identifier: Apache-2.0
"""Figures of every arm with intervals, and its difference from the baseline at equal bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.study.beyond.arms import ARMS, BASELINE, SPARSITIES, Arm
from benchmarks.study.beyond.measure import Figures
from spin_trtllm.calibration.allocate import Curve, allocate
from spin_trtllm.report.intervals import Estimate, interpolate, mean_of, p99_of
from spin_trtllm.report.record import FloatArray

EQUAL_AT = (0.2, 0.3, 0.4, 0.5)  # baseline's targets, whose bytes the others are given
DEFAULTS_AT = (0.2, 0.4, 0.6, 0.8)  # the same, where a default is looked for
BUDGETS = tuple(sorted({*EQUAL_AT, *DEFAULTS_AT}))
PAPER = "block 64"  # the paper's block size: targets of EQUAL_AT, whose misses the others are given
STATISTICS: dict[str, tuple[str, Callable[[Sequence[FloatArray]], Estimate]]] = {
    "mean_miss": ("miss", mean_of),
    "p99_miss": ("miss", p99_of),
    "missed_mass": ("missed_mass", mean_of),
}

ByTarget = Sequence[Sequence[Figures]]  # figures by target sparsity, then by document
Estimates = Mapping[str, list[Estimate]]  # of each statistic, by target sparsity


def find(figures: Mapping[str, ByTarget], tasks: Sequence[str]) -> dict[str, Any]:
    """All figures, as plain values for JSON.

    Args:
        figures: of every arm, the baseline's among them.
        tasks: of each document.

    Returns:
        By task, `all` first, then by arm: `targets`; `equal_bytes` at `BUDGETS`, or where a fixed
        arm reads as much as the baseline; `equal_misses`, where the paper's blocks are among the
        arms and it has targets.
    """
    found = {}
    for task in ("all", *dict.fromkeys(tasks)):
        chosen = [n for n, one in enumerate(tasks) if task in ("all", one)]
        curves = {
            name: _curve([[of_target[n] for n in chosen] for of_target in by_target])
            for name, by_target in figures.items()
        }
        found[task] = {name: _describe(ARMS[name], name, curves) for name in curves}
    return found


def _curve(by_target: ByTarget) -> dict[str, list[Estimate]]:
    """An estimate of each statistic at each target."""

    def over(name: str, statistic: Callable[[Sequence[FloatArray]], Estimate]) -> list[Estimate]:
        return [statistic([getattr(one, name) for one in figures]) for figures in by_target]

    curve = {name: over(*source) for name, source in STATISTICS.items()}
    return curve | {"read": over("read", mean_of), "written": over("written", mean_of)}


def _describe(arm: Arm, name: str, curves: Mapping[str, Estimates]) -> dict[str, Any]:
    curve, baseline = curves[name], curves[BASELINE]
    targets = [
        {"target_sparsity": None if arm.fixed else target}
        | {key: _rounded(estimates[n]) for key, estimates in curve.items()}
        for n, target in enumerate(arm.targets)
    ]
    described = {"group": arm.group, "targets": targets, "equal_misses": []}
    if arm.fixed:
        return described | {"equal_bytes": [_as_spin_reads(curve, baseline)]}
    if PAPER in curves:
        described["equal_misses"] = _as_good_as(curves[PAPER], arm, curve)
    others = {BASELINE: baseline}
    if arm.against is not None and arm.against in curves:
        others[arm.against] = curves[arm.against]
    rows = [_at_equal_bytes(arm, curve, others, target) for target in BUDGETS]
    return described | {"equal_bytes": rows}


def _at_equal_bytes(
    arm: Arm, curve: Estimates, others: Mapping[str, Estimates], target: float
) -> dict[str, Any]:
    """Where an arm reads what the baseline does at a target, and what others miss there."""
    at = others[BASELINE]["read"][ARMS[BASELINE].targets.index(target)]
    here = {key: _at_bytes(curve, key, at) for key in STATISTICS}
    sparsity = interpolate(curve["read"][::-1], [_constant(s, at) for s in arm.targets[::-1]], at)
    row = {"as_baseline_at": target, "read": _rounded(at), "target_sparsity": _rounded(sparsity)}
    for key, estimate in here.items():
        row[key] = _rounded(estimate)
        for other, theirs in others.items():
            row[difference_key(key, other)] = _rounded(estimate - _at_bytes(theirs, key, at))
    return row


def _as_spin_reads(curve: Estimates, baseline: Estimates) -> dict[str, Any]:
    """What a fixed arm reads and misses, and what the baseline misses for as many bytes."""
    (at,), targets = curve["read"], ARMS[BASELINE].targets
    sparsity = interpolate(baseline["read"][::-1], [_constant(s, at) for s in targets[::-1]], at)
    row = {"as_baseline_at": _rounded(sparsity)["value"], "read": _rounded(at)}
    for key in STATISTICS:
        row[key] = _rounded(curve[key][0])
        row[difference_key(key)] = _rounded(curve[key][0] - _at_bytes(baseline, key, at))
    return row


def _at_bytes(curve: Estimates, key: str, at: Estimate) -> Estimate:
    """A statistic where as many bytes are read; turned round, since targets rise as bytes fall."""
    return interpolate(curve["read"][::-1], curve[key][::-1], at)


def _as_good_as(paper: Estimates, arm: Arm, curve: Estimates) -> list[dict[str, Any]]:
    """How much can be skipped, and what is read, where the mean miss is that of `PAPER`."""
    rows = []
    for target in EQUAL_AT:
        place = ARMS[PAPER].targets.index(target)
        at, missed = paper["mean_miss"][place], curve["mean_miss"]
        read = interpolate(missed, curve["read"], at)
        skipped = interpolate(missed, [_constant(s, at) for s in arm.targets], at)
        rows.append(
            {
                "as_paper_at": target,
                "target_sparsity": _rounded(skipped),
                "read": _rounded(read),
                "read_difference": _rounded(read - paper["read"][place]),
            }
        )
    return rows


def row_at(arm: Mapping[str, Any], target: float) -> dict[str, Any]:
    """Of an arm of `find` that has targets, what holds at the baseline's bytes at this one."""
    (row,) = (row for row in arm["equal_bytes"] if row["as_baseline_at"] == target)
    return dict(row)


def difference_key(statistic: str, other: str = BASELINE) -> str:
    """Where such a row has the difference of a statistic from another arm."""
    return f"{statistic}_difference" + ("" if other == BASELINE else f" from {other}")


def _constant(value: float, like: Estimate) -> Estimate:
    return Estimate(value, np.full_like(like.by_trace, value), np.full_like(like.draws, value))


def _rounded(estimate: Estimate) -> dict[str, float | None]:
    return {
        name: None if value is None else round(value, 5)
        for name, value in estimate.to_json().items()
    }


def layer_targets(
    by_target: ByTarget,
    calibrate: Sequence[int],
    target: float,
    sparsities: Sequence[float] = SPARSITIES,
) -> list[float]:
    """Target sparsity of each layer, least missed in the mean at this mean sparsity.

    Args:
        by_target: an arm's figures at `sparsities`; calibrate: documents to look at.
        target: mean over the layers.
    """
    targets = np.array((0.0, *sparsities))
    misses = [np.concatenate([of_target[n].miss for n in calibrate]) for of_target in by_target]
    missed = np.stack([np.nanmean(miss, 0) for miss in misses], 1)
    # Single rows all have the same budget at one target, so it stands for what is skipped.
    return allocate([Curve(targets, targets, np.append(0.0, layer)) for layer in missed], target)
