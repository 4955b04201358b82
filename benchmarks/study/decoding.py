# SPDX-License-Identifier: Apache-2.0
"""Documents read at once and answered token by token, many at a time, the true text fed.

A batch is read once; every method then answers on a copy of the cache, so that all methods start
from the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.study.methods import Run
from benchmarks.tiny_model.model import BOS
from spin_trtllm.errors import refuse
from spin_trtllm.generate import forward, prefill, split_prompt
from spin_trtllm.recall import RecallDocument

CHUNK_TOKENS = 512
AFTER = b"\n"  # what is fed to a document that has been answered while others of its batch go on


@dataclass(frozen=True)
class Answer:
    """One question answered.

    Attributes:
        right: whether every byte of the answer was the likeliest.
        nats: minus the log-probability of the true answer.
        distance_bytes: see `Question`.
    """

    right: bool
    nats: float
    distance_bytes: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Documents of equal shape, the first turn of each read.

    Attributes:
        documents: turns of each; turn `t` is as long to read in all of them.
        cache: after the first turn's text; not to be changed.
        logits: fp32 `[S, vocabulary]` after it.
    """

    documents: list[list[RecallDocument]]
    cache: Any
    logits: Tensor

    @property
    def steps(self) -> int:
        """Decode steps that answering takes, all documents side by side."""
        return sum(max(len(turn.asked) for turn in turns) - 1 for turns in self._turns)

    @property
    def _turns(self) -> list[tuple[RecallDocument, ...]]:
        return list(zip(*self.documents, strict=True))


def read_documents(
    model: torch.nn.Module,
    documents: Sequence[list[RecallDocument]],
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Batch:
    """Read the first turn of every document.

    Raises:
        SpinError: no document, or turns of unequal length.
    """
    shapes = {tuple(len(turn.context) for turn in turns) for turns in documents}
    if len(shapes) != 1:
        refuse("documents", f"lengths {sorted(shapes)}", "documents whose turns are equally long")
    ids = torch.tensor([[BOS, *turns[0].context] for turns in documents])
    return Batch(list(documents), *prefill(model, ids, chunk_tokens=chunk_tokens))


@torch.no_grad()
def answer(
    model: torch.nn.Module, batch: Batch, run: Run, *, chunk_tokens: int = CHUNK_TOKENS
) -> list[list[Answer]]:
    """Answer all questions of a batch with a method at work: for each document, its answers."""
    cache, logits = copy.deepcopy(batch.cache), batch.logits
    answers: list[list[Answer]] = [[] for _ in batch.documents]
    last: Tensor | None = None  # the one token of the turn before that was not yet fed
    for turns in zip(*batch.documents, strict=True):
        if last is not None:
            context = torch.tensor([list(turn.context) for turn in turns], device=logits.device)
            with run.reading():
                for chunk in split_prompt(torch.cat((last, context), 1), chunk_tokens):
                    logits = forward(model, chunk, cache)
        asked = side_by_side(turns).to(logits.device)
        picked, nats = _follow(model, cache, logits, asked, run)
        last = asked[:, -1:]
        for number, turn in enumerate(turns):
            answers[number] += _judge(turn, picked[number], nats[number])
    return answers


def side_by_side(turns: Sequence[RecallDocument]) -> Tensor:
    """What is fed in a turn: int64 `[S, T]`, shorter ones filled up."""
    longest = max(len(turn.asked) for turn in turns)
    return torch.tensor([list(turn.asked.ljust(longest, AFTER)) for turn in turns])


def _follow(
    model: torch.nn.Module, cache: Any, logits: Tensor, asked: Tensor, run: Run
) -> tuple[list[list[int]], list[list[float]]]:
    """Feed all of `asked` but its last token: the likeliest token in each place, and the nats."""
    picked, nats = [], []
    for place, true in enumerate(asked.split(1, 1)):
        if place:
            logits = forward(model, asked[:, place - 1 : place], cache)
            run.commit(0)
        picked.append(logits.argmax(-1))
        nats.append(-logits.float().log_softmax(-1).gather(1, true)[:, 0])
    return torch.stack(picked, 1).tolist(), torch.stack(nats, 1).tolist()


def _judge(turn: RecallDocument, picked: list[int], nats: list[float]) -> list[Answer]:
    return [
        Answer(turn.is_right(number, picked), sum(nats[place]), question.distance_bytes)
        for number, (question, place) in enumerate(
            zip(turn.questions, turn.answer_places, strict=True)
        )
    ]
