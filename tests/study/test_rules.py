# SPDX-License-Identifier: Apache-2.0
"""What single rules learn and decide, on made-up scores: blocks of one slot, four of them."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.study.methods.heavy_hitters import HeavyHitters
from benchmarks.study.methods.index_cache import IndexCache
from benchmarks.study.methods.previous_picks import PreviousPicks
from benchmarks.study.methods.streaming import Streaming
from benchmarks.study.methods.tisa import Tisa

NEVER = float("-inf")
THREE_OF_FOUR = 250_000


def step(slots=4, rows=1, number=0, top_k=1):
    """As much of a step as these rules look at."""
    return SimpleNamespace(
        layer=1,
        number=number,
        sequences=1,
        rows=rows,
        slots=slots,
        keys=torch.zeros(1, slots, 2),
        visible=torch.ones(1, rows, slots, dtype=torch.bool),
        geometry=SimpleNamespace(top_k=top_k),
        blocks=lambda size: -(-slots // size),
    )


def of_one_slot(rule):
    rule.block_size_slots = 1
    return rule


def scores(*rows):
    return torch.tensor([rows])


def kept(rule, at=None):
    return rule.keep(at or step())[0].nonzero()[:, 0].tolist()


def test_heavy_hitters_add_what_is_above_zero():
    rule = of_one_slot(HeavyHitters(THREE_OF_FOUR))
    assert rule.keep(step()) is None
    rule.learn(step(), scores([0.0, 1.0, 3.0, 0.0]), 0)
    rule.learn(step(), scores([0.0, 0.5, -3.0, NEVER]), 0)
    assert kept(rule) == [0, 2, 3]
    rule.learn(step(rows=3), scores([0.0] * 4, [0, 2, 0, 0], [0, 0, 9, 0]), 1)  # not the last row
    assert kept(rule) == [0, 1, 3]
    rule.forget()
    assert rule.keep(step()) is None


def test_previous_picks_are_of_the_last_accepted_row():
    rule = of_one_slot(PreviousPicks())
    assert rule.keep(step()) is None
    rule.picked(step(rows=3), torch.tensor([[[1], [2], [-1]]]))
    rule.learn(step(rows=3), None, 1)
    assert kept(rule) == [0, 2, 3]
    rule.picked(step(rows=3), torch.tensor([[[1], [2], [-1]]]))
    rule.learn(step(rows=3), None, 2)
    assert kept(rule) == [0, 3]  # a pad is no pick


def test_tisa_picks_among_fresh_and_cached_scores():
    rule = of_one_slot(Tisa(THREE_OF_FOUR))
    rule.learn(step(), scores([0.0, 5.0, 1.0, 0.0]), 0)
    assert kept(rule) == [0, 2, 3]
    fresh = scores([0.0, NEVER, 2.0, 0.0])
    assert rule.pick(step(), fresh).tolist() == [[[1]]]
    assert rule.pick(step(top_k=2), fresh).tolist() == [[[1, 2]]]
    rule.learn(step(rows=2), scores([0.0, NEVER, 2.0, 0.0], [0.0, NEVER, 9.0, 0.0]), 0)
    assert kept(rule) == [0, 1, 3]
    assert rule.pick(step(), scores([0.0, 1.0, NEVER, 0.0])).tolist() == [[[2]]]


def test_streaming_keeps_the_oldest_and_the_newest():
    assert kept(of_one_slot(Streaming(500_000)), step(slots=8)) == [0, 5, 6, 7]


@pytest.mark.parametrize(("every", "scoring"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (4, [0])])
def test_index_cache_scores_every_so_many_layers(every, scoring):
    rule = IndexCache(every)
    assert [n for n in range(4) if rule.keep(step(number=n)) is None] == scoring
    rule.picked(step(), torch.tensor([[[3]]]))
    assert rule.pick(step(number=1), None).tolist() == [[[3]]]
