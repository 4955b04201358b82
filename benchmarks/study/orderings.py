# SPDX-License-Identifier: Apache-2.0
"""The paper's orderings on several checkpoints: what `spin-trtllm report` found, side by side.

    python -m benchmarks.study.orderings --output benchmarks/study/results/orderings-cpu \\
        shipped=build/orderings/shipped seed-1=build/orderings/seed-1 \\
        --answers shipped=build/study --answers seed-1=build/study-seed-1

Each directory is a report's; `--answers` names a study's results of the same checkpoint, whose
answers are compared, too. It writes a .json and a .md.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.study.claims import NOT_RUN, judge_answers
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_file
from spin_trtllm.report.claims import FAILS, HOLDS, UNDECIDED
from spin_trtllm.report.studies import STUDIES

PLACES = 5  # decimals that are kept
_KEPT = ("columns", "rows", "claims")  # of a study; replays and charts stay where they are
_SHOWN = ("table1", "tables2-5")  # tables on the page; the others' are in the JSON
_QUALITY = {"realized_sparsity": "skipped", "mean_miss": "mean miss", "p99_miss": "p99 miss"}
# What a claim's text says beyond the ordering: where it was looked at.
_WHERE = re.compile(r", at [\d.]+% sparsity$| \(.*\)$")
_REALIZED = re.compile(r", at a realized sparsity of [\d.]+")

Report = dict[str, Any]


def load_report(folder: Path) -> Report:
    """What a report found, without its replays and charts.

    Returns:
        `config`, `traces`, and `studies` by key.

    Raises:
        SpinError: a study is missing, or no report.
    """
    studies = {key: _read(folder / f"{key}.json") for key in STUDIES}
    try:
        inputs = next(iter(studies.values()))["inputs"]
        if any(study["inputs"] != inputs for study in studies.values()):
            raise SpinError(f"orderings: studies in {str(folder)!r} are of different traces")
        kept = {key: {name: study[name] for name in _KEPT} for key, study in studies.items()}
    except KeyError as error:
        raise SpinError(f"orderings: {str(folder)!r} holds no report: no {error}") from error
    return _rounded({"config": inputs["config"], "traces": inputs["traces"], "studies": kept})


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpinError(f"orderings: cannot read {str(path)!r}: {error}") from error
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, PLACES) if isinstance(value, float) else value


def write_markdown(reports: Mapping[str, Report]) -> str:
    """Verdicts and figures of every report, side by side.

    Args:
        reports: by name of the checkpoint, all of the same parameters and claims; with or without
            `answers`, see `judge_answers`.

    Raises:
        SpinError: different parameters, or other claims.
    """
    _check_alike(reports)
    parts = ["<!-- SPDX-License-Identifier: Apache-2.0 -->", "# The paper's orderings"]
    parts += [_head(reports), "\n".join(_summary(reports)), _READING]
    for key, study in STUDIES.items():
        tables = [_claims(reports, key), *_figures(reports, key)]
        if any(tables):
            parts += [f"## {study.title}", *("\n".join(table) for table in tables if table)]
    if any("answers" in report for report in reports.values()):
        parts += ["## In answers", "\n".join(_answers(reports)), _ANSWERS_NOTE]
    return "\n\n".join(parts) + "\n"


_READING = (
    "In brackets: the 95 % interval; after it, in how many traces the difference speaks for the "
    "claim. Differences are formed so that a positive one does. A miss is a multiple of 1 in "
    "top-K, and so is its 99th percentile, nearly always: smaller differences show only in the "
    "mean over layers."
)
_ANSWERS_NOTE = (
    "Answers of four bytes, exact, with the true text fed; two ways to skip on the same documents. "
    "First what is claimed to answer as many, then what it is held against. In brackets: the 95 % "
    "interval of the difference of the shares right, over documents; then answers that only the "
    "first, and that only the second way got right. A claim whose interval touches zero from above "
    "holds; where nothing differs nothing is decided."
)


def _check_alike(reports: Mapping[str, Report]) -> None:
    names = list(reports)
    for name in names[1:]:
        if reports[name]["config"] != reports[names[0]]["config"]:
            refuse(name, "other parameters", f"a report with those of {names[0]}")
        if _claim_texts(reports[name]) != _claim_texts(reports[names[0]]):
            refuse(name, "other claims", f"a report with those of {names[0]}")


def _claim_texts(report: Report) -> list[tuple[str, str]]:
    return [
        (claim["text"], _metric(claim))
        for study in report["studies"].values()
        for claim in study["claims"]
    ]


def _metric(claim: Mapping[str, Any]) -> str:
    """What is compared, without how much was skipped, which checkpoints need not share."""
    return _REALIZED.sub("", claim["metric"])


def _head(reports: Mapping[str, Report]) -> str:
    config = next(iter(reports.values()))["config"]
    traces = "; ".join(
        f"{name}: {len(report['traces'])} traces, "
        f"{sum(trace['steps'] for trace in report['traces']):,} steps"
        for name, report in reports.items()
    )
    return (
        f"{traces}. Blocks of {config['block_size']}, averages in {config['state_dtype']}, decay "
        f"{config['ema_decay']:g}, exploration {config['exploration']:g}."
    )


def _summary(reports: Mapping[str, Report]) -> Iterator[str]:
    """How many verdicts of each ordering there are."""
    counts: dict[str, dict[str, Counter[str]]] = {}
    for name, report in reports.items():
        for study in report["studies"].values():
            for claim in study["claims"]:
                ordering = counts.setdefault(_WHERE.sub("", claim["text"]), {})
                ordering.setdefault(name, Counter())[claim["verdict"]] += 1
    yield _line("ordering", *reports)
    yield _rule(1 + len(reports))
    for text, by_name in counts.items():
        yield _line(text, *(_counted(by_name[name]) for name in reports))


def _counted(verdicts: Counter[str]) -> str:
    return ", ".join(f"{v} {verdicts[v]}" for v in (HOLDS, FAILS, UNDECIDED) if verdicts[v])


def _claims(reports: Mapping[str, Report], key: str) -> list[str]:
    """A line for each claim of a study."""
    by_report = [report["studies"][key]["claims"] for report in reports.values()]
    if not by_report[0]:
        return []
    lines = [_line("claim", "figure", *reports), _rule(2 + len(reports))]
    for claims in zip(*by_report, strict=True):
        verdicts = [
            f"{_interval(claim, 'difference', signed=True)}, "
            f"{claim['for_it']} of {claim['traces']}: **{claim['verdict']}**"
            for claim in claims
        ]
        lines.append(_line(claims[0]["text"], _metric(claims[0]), *verdicts))
    return lines


def _figures(reports: Mapping[str, Report], key: str) -> Iterator[list[str]]:
    """A table for each checkpoint; of the studies whose claims say all there is, none."""
    for name, report in reports.items() if key in _SHOWN else ():
        study = report["studies"][key]
        columns = {k: _QUALITY.get(k, heading) for k, heading in study["columns"].items()}
        lines = [_line(*columns.values()), _rule(len(columns))]
        lines += [_line(*(_cell(row[column]) for column in columns)) for row in study["rows"]]
        yield [f"{name}:", "", *lines]


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return _interval(value, "value")
    if isinstance(value, float):
        return f"{value:.3g}"
    return "-" if value is None else str(value)


def _interval(figure: Mapping[str, Any], key: str, *, signed: bool = False) -> str:
    numbers = [figure[key], figure["low"], figure["high"]]
    shown = ["-" if n is None else f"{n:+.4f}" if signed else f"{n:.4f}" for n in numbers]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


def _answers(reports: Mapping[str, Report]) -> Iterator[str]:
    """A line for each claim."""
    verdicts = [
        {one["claim"]: one for one in report.get("answers", [])} for report in reports.values()
    ]
    yield _line("claim", *reports)
    yield _rule(1 + len(reports))
    for claim in dict.fromkeys(claim for known in verdicts for claim in known):
        yield _line(claim, *(_compared(known.get(claim)) for known in verdicts))


def _compared(found: Mapping[str, Any] | None) -> str:
    if found is None or found["verdict"] == NOT_RUN:
        return NOT_RUN
    return (
        f"{found['right']} against {found['right_before']} of {found['answers']}: "
        f"{_interval(found, 'difference', signed=True)}, +{found['gained']} -{found['lost']}: "
        f"**{found['verdict']}**"
    )


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|---" * columns + "|"


def _named(argument: str, given: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """`NAME=PATH` of each."""
    for text in given:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            refuse(argument, text, "NAME=DIRECTORY")
        yield name, Path(path)


def main() -> None:
    """Read and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", metavar="NAME=DIRECTORY", help="of a checkpoint")
    parser.add_argument(
        "--answers",
        action="append",
        default=[],
        metavar="NAME=RESULTS",
        help="of a study on that checkpoint: a directory, or one packed",
    )
    parser.add_argument("--output", type=Path, required=True, help="without .json and .md")
    arguments = parser.parse_args()
    try:
        reports = {name: load_report(path) for name, path in _named("reports", arguments.reports)}
        for name, path in _named("--answers", arguments.answers):
            if name not in reports:
                refuse("--answers", name, f"a checkpoint with a report: {', '.join(reports)}")
            reports[name]["answers"] = _rounded(judge_answers(path))
        for suffix, content in (
            (".md", write_markdown(reports)),
            (".json", json.dumps(reports) + "\n"),
        ):
            target = arguments.output.with_name(arguments.output.name + suffix)
            with atomic_file(target) as path:
                path.write_text(content, encoding="utf-8")
            print(target)
    except SpinError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
