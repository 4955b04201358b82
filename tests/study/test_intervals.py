# SPDX-License-Identifier: Apache-2.0
"""Intervals against published values, symmetry, and how often they hold the truth."""

import math

import numpy as np
import pytest

from benchmarks.study import intervals
from benchmarks.study.intervals import compare, share_interval
from spin_trtllm.errors import SpinError


@pytest.mark.parametrize(
    ("right", "answers", "low", "high"),
    [  # Newcombe (1998), Statistics in Medicine 17, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_published_intervals(right, answers, low, high):
    alone = range(answers)  # a document each
    found = [True] * right + [False] * (answers - right)
    assert share_interval(found, alone) == pytest.approx((low, high), abs=1e-4)
    mirrored = share_interval([not one for one in found], alone)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-4)


@pytest.mark.parametrize(
    ("freedom", "quantile"),  # of the tables of Student's distribution, two-sided 95 %
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (7, 2.3646), (24, 2.0639), (100, 1.9840)],
)
def test_student_quantiles(freedom, quantile):
    assert intervals._student_quantile(freedom) == pytest.approx(quantile, abs=1e-4)


def test_a_share_of_few_documents_by_hand():
    """Half of 20 documents of ten answers know all: as sure as 19 answers of 19 documents."""
    right = [n // 10 % 2 == 0 for n in range(200)]
    low, high = share_interval(right, [n // 10 for n in range(200)])
    t, answers = 2.0930, 19  # design effect 10 * 20 / 19
    half = math.sqrt(t * t / answers / 4 + (t * t / answers) ** 2 / 4) / (1 + t * t / answers)
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-4)
    alone = share_interval(right, range(200))
    assert high - low > 2.5 * (alone[1] - alone[0])


def test_answers_alike_in_all_documents_count_singly():
    few, many = (share_interval([True] * 32, [n % k for n in range(32)]) for k in (2, 16))
    assert few[0] < many[0] < share_interval([True] * 32, range(32))[0]
    assert few[1] == many[1] == 1.0
    assert share_interval([True, False], "aa") is None


def test_shares_hold_the_truth_about_as_often_as_they_say():
    """Documents differ: the interval that takes answers as independent holds it far too rarely."""
    draws = np.random.default_rng(2)
    held = naive = 0
    for _ in range(400):
        of_document = draws.beta(2, 1, size=(25, 1))  # 2/3 on average
        right = (draws.random((25, 8)) < of_document).flatten().tolist()
        low, high = share_interval(right, np.repeat(range(25), 8).tolist())
        held += low <= 2 / 3 <= high
        low, high = share_interval(right, range(200))
        naive += low <= 2 / 3 <= high
    assert 370 <= held <= 392  # 95 % of 400 is 380
    assert naive < 340


def test_a_comparison_by_hand():
    before = [True, True, True, True, False, True]
    now = [True, False, False, True, True, False]
    found = compare(before * 4, now * 4, documents=[n // 2 for n in range(24)])
    assert (found.answers, found.lost, found.gained) == (24, 12, 4)
    assert found.difference == pytest.approx(-2 / 6)
    tail = sum(math.comb(16, k) for k in range(5)) / 2**16
    assert found.sign_p == pytest.approx(2 * tail)
    # Changes by document: -1, -1, 0 of two answers each, four times: the mean of twelve draws of
    # -1/2, -1/2, 0 has a standard deviation of sqrt(1/18 / 12) = 0.068.
    low, high = found.interval
    assert -0.333 - 2.3 * 0.068 < low < -0.333 - 1.5 * 0.068
    assert -0.333 + 1.5 * 0.068 < high < -0.333 + 2.3 * 0.068


def test_too_few_documents_give_no_interval():
    few = compare([True] * 70, [True] * 70, documents=[n // 10 for n in range(70)])
    enough = compare([True] * 80, [True] * 80, documents=[n // 10 for n in range(80)])
    assert few.interval is None
    assert enough.interval == (0.0, 0.0)


def test_equal_answers_differ_by_nothing():
    found = compare([True, False] * 8, [True, False] * 8, documents=list("aabbccddeeffgghh"))
    assert (found.lost, found.gained, found.difference) == (0, 0, 0.0)
    assert found.interval == (0.0, 0.0)
    assert found.sign_p == 1.0


def test_answers_of_a_document_are_not_taken_as_independent():
    lost = [False] * 40 + [True] * 40  # half of the documents lose every answer
    before = [True] * 80
    wide = compare(before, lost, documents=[n // 10 for n in range(80)])
    narrow = compare(before, lost, documents=list(range(80)))
    assert wide.difference == narrow.difference == -0.5
    assert wide.interval[0] <= -0.75
    assert -0.65 < narrow.interval[0] < -0.55


def test_intervals_hold_the_truth_about_as_often_as_they_say(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 1_000)
    draws = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        of_document = draws.random(60) < 0.3  # 30 % of documents lose half of their answers
        now = draws.random((60, 4)) >= 0.5 * of_document[:, None]
        documents = np.repeat(np.arange(60), 4).tolist()
        low, high = compare([True] * 240, now.flatten().tolist(), documents).interval
        held += low <= -0.15 <= high
    assert 178 <= held <= 199  # 95 % of 200 is 190


@pytest.mark.parametrize(("right", "documents"), [([], []), ([True], [0, 1])])
def test_shares_of_nothing_are_refused(right, documents):
    with pytest.raises(SpinError, match=r"right, documents: got .* allowed: equal lengths of at"):
        share_interval(right, documents)


@pytest.mark.parametrize("lengths", [(0, 0, 0), (2, 1, 2), (2, 2, 1)])
def test_unpaired_answers_are_refused(lengths):
    with pytest.raises(SpinError, match="allowed: equal lengths of at least 1"):
        compare(*([True] * length for length in lengths))
