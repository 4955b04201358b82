# SPDX-License-Identifier: Apache-2.0
"""The sweep's findings as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.study.beyond.arms import ARMS, BASELINE
from benchmarks.study.beyond.findings import EQUAL_AT, difference_key, row_at

_HEADINGS = {"mean_miss": "mean miss", "p99_miss": "p99 miss", "missed_mass": "missed mass"}


def write_table(result: dict[str, Any]) -> str:
    """Tables for each task: every arm at the baseline's bytes at each target, then fixed ones."""
    parts = ["<!-- SPDX-License-Identifier: Apache-2.0 -->", "# Beyond the paper", _head(result)]
    for task, arms in result["found"].items():
        name = "all tasks" if task == "all" else f"`{task}`"
        for target in EQUAL_AT:
            read = row_at(arms[BASELINE], target)["read"]["value"]
            parts.append(f"## {name}, {read:.3f} of dense's bytes: `{BASELINE}` at {target:g}")
            parts.append("\n".join(_lines(arms, target)))
        if any(ARMS[arm].fixed for arm in arms):
            parts.append(f"## {name}, arms of one setting, and `{BASELINE}` at the bytes of each")
            parts.append("\n".join(_fixed_lines(arms)))
    return "\n\n".join(parts) + "\n"


def _head(result: dict[str, Any]) -> str:
    return (
        f"{result['documents']} documents of each task, {result['context_bytes']:,} bytes read "
        f"before the first of about 240 steps; keys of {result['key_bytes']} bytes. In brackets: "
        f"the difference from `{BASELINE}` with its 95 % interval; less is better. "
        f"{result['environment']['device']}, {result['environment']['date']}."
    )


def _lines(arms: dict[str, Any], target: float) -> Iterator[str]:
    yield "| | target | " + " | ".join(_HEADINGS.values()) + " |"
    yield "|---" * (2 + len(_HEADINGS)) + "|"
    for name, arm in arms.items():
        if not ARMS[name].fixed:
            row = row_at(arm, target)
            yield f"| `{name}` | {_number(row['target_sparsity']['value'], 2)} | {_misses(row)} |"


def _fixed_lines(arms: dict[str, Any]) -> Iterator[str]:
    yield f"| | bytes | `{BASELINE}` at | " + " | ".join(_HEADINGS.values()) + " |"
    yield "|---" * (3 + len(_HEADINGS)) + "|"
    for name, arm in arms.items():
        if ARMS[name].fixed:
            (row,) = arm["equal_bytes"]
            cells = [_number(row["read"]["value"], 3), _number(row["as_baseline_at"], 2)]
            yield f"| `{name}` | {' | '.join(cells)} | {_misses(row)} |"


def _misses(row: dict[str, Any]) -> str:
    return " | ".join(_cell(row[key], row[difference_key(key)]) for key in _HEADINGS)


def _number(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value:.{places}f}"


def _cell(value: dict[str, Any], difference: dict[str, Any]) -> str:
    """A figure and its difference; bold where the whole interval lies below zero."""
    if value["value"] is None:
        return "-"
    text = f"{value['value']:.4f}"
    if difference["low"] is None or not (difference["low"] or difference["high"]):
        return text
    shown = f"{difference['value']:+.4f}: {difference['low']:+.4f} to {difference['high']:+.4f}"
    return f"**{text}** ({shown})" if difference["high"] < 0 else f"{text} ({shown})"
