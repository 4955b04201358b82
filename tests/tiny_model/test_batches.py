# SPDX-License-Identifier: Apache-2.0
"""Batches: each a function of seed and step, of training text only, with answers marked."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.tiny_model.batches import LOSS_ROWS, Batches
from benchmarks.tiny_model.episodes import recall_episode, task_episode
from benchmarks.tiny_model.model import BOS
from benchmarks.tiny_model.stages import STAGES
from spin_trtllm.errors import SpinError
from spin_trtllm.recall import Draws

FILLER = b"The quick brown fox jumps over the lazy dog. " * 90
FACT = re.compile(rb'(?:\n\[| of |\n")([a-z]+ [a-z]+)(?: = | is |": ")(\w{4})')
QUESTION = re.compile(rb'(?:\n\[| of |\nlookup\(")([a-z]+ [a-z]+)(?: \? |\? Answer: |"\) -> ")$')


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), length=st.sampled_from([256, 2_048, 8_192]))
def test_every_question_can_be_answered(seed, length):
    episode = recall_episode(Draws(seed), length, FILLER)
    assert len(episode.text) == length
    told = {}
    for fact in FACT.finditer(episode.text):
        told.setdefault(fact[1], (fact[2], fact.start(2)))
    for question in episode.asked:
        place = question.place
        value = episode.text[place]
        earlier = slice(place.start - question.distance_bytes, place.stop - question.distance_bytes)
        assert question.distance_bytes > 0
        assert episode.text[earlier] == value
        key = QUESTION.search(episode.text[: place.start])[1]
        assert told[key][0] == value
        assert told[key][1] < place.start


def test_long_episodes_ask_far_back():
    distances = [
        question.distance_bytes
        for seed in range(20)
        for question in recall_episode(Draws(seed), 8_192, FILLER).asked
    ]
    assert min(distances) < 100
    assert max(distances) > 5_000


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.sampled_from([2_048, 8_192, 32_768]))
def test_task_episodes_hold_their_answers(seed, length):
    episode = task_episode(Draws(seed), length, (FILLER * 10)[:length])
    assert len(episode.text) == length
    assert episode.asked
    for question in episode.asked:
        place = question.place
        earlier = slice(place.start - question.distance_bytes, place.stop - question.distance_bytes)
        assert episode.text[place] == episode.text[earlier]
        assert len(episode.text[place]) == 4


def test_tasks_take_their_share_of_a_batch(corpus, stage):
    batch = Batches(corpus.train, stage(scale=8, recall_share=0.25, task_share=0.5), seed=0)[0]
    assert batch.tokens.shape == (4, 2_048)
    assert batch.texts == 1
    assert batch.asked.any(dim=1).tolist() == [False, True, True, True]


def test_where_sequences_are_few_tasks_come_first(corpus, stage):
    """0.7 of two sequences are tasks and 0.7 recall: on average more than there is room for."""
    batches = Batches(corpus.train, stage(scale=8, recall_share=0.7, task_share=0.7), seed=0)
    seen = [batches[step] for step in (6, 7)] + [batches[step] for step in range(4)]
    assert {batch.texts for batch in seen} <= {0, 1}
    assert {len(batch.tokens) for batch in seen} == {2, 4}


def test_a_batch_depends_on_seed_stage_and_step_alone(corpus, stage):
    batches = Batches(corpus.train, stage(), seed=3)
    late = batches[5]
    assert torch.equal(Batches(corpus.train, stage(), seed=3)[5].targets, late.targets)
    for other in (
        batches[4],
        Batches(corpus.train, stage(), seed=4)[5],
        Batches(corpus.train, stage(number=2), seed=3)[5],
    ):
        assert not torch.equal(other.targets, late.targets)


def test_shapes_marks_and_shift(corpus, stage):
    batches = Batches(corpus.train, stage(), seed=0)
    for step, length in ((0, 256), (7, 512)):
        batch = batches[step]
        assert batch.tokens.shape == batch.targets.shape == (1_024 // length, length)
        assert batch.tokens[:, 0].tolist() == [BOS] * (1_024 // length)
        assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
        assert batch.texts == 1_024 // length // 2
        assert not batch.asked[: batch.texts].any()
        assert batch.asked[batch.texts :].any()
        assert set(batch.weights[batch.asked].tolist()) == {6.0}
        assert set(batch.weights[~batch.asked].tolist()) == {1.0}
        assert len(set(batch.loss_rows.tolist())) == min(LOSS_ROWS, length)
        assert batch.loss_rows.max() < length


def test_recall_share_holds_on_average_where_sequences_are_few(corpus, stage):
    batches = Batches(corpus.train, stage(steps=400, recall_share=0.35), seed=0)
    in_pairs = [2 - batches[step].texts for step in range(300, 400)]
    assert set(in_pairs) == {0, 1}
    assert 50 < sum(in_pairs) < 90  # 0.7 of 100, give or take four deviations


def test_text_shorter_than_a_sequence_is_refused(corpus, stage):
    with pytest.raises(SpinError, match="text: got 512, allowed: more than 512 bytes"):
        Batches(corpus.train[:512], stage(), seed=0)


def test_stages_have_the_documented_lengths():
    assert {number: stage.steps for number, stage in STAGES.items()} == {
        1: 2_840,
        2: 1_114,
        3: 2_100,
    }
    for number, lengths in ((1, [2_048, 8_192]), (2, [8_192, 32_768]), (3, [2_048, 8_192, 32_768])):
        phases = STAGES[number].phases
        assert sorted({phase.length for phase in phases}) == lengths
        modes = [(phase.teach_indexer, phase.sparse) for phase in phases]
        assert list(dict.fromkeys(modes)) == [(False, False), (True, False), (True, True)]
        assert sum(phase.seconds for phase in phases) < 520


def test_learning_rates_rise_then_fall(stage):
    some = stage(steps=400)
    rates = [some.learning_rates_at(step) for step in range(some.steps)]
    of_model, of_indexer = ([pair[i] for pair in rates] for i in range(2))
    top = of_model.index(max(of_model))
    assert 0 < top < 20
    assert of_model[:top] == sorted(of_model[:top])
    assert of_model[top:] == sorted(of_model[top:], reverse=True)
    assert of_model[-1] < 0.05 * some.learning_rate
    assert set(of_indexer[:200]) == {0.0}
    assert max(of_indexer) == pytest.approx(some.indexer_learning_rate, rel=0.05)


@pytest.mark.parametrize("step", [-1, 8])
def test_steps_outside_the_stage_are_refused(stage, step):
    with pytest.raises(SpinError, match=rf"step: got {step}, allowed: 0 \.\. 7"):
        stage().phase_at(step)
