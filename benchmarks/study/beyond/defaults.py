# SPDX-License-Identifier: Apache-2.0
"""One default for each sparsity: of the options that a user has, what misses least."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.study.beyond.arms import ARMS, BASELINE, DEFAULT_BLOCKS
from benchmarks.study.beyond.findings import DEFAULTS_AT, PAPER, difference_key, row_at

_PLAIN = dict(zip(DEFAULT_BLOCKS, (BASELINE, PAPER), strict=True))  # SPIN and no option
_STATISTICS = {"mean_miss": "mean miss", "p99_miss": "p99 miss"}

Arms = Mapping[str, Any]  # figures of all tasks by arm


def default_of(
    sweeps: Mapping[str, Arms], block_slots: int, target: float, *, kernels: bool
) -> str | None:
    """The arm that misses least in the mean over checkpoints, at the baseline's bytes at a target.

    Args:
        sweeps: by name of the checkpoint; block_slots: of `DEFAULT_BLOCKS`.
        kernels: whether only what has kernels is asked for.

    Returns:
        Its name; None where no arm was run that reads so little.
    """
    missed = {}
    for name in next(iter(sweeps.values())):
        if ARMS[name].default_block_slots != block_slots or kernels > ARMS[name].has_kernels:
            continue
        misses = [row_at(arms[name], target)["mean_miss"]["value"] for arms in sweeps.values()]
        if None not in misses:
            missed[name] = sum(misses)
    return min(missed, key=missed.__getitem__, default=None)


def default_lines(sweeps: Mapping[str, Arms]) -> Iterator[str]:
    """A Markdown table: block size and target by what is asked for, then figures by checkpoint."""
    figures = [f"{text}, {name}" for name in sweeps for text in ("target", *_STATISTICS.values())]
    yield "| blocks of | bytes as at | with kernels | default | " + " | ".join(figures) + " |"
    yield "|---" * (4 + len(figures)) + "|"
    for block_slots in DEFAULT_BLOCKS:
        for kernels in (False, True):
            for target in DEFAULTS_AT:
                name = default_of(sweeps, block_slots, target, kernels=kernels)
                if name is None:
                    continue
                cells = [str(block_slots), f"{target:.0%}".replace("%", " %")]
                cells += ["yes" if ARMS[name].has_kernels else "no", f"`{name}`"]
                for arms in sweeps.values():
                    cells += _figures(row_at(arms[name], target), _PLAIN[block_slots])
                yield "| " + " | ".join(cells) + " |"


def _figures(row: Mapping[str, Any], plain: str) -> list[str]:
    cells = [f"{row['target_sparsity']['value']:.2f}"]
    for key in _STATISTICS:
        change = row.get(difference_key(key, plain), {"low": None})
        cells.append(f"{row[key]['value']:.3f}")
        if change["low"] is not None and (change["low"] or change["high"]):
            cells[-1] += f" ({change['low']:+.3f} to {change['high']:+.3f})"
    return cells
