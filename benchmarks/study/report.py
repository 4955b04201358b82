# SPDX-License-Identifier: Apache-2.0
"""What a directory of results says: tables, and quality against bytes read.

    python -m benchmarks.study.report build/study

It writes `report.md` and `report.html` there. Every method is paired with dense, document by
document; intervals are of 95 % and know that answers of a document share its fate.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, tostring

from benchmarks.study.documents import RECALL, TEXT
from benchmarks.study.intervals import compare, mean_interval, share_interval
from benchmarks.study.tables import (
    Result,
    documents_of_answers,
    flat,
    label,
    setting,
    signed,
    table,
)
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_file
from spin_trtllm.report.charts import draw
from spin_trtllm.report.svg import element

DENSE = "dense"
BUCKETS_BYTES = (0, 1_024, 4_096, 16_384)  # where distances of the table begin
FIGURE_METHODS = 5  # of fewer, a question has no figure
_STYLE = (
    "body{font:16px system-ui;max-width:44rem;margin:2rem auto;padding:0 1rem}"
    "svg text{font-size:12px}.grid,.whisker{stroke-width:1}.grid{stroke:#ddd}"
)


def load_results(folder: Path) -> dict[str, list[Result]]:
    """Results of a directory by the name of their question, dense first.

    A question without its dense result is left out.

    Raises:
        SpinError: no result there, one of something else, results of different sources, or no
            question with its dense result.
    """
    found: dict[str, list[Result]] = defaultdict(list)
    sources: dict[str, str] = {}  # the last file of each
    for path in sorted(folder.glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            found[_question_name(result["cell"]["question"])].append(result)
            sources[result["source"]] = path.name
        except (ValueError, KeyError, TypeError) as error:
            raise SpinError(f"study: {str(path)!r} is no result: {error!r}") from error
    if not found:
        refuse("folder", str(folder), "a directory with results")
    if len(sources) > 1:
        files = " and ".join(sorted(sources.values())[:2])
        raise SpinError(f"study: {files} come from different models, texts or versions")
    for results in found.values():
        results.sort(key=lambda r: (r["cell"]["method"] != DENSE, r["cell"]["method"], setting(r)))
    # A study that is not finished: what cannot be paired yet is for a later report.
    whole = {name: rs for name, rs in found.items() if rs[0]["cell"]["method"] == DENSE}
    if not whole:
        raise SpinError(f"study: no dense result of {next(iter(found))} in {str(folder)!r}")
    return whole


def quality_row(result: Result, dense: Result) -> dict[str, str]:
    """A method on a question next to dense, as text."""
    right, before = flat(result["right"]), flat(dense["right"])
    change = compare(before, right, documents_of_answers(result))
    interval = share_interval(right, documents_of_answers(result))
    row = {
        "method": label(result),
        "right": f"{sum(right)} of {len(right)}",
        "share": "{:.3f} to {:.3f}".format(*interval) if interval else "(one document)",
        "lost, gained": f"{change.lost}, {change.gained}",
        "share - dense": signed(change.difference, change.interval),
    }
    if "nats" in result:
        changes = [n - d for n, d in zip(*map(flat, (result["nats"], dense["nats"])), strict=True)]
        mean = sum(changes) / len(changes)
        row["nats - dense"] = signed(mean, mean_interval(changes, documents_of_answers(result)))
    return row | _cost_columns(result)


def draft_row(result: Result, dense: Result) -> dict[str, str]:
    """How a method's drafts fared, and how far it says what dense says."""
    same = [a == b for a, b in zip(*map(flat, (result["tokens"], dense["tokens"])), strict=True)]
    steps = sum(result["steps_of_rows"].values())
    return {
        "method": label(result),
        "drafts accepted": f"{result['accepted']} of {result['proposed']}",
        "tokens a step": f"{len(same) / steps:.2f}" if steps else "-",
        "tokens as dense": f"{sum(same) / len(same):.3f}",
        **_cost_columns(result),
    }


def distance_rows(results: Sequence[Result]) -> Iterator[dict[str, str]]:
    """Right answers by the distance to their fact."""
    for result in results:
        buckets: dict[int, list[bool]] = {start: [] for start in BUCKETS_BYTES}
        pairs = zip(*map(flat, (result["distance_bytes"], result["right"])), strict=True)
        for distance, right in pairs:
            buckets[max(start for start in BUCKETS_BYTES if start <= distance)].append(right)
        yield {"method": label(result)} | {
            f"from {start:,} bytes": f"{sum(of)} of {len(of)}"
            for start, of in buckets.items()
            if of
        }


def chart_of(name: str, results: Sequence[Result]) -> dict[str, Any]:
    """Share of right answers over bytes read, a series for each method (see `charts`)."""
    series: dict[str, list[dict[str, float]]] = defaultdict(list)
    for result in results:
        right = flat(result["right"])
        low, high = share_interval(right, documents_of_answers(result)) or (None, None)
        point = {"x": result["cost"]["bytes_share"], "value": sum(right) / len(right)}
        series[result["cell"]["method"]].append(point | {"low": low, "high": high})
    return {
        "kind": "lines",
        "title": f"{name}: right answers against bytes that the indexer reads",
        "x_label": "bytes of keys, pooled keys and state, over dense's",
        "y_label": "share of right answers",
        "series": [{"label": method, "points": points} for method, points in series.items()],
    }


def write_markdown(questions: dict[str, list[Result]]) -> str:
    """All tables."""
    parts = ["# Study", *_ran_on(questions)]
    for name, results in questions.items():
        dense = results[0]
        task, generated = dense["cell"]["question"]["task"], "tokens" in dense
        parts.append(f"## {name}")
        if task != TEXT or not generated:  # what follows a text is not in the text
            parts.append(table(quality_row(result, dense) for result in results))
        if generated:
            parts.append(table(draft_row(result, dense) for result in results))
        elif task == RECALL:
            parts.append(table(distance_rows(results)))
    return "\n\n".join(parts) + "\n"


def write_page(questions: dict[str, list[Result]]) -> str:
    """All figures, as a page without scripts."""
    figures = [
        draw(chart_of(name, results), f"figure-{number}")
        for number, (name, results) in enumerate(questions.items())
        if len({result["cell"]["method"] for result in results}) >= FIGURE_METHODS
    ]
    page = element(
        "html",
        element("head", element("title", "Study"), element("style", _STYLE)),
        element("body", element("h1", "Study"), *_paragraphs(questions), *figures),
        lang="en",
    )
    return "<!DOCTYPE html>\n" + tostring(page, encoding="unicode", method="html") + "\n"


def _ran_on(questions: dict[str, list[Result]]) -> list[str]:
    """What was run, on what and when."""
    results = [result for found in questions.values() for result in found]
    machines: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        environment = result["environment"]
        versions = environment["versions"]
        machines[
            f"{environment['device']}, torch {versions['torch']}, "
            f"transformers {versions['transformers']}"
        ].append(result)
    lines = []
    for machine, ran in machines.items():
        dates = sorted({result["environment"]["date"] for result in ran})
        seconds = sum(result["seconds"] for result in ran)
        when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        lines.append(f"{len(ran)} cells on {machine}, {when}: {seconds:.0f} s of decoding.")
    return lines


def _paragraphs(questions: dict[str, list[Result]]) -> list[Element]:
    return [element("p", line) for line in _ran_on(questions)]


def _cost_columns(result: Result) -> dict[str, str]:
    cost = result["cost"]
    return {
        "bytes": f"{cost['bytes_share']:.3f}",
        "keys": f"{cost['keys'] / cost['dense_keys']:.3f}",
        "products": f"{cost['products'] / cost['dense_products']:.3f}",
    }


def _question_name(question: dict[str, Any]) -> str:
    drafts = "" if question["drafts"] is None else f", up to {question['drafts']} drafts a step"
    size = f"{question['documents']} documents, {question['queries']} answers each"
    return f"{question['task']} at {question['context_bytes']:,} bytes, {size}{drafts}"


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the study's output directory")
    arguments = parser.parse_args()
    try:
        questions = load_results(arguments.folder)
        for name, content in (
            ("report.md", write_markdown(questions)),
            ("report.html", write_page(questions)),
        ):
            with atomic_file(arguments.folder / name) as path:
                path.write_text(content, encoding="utf-8")
            print(arguments.folder / name)
    except SpinError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
