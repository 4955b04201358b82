# SPDX-License-Identifier: Apache-2.0
"""What a study is: the replays it asks for, and what it makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from spin_trtllm.config import SpinConfig
from spin_trtllm.report.claims import Claim
from spin_trtllm.report.intervals import (
    Estimate,
    halfway,
    interpolate,
    mean_of,
    p99_layer_mean_of,
    p99_of,
)
from spin_trtllm.report.record import FloatArray, Record
from spin_trtllm.report.store import Arm, TraceFile

SPARSITIES = (0.2, 0.3, 0.4, 0.5)

Arms = dict[str, Arm]


@dataclass(frozen=True)
class Evidence:
    """What a study works on.

    Attributes:
        config: SPIN's parameters, of which the study varies some.
        traces: the trace files.
        arms: what the study asked for, by label.
        records: of every arm, one record a trace.
    """

    config: SpinConfig
    traces: Sequence[TraceFile]
    arms: Arms
    records: Mapping[str, list[Record]]

    def misses(self, label: str) -> list[FloatArray]:
        """Miss rates of an arm, one array `[T, L, R]` a trace."""
        return [record.miss for record in self.records[label]]

    def sparsity(self, label: str) -> Estimate:
        """Realized sparsity of an arm."""
        return mean_of([record.sparsity for record in self.records[label]])

    def quality(self, label: str) -> dict[str, Any]:
        """Realized sparsity, mean and p99 misses of an arm, with intervals."""
        misses = self.misses(label)
        return {
            "realized_sparsity": self.sparsity(label).to_json(),
            "mean_miss": mean_of(misses).to_json(),
            "p99_miss": p99_of(misses).to_json(),
            "p99_miss_layer_mean": p99_layer_mean_of(misses).to_json(),
        }

    def at_equal_sparsity(
        self, tail: str, first: Sequence[str], second: Sequence[str], middle: int
    ) -> tuple[float, Estimate, Estimate]:
        """A tail of two curves where they skip as much: at one target they need not.

        Args:
            tail: of `TAILS`.
            first, second: labels of the arms of each curve, in order of rising targets.
            middle: which of these targets; the curves are compared midway between what they
                realize there, draw by draw.

        Returns:
            That realized sparsity, and the figure of each curve there; NaN beyond a curve's end.
        """
        sparsities = [[self.sparsity(label) for label in labels] for labels in (first, second)]
        tails = [
            [TAILS[tail](self.misses(label)) for label in labels] for labels in (first, second)
        ]
        at = halfway(sparsities[0][middle], sparsities[1][middle])
        one, other = (interpolate(x, y, at) for x, y in zip(sparsities, tails, strict=True))
        return at.value, one, other

    def replays(self) -> list[dict[str, Any]]:
        """The figures of every single replay, as `spin-trtllm replay` gives them."""
        return [
            {"arm": label, "trace": trace.path.name, **record.figures()}
            for label, records in self.records.items()
            for trace, record in zip(self.traces, records, strict=True)
        ]


@dataclass(frozen=True)
class Findings:
    """What a study found, as plain values for JSON.

    Attributes:
        columns: key of each column of `rows` and its heading, in order.
        rows: lines of the table; a figure is a number, or a dict of `value`, `low`, `high`.
        claims: the paper's, each with a verdict.
        charts: for `charts.draw`, which says what they hold.
        notes: what a reader should know, a sentence each.
    """

    columns: dict[str, str]
    rows: list[dict[str, Any]]
    claims: list[Claim] = field(default_factory=list)
    charts: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Study:
    """One of the paper's studies.

    Attributes:
        key: its name on the command line and of its JSON file.
        title: its heading.
        asks: what is varied, a sentence or two.
        paper: the ordering that the paper found, or that none is checked.
        arms: the replays it needs, by label.
        compute: what they say.
    """

    key: str
    title: str
    asks: str
    paper: str
    arms: Callable[[SpinConfig, Sequence[TraceFile]], Arms]
    compute: Callable[[Evidence], Findings]


QUALITY_COLUMNS = {
    "realized_sparsity": "realized sparsity",
    "mean_miss": "mean miss",
    "p99_miss": "p99 miss",
    "p99_miss_layer_mean": "p99 miss, mean over layers",
}
TAILS = {"p99 miss": p99_of, "p99 miss, mean over layers": p99_layer_mean_of}


def curves(
    rows: Sequence[Mapping[str, Any]], *, series: str, figure: str, title: str, figure_label: str
) -> dict[str, Any]:
    """A chart of a figure over realized sparsity, one line for each value of `series`."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        point = {"x": row["realized_sparsity"]["value"], **row[figure]}
        lines.setdefault(str(row[series]), []).append(point)
    return {
        "kind": "lines",
        "title": title,
        "x_label": "realized sparsity",
        "y_label": figure_label,
        "series": [{"label": label, "points": points} for label, points in lines.items()],
    }


def quality_curves(rows: Sequence[Mapping[str, Any]], series: str) -> list[dict[str, Any]]:
    """Mean and p99 miss over realized sparsity."""
    return [
        curves(rows, series=series, figure=figure, title=title, figure_label=label)
        for figure, title, label in (
            ("mean_miss", "Mean miss against sparsity", "mean miss"),
            ("p99_miss", "99th percentile of the miss against sparsity", "p99 miss"),
        )
    ]
