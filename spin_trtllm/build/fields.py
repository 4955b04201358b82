# SPDX-License-Identifier: Apache-2.0
"""Reading JSON that somebody else wrote: whatever is in it, bad input is one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spin_trtllm.errors import SpinError, refuse

MAX_JSON_BYTES = 16 * 2**20  # real ones are a few kilobytes; a weight file by mistake is refused
MAX_JSON_DEPTH = 64  # far below Python's recursion limit, so that the file can be written again


def read_json_object(
    path: Path, argument: str, *, max_bytes: int = MAX_JSON_BYTES
) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        argument: option that named the file's directory, for the error line.
        max_bytes: the largest file to read.

    Raises:
        SpinError: unreadable, larger than `max_bytes`, nested deeper than `MAX_JSON_DEPTH`,
            not JSON, or not an object.
    """
    content = _read(path, argument, max_bytes)
    try:
        loaded = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SpinError(f"{argument}: {str(path)!r} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        refuse(f"{argument}: {path.name}", type(loaded).__name__, "a JSON object")
    if _depth(loaded) > MAX_JSON_DEPTH:
        refuse(f"{argument}: {path.name}", "deeper nesting", f"up to {MAX_JSON_DEPTH} levels")
    return loaded


def integer(
    values: Mapping[str, Any], name: str, low: int, high: int, default: int | None = None
) -> int:
    """The integer field `name`, or its default where it is absent.

    Raises:
        SpinError: absent without a default, not an integer, or outside `low .. high`.
    """
    value = values.get(name, default)
    # bool is an int in Python, but `true` is never a size
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        refuse(name, value, f"an integer in {low} .. {high}")
    return value


def text(values: Mapping[str, Any], name: str) -> str:
    """The non-empty string field `name`."""
    value = values.get(name)
    if not isinstance(value, str) or not value:
        refuse(name, value, "a non-empty string")
    return value


def items(values: Mapping[str, Any], name: str) -> list[Any]:
    """The list field `name`."""
    value = values.get(name)
    if not isinstance(value, list):
        refuse(name, value, "a list")
    return value


def section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object field `name`."""
    value = values.get(name)
    if not isinstance(value, dict):
        refuse(name, value, "a JSON object")
    return value


def _read(path: Path, argument: str, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        reason = error.strerror or error
        raise SpinError(f"{argument}: cannot read {str(path)!r}: {reason}") from error
    if len(content) > max_bytes:
        refuse(f"{argument}: {path.name}", "a larger file", f"up to {max_bytes} bytes")
    return content


def _depth(value: Any) -> int:
    """Levels of lists and objects in a JSON value; a loop, because recursion is what may fail."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, (dict, list))]:
        depth += 1
        level = [child for v in level for child in (v.values() if isinstance(v, dict) else v)]
    return depth
