# SPDX-License-Identifier: Apache-2.0
"""Errors of the public API: one line naming the argument, what was given, what is allowed."""

from __future__ import annotations

import reprlib
from typing import NoReturn

_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxlist, _repr.maxtuple, _repr.maxdict = 2, 20, 20, 20  # aliases can nest
_repr.maxstring = _repr.maxother = _repr.maxlong = 10_000


class SpinError(ValueError):
    """Bad input. Command lines print the message on one line and exit with code 2."""


def refuse(argument: str, given: object, allowed: str) -> NoReturn:
    """Raise the one-line error that every check in this package uses.

    Args:
        argument: name of the argument, option or field, as the caller spells it.
        given: the value that was refused; long values are shortened.
        allowed: what would have been accepted.

    Raises:
        SpinError: always.
    """
    try:
        shown = _repr.repr(given)
    except ValueError:  # an integer with more digits than Python prints
        shown = f"{type(given).__name__} too long to print"
    if len(shown) > 120:
        shown = shown[:117] + "..."
    raise SpinError(f"{argument}: got {shown}, allowed: {allowed}")


def check_integer(argument: str, value: object, low: int, high: int) -> int:
    """An integer in `low .. high`, as it is; bool is an int in Python, but `True` is no size.

    Raises:
        SpinError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        refuse(argument, value, f"an integer in {low} .. {high}")
    return value
