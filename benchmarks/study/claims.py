# SPDX-License-Identifier: Apache-2.0
"""Claims about answers, which traces do not have: two cells that answer the same questions.

`benchmarks.study.orderings` sets what several checkpoints say side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.study.cells import (
    DENSE,
    MULTI_KEY_16K,
    PARTS,
    RECALL_8K,
    RECALL_32K,
    Cell,
    Question,
)
from benchmarks.study.intervals import Comparison, compare
from benchmarks.study.questions import load_results
from benchmarks.study.tables import Result, documents_of_answers, flat
from spin_trtllm.report.claims import FAILS, HOLDS, UNDECIDED

NOT_RUN = "not run"


@dataclass(frozen=True)
class Claim:
    """`now` gives at least as many right answers as `before`, both of one question.

    Attributes:
        text: one line.
    """

    text: str
    before: Cell
    now: Cell


def _claims(question: Question) -> Iterator[Claim]:
    where = f"{question.task} at {question.context_bytes:,} bytes"
    for blocks, method in ((16, "spin"), (64, "spin_64")):
        for sparsity in (0.4, 0.5):
            yield Claim(
                f"{where}: random exploration answers as many as none, blocks of {blocks}, "
                f"at {sparsity:.0%} sparsity",
                Cell(question, f"{method}_unexplored", sparsity),
                Cell(question, method, sparsity),
            )
    yield Claim(
        f"{where}: blocks of 16, half ranked by the query, at 80% answer as many as blocks of 64 "
        "at 40%",
        Cell(question, "spin_64", 0.4),
        Cell(question, "spin_query", 0.8),
    )
    yield Claim(
        f"{where}: blocks of 16, 30% ranked by the query, at 50% answer as many as dense",
        Cell(question, *DENSE),
        Cell(question, "spin_query_30", 0.5),
    )


_CELLS = {cell for part in PARTS.values() for cell in part}
CLAIMS = tuple(
    claim
    for question in (RECALL_8K, RECALL_32K, MULTI_KEY_16K)
    for claim in _claims(question)
    if {claim.before, claim.now} <= _CELLS
)


def judge_answers(path: Path) -> list[dict[str, Any]]:
    """All of `CLAIMS` held against a study's results, in order.

    Args:
        path: see `load_results`.

    Returns:
        `claim` and `verdict` of each; where both cells have a result, also `right` and
        `right_before`, `low` and `high`, and what `Comparison` has.

    Raises:
        SpinError: as `load_results`.
    """
    results = {
        _cell_of(result): result for found in load_results(path).values() for result in found
    }
    return [{"claim": claim.text, **_judge(claim, results)} for claim in CLAIMS]


def _cell_of(result: Result) -> Cell:
    cell = result["cell"]
    return Cell(Question(**cell["question"]), cell["method"], cell["setting"])


def _judge(claim: Claim, results: Mapping[Cell, Result]) -> dict[str, Any]:
    if not {claim.before, claim.now} <= results.keys():
        return {"verdict": NOT_RUN}
    before, now = (flat(results[cell]["right"]) for cell in (claim.before, claim.now))
    change = compare(before, now, documents_of_answers(results[claim.now]))
    low, high = change.interval or (None, None)
    return {
        "verdict": _verdict(change),
        "right": sum(now),
        "right_before": sum(before),
        "low": low,
        "high": high,
        **{key: value for key, value in asdict(change).items() if key != "interval"},
    }


def _verdict(change: Comparison) -> str:
    """As `spin_trtllm.report.claims` judges "at least": of nothing that differs, nothing."""
    if change.interval is None:
        return UNDECIDED
    low, high = change.interval
    if high < 0:
        return FAILS
    return HOLDS if low >= 0 and high > 0 else UNDECIDED
