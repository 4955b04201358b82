# SPDX-License-Identifier: Apache-2.0
"""What results say: tables, figures of quality against bytes read, and what the paper found.

    python -m benchmarks.study.report build/study
    python -m benchmarks.study.report benchmarks/study/results/h200-shipped.tar.xz

It writes a .md, a .html and, of the figure with all methods, a .svg: `report.*` in the directory,
or beside the packed file, named after it. Every method is paired with dense, document by document;
intervals are of 95 % and know that answers of a document share its fate.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, tostring

from benchmarks.study.equal_bytes import NOTE
from benchmarks.study.figures import headline
from benchmarks.study.pack import SUFFIX
from benchmarks.study.questions import DENSE, load_about, load_results
from benchmarks.study.sections import Section, sections_of
from benchmarks.study.tables import Result, html_table, plain, table
from spin_trtllm.errors import SpinError
from spin_trtllm.files import atomic_file
from spin_trtllm.report.charts import draw
from spin_trtllm.report.svg import STYLE, element, standalone

__all__ = ["DENSE", "load_results", "write_figure", "write_markdown", "write_page"]

_STYLE = (
    """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 3rem; border-top: 1px solid #bbb; padding-top: 1rem; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: 0.2rem 0.6rem; text-align: left; }
.wide { overflow-x: auto; }
svg { width: 100%; max-width: 46rem; height: auto; }
"""
    + STYLE
)
_SAID = {"paper": "The paper", "found": "These cells", "differ": "Where they differ"}
_READING = (
    "Every method is paired with dense, document by document. Intervals are of 95 %: of a share "
    "Wilson's, widened by how alike answers of a document are; of a difference by resampling "
    "documents. A difference is told where its whole interval lies on one side of zero; intervals "
    "are not corrected for their number: of twenty true nothings, one is expected to look like "
    "something. Bytes are what a method reads of keys, pooled keys and its own state, over what "
    f"dense reads of keys. {NOTE}"
)
LIMITS = {
    "It can show": (
        "what skipping keys costs a trained indexer in exact answers, the same documents answered "
        "by every method, and keys really skipped;",
        "which methods lose answers at equal bytes, there;",
        "where an ordering of the paper does not even hold in the small.",
    ),
    "It cannot show": (
        "how many answers DeepSeek-V4 loses: its indexers have 64 heads and read 512 or 1,024 "
        "slots, not 16 heads and 64 slots, and its contexts are up to many times longer;",
        "its bytes: a key takes 132 there and 68 here, so that a method's own state weighs about "
        "half as much there;",
        "what real tasks lose: these are facts of four bytes in filler text, and held-out text;",
        "anything about speed.",
    ),
}


def write_markdown(
    questions: Mapping[str, Sequence[Result]], about: Mapping[str, Any] | None
) -> str:
    """All text and tables.

    Args:
        about: see `load_about`.
    """
    parts = ["<!-- SPDX-License-Identifier: Apache-2.0 -->", "# Study", *ran_on(questions, about)]
    parts += ["## What a model of 7.6 million parameters can and cannot show"]
    for heading, lines in LIMITS.items():
        parts += [f"{heading}", "\n".join(f"- {line}" for line in lines)]
    parts += ["## How to read the figures", _READING]
    for section in sections_of(questions):
        parts.append(f"## {section.title}")
        for said, found in _said(section):
            listed = "\n\n" + "\n".join(f"- {line}" for line in found)
            parts.append(f"**{said}:**" + (listed if len(found) > 1 else f" {found[0]}"))
        for caption, rows in section.tables.items():
            parts += [caption, table(rows)]
    return "\n\n".join(parts) + "\n"


def write_page(questions: Mapping[str, Sequence[Result]], about: Mapping[str, Any] | None) -> str:
    """All of that and the figures, as a page without scripts that loads nothing."""
    parts = [element("h1", "Study: what skipping keys costs in answers")]
    parts += [element("p", plain(line)) for line in ran_on(questions, about)]
    parts.append(element("h2", "What a model of 7.6 million parameters can and cannot show"))
    for heading, lines in LIMITS.items():
        parts.append(element("p", heading))
        parts.append(element("ul", *(element("li", line) for line in lines)))
    parts += [element("h2", "How to read the figures"), element("p", _READING)]
    sections = enumerate(sections_of(questions))
    parts += [_section(section, f"section-{number}") for number, section in sections]
    page = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("title", "Study"),
            element("style", _STYLE),
        ),
        element("body", *parts),
        lang="en",
    )
    return "<!DOCTYPE html>\n" + tostring(page, encoding="unicode", method="html") + "\n"


def write_figure(questions: Mapping[str, Sequence[Result]]) -> str | None:
    """The figure with all methods, as SVG; None without its cells."""
    chart = headline(questions)
    return standalone(draw(chart, "quality")) if chart else None


def ran_on(
    questions: Mapping[str, Sequence[Result]], about: Mapping[str, Any] | None
) -> Iterator[str]:
    """What was run, on what and when."""
    results = [result for found in questions.values() for result in found]
    machines: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        environment = result["environment"]
        versions = ", ".join(f"{name} {of}" for name, of in environment["versions"].items())
        machines[f"{environment['device']}, {versions}"].append(result)
    for machine, ran in machines.items():
        dates = sorted({result["environment"]["date"] for result in ran})
        seconds = sum(result["seconds"] for result in ran)
        when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        yield f"{len(ran)} cells on {machine}, {when}: {seconds:.0f} s of decoding."
    if about is None:
        yield f"Checkpoint and text were not named; their {_digest(results[0]['source'])}."
        return
    files = ", ".join(f"{name} {_digest(digest)}" for name, digest in about["sha256"].items())
    yield f"Checkpoint: `{about['checkpoint']}`, {files}."
    yield (
        f"Text around the facts, and to predict: {about['text']}, {about['text_bytes']:,} bytes, "
        f"{_digest(about['text_sha256'])}."
    )


def _digest(sha256: str) -> str:
    return f"SHA-256 {sha256[:12]}"


def _said(section: Section) -> Iterator[tuple[str, Sequence[str]]]:
    for key, said in _SAID.items():
        value = getattr(section, key)
        lines = [value] if isinstance(value, str) else value
        if any(lines):
            yield said, lines


def _section(section: Section, key: str) -> Element:
    parts = [element("h2", section.title)]
    for said, lines in _said(section):
        head, single = element("strong", f"{said}: "), len(lines) == 1
        parts.append(element("p", head, plain(lines[0]) if single else None))
        if not single:
            parts.append(element("ul", *(element("li", plain(line)) for line in lines)))
    if section.chart:
        parts.append(draw(section.chart, f"{key}-figure"))
    for caption, rows in section.tables.items():
        parts += [element("p", plain(caption)), html_table(rows)]
    return element("section", *parts, id=key)


def _target(results: Path, output: Path | None) -> Path:
    """Where the files go, without suffix."""
    if output is not None:
        return output
    if results.is_dir():
        return results / "report"
    return results.with_name(results.name.removesuffix(SUFFIX))


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "results", type=Path, help="the study's output directory, or packed results"
    )
    parser.add_argument("--output", type=Path, help="without .md, .html and .svg")
    arguments = parser.parse_args()
    try:
        questions, about = load_results(arguments.results), load_about(arguments.results)
        target = _target(arguments.results, arguments.output)
        for suffix, content in (
            (".md", write_markdown(questions, about)),
            (".html", write_page(questions, about)),
            (".svg", write_figure(questions)),
        ):
            if content is None:
                continue
            file = target.with_name(target.name + suffix)
            with atomic_file(file) as path:
                path.write_text(content, encoding="utf-8")
            print(file)
    except SpinError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
