# SPDX-License-Identifier: Apache-2.0
"""Tables of results, as Markdown: rows, and what stands in their cells."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Result = dict[str, Any]


def table(rows: Iterable[dict[str, str]]) -> str:
    """Rows as Markdown; columns in the order in which they first come up."""
    found = list(rows)
    columns = list(dict.fromkeys(column for row in found for column in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[row.get(column, "-") for column in columns] for row in found]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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
