# SPDX-License-Identifier: Apache-2.0
"""Quality against the bytes that the indexer reads, as charts for `spin_trtllm.report.charts`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.study.intervals import mean_interval, share_interval
from benchmarks.study.methods import METHODS
from benchmarks.study.rows import is_generated, less, measure_of
from benchmarks.study.tables import Result, documents_of_answers

LEAST_METHODS = 5  # of fewer, a question has no figure
HEADLINE = ("recall at 31,744 bytes", "recall at 8,192 bytes")
_ASIDE = 0.6  # between series: their bytes set them apart already
_LABELS = {
    "right": "share of right answers",
    "nats": "nats a byte, over dense's (less is better)",
}


def chart_of(name: str, results: Sequence[Result]) -> dict[str, Any] | None:
    """A question's quality over bytes read, a series for each method.

    None for few methods, or for generated answers, which are another text in each method.
    """
    series: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        series[result["cell"]["method"]].append(_point(result, results[0]))
    if len(series) < LEAST_METHODS or is_generated(results[0]):
        return None
    measure = measure_of(results[0])
    return {
        "kind": "lines",
        "title": f"{name}: {measure} against bytes that the indexer reads",
        "x_label": "bytes of keys, pooled keys and state, over dense's",
        "y_label": _LABELS[measure],
        "aside": _ASIDE,
        "series": [
            {"label": method, "number": _number(method), "points": points}
            for method, points in sorted(series.items(), key=lambda item: _number(item[0]))
        ],
    }


def headline(questions: Mapping[str, Sequence[Result]]) -> dict[str, Any] | None:
    """All methods where the answer is far away: a panel for each length; None of no such cells."""
    charts = {
        start: chart_of(start, results)
        for start in HEADLINE
        for name, results in questions.items()
        if name.startswith(f"{start},") and not is_generated(results[0])
    }
    panels = [{**chart, "title": start} for start, chart in charts.items() if chart]
    if not panels:
        return None
    title = "Right answers against bytes that the indexer reads, all methods"
    return {"kind": "panels", "title": title, "charts": panels}


def _point(result: Result, dense: Result) -> dict[str, Any]:
    documents = documents_of_answers(result)
    if measure_of(result) == "nats" and "nats" in result:
        found = less(result, dense)
        interval = mean_interval(found, documents)
    else:
        right = [bool(one) for document in result["right"] for one in document]
        found, interval = [float(one) for one in right], share_interval(right, documents)
    low, high = interval or (None, None)
    share = result["cost"]["bytes_share"]
    return {"x": share, "value": sum(found) / len(found), "low": low, "high": high}


def _number(method: str) -> int:
    """A method looks the same in every figure."""
    return list(METHODS).index(method) if method in METHODS else len(METHODS)
