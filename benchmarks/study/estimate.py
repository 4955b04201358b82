# SPDX-License-Identifier: Apache-2.0
"""How long cells take: a guess of the work, scaled by what was measured so far."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.study.cells import Cell, Question
from benchmarks.study.documents import DIALOGUE, TURNS


@dataclass(frozen=True)
class Speed:
    """Of one kind of device, before anything is measured.

    Attributes:
        step_seconds: a decode step of one sequence.
        sequence_seconds: what each sequence beside it adds.
        read_seconds: 4,096 bytes of one document.
        read_power: by which power of the length that grows.
    """

    step_seconds: float
    sequence_seconds: float
    read_seconds: float
    read_power: float


# One core of the CPU was measured; a step of the GPU is bound by launches. Where fifteen processes
# share an H200, a cell takes about twice this.
SPEEDS = {"cpu": Speed(0.012, 0.005, 4.5, 1.7), "cuda": Speed(0.03, 0.0005, 0.1, 1.2)}


class Estimate:
    """Seconds of cells on one kind of device.

    Args:
        device: `cpu` or `cuda`.
        done: cells that ran on it, and the seconds each took.
    """

    def __init__(self, device: str, done: Sequence[tuple[Cell, float]] = ()) -> None:
        self._speed = SPEEDS[device]
        self._pace = 1.0
        self._pace = statistics.median([s / self.cell(cell) for cell, s in done]) if done else 1.0

    def cell(self, cell: Cell) -> float:
        """Answering with one method, the documents read."""
        question, speed = cell.question, self._speed
        step = speed.step_seconds + speed.sequence_seconds * (question.side_by_side - 1)
        seconds = question.steps * step
        if question.task == DIALOGUE:  # later turns are read anew by every method
            seconds += self._read(question) * (TURNS - 1) / TURNS
        return seconds * self._pace

    def reading(self, question: Question) -> float:
        """Reading what all methods share."""
        share = 1 / TURNS if question.task == DIALOGUE else 1.0
        return self._read(question) * share * self._pace

    def total(self, cells: Sequence[Cell]) -> float:
        """All of the cells, each question read once."""
        questions = {cell.question for cell in cells}
        return sum(map(self.cell, cells)) + sum(map(self.reading, questions))

    def _read(self, question: Question) -> float:
        length = question.context_bytes / 4_096
        return question.documents * self._speed.read_seconds * length**self._speed.read_power
