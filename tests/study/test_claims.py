# SPDX-License-Identifier: Apache-2.0
"""Claims about answers are held against two cells of the same question."""

import json
from dataclasses import asdict

import pytest

from benchmarks.study.cells import DENSE, PARTS, RECALL_8K, RECALL_32K, Cell, Question
from benchmarks.study.claims import CLAIMS, NOT_RUN, judge_answers
from spin_trtllm.report.claims import FAILS, HOLDS, UNDECIDED

RIGHT = [[True] * 4] * 8
SOME = [[True] * 4] * 4 + [[True, False, True, True]] * 4
FEW = [[True, False, False, True]] * 8
ONE = [[True] * 4] * 7 + [[True, True, False, True]]
MIXED = [[False, True, True, True]] * 4 + [[True] * 4] * 4


def save(folder, cell, right):
    result = {"cell": asdict(cell), "source": "one model and text", "right": right}
    (folder / f"{cell.name}.json").write_text(json.dumps(result), encoding="utf-8")


def judged(folder, before, now, claim=CLAIMS[0]):
    save(folder, Cell(claim.now.question, *DENSE), RIGHT)
    save(folder, claim.before, before)
    save(folder, claim.now, now)
    return judge_answers(folder)


@pytest.mark.parametrize(
    ("before", "now", "gained", "lost", "verdict"),
    [
        (FEW, RIGHT, 16, 0, HOLDS),
        (SOME, RIGHT, 4, 0, HOLDS),
        (RIGHT, RIGHT, 0, 0, UNDECIDED),
        (SOME, MIXED, 4, 4, UNDECIDED),
        (RIGHT, ONE, 0, 1, UNDECIDED),
        (RIGHT, SOME, 0, 4, FAILS),
        (RIGHT, FEW, 0, 16, FAILS),
    ],
)
def test_answers_are_paired(before, now, gained, lost, verdict, tmp_path):
    first, *others = judged(tmp_path, before, now)
    assert (first["gained"], first["lost"], first["answers"]) == (gained, lost, 32)
    assert (first["right"], first["right_before"]) == (sum(map(sum, now)), sum(map(sum, before)))
    assert first["difference"] == pytest.approx((gained - lost) / 32)
    assert first["low"] <= first["difference"] <= first["high"]
    assert first["verdict"] == verdict
    assert {one["verdict"] for one in others} == {NOT_RUN}


def test_few_documents_decide_nothing(tmp_path):
    first, *_ = judged(tmp_path, FEW[:7], RIGHT[:7])
    assert (first["low"], first["high"], first["verdict"]) == (None, None, UNDECIDED)


def test_a_claim_without_one_of_its_cells_is_not_run(tmp_path):
    claim = CLAIMS[0]
    save(tmp_path, Cell(claim.now.question, *DENSE), RIGHT)
    save(tmp_path, claim.now, RIGHT)
    assert judge_answers(tmp_path) == [{"claim": one.text, "verdict": NOT_RUN} for one in CLAIMS]


def test_claims_compare_cells_of_one_question_that_are_run():
    cells = {cell for part in PARTS.values() for cell in part}
    assert len({claim.text for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.before.question == claim.now.question
        assert {claim.before, claim.now} <= cells


def test_claims_are_made_at_both_lengths():
    def methods(question: Question):
        pairs = [(c.before, c.now) for c in CLAIMS if c.now.question == question]
        return {
            (f"{before.method} {before.setting:g}", f"{now.method} {now.setting:g}")
            for before, now in pairs
        }

    at_both = {
        ("spin_unexplored 0.4", "spin 0.4"),
        ("spin_unexplored 0.5", "spin 0.5"),
        ("spin_64 0.4", "spin_query 0.8"),
        ("dense 0", "spin_query_30 0.5"),
    }
    at_32k = {
        ("spin_64_unexplored 0.4", "spin_64 0.4"),
        ("spin_64_unexplored 0.5", "spin_64 0.5"),
    }
    assert methods(RECALL_8K) == at_both
    assert methods(RECALL_32K) == at_both | at_32k
