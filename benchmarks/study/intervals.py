# SPDX-License-Identifier: Apache-2.0
"""How sure a share of right answers is, and a difference between two ways of answering."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from spin_trtllm.errors import refuse

CONFIDENCE = 0.95
RESAMPLES = 10_000
LEAST_DOCUMENTS = 8
_SEED = 0


def share_interval(right: int, answers: int) -> tuple[float, float]:
    """Confidence interval of a share (Wilson, 1927), for answers independent of each other.

    Unlike the usual one it has a width where all answers are right, or none.

    Args:
        right: `0 .. answers`.
        answers: at least 1.
    """
    if answers < 1:
        refuse("answers", answers, "an integer >= 1")
    if not 0 <= right <= answers:
        refuse("right", right, f"0 .. {answers}")
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    share, spread = right / answers, z * z / answers
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Comparison:
    """The same questions answered in two ways.

    Attributes:
        answers: questions.
        lost: right before, wrong now.
        gained: wrong before, right now.
        difference: share right now less share right before.
        interval: of the difference, by resampling documents: answers of one share its fate; None
            for too few documents.
        sign_p: chance of a split of lost and gained at least so uneven, were both alike (exact
            sign test, as McNemar's); takes all answers as independent, so documents of many
            questions make it too small.
    """

    answers: int
    lost: int
    gained: int
    difference: float
    interval: tuple[float, float] | None
    sign_p: float


def compare(
    before: Sequence[bool], now: Sequence[bool], documents: Sequence[Hashable]
) -> Comparison:
    """Compare two ways of answering, question by question.

    Args:
        before: whether each question was answered right, dense for example.
        now: the same questions, with SPIN for example.
        documents: which document each question belongs to.

    Raises:
        SpinError: no question, or unequal lengths.
    """
    if not len(before) == len(now) == len(documents) > 0:
        lengths = f"{len(before)}, {len(now)} and {len(documents)}"
        refuse("before, now, documents", lengths, "equal lengths of at least 1")
    changes = np.asarray(now, dtype=np.int64) - np.asarray(before, dtype=np.int64)
    lost, gained = int((changes < 0).sum()), int((changes > 0).sum())
    return Comparison(
        answers=len(changes),
        lost=lost,
        gained=gained,
        difference=float(changes.mean()),
        interval=mean_interval(changes, documents),
        sign_p=_sign_test(lost, gained),
    )


def mean_interval(
    changes: Sequence[float] | NDArray[np.int64], documents: Sequence[Hashable]
) -> tuple[float, float] | None:
    """Percentile interval of a mean, over documents drawn with replacement.

    None for fewer than `LEAST_DOCUMENTS`: too few to say how documents differ.

    Args:
        changes: one of each question, such as a difference of two ways to answer it.
        documents: which document each question belongs to.
    """
    number = {document: n for n, document in enumerate(dict.fromkeys(documents))}
    if len(number) < LEAST_DOCUMENTS:
        return None
    of_answer = np.array([number[document] for document in documents])
    sums = np.bincount(of_answer, weights=changes, minlength=len(number))
    sizes = np.bincount(of_answer, minlength=len(number))
    # One draw a resample: how often each document is in it.
    times = np.random.default_rng(_SEED).multinomial(
        len(number), np.full(len(number), 1 / len(number)), size=RESAMPLES
    )
    means = (times @ sums) / (times @ sizes)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)


def _sign_test(lost: int, gained: int) -> float:
    """Two-sided: both tails of a fair coin thrown `lost + gained` times."""
    throws = lost + gained
    tail = sum(math.comb(throws, k) for k in range(min(lost, gained) + 1))
    return float(min(1.0, 2 * tail / 2**throws))
