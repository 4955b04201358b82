# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding with n-gram drafts: one sequence, one to four rows a step.

Questions are fed as they stand, answers are generated: drafts are verified in one call, accepted as
far as the model agrees, and the rest is rolled back. The library's cache has no rollback, so it is
copied before a verification; of a rejected one, the accepted rows run again on the copy with the
same picks.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.study.decoding import Batch
from benchmarks.study.drafts import NGramDrafts, accepted_drafts
from benchmarks.study.methods import Run
from benchmarks.tiny_model.model import BOS
from spin_trtllm.errors import refuse


@dataclass
class Speculation:
    """What one document was answered, and how its drafts fared.

    Attributes:
        right: whether each question was answered exactly.
        tokens: everything that was generated.
        steps: verifications, by their number of rows.
        accepted: drafts accepted.
    """

    right: list[bool] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)
    accepted: int = 0

    @property
    def proposed(self) -> int:
        """Drafts proposed."""
        return sum((rows - 1) * steps for rows, steps in self.steps.items())


def speculate(model: torch.nn.Module, batch: Batch, run: Run, *, drafts: int) -> Speculation:
    """Answer the questions of one document, the answers with drafts.

    Args:
        batch: one document of one turn.
        run: a method started with `drafts=True`.
        drafts: at most so many in a step; 0 decodes plainly.

    Raises:
        SpinError: several documents or turns.
    """
    shape = [len(turns) for turns in batch.documents]
    if shape != [1]:
        refuse("batch", f"documents of {shape} turns", "one document of one turn")
    (turn,) = batch.documents[0]
    stream = _Stream(model, batch, run, drafts)
    picked = list(turn.asked)
    end = 0
    for free in _merged(turn.answer_places):
        stream.feed(turn.asked[end : free.start])
        picked[free] = stream.generate(free.stop - free.start)
        end = free.stop
    found = stream.found
    found.right = [turn.is_right(number, picked) for number in range(len(turn.questions))]
    return found


def _merged(places: Sequence[slice]) -> list[slice]:
    """Answers that follow each other without a byte between them are generated as one."""
    merged: list[slice] = []
    for place in places:
        if merged and merged[-1].stop == place.start:
            place = slice(merged.pop().start, place.stop)
        merged.append(place)
    return merged


class _Stream:
    """A sequence that grows: all of it is in the cache but the last token."""

    def __init__(self, model: torch.nn.Module, batch: Batch, run: Run, drafts: int) -> None:
        self.found = Speculation()
        self._model, self._run, self._drafts = model, run, drafts
        self._cache = copy.deepcopy(batch.cache)
        self._last: int | None = None  # certain, but not in the cache
        self._first = int(batch.logits.argmax(-1))  # the model's own after the text
        self._source = NGramDrafts()
        self._source.extend([BOS, *batch.documents[0][0].context])

    def feed(self, tokens: Sequence[int]) -> None:
        """Take tokens as they are, one a step."""
        for token in tokens:
            if self._last is not None:
                self._verify([])
            self._append([token])

    def generate(self, count: int) -> list[int]:
        """The next `count` tokens, greedily."""
        new: list[int] = []
        while len(new) < count:
            if self._last is None:
                found = [self._first]
            else:
                room = min(self._drafts, count - len(new) - 1)
                found = self._speculate(self._source.propose(room) if room else [])
            self._append(found)
            new += found
        self.found.tokens += new
        return new

    def _append(self, tokens: list[int]) -> None:
        self._source.extend(tokens)
        self._last = tokens[-1]

    def _speculate(self, drafts: list[int]) -> list[int]:
        """What a step makes certain: the accepted drafts, and the model's own token after them."""
        picked, accepted = self._verify(drafts)
        rows = 1 + len(drafts)
        self.found.steps[rows] = self.found.steps.get(rows, 0) + 1
        self.found.accepted += accepted
        return [*drafts[:accepted], picked[accepted]]

    def _verify(self, drafts: list[int]) -> tuple[list[int], int]:
        """Run the last token and drafts after it: the likeliest after each, and drafts accepted."""
        assert self._last is not None
        before = copy.deepcopy(self._cache) if drafts else None
        picked = self._run_rows([self._last, *drafts])
        accepted = accepted_drafts(drafts, picked)
        self._run.commit(accepted)
        if accepted < len(drafts):
            self._cache = before
            with self._run.again(1 + accepted):
                self._run_rows([self._last, *drafts[:accepted]])
        return picked, accepted

    def _run_rows(self, tokens: list[int]) -> list[int]:
        logits = _forward_rows(self._model, tokens, self._cache)
        likeliest: list[int] = logits.argmax(-1).tolist()
        return likeliest


@torch.no_grad()
def _forward_rows(model: torch.nn.Module, tokens: list[int], cache: Any) -> Tensor:
    """Logits `[T, vocabulary]` after each of `T` tokens of one sequence."""
    known = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in known else "past_key_values"  # renamed in Transformers 5.24
    device = next(model.parameters()).device
    ids = torch.tensor([tokens], device=device)
    logits: Tensor = model(input_ids=ids, use_cache=True, **{name: cache}).logits[0]
    return logits
