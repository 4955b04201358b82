# SPDX-License-Identifier: Apache-2.0
"""Tables of results, as Markdown and HTML: rows, and what stands in their cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from spin_trtllm.report.svg import element

Result = dict[str, Any]
Row = dict[str, str]

_MISSING = "-"


def table(rows: Iterable[Row]) -> str:
    """Rows as Markdown; columns in the order in which they first come up."""
    found = list(rows)
    columns = _columns(found)
    lines = [columns, ["---"] * len(columns)]
    lines += [[row.get(column, _MISSING) for column in columns] for row in found]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def html_table(rows: Sequence[Row]) -> Element:
    """The same as HTML."""
    columns = _columns(rows)
    heads = (element("th", column, scope="col") for column in columns)
    lines = (
        element("tr", *(element("td", plain(row.get(c, _MISSING))) for c in columns))
        for row in rows
    )
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *lines))
    return element("div", table, class_="wide")


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def plain(markdown: str) -> str:
    """Without the marks of code."""
    return markdown.replace("`", "")


def setting(result: Result) -> float:
    """Of the result's method."""
    return float(result["cell"]["setting"])


def label(result: Result) -> str:
    """A method with its setting, if it has one."""
    number = setting(result)
    return f"`{result['cell']['method']}`" + (f" {number:g}" if number else "")


def documents_of_answers(result: Result) -> list[int]:
    """The document of each answer."""
    return [number for number, answers in enumerate(result["right"]) for _ in answers]


def flat(by_document: list[list[Any]]) -> list[Any]:
    """Answers of all documents, one after another."""
    return [one for document in by_document for one in document]


def signed(value: float, interval: tuple[float, float] | None) -> str:
    """A difference with its interval."""
    if interval is None:
        return f"{value:+.3f} (too few documents)"
    low, high = interval
    return f"{value:+.3f} ({low:+.3f} to {high:+.3f})"


def counted(right: Sequence[bool]) -> str:
    """How many answers are right."""
    return f"{sum(right)} of {len(right)}"
