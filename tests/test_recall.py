# SPDX-License-Identifier: Apache-2.0
"""Recall documents: every question has one fact, at the distance it says, in a known format."""

import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spin_trtllm.errors import SpinError
from spin_trtllm.recall import ANSWER_BYTES, STYLES, RecallDocument, recall_document

FILLER = b"The quick brown fox jumps over the lazy dog. " * 7

# Written out by hand from the training formats: (fact, question), value last.
PATTERNS = [
    (rb"\n\[([a-z]+ [a-z]+) = (\w{4})\]\n", rb"\n\[([a-z]+ [a-z]+) \? $"),
    (
        rb"\nNote: the \w+ of ([a-z]+ [a-z]+) is (\w{4})\.\n",
        rb"\nQuestion: what is the \w+ of ([a-z]+ [a-z]+)\? Answer: $",
    ),
    (rb'\n"([a-z]+ [a-z]+)": "(\w{4})",\n', rb'\nlookup\("([a-z]+ [a-z]+)"\) -> "$'),
]


def whole_text(document: RecallDocument) -> bytes:
    return document.context + document.asked


@given(
    seed=st.integers(0, 2**32),
    queries=st.integers(1, 20),
    spare_bytes=st.integers(0, 3_000),
    style=st.sampled_from(range(len(STYLES))),
)
def test_each_question_asks_for_one_fact_at_its_distance(seed, queries, spare_bytes, style):
    context_bytes = 2 * queries * 60 + spare_bytes
    document = recall_document(
        seed, context_bytes=context_bytes, queries=queries, filler=FILLER, style=STYLES[style]
    )
    fact_pattern, question_pattern = PATTERNS[style]
    facts = re.findall(fact_pattern, document.context)
    values = dict(facts)
    assert len(document.context) == context_bytes
    assert len(facts) == len(values) == 2 * queries
    assert len(document.questions) == queries

    text, place, asked = whole_text(document), context_bytes, set()
    for question, answer in zip(document.questions, document.answer_places, strict=True):
        key = re.search(question_pattern, question.prompt).group(1)
        asked.add(key)
        assert question.answer == values[key]
        assert len(question.answer) == ANSWER_BYTES
        place += len(question.prompt)
        assert answer == slice(place - context_bytes, place - context_bytes + ANSWER_BYTES)
        start = place - question.distance_bytes
        assert text[start : start + ANSWER_BYTES] == question.answer
        assert start < context_bytes
        place += len(question.answer + question.end)
    assert len(asked) == queries
    assert place == len(text)


def test_an_answer_is_right_only_when_all_its_bytes_are():
    document = recall_document(0, context_bytes=600, queries=4, filler=FILLER)
    tokens = list(document.asked)
    assert document.share_right(tokens) == 1
    tokens[0] = 256  # outside every answer
    tokens[document.answer_places[1].stop - 1] = 256
    assert [document.is_right(number, tokens) for number in range(4)] == [True, False, True, True]
    assert document.share_right(tokens) == 0.75


def test_filler_is_read_in_order_and_over_again():
    document = recall_document(3, context_bytes=2_000, queries=4, filler=FILLER, style=STYLES[0])
    without_facts = re.sub(PATTERNS[0][0], b"", document.context)
    assert without_facts == (FILLER * 7)[: len(without_facts)]


def test_distances_range_over_the_context():
    document = recall_document(0, context_bytes=7_200, queries=24, filler=FILLER)
    distances = sorted(q.distance_bytes for q in document.questions)
    assert distances[0] < 1_500
    assert distances[-1] > 6_000


def test_seeds_use_all_styles_and_both_kinds_of_value():
    documents = [
        recall_document(seed, context_bytes=600, queries=2, filler=FILLER) for seed in range(20)
    ]
    assert len({d.questions[0].end for d in documents}) == len(STYLES)
    assert {d.questions[0].answer.isdigit() for d in documents} == {True, False}


def test_a_document_is_the_same_everywhere():
    """The committed demo figures belong to exactly these bytes; hence a digest, not a property."""
    text = whole_text(recall_document(0, context_bytes=7_200, queries=24, filler=FILLER))
    assert (
        hashlib.sha256(text).hexdigest()
        == "2407cb51860056e5b67ee056c055c4c728e5a308437ee15e6bd2235bece88792"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context_bytes": 100}, "context_bytes: got 100, allowed: enough for 16 facts"),
        ({"queries": 0}, "queries: got 0, allowed: 1 .. "),
        ({"queries": 10_000}, "queries: got 10000, allowed: 1 .. "),
        ({"filler": b""}, "filler: got b'', allowed: at least one byte"),
    ],
)
def test_impossible_documents_are_refused(arguments, message):
    with pytest.raises(SpinError, match=re.escape(message)):
        recall_document(0, **{"context_bytes": 2_000, "queries": 8, "filler": FILLER} | arguments)
