# SPDX-License-Identifier: Apache-2.0
"""The study's documents: every task as turns of text to read and questions to answer.

Language modelling is one of the tasks: each byte of the continuation is a question by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.study.tasks import TASKS, dialogue, task_document
from spin_trtllm.errors import refuse
from spin_trtllm.recall import Draws, Question, RecallDocument, recall_document

TURNS = 4  # of a dialogue, each reading its share of the context
DIALOGUE = "dialogue"
RECALL = "recall"
TEXT = "text"
NAMES = (TEXT, RECALL, *TASKS, DIALOGUE)


def documents_of(
    task: str, *, documents: int, context_bytes: int, queries: int, filler: bytes
) -> Iterator[list[RecallDocument]]:
    """Seeds `0 .. documents - 1` of a task; a document is its turns, one except for `dialogue`.

    Args:
        task: one of `NAMES`.
        documents: how many.
        context_bytes: read before the first question; in a dialogue, over all turns.
        queries: answers a document; `single` has one, `text` as many bytes.
        filler: text around the facts; the text itself in `text`.

    Raises:
        SpinError: an unknown task, or as the tasks themselves.
    """
    if task not in NAMES:
        refuse("task", task, ", ".join(NAMES))
    for seed in range(documents):
        if task == DIALOGUE:
            turn_bytes, turn_queries = context_bytes // TURNS, max(1, queries // TURNS)
            turns = dialogue(
                seed, turns=TURNS, turn_bytes=turn_bytes, queries=turn_queries, filler=filler
            )
            yield list(turns)
        elif task == TEXT:
            yield [text_document(seed, context_bytes=context_bytes, queries=queries, text=filler)]
        elif task == RECALL:
            start = Draws(seed).below(len(filler))
            yield [
                recall_document(
                    seed,
                    context_bytes=context_bytes,
                    queries=queries,
                    filler=filler[start:] + filler[:start],
                )
            ]
        else:
            asked = 1 if task == "single" else queries
            document = task_document(
                task, seed, context_bytes=context_bytes, queries=asked, filler=filler
            )
            yield [document]


def text_document(seed: int, *, context_bytes: int, queries: int, text: bytes) -> RecallDocument:
    """A window of text: what to read, then bytes to predict, each with those before it.

    Windows of different seeds do not overlap as long as the text lasts.

    Args:
        queries: bytes to predict.
        text: read in a circle.
    """
    length = context_bytes + queries
    start = seed * length % len(text)
    copies = -(-(start + length) // len(text))
    window = (text * copies)[start : start + length]
    asked = window[context_bytes:]
    return RecallDocument(
        window[:context_bytes],
        tuple(Question(b"", asked[n : n + 1], b"", 0) for n in range(queries)),
    )
