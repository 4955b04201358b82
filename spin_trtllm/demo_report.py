# SPDX-License-Identifier: Apache-2.0
"""What the demo shows: a line for every question, and the table of figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spin_trtllm.hosts.transformers import SpinSession
from spin_trtllm.recall import RecallDocument

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ROW = "{:>3}  {:30}  {:>10}  {:10}  {:10}  {}"

# key of a part: label, in the order of the table
LABELS = {
    "prompt_tokens": "prompt tokens",
    "steps": "decode steps",
    "cold_steps": "cold steps",
    "dense_slots_scored": "slots scored, dense",
    "spin_slots_scored": "slots scored, SPIN",
    "target_sparsity": "target sparsity",
    "expected_sparsity": "sparsity the budget allows",
    "realized_sparsity": "realized sparsity",
    "mean_miss": "mean miss",
    "p99_miss": "p99 miss",
    "token_agreement": "token agreement with dense",
    "queries": "questions",
    "exact_dense": "answered exactly, dense",
    "exact_spin": "answered exactly, SPIN",
}


@dataclass
class QuestionRows:
    """Prints a line for every question as soon as SPIN has answered it.

    Attributes:
        dense: what the dense model picked for all tokens.
        session: whose counts tell what SPIN skipped.
    """

    document: RecallDocument
    dense: list[int]
    tokenizer: Tokenizer
    session: SpinSession
    console: Console
    _spin: list[int] = field(default_factory=list)
    _dense_slots: int = 0
    _spin_slots: int = 0

    def __post_init__(self) -> None:
        heads = ("#", "question", "bytes back", "dense", "SPIN", "slots skipped")
        self.console.print(_ROW.format(*heads))

    def add_token(self, token: int) -> None:
        """Take the next token that SPIN picked."""
        self._spin.append(token)
        for number, place in enumerate(self.document.answer_places):
            if place.stop == len(self._spin):
                self._print_row(number)

    def _print_row(self, number: int) -> None:
        stats = self.session.stats
        scored = stats.dense_slots_scored - self._dense_slots
        skipped = scored - (stats.spin_slots_scored - self._spin_slots)
        self._dense_slots, self._spin_slots = stats.dense_slots_scored, stats.spin_slots_scored
        question = self.document.questions[number]
        row = _ROW.format(
            number + 1,
            question.prompt.decode().strip(' \n"'),
            f"{question.distance_bytes:,}",
            self._answer(number, self.dense),
            self._answer(number, self._spin),
            f"{skipped:,} of {scored:,} ({percent(skipped / scored)})",
        )
        right = self.document.is_right(number, self._spin)
        self.console.print(Text(row, style="green" if right else "red"))

    def _answer(self, number: int, tokens: list[int]) -> str:
        given = self.tokenizer.decode(tokens[self.document.answer_places[number]])
        return f"{given} {'ok' if self.document.is_right(number, tokens) else 'WRONG'}"


def show_figure(value: object) -> str:
    """A figure as the table has it; `-` for one that a part does not have."""
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}"


def print_table(console: Console, parts: dict[str, dict[str, Any]]) -> None:
    """The figures of all parts, side by side."""
    table = Table(title="\nSPIN on the embedded host", title_justify="left")
    table.add_column("figure")
    for name in parts:
        table.add_column(name, justify="right")
    for key, label in LABELS.items():
        table.add_row(label, *(show_figure(part.get(key)) for part in parts.values()))
    console.print(table)


def percent(share: float | None) -> str:
    """A share in percent; none where nothing was measured."""
    return "none" if share is None else f"{share:.1%}"
