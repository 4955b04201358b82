# SPDX-License-Identifier: Apache-2.0
"""Task documents: the answers follow from the context alone, by readers written for each task."""

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.study.tasks import ORDINALS, TASKS, dialogue, task_document
from spin_trtllm.errors import SpinError
from spin_trtllm.recall import STYLES

FILLER = b"The quick brown fox jumps over the lazy dog. " * 7
LENGTHS = (4_096, 8_192, 32_768)

# Written out by hand from the formats: facts of a text, and what a prompt asks for.
FACTS = re.compile(
    rb"\n\[(\w+ \w+) = (\w+(?: \w+)?)\]\n"
    rb"|\nNote: the \w+ of (\w+ \w+) is (\w+(?: \w+)?)\.\n"
    rb'|\n"(\w+ \w+)": "(\w+(?: \w+)?)",\n'
)
QUESTIONS = re.compile(
    rb"\n\[([\w ]+) \? $|\nQuestion: what is the \w+ of ([\w ]+)\? Answer: $"
    rb'|\nlookup\("([\w ]+)"\) -> "$'
)


def facts_of(text):
    """Key and value of each fact, in the order of telling."""
    found = [tuple(filter(None, match.groups())) for match in FACTS.finditer(text)]
    return [(key.decode(), value) for key, value in found]


def values_of(facts, key):
    return [value for told, value in facts if told == key]


def follow(facts, key):
    (value,) = values_of(facts, key)
    return follow(facts, value.decode()) if b" " in value else value


def read_answers(task, facts, asked):
    """The answers to one question, read off the facts by somebody who knows the task."""
    if task == "multi_value":
        return values_of(facts, asked)
    if task == "multi_needle":
        ordinal, key = asked.split(" ", 1)
        return [values_of(facts, key)[ORDINALS.index(ordinal)]]
    if task == "aggregation":
        ((most, times), (_, next_most), *_) = Counter(
            values_of(facts, asked.removeprefix("usual "))
        ).most_common()
        assert times > next_most
        return [most]
    if task == "variable_tracking":
        assert b" " in values_of(facts, asked)[0]
        return [follow(facts, asked)]
    (value,) = values_of(facts, asked)
    return [value]


def questions_of(document):
    """What each question asks for, and all its answers: a prompt of one blank goes on answering."""
    found = []
    for question in document.questions:
        if question.prompt == b" ":
            found[-1][1].append(question.answer)
        else:
            match = QUESTIONS.search(question.prompt)
            found.append((next(filter(None, match.groups())).decode(), [question.answer]))
    return found


def assert_distances(text, start, questions):
    """Each answer stands where its distance says, as well as where it is asked for."""
    for question in questions:
        start += len(question.prompt)
        told = start - question.distance_bytes
        assert 0 <= told < start
        assert text[start : start + 4] == text[told : told + 4] == question.answer
        start += len(question.answer + question.end)
    return start


@settings(max_examples=60, deadline=None)
@given(
    task=st.sampled_from(list(TASKS)),
    seed=st.integers(0, 2**32),
    context_bytes=st.sampled_from(LENGTHS),
    style=st.sampled_from(range(len(STYLES))),
)
def test_answers_follow_from_the_context(task, seed, context_bytes, style):
    queries = 1 if task == "single" else 4
    document = task_document(
        task, seed, context_bytes=context_bytes, queries=queries, filler=FILLER, style=style
    )
    assert len(document.context) == context_bytes
    assert len(document.questions) == queries
    facts = facts_of(document.context)
    for asked, answers in questions_of(document):
        assert answers == read_answers(task, facts, asked)
    text = document.context + document.asked
    assert assert_distances(text, context_bytes, document.questions) == len(text)


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ("single", 1),
        ("multi_key", 64),  # one in 128 bytes
        ("multi_query", 4),
        ("multi_value", 4),
        ("multi_needle", 8),
        ("variable_tracking", 12),  # four chains of a value and two hops
        ("aggregation", 48),  # four keys, each told twelve times
    ],
)
def test_how_much_each_task_tells(task, told):
    queries = 1 if task == "single" else 4
    document = task_document(task, 0, context_bytes=8_192, queries=queries, filler=FILLER)
    assert len(facts_of(document.context)) == told


def test_chains_are_two_hops_long():
    document = task_document("variable_tracking", 0, context_bytes=8_192, queries=8, filler=FILLER)
    facts = dict(facts_of(document.context))
    for asked, _ in questions_of(document):
        assert b" " in facts[asked]
        assert b" " in facts[facts[asked].decode()]
        assert b" " not in facts[facts[facts[asked].decode()].decode()]


def test_needles_are_asked_for_in_any_order():
    asked = []
    for seed in range(10):
        document = task_document(
            "multi_needle", seed, context_bytes=4_096, queries=4, filler=FILLER
        )
        asked.append([ORDINALS.index(key.split()[0]) for key, _ in questions_of(document)])
    assert {number for numbers in asked for number in numbers} == set(range(8))
    assert not all(numbers == sorted(numbers) for numbers in asked)


def test_facts_of_different_groups_are_mixed():
    document = task_document(
        "variable_tracking", 0, context_bytes=8_192, queries=8, filler=FILLER, style=0
    )
    values = [b" " in value for _, value in facts_of(document.context)]
    assert values != sorted(values)  # not all starts of chains first
    assert values[:3] * 8 != values  # nor chain after chain


def test_documents_differ_by_seed_alone():
    def text(seed):
        document = task_document("multi_key", seed, context_bytes=4_096, queries=4, filler=FILLER)
        return document.context + document.asked

    assert text(1) == text(1)
    assert text(1) != text(2)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), turns=st.integers(1, 6), queries=st.integers(1, 6))
def test_dialogues_ask_for_old_and_new_facts_once(seed, turns, queries):
    parts = dialogue(seed, turns=turns, turn_bytes=1_024, queries=queries, filler=FILLER)
    assert len(parts) == turns
    text = b"".join(part.context + part.asked for part in parts)
    end, facts, asked_before = 0, [], set()
    for number, part in enumerate(parts):
        assert len(part.context) == 1_024
        assert len(part.questions) == queries
        new = facts_of(part.context)
        assert len(new) == 2 * queries
        keys = [asked for asked, _ in questions_of(part)]
        assert len([key for key in keys if values_of(new, key)]) == queries - (
            queries // 2 if number else 0
        )
        assert asked_before.isdisjoint(keys)
        asked_before.update(keys)
        facts += new
        for asked, answers in questions_of(part):
            assert answers == values_of(facts, asked)
        end = assert_distances(text, end + 1_024, part.questions)
    assert end == len(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "poetry"}, "task: got 'poetry', allowed: single, multi_key"),
        ({"queries": 0}, "queries: got 0, allowed: an integer >= 1"),
        ({"queries": 6}, "queries: got 6, allowed: a multiple of 4"),
        ({"task": "single"}, "queries: got 4, allowed: 1: a single fact"),
        ({"filler": b""}, "filler: got b'', allowed: at least one byte"),
        ({"context_bytes": 99}, "context_bytes: got 99, allowed: enough for 4 facts"),
        ({"task": "multi_query", "queries": 5_000}, "queries: got 'more facts than keys'"),
    ],
)
def test_impossible_documents_are_refused(arguments, message):
    usual = {"task": "multi_value", "context_bytes": 4_096, "queries": 4, "filler": FILLER}
    with pytest.raises(SpinError, match=re.escape(message)):
        task_document(seed=0, **(usual | arguments))


@pytest.mark.parametrize("name", ["turns", "queries"])
def test_empty_dialogues_are_refused(name):
    usual = {"turns": 2, "turn_bytes": 1_024, "queries": 2, "filler": FILLER}
    with pytest.raises(SpinError, match=f"{name}: got 0, allowed: an integer >= 1"):
        dialogue(0, **(usual | {name: 0}))
