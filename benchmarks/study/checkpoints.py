# SPDX-License-Identifier: Apache-2.0
"""What a method costs on one checkpoint and on another, document by document.

    python -m benchmarks.study.checkpoints build/study build/study-seed-1 --output both.md

Each is a directory of results or a packed file of them.

The documents are the same for both, so the difference of the two costs is paired: an interval
without zero says that the checkpoints differ, not that one of them answers better.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.study.intervals import mean_interval
from benchmarks.study.questions import DENSE, load_about, load_results
from benchmarks.study.report import ran_on
from benchmarks.study.rows import is_generated, less
from benchmarks.study.tables import (
    Result,
    counted,
    documents_of_answers,
    flat,
    label,
    signed,
    table,
)
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_file

_READING = (
    "Of each checkpoint what is right, and what a method changes in it: the share right less "
    "dense's, of text nats a byte less dense's; then how the two changes differ. In brackets 95 % "
    "intervals over documents, which are the same for both. What is generated is left out: it is "
    "another text on each."
)


def write_comparison(first: Path, second: Path) -> str:
    """A table for each question that both directories answer, as Markdown.

    Raises:
        SpinError: as `load_results`; no method that both ran.
    """
    ours, theirs = load_results(first), load_results(second)
    parts = ["<!-- SPDX-License-Identifier: Apache-2.0 -->", "# Two checkpoints", _READING]
    for name, path, results in (("First", first, ours), ("Second", second, theirs)):
        lines = (f"{name}: `{path}`", *ran_on(results, load_about(path)))
        parts.append("\n".join(f"- {line}" for line in lines))
    tables = {name: list(_rows(ours[name], theirs[name])) for name in ours if name in theirs}
    if not any(tables.values()):
        refuse("second", str(second), f"a directory with methods that {str(first)!r} ran, too")
    for name, rows in tables.items():
        parts += [f"## {name}", table(rows)] if rows else []
    return "\n\n".join(parts) + "\n"


def _rows(ours: list[Result], theirs: list[Result]) -> Iterator[dict[str, str]]:
    """A method a row: of each checkpoint what is left and the cost, and how the costs differ."""
    others = {label(result): result for result in theirs}
    for mine in ours:
        other = others.get(label(mine))
        if other is None or is_generated(mine):
            continue
        row = {"method": label(mine), "right": _right(mine), "right, second": _right(other)}
        if mine["cell"]["method"] != DENSE:
            documents = documents_of_answers(mine)
            before, after = less(mine, ours[0]), less(other, theirs[0])
            change = [b - a for a, b in zip(before, after, strict=True)]
            row |= {
                name: signed(sum(values) / len(values), mean_interval(values, documents))
                for name, values in (
                    ("less dense", before),
                    ("less dense, second", after),
                    ("second less first", change),
                )
            }
        yield row


def _right(result: Result) -> str:
    return counted(flat(result["right"]))


def main() -> None:
    """Write the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "first", type=Path, help="output directory of a study, or its packed results"
    )
    parser.add_argument("second", type=Path, help="of the same study, another checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="Markdown")
    arguments = parser.parse_args()
    try:
        content = write_comparison(arguments.first, arguments.second)
        with atomic_file(arguments.output) as path:
            path.write_text(content, encoding="utf-8")
    except SpinError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
