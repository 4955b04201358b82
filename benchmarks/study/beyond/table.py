# SPDX-License-Identifier: Apache-2.0
"""The sweep's findings as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.study.beyond.arms import BASELINE
from benchmarks.study.beyond.findings import EQUAL_AT

_HEADINGS = {"mean_miss": "mean miss", "p99_miss": "p99 miss", "missed_mass": "missed mass"}


def write_table(result: dict[str, Any]) -> str:
    """A table for each target and task: every arm at the baseline's bytes."""
    parts = ["<!-- SPDX-License-Identifier: Apache-2.0 -->", "# Beyond the paper", _head(result)]
    for task, arms in result["found"].items():
        for place, target in enumerate(EQUAL_AT):
            read = arms[BASELINE]["equal_bytes"][place]["read"]["value"]
            name = "both tasks" if task == "all" else f"`{task}`"
            parts.append(f"## {name}, {read:.3f} of dense's bytes: `{BASELINE}` at {target:g}")
            parts.append("\n".join(_lines(arms, place)))
    return "\n\n".join(parts) + "\n"


def _head(result: dict[str, Any]) -> str:
    return (
        f"{result['documents']} documents of each task, {result['context_bytes']:,} bytes read "
        f"before the first of about 240 steps; keys of {result['key_bytes']} bytes. In brackets: "
        f"the difference from `{BASELINE}` with its 95 % interval; less is better. "
        f"{result['environment']['device']}, {result['environment']['date']}."
    )


def _lines(arms: dict[str, Any], place: int) -> Iterator[str]:
    yield "| | target | " + " | ".join(_HEADINGS.values()) + " |"
    yield "|---" * (2 + len(_HEADINGS)) + "|"
    for name, arm in arms.items():
        row = arm["equal_bytes"][place]
        target = row["target_sparsity"]["value"]
        cells = [f"`{name}`", "-" if target is None else f"{target:.2f}"]
        cells += [_cell(row[key], row[f"{key}_difference"]) for key in _HEADINGS]
        yield "| " + " | ".join(cells) + " |"


def _cell(value: dict[str, Any], difference: dict[str, Any]) -> str:
    """A figure and its difference; bold where the whole interval lies below zero."""
    if value["value"] is None:
        return "-"
    text = f"{value['value']:.4f}"
    if difference["low"] is None or not (difference["low"] or difference["high"]):
        return text
    shown = f"{difference['value']:+.4f}: {difference['low']:+.4f} to {difference['high']:+.4f}"
    return f"**{text}** ({shown})" if difference["high"] < 0 else f"{text} ({shown})"
