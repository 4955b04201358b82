# SPDX-License-Identifier: Apache-2.0
"""How sure a share of right answers is, and a difference between two ways of answering."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spin_trtllm.errors import refuse
from spin_trtllm.report.intervals import Estimate

CONFIDENCE = 0.95
RESAMPLES = 10_000
LEAST_DOCUMENTS = 8
_SEED = 0


def share_interval(
    right: Sequence[bool], documents: Sequence[Hashable]
) -> tuple[float, float] | None:
    """Confidence interval of a share of right answers (Wilson, 1927).

    Unlike the usual one it has a width where all answers are right, or none. Answers of a document
    share its fate: they count for as many independent ones as their variance between documents says
    (Kish's design effect, at least 1), and few documents widen it by Student's distribution. Where
    all answers are alike nothing tells documents apart, and each counts as one. None for one
    document with several answers.

    Args:
        right: whether each question was answered right.
        documents: which document each question belongs to.

    Raises:
        SpinError: no question, or unequal lengths.
    """
    if not len(right) == len(documents) > 0:
        refuse("right, documents", f"{len(right)}, {len(documents)}", "equal lengths of at least 1")
    sums, sizes = _by_document(right, documents)
    count, share = len(sizes), float(sums.sum() / len(right))
    if len(right) == count:  # one answer each
        return _wilson(share, len(right), _normal_quantile())
    if count < 2:
        return None
    between = float(np.square(sums - share * sizes).sum()) * count / (count - 1) / len(right)
    within = share * (1 - share)
    effect = max(1.0, between / within) if within else 1.0
    return _wilson(share, len(right) / effect, _student_quantile(count - 1))


def _wilson(share: float, answers: float, quantile: float) -> tuple[float, float]:
    spread = quantile * quantile / answers
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def _normal_quantile() -> float:
    return NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


def _student_quantile(freedom: int) -> float:
    """Of Student's distribution, by bisection of its distribution function (A&S 26.7.3, 26.7.4)."""
    low, high = 0.0, 1_000.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        inside = _student_inside(middle, freedom)
        low, high = (middle, high) if inside < CONFIDENCE else (low, middle)
    return high


def _student_inside(t: float, freedom: int) -> float:
    """Probability of `-t .. t`."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = total = cosine if odd else 1.0
    if freedom == 1:
        total = 0.0
    for k in range(2 + odd, freedom, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


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
    sums, sizes = _by_document(changes, documents)
    return percentiles(ratio_draws(sums, sizes))


def mean_estimate(changes: Sequence[float], documents: Sequence[Hashable]) -> Estimate:
    """A mean for `spin_trtllm.report.claims.judge`, the documents in the place of traces."""
    sums, sizes = _by_document(changes, documents)
    return Estimate(float(sums.sum() / sizes.sum()), sums / sizes, ratio_draws(sums, sizes))


def ratio_draws(parts: ArrayLike, wholes: ArrayLike) -> NDArray[np.float64]:
    """Ratios of two sums over documents drawn with replacement: all NaN of too few documents.

    Equally many documents are drawn alike, so that ratios of the same documents can be compared
    draw by draw.

    Args:
        parts, wholes: one of each document, such as drafts accepted and proposed.

    Returns:
        float64 `[RESAMPLES]`.
    """
    parts, wholes = np.asarray(parts), np.asarray(wholes)
    count = len(wholes)
    if count < LEAST_DOCUMENTS:
        return np.full(RESAMPLES, np.nan)
    times = _times(count)
    ratios: NDArray[np.float64] = (times @ parts) / (times @ wholes)
    return ratios


@lru_cache
def _times(count: int) -> NDArray[np.float64]:
    """How often each document is in a resample: `[RESAMPLES, count]`."""
    draws = np.random.default_rng(_SEED).multinomial(
        count, np.full(count, 1 / count), size=RESAMPLES
    )
    return draws.astype(np.float64)


def percentiles(draws: NDArray[np.float64]) -> tuple[float, float] | None:
    """The ends that leave out equally many draws on either side; None where a draw is NaN."""
    if not np.isfinite(draws).all():
        return None
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(draws, [tail, 100 - tail])
    return float(low), float(high)


def _by_document(
    values: Sequence[float] | NDArray[np.int64], documents: Sequence[Hashable]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Sum of each document's values, and how many it has."""
    number = {document: n for n, document in enumerate(dict.fromkeys(documents))}
    of_value = np.array([number[document] for document in documents])
    return np.bincount(of_value, weights=values), np.bincount(of_value)


def _sign_test(lost: int, gained: int) -> float:
    """Two-sided: both tails of a fair coin thrown `lost + gained` times."""
    throws = lost + gained
    tail = sum(math.comb(throws, k) for k in range(min(lost, gained) + 1))
    return float(min(1.0, 2 * tail / 2**throws))
