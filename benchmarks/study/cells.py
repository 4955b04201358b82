# SPDX-License-Identifier: Apache-2.0
"""Cells of the study, and the parts that it is run in.

A cell is one task at one length with one method. Each part of the GPU's is meant for one call of
less than ten minutes by several processes; `quick` runs on two CPU cores in as much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.study.documents import TEXT

LENGTHS_BYTES = (4_096, 8_192, 16_384, 31_744)  # the last leaves a 32K context room for answers
DRAFTS = 3
QUESTION_BYTES = 61  # of the longest style, with its answer

Setting = tuple[str, float]  # a method and its setting

DENSE: Setting = ("dense", 0)
SPIN: tuple[Setting, ...] = (DENSE, ("spin", 0.4), ("spin", 0.6))
# Rivals where they read about as much as SPIN at 0.6; the last two cannot choose what they read.
EQUAL: tuple[Setting, ...] = (
    *SPIN,
    ("spin_query", 0.6),
    ("spin_layers", 0.6),
    ("spin_64", 0.6),
    ("streaming", 0.6),
    ("tisa", 0.6),
    ("hisa", 0.6),
    ("heavy_hitters", 0.6),
    ("index_cache", 2),
    ("head_subset", 4),
    ("previous_picks", 0),
)
CURVE: tuple[Setting, ...] = (
    DENSE,
    *(
        (method, sparsity)
        for method in ("spin", "spin_query", "spin_layers", "spin_64")
        for sparsity in (0.2, 0.4, 0.6, 0.8)
    ),
    *(
        (method, sparsity)
        for method in ("streaming", "tisa", "hisa", "heavy_hitters")
        for sparsity in (0.4, 0.6, 0.8)
    ),
    ("index_cache", 2),
    ("index_cache", 4),
    ("head_subset", 4),
    ("head_subset", 2),
    ("previous_picks", 0),
)
# The paper's Tables 2 to 5: with and without exploration.
EXPLORED: tuple[Setting, ...] = (
    DENSE,
    *(
        (method, sparsity)
        for method in ("spin", "spin_unexplored")
        for sparsity in (0.2, 0.3, 0.4, 0.5)
    ),
    ("spin_query_30", 0.5),
)
EXPLORED_64: tuple[Setting, ...] = tuple(
    (method, sparsity) for method in ("spin_64", "spin_64_unexplored") for sparsity in (0.4, 0.5)
)
# And its Table 7: whose blocks the rows of a draft share, and which rows are learnt from.
DRAFTED: tuple[Setting, ...] = (
    *SPIN,
    *(
        (method, sparsity)
        for method in ("spin_row0_mask", "spin_row0_update")
        for sparsity in (0.4, 0.6)
    ),
)


@dataclass(frozen=True)
class Question:
    """What is asked: the documents that methods share.

    Attributes:
        task: one of `documents.NAMES`.
        context_bytes: see `documents_of`, as are `documents` and `queries`.
        drafts: most drafts in a step; None: the true text is fed, and no draft is made.
    """

    task: str
    context_bytes: int
    documents: int
    queries: int
    drafts: int | None = None

    @property
    def name(self) -> str:
        """Such as `recall-8192-25x8`: task, length, documents times answers."""
        drafts = "" if self.drafts is None else f"-drafts-{self.drafts}"
        return f"{self.task}-{self.context_bytes}-{self.documents}x{self.queries}{drafts}"

    @property
    def steps(self) -> int:
        """About how many decode steps a method takes."""
        one = 1 if self.task == TEXT else QUESTION_BYTES
        steps = self.queries * one
        return steps if self.drafts is None else steps * self.documents

    @property
    def side_by_side(self) -> int:
        """Documents decoded together."""
        return self.documents if self.drafts is None else 1


@dataclass(frozen=True)
class Cell:
    """One method on one question."""

    question: Question
    method: str
    setting: float

    @property
    def name(self) -> str:
        """Of the result's file, without suffix."""
        return f"{self.question.name}-{self.method}-{self.setting:g}"


def _cells(settings: tuple[Setting, ...], *questions: Question) -> tuple[Cell, ...]:
    return tuple(Cell(question, *setting) for question in questions for setting in settings)


def _over(lengths: tuple[int, ...], tasks: tuple[str, ...]) -> Iterator[Question]:
    """At least 50 answers of each task at each length."""
    for length in lengths:
        for task in tasks:
            yield Question(task, length, *_asked(task, length))


def _asked(task: str, length: int) -> tuple[int, int]:
    """Documents, and answers of each."""
    if task == "single":
        return 50, 1
    if (task, length) == ("multi_needle", 8_192):
        return 25, 8  # as many as a curve, since all methods are run on it
    if task == "aggregation" and length < 8_192:
        return 13, 4  # twelve facts an answer: those of eight need more room
    return 8, 8  # fewer documents have no interval


_KNOWN = ("single", "multi_key", "multi_query", "aggregation")
_HARD = ("multi_value", "multi_needle", "variable_tracking")
_QUICK = 4_096
RECALL_8K, RECALL_32K = (Question("recall", length, 25, 8) for length in (8_192, 31_744))
MULTI_KEY_16K = Question("multi_key", 16_384, *_asked("multi_key", 16_384))

PARTS: dict[str, tuple[Cell, ...]] = {
    "quick": (
        *_cells(EQUAL, Question("recall", _QUICK, 4, 4), Question("multi_key", _QUICK, 4, 4)),
        *_cells(EQUAL, Question("text", _QUICK, 4, 48)),
        *_cells(SPIN, Question("dialogue", _QUICK, 2, 4)),
        *_cells(SPIN, Question("text", _QUICK, 2, 96, DRAFTS)),
    ),
    "curve-8k": _cells(CURVE, RECALL_8K),
    "curve-32k": _cells(CURVE, RECALL_32K),
    "text": _cells(EQUAL, *(Question("text", length, 32, 128) for length in LENGTHS_BYTES)),
    "tasks-short": _cells(SPIN, *_over((4_096, 8_192), _KNOWN)),
    "tasks-long": _cells(SPIN, *_over((16_384, 31_744), _KNOWN)),
    "rivals": _cells(EQUAL[3:], *_over((16_384,), _KNOWN)),
    "dialogue": (
        *_cells(SPIN, *_over(LENGTHS_BYTES, ("dialogue",))),
        *_cells(EQUAL[3:], *_over((16_384,), ("dialogue",))),
    ),
    "paper": (
        *_cells((*EXPLORED, *EXPLORED_64), RECALL_32K, MULTI_KEY_16K),
        *_cells(EXPLORED, RECALL_8K, *_over((16_384,), ("single", "multi_query", "aggregation"))),
    ),
    "drafts": _cells(
        DRAFTED,
        Question("recall", 16_384, 8, 7, DRAFTS),
        Question("text", 16_384, 8, 256, DRAFTS),
    ),
    # For weights that were taught these tasks: the others answer next to none of them.
    "hard": _cells(SPIN, *_over(LENGTHS_BYTES, _HARD)),
    "hard-rivals": _cells(EQUAL[3:], *_over((8_192,), ("multi_needle",))),
}
# Parts that ask what was skipped and missed, which results did not always say.
MEASURED = ("paper",)
