# SPDX-License-Identifier: Apache-2.0
"""Results of a study by the question that they answer, from a directory or a packed file."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.study.pack import read_files
from benchmarks.study.tables import Result, setting
from spin_trtllm.errors import SpinError, refuse

DENSE = "dense"
ABOUT = "about.json"  # beside results: see `benchmarks.study.about`


def load_results(path: Path) -> dict[str, list[Result]]:
    """Results by the name of their question, dense first.

    A question without its dense result is left out.

    Args:
        path: a directory, or what `benchmarks.study.pack` made of it.

    Raises:
        SpinError: no result there, one of something else, results of different sources, or no
            question with its dense result.
    """
    found: dict[str, list[Result]] = defaultdict(list)
    sources: dict[str, str] = {}  # the last file of each
    for name, content in read_files(path):
        if name == ABOUT:
            continue
        try:
            result = json.loads(content)
            found[question_name(result["cell"]["question"])].append(result)
            sources[result["source"]] = name
        except (ValueError, KeyError, TypeError) as error:
            raise SpinError(f"study: {str(path / name)!r} is no result: {error!r}") from error
    if not found:
        refuse("results", str(path), "a directory with results")
    if len(sources) > 1:
        files = " and ".join(sorted(sources.values())[:2])
        raise SpinError(f"study: {files} come from different models, texts or versions")
    for results in found.values():
        results.sort(key=lambda r: (r["cell"]["method"] != DENSE, r["cell"]["method"], setting(r)))
    # A study that is not finished: what cannot be paired yet is for a later report.
    whole = {name: rs for name, rs in found.items() if rs[0]["cell"]["method"] == DENSE}
    if not whole:
        raise SpinError(f"study: no dense result of {next(iter(found))} in {str(path)!r}")
    return whole


def load_about(path: Path) -> dict[str, Any] | None:
    """What the results of `load_results` were made from; None where nobody wrote it down."""
    for name, content in read_files(path):
        if name == ABOUT:
            found: dict[str, Any] = json.loads(content)
            return found
    return None


def question_name(question: dict[str, Any]) -> str:
    """A line for people."""
    drafts = "" if question["drafts"] is None else f", up to {question['drafts']} drafts a step"
    size = f"{question['documents']} documents, {question['queries']} answers each"
    return f"{question['task']} at {question['context_bytes']:,} bytes, {size}{drafts}"
