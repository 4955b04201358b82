# SPDX-License-Identifier: Apache-2.0
"""Steps of several tokens out of a trace of single ones, to study drafts (SPEC 1 and 4).

The rows of a step are consecutive rows of the trace, so the scores of accepted drafts are those
that the model would have seen. Rejected drafts are given the scores of the true tokens, too: a
wrong token would have asked for something else, and its row might have missed more.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from spin_trtllm.errors import refuse
from spin_trtllm.replay.trace import Trace, TraceStep


@dataclass(frozen=True)
class Drafts:
    """How a trace is regrouped.

    Attributes:
        tokens: length of every draft, at least 1; a step has one row more.
        acceptance: chance in [0, 1] that a draft token is accepted, given those before it were.
    """

    tokens: int
    acceptance: float


class DraftedTrace(Trace):
    """A trace of one row a step, read as if it had been decoded in drafts.

    A stretch between two resets ends where not all rows of a step are left; those are dropped.

    Args:
        path: a trace with one row a step.
        drafts: how to regroup it; which drafts are accepted is the same on every machine.

    Raises:
        SpinError: not a readable trace, or several rows a step.
    """

    def __init__(self, path: str | os.PathLike[str], drafts: Drafts) -> None:
        super().__init__(path)
        if self.rows != 1:
            refuse(f"trace {self.path}: rows", self.rows, "1, to be regrouped into drafts")
        self._single = Trace(path)
        self.rows = drafts.tokens + 1
        self._starts, accepted = self._regroup(drafts)
        self.steps = len(self._starts)
        first = self._single.positions_tokens[self._starts, :1]
        self.positions_tokens = first + torch.arange(self.rows)
        self.accepted = torch.tensor(accepted, dtype=torch.int64)

    def _regroup(self, drafts: Drafts) -> tuple[list[int], list[int]]:
        """First row of each step, and how many of its drafts are accepted."""
        chance = np.random.default_rng(self.sequence_id)
        positions = self._single.positions_tokens[:, 0].tolist()
        starts: list[int] = []
        accepted: list[int] = []
        for begin, end in _stretches(positions):
            start = begin
            if starts and positions[start] == positions[starts[-1]] + accepted[-1] + 1:
                start += 1  # a jump to the very next token would not be seen as the reset it is
            while start + drafts.tokens < end:
                starts.append(start)
                hits = chance.random(drafts.tokens) < drafts.acceptance
                accepted.append(int(np.logical_and.accumulate(hits).sum()))
                start += accepted[-1] + 1
        return starts, accepted

    def __iter__(self) -> Iterator[TraceStep]:
        """Read the steps in order; memory holds the rows of one step.

        Raises:
            SpinError: NaN in a visible slot.
        """
        window: deque[TraceStep] = deque(maxlen=self.rows)
        index = 0
        for row in self._single:
            window.append(row)
            if index < self.steps and row.index == self._starts[index] + self.rows - 1:
                yield self._join(index, window)
                index += 1

    def _join(self, index: int, rows: Iterable[TraceStep]) -> TraceStep:
        queries = [row.query_scores for row in rows if row.query_scores is not None]
        return TraceStep(
            index,
            self.positions_tokens[index],
            torch.cat([row.scores for row in rows], dim=1),
            int(self.accepted[index]),
            torch.cat(queries, dim=1) if queries else None,
        )


def _stretches(positions: list[int]) -> Iterator[tuple[int, int]]:
    """`begin, end` of every run of consecutive positions."""
    begin = 0
    for end in range(1, len(positions) + 1):
        if end == len(positions) or positions[end] != positions[end - 1] + 1:
            yield begin, end
            begin = end
