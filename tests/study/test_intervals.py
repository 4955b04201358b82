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
    assert share_interval(right, answers) == pytest.approx((low, high), abs=1e-4)
    mirrored = share_interval(answers - right, answers)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-4)


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


@pytest.mark.parametrize(("right", "answers"), [(1, 0), (3, 2), (-1, 2)])
def test_impossible_counts_are_refused(right, answers):
    with pytest.raises(SpinError, match=r"answers: got 0, |right: got"):
        share_interval(right, answers)


@pytest.mark.parametrize("lengths", [(0, 0, 0), (2, 1, 2), (2, 2, 1)])
def test_unpaired_answers_are_refused(lengths):
    with pytest.raises(SpinError, match="allowed: equal lengths of at least 1"):
        compare(*([True] * length for length in lengths))
