# SPDX-License-Identifier: Apache-2.0
"""The paper's tables of answers, from cells made before misses were counted, and since."""

import pytest

from benchmarks.study.paper import (
    acceptance_found,
    acceptance_rows,
    difference,
    exploration_claims,
    exploration_found,
    quality_rows,
)
from benchmarks.study.sections import sections_of
from spin_trtllm.report.claims import FAILS, HOLDS, UNDECIDED

DOCUMENTS = 8
ALL, HALF = ([[True, second]] * DOCUMENTS for second in (True, False))
SOME = [*ALL[:4], *HALF[4:]]
MISSES = {"realized_sparsity": 0.3912, "mean_miss": 0.0421, "p99_miss": 0.2969}


def result(method, setting=0.0, right=ALL, task="recall", **more):
    question = {"task": task, "context_bytes": 8_192, "documents": DOCUMENTS, "queries": 2}
    question["drafts"] = 3 if "tokens" in more else None
    cost = {"keys": 1, "dense_keys": 1, "products": 1, "dense_products": 1, "bytes_share": 1.0}
    cell = {"question": question, "method": method, "setting": setting}
    return {"cell": cell, "right": right, "cost": cost, **more}


def questions(*results):
    return {"recall at 8,192 bytes, 8 documents, 2 answers each": [result("dense"), *results]}


def test_cells_with_misses_and_without_stand_in_one_table():
    asked = questions(
        result("spin", 0.4, HALF, **MISSES),
        result("spin", 0.2),
        result("spin_unexplored", 0.4, SOME),
        result("hisa", 0.4),
    )
    assert quality_rows(asked) == [
        {
            "question": "recall at 8,192 bytes",
            "method": "`spin` 0.2",
            **dict.fromkeys(("realized", "mean miss", "p99 miss"), "-"),
            "less dense": "+0.000 (+0.000 to +0.000)",
            "less unexplored": "-",
            "answers": "16 of 16",
        },
        {
            "question": "recall at 8,192 bytes",
            "method": "`spin` 0.4",
            **{"realized": "0.391", "mean miss": "0.042", "p99 miss": "0.297"},
            "less dense": "-0.500 (-0.500 to -0.500)",
            "less unexplored": "-0.250 (-0.438 to -0.062)",
            "answers": "8 of 16",
        },
        {
            "question": "recall at 8,192 bytes",
            "method": "`spin_unexplored` 0.4",
            **dict.fromkeys(("realized", "mean miss", "p99 miss"), "-"),
            "less dense": "-0.250 (-0.438 to -0.062)",
            "less unexplored": "-",
            "answers": "12 of 16",
        },
    ]


@pytest.mark.parametrize(
    ("explored", "unexplored", "verdict", "said"),
    [
        (SOME, HALF, HOLDS, "They agree on 1 of 1 comparisons."),
        (HALF, SOME, FAILS, "They contradict the paper on 1 of 1 comparisons."),
        (SOME, SOME, UNDECIDED, "They neither confirm nor contradict it on 1 of 1 comparisons."),
    ],
)
def test_the_claim_is_judged_where_both_were_run(explored, unexplored, verdict, said):
    asked = questions(
        result("spin_64", 0.5, explored),
        result("spin_64_unexplored", 0.5, unexplored),
        result("spin", 0.4),
        result("spin", 0.3, explored),  # the paper claims nothing at 30 %
        result("spin_unexplored", 0.3, unexplored),
    )
    ((sparsity, name, claim),) = exploration_claims(asked)
    assert (sparsity, name[:6], claim.verdict) == (0.5, "recall", verdict)
    found = exploration_found(asked)
    assert f"{verdict} 1" in found[-1]
    assert "Without exploration at 40%: not run." in found
    assert difference([claim]) == said


def test_plain_text_is_measured_but_no_claim_of_answers():
    asked = {
        "text at 8,192 bytes": [
            result(method, 0.4, ALL, "text", nats=[[nats, nats]] * 4 + [[nats, 1.0]] * 4)
            for method, nats in (("dense", 1.0), ("spin", 1.1), ("spin_unexplored", 1.2))
        ]
    }
    assert list(exploration_claims(asked)) == []
    row = quality_rows(asked)[0]
    assert row["answers"] == "1.0750 nats"
    assert row["less unexplored"].startswith("-0.075 (-0.")
    _, text = sections_of(asked)
    assert text.paper == ""  # no figure of so few methods


def drafted(method, setting, accepted, **more):
    tokens = [[0] * 4] * DOCUMENTS
    totals = {"tokens": tokens, "proposed": 60, "accepted": accepted, "steps_of_rows": {"4": 16}}
    return result(method, setting, task="text", **totals | more)


def by_document(method, setting, accepted):
    more = {"proposed": [8] * DOCUMENTS, "verifications": [2] * DOCUMENTS}
    return drafted(method, setting, accepted, **more)


def test_acceptance_lengths_have_an_interval_where_documents_are_known():
    uneven = [0, 1, 2, 3, 4, 5, 6, 3]
    asked = {
        "text at 8,192 bytes, 8 documents": [
            by_document("dense", 0, [3] * DOCUMENTS),
            by_document("spin", 0.4, uneven),
            by_document("spin_row0_mask", 0.4, [n - 1 for n in [1, *uneven[1:]]]),
            drafted("spin", 0.6, 16),
            by_document("hisa", 0.6, uneven),
        ]
    }
    rows = {row["method"]: row for row in acceptance_rows(asked)}
    assert list(rows) == ["`dense`", "`spin` 0.4", "`spin_row0_mask` 0.4", "`spin` 0.6"]
    assert rows["`dense`"]["tokens a step"] == "2.500 (2.500 to 2.500)"
    assert rows["`dense`"]["less dense"] == "-"
    spin = rows["`spin` 0.4"]
    assert spin["policies"] == "union mask, prefix update"
    assert spin["tokens a step"].startswith("2.500 (1.")
    assert spin["less dense"].startswith("+0.000 (-0.")
    row0 = rows["`spin_row0_mask` 0.4"]
    assert row0["policies"] == "row-0 mask, prefix update"
    assert row0["less `spin`"].startswith("-0.438 (-0.500 to -0.")
    assert rows["`spin` 0.6"]["tokens a step"] == "2.000"
    assert rows["`spin` 0.6"]["less dense"] == "-0.500 (no interval)"
    found = acceptance_found(asked)
    assert found[0].startswith("text at 8,192 bytes, `spin` 0.4: 2.500 (1.")
    assert "less those of `spin` 0.4 -0.438 (" in found[1]


def test_the_report_has_what_was_run_and_no_more():
    asked = {"single at 8,192 bytes": [result(m, 0.4, task="single") for m in ("dense", "spin")]}
    titles = [section.title for section in sections_of(asked)]
    assert titles == ["Tables 2 to 5: quality against sparsity", "single at 8,192 bytes"]
    asked = {"text at 8,192 bytes": [drafted("dense", 0, 16), drafted("spin", 0.4, 16)]}
    table7, drafts = sections_of(asked)
    assert table7.title.startswith("Table 7")
    assert "lower p99 miss than updating with row 0 alone" in table7.paper
    assert list(drafts.tables) == ["Drafts."]  # what follows a text is not in the text
