# SPDX-License-Identifier: Apache-2.0
"""Methods are compared where SPIN reads as much, on a line between its cells."""

import pytest

from benchmarks.study.equal_bytes import match_all, match_rows
from benchmarks.study.rows import BETTER, EVEN, UNKNOWN, WORSE
from benchmarks.study.sections import _against_spin

DOCUMENTS = 10
ALL, HALF, NONE = ([[first, second]] * DOCUMENTS for first, second in ((1, 1), (1, 0), (0, 0)))


def result(method, share, right, setting=0.0, task="recall", **more):
    right = [[bool(one) for one in document] for document in right]
    cell = {"question": {"task": task}, "method": method, "setting": setting}
    return {"cell": cell, "right": right, "cost": {"bytes_share": share}, **more}


CURVE = [
    result("dense", 1.0, ALL),
    result("spin", 0.6, ALL, 0.4),
    result("spin", 0.4, HALF, 0.6),
]


@pytest.mark.parametrize(
    ("share", "right", "between", "spin", "verdict"),
    [
        (0.5, ALL, (0.4, 0.6), 0.75, BETTER),
        (0.5, HALF, (0.4, 0.6), 0.75, WORSE),
        (0.6, ALL, (0.4, 0.6), 1.0, EVEN),  # as many as a cell of SPIN
        (0.4, HALF, (0.4, 0.4), 0.5, EVEN),  # its last cell
        (0.399, HALF, (0.4, 0.4), 0.5, EVEN),
        (0.8, ALL, (0.6, 1.0), 1.0, EVEN),
        (1.1, HALF, (0.6, 1.0), 1.0, WORSE),  # more than dense: next to dense
    ],
)
def test_spin_is_met_at_the_bytes_of_the_method(share, right, between, spin, verdict):
    (match,) = match_all([*CURVE, result("hisa", share, right, 0.5)])
    assert match.between == between
    assert match.spin == pytest.approx(spin)
    mean = sum(map(sum, right)) / (2 * DOCUMENTS)
    assert match.difference == pytest.approx(mean - spin)
    assert match.verdict == verdict
    assert not match.is_below


def test_less_text_is_better():
    more = {"task": "text"}
    dense = result("dense", 1.0, ALL, nats=[[1.0, 1.0]] * DOCUMENTS, **more)
    spin = result("spin", 0.5, ALL, 0.5, nats=[[1.5, 2.5]] * DOCUMENTS, **more)
    hisa = result("hisa", 0.75, ALL, 0.5, nats=[[1.0, 1.4]] * DOCUMENTS, **more)
    (match,) = match_all([dense, spin, hisa])
    assert match.spin == pytest.approx(1.5)
    assert match.difference == pytest.approx(-0.3)
    assert match.verdict == BETTER
    (row,) = match_rows([match])
    assert row == {
        "method": "`hisa` 0.5",
        "bytes": "0.750",
        "nats": "1.200",
        "SPIN": "1.500",
        "from its cells at": "0.500 and 1.000",
        "less SPIN": "-0.300 (-0.300 to -0.300)",
    }


def test_below_the_curve_only_a_better_method_is_told():
    better, worse = match_all(
        [*CURVE, result("hisa", 0.2, ALL, 0.8), result("tisa", 0.2, NONE, 0.8)]
    )
    assert (better.verdict, worse.verdict) == (BETTER, WORSE)
    assert better.is_below
    assert better.between == (0.4, 0.4)
    assert match_rows([better])[0]["from its cells at"] == "0.400, more bytes"
    said = list(_against_spin([*CURVE, better.result, worse.result]))
    assert said == [
        "Better than SPIN at equal bytes or more: `hisa` 0.8.",
        "With fewer bytes than any cell of SPIN, and not better than the nearest: `tisa` 0.8.",
    ]


def test_without_spin_nothing_is_compared():
    assert match_all([CURVE[0], result("tisa", 0.2, ALL)]) == []


def test_few_documents_tell_nothing():
    few = [one | {"right": one["right"][:3]} for one in (*CURVE, result("hisa", 0.5, NONE))]
    (match,) = match_all(few)
    assert match.verdict == UNKNOWN
    assert match_rows([match])[0]["less SPIN"] == "-0.750 (too few documents)"
