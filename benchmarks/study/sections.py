# SPDX-License-Identifier: Apache-2.0
"""Parts of the report: what the paper found, what the cells say, where they differ, and tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.study.documents import RECALL, TEXT
from benchmarks.study.equal_bytes import match_all, match_rows
from benchmarks.study.figures import HEADLINE, chart_of, headline
from benchmarks.study.intervals import mean_interval
from benchmarks.study.paper import (
    acceptance_found,
    acceptance_rows,
    difference,
    exploration_claims,
    exploration_found,
    quality_rows,
)
from benchmarks.study.rows import (
    BETTER,
    EVEN,
    UNKNOWN,
    WORSE,
    distance_rows,
    draft_row,
    is_generated,
    less,
    measure_of,
    quality_row,
    values,
    verdict,
)
from benchmarks.study.tables import (
    Result,
    Row,
    counted,
    documents_of_answers,
    flat,
    label,
)
from spin_trtllm.report.studies import STUDIES

Questions = Mapping[str, Sequence[Result]]

_ELSEWHERE = (
    "Its figures are of other models, tasks and lengths: only orderings can be compared, under "
    "Tables 2 to 5 and Table 7."
)
_NO_FIGURE = (
    "Its Tables 2 to 5 give quality against sparsity; no figure of it against bytes is held "
    "against this one."
)
_PLAIN_TEXT = "Its claims are of answers, not of plain text."
_LENGTHS = "No ordering of acceptance lengths is checked; that of misses is:"


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        paper: what the paper found; empty where it asks nothing of the kind.
        found: what the cells say, in computed sentences.
        differ: where the two differ.
        chart: for `spin_trtllm.report.charts.draw`.
        tables: rows of each table, by its caption.
    """

    title: str
    paper: str
    found: list[str]
    differ: str
    chart: dict[str, Any] | None = None
    tables: dict[str, list[Row]] = field(default_factory=dict)


def sections_of(questions: Questions) -> Iterator[Section]:
    """The headline, the paper's tables, then every question."""
    chart = headline(questions)
    if chart:
        yield _headline(questions, chart)
    rows = quality_rows(questions)
    if rows:
        yield _quality(questions, rows)
    rows = acceptance_rows(questions)
    if rows:
        yield _acceptance(questions, rows)
    for name, results in questions.items():
        yield _question(name, results)


def _headline(questions: Questions, chart: dict[str, Any]) -> Section:
    found = [
        " ".join([f"{start.capitalize()}:", *_against_dense(results), *_against_spin(results)])
        for start in HEADLINE
        for name, results in questions.items()
        if name.startswith(f"{start},") and not is_generated(results[0])
    ]
    return Section("Quality against bytes read", _NO_FIGURE, found, _ELSEWHERE, chart)


def _quality(questions: Questions, rows: list[Row]) -> Section:
    study = STUDIES["tables2-5"]
    claims = [claim for _, _, claim in exploration_claims(questions)]
    caption = (
        "Answers and misses at each target sparsity. Of text, nats a byte, less being better; a "
        "dash is what was not measured or not run."
    )
    found = exploration_found(questions)
    return Section(study.title, study.paper, found, difference(claims), None, {caption: rows})


def _acceptance(questions: Questions, rows: list[Row]) -> Section:
    study = STUDIES["figure2"]
    caption = (
        "Tokens a step: accepted drafts and one more. An interval is over documents, of results "
        "that count each by itself."
    )
    return Section(
        "Table 7: drafts accepted, by mask and update policy",
        f"{_LENGTHS} {study.paper}",
        acceptance_found(questions),
        "Cells give a p99 miss without an interval; whether the ordering holds is for replays of "
        "traces to say: spin-trtllm report, Figure 2.",
        None,
        {caption: rows},
    )


def _question(name: str, results: Sequence[Result]) -> Section:
    dense, generated = results[0], is_generated(results[0])
    task = dense["cell"]["question"]["task"]
    tables: dict[str, list[Row]] = {}
    found: list[str] = []
    if task != TEXT or not generated:  # what follows a text is not in the text
        tables["Next to dense."] = [quality_row(result, dense) for result in results]
        found += _against_dense(results)
    if generated:
        tables["Drafts."] = [draft_row(result, dense) for result in results]
    else:
        if task == RECALL:
            tables["By distance to the fact."] = list(distance_rows(results))
        matches = match_all(results)
        if matches:
            tables["Next to SPIN at equal bytes."] = match_rows(matches)
            found += _against_spin(results)
    chart = chart_of(name, results)
    claims = [claim for _, _, claim in exploration_claims({name: results})]
    paper, differ = STUDIES["tables2-5"].paper, difference(claims)
    if task == TEXT:
        paper, differ = _PLAIN_TEXT, "Nothing to compare."
    if chart is None and not claims:
        paper = differ = ""
    return Section(name, paper, found, differ, chart, tables)


def _against_dense(results: Sequence[Result]) -> Iterator[str]:
    """Which methods can be told from dense."""
    dense = results[0]
    found = values(dense)
    if measure_of(dense) == "nats":
        yield f"Dense has {sum(found) / len(found):.4f} nats a byte."
    else:
        yield f"Dense has {counted(flat(dense['right']))} right."
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results[1:]:
        interval = mean_interval(less(result, dense), documents_of_answers(result))
        groups[verdict(result, interval)].append(result)
    yield from _grouped("dense", groups)


def _against_spin(results: Sequence[Result]) -> Iterator[str]:
    """Which methods can be told from SPIN at equal bytes."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for match in match_all(results):
        untold = match.is_below and match.verdict != BETTER
        groups[_FEWER if untold else match.verdict].append(match.result)
    yield from _grouped("SPIN at equal bytes or more", groups)


_FEWER = "not better, with fewer bytes"


def _grouped(other: str, groups: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    words = {
        BETTER: f"Better than {other}",
        WORSE: f"Worse than {other}",
        EVEN: f"Not told apart from {other}",
        UNKNOWN: f"Too few documents to tell from {other}",
        _FEWER: "With fewer bytes than any cell of SPIN, and not better than the nearest",
    }
    for kind, said in words.items():
        if groups.get(kind):
            yield f"{said}: {_names(groups[kind])}."


def _names(results: Sequence[Result]) -> str:
    """Methods with all of their settings."""
    settings: dict[str, list[str]] = defaultdict(list)
    for result in results:
        method, _, number = label(result).partition(" ")
        settings[method].append(number)
    return "; ".join(f"{method} {', '.join(found)}".strip() for method, found in settings.items())
