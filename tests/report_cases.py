# SPDX-License-Identifier: Apache-2.0
"""Traces for the report's tests, what the referee says of them, and the command that reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import oracle
from replay_cli import Capture, Trace, call, make_trace, save

OPTIONS = ("--block-size", "8", "--sparsity", "0.5")
BY_ORACLE = {"block_size": 8, "sparsity": 0.5}


def single_rows(steps: int, seed: int) -> Trace:
    """A trace of one token a step on two layers, 60 slots and more, with one reset."""
    return make_trace(steps=steps, rows=1, seed=seed, jumps=(steps // 2,))


def write_traces(folder: Path, steps: int = 40, count: int = 2, rows: int = 1) -> list[str]:
    """`count` different trace files."""
    return [
        save(folder, make_trace(steps=steps, rows=rows, seed=n, jumps=(steps // 2,)), f"{n}.trace")
        for n in range(count)
    ]


def report(capsys: Capture, traces: list[str], output: Path, *options: str) -> dict[str, Any]:
    """Results of a report that must succeed, by study."""
    code, out, err = call(capsys, "report", *traces, "--output", output, *OPTIONS, *options)
    assert (code, err.count("\n")) == (0, err.startswith("settings: "))
    files = [Path(line) for line in out.splitlines()]
    assert files[-1] == output / "report.html"
    return {f.stem: json.loads(f.read_text(encoding="utf-8")) for f in files[:-1]}


def referee(trace: Trace, **changes: Any) -> dict[str, float]:
    """The referee's figures of SPIN on a trace."""
    figures: dict[str, float] = oracle.replay(trace, **BY_ORACLE, **changes)["metrics"]
    return figures


def regroup(trace: Trace, draft_tokens: int, starts: list[int], accepted: list[int]) -> Trace:
    """A trace of single rows as one of drafts, row by row; `starts` are first rows of the steps."""
    rows = [[start + r for r in range(draft_tokens + 1)] for start in starts]
    scores = [[[trace["scores"][t, layer, 0] for t in step] for layer in (0, 1)] for step in rows]
    return {
        **trace,
        "scores": np.array(scores),
        "positions": np.array([[trace["positions"][t, 0] for t in step] for step in rows]),
        "accepted": np.array(accepted),
    }
