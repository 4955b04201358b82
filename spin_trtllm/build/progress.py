# SPDX-License-Identifier: Apache-2.0
"""Shows the stages of a build: a spinner on a terminal, one plain line a stage otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO, TypeVar

from rich.console import Console
from rich.text import Text

Result = TypeVar("Result")


class Stages:
    """Runs the stages of a build in order and shows what each found.

    Args:
        total: stages there will be.
        stream: where to write; default standard output.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total = total
        self._started = 0
        self._console = Console(file=stream or sys.stdout, soft_wrap=True, highlight=False)

    def run(
        self, title: str, work: Callable[[], Result], describe: Callable[[Result], str]
    ) -> Result:
        """Run one stage; its result is described on success, and an error is passed on."""
        self._started += 1
        label = f"[{self._started}/{self.total}] {title}"
        show = self._on_terminal if self._console.is_terminal else self._on_lines
        return show(label, work, describe)

    def _on_terminal(
        self, label: str, work: Callable[[], Result], describe: Callable[[Result], str]
    ) -> Result:
        try:
            with self._console.status(Text(label), spinner="line"):
                result = work()
        except BaseException:
            self._console.print(Text.assemble((label, "bold red"), " failed"))
            raise
        self._console.print(Text.assemble((label, "bold green"), " ", describe(result)))
        return result

    def _on_lines(
        self, label: str, work: Callable[[], Result], describe: Callable[[Result], str]
    ) -> Result:
        self._console.print(Text(label + " ... "), end="")
        try:
            result = work()
        except BaseException:
            self._console.print(Text("failed"))
            raise
        self._console.print(Text(describe(result)))
        return result
