# SPDX-License-Identifier: Apache-2.0
"""Reference operations on blocks and averages, each against an independent computation."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spin_trtllm.config import STATE_DTYPES
from spin_trtllm.reference import (
    observe_scores,
    select_blocks,
)
from spin_trtllm.reference.averages import read_averages
from spin_trtllm.reference.select_blocks import explore_priorities, mix

INF, NAN = float("inf"), float("nan")
quick = settings(max_examples=60, deadline=None, derandomize=True)
B = 8  # slots a block, in most tests


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def visible(position: int, ratio: int, blocks: list[bool]) -> list[int]:
    """Visible slots of the kept blocks, by the definition."""
    return [i for i in range((position + 1) // ratio) if blocks[i // B]]


# ---------------------------------------------------------------- priorities
def signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def test_the_mixer_is_splitmix64() -> None:
    # First outputs of the published generator seeded with 0 and 1234567.
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(1234567) == 6457827717110365317
    assert mix(2**64 - 1) == oracle.mix(2**64 - 1)


@quick
@given(
    seed=st.one_of(st.integers(0, 2**64 - 1), st.sampled_from((0, 2**63, 2**64 - 1))),
    ids=st.lists(
        st.one_of(
            st.integers(0, 9), st.integers(2**63, 2**64 - 1), st.sampled_from((2**63, 2**64 - 1))
        ),
        min_size=1,
        max_size=3,
    ),
    layer=st.integers(0, 100),
    p0=st.integers(0, 2**20),
)
def test_priorities_against_the_oracle(seed: int, ids: list[int], layer: int, p0: int) -> None:
    found = explore_priorities(
        torch.tensor([signed(i) for i in ids]),
        torch.full((len(ids),), layer),
        torch.tensor([p0 + s for s in range(len(ids))]),
        20,
        seed=seed,
    )
    assert found.dtype == torch.int64
    for s, sequence_id in enumerate(ids):
        wanted = [oracle.priority(seed, sequence_id, layer, p0 + s, j) for j in range(20)]
        assert found[s].tolist() == wanted
    assert int(found.min()) >= 0
    assert int(found.max()) < 2**32


def test_priorities_change_with_everything_they_depend_on() -> None:
    def row(sequence_id: int = 1, layer: int = 2, p0: int = 3, seed: int = 4) -> tuple[int, ...]:
        arguments = (torch.tensor([x]) for x in (sequence_id, layer, p0))
        return tuple(explore_priorities(*arguments, 16, seed=seed)[0].tolist())

    base = row()
    assert row() == base
    others = {row(sequence_id=2), row(layer=3), row(p0=4), row(seed=5), row(sequence_id=-1)}
    assert len(others | {base}) == 6


def test_exploration_reaches_every_skipped_block_evenly() -> None:
    """Over 400 steps each of the 18 free blocks is explored about as often as any other."""
    counts = torch.zeros(20)
    arguments = {
        "ratio": 1,
        "block_size_slots": 8,
        "top_k": 1,
        "sparsity_ppm": 800_000,  # 4 kept: 2 forced and 2 explored
        "exploration_ppm": 1_000_000,
        "seed": 9,
    }
    for step in range(400):
        selection = select_blocks(
            torch.zeros(1, 1, 20),
            torch.tensor([[159 - (step % 8)]]),
            torch.tensor([True]),
            torch.tensor([step // 8]),
            torch.tensor([0]),
            **arguments,
        )
        assert int(selection.blocks.sum()) == 4
        assert int(selection.explored_blocks.sum()) == 2
        counts += selection.explored_blocks[0]
    assert counts[[0, 19]].tolist() == [0, 0]
    # 800 draws over 18 blocks: mean 44, standard deviation below 7
    assert float(counts[1:19].min()) > 20
    assert float(counts.max()) < 70


# ---------------------------------------------------------------- select_blocks
def test_ties_between_blocks_go_to_the_lower_block() -> None:
    selection = select_blocks(
        torch.zeros(1, 1, 10),
        torch.tensor([[79]]),
        torch.tensor([True]),
        torch.tensor([0]),
        torch.tensor([0]),
        ratio=1,
        block_size_slots=8,
        top_k=1,
        sparsity_ppm=500_000,
        exploration_ppm=0,
        seed=0,
    )
    assert selection.blocks[0].nonzero().squeeze(-1).tolist() == [0, 1, 2, 3, 9]
    assert not selection.explored_blocks.any()


def test_even_minus_infinity_outranks_a_block_that_is_not_there() -> None:
    scores = torch.tensor([[[-INF, -INF, -3.4e38, -INF, -INF, 5.0, 9.0]]])
    selection = select_blocks(
        scores,
        torch.tensor([[39]]),  # five blocks of eight
        torch.tensor([True]),
        torch.tensor([0]),
        torch.tensor([0]),
        ratio=1,
        block_size_slots=8,
        top_k=32,
        sparsity_ppm=900_000,
        exploration_ppm=0,
        seed=0,
    )
    assert selection.blocks[0].tolist() == [True, True, True, False, True, False, False]


# ---------------------------------------------------------------- observe_scores
def test_observation_by_hand() -> None:
    # two rows at p = 1 and 2, ratio 1: q = 1 and 2; alpha = 0.25
    v, d = torch.tensor([[4.0, 8, 0]]), torch.tensor([[0.0, 4, 8, 0]])
    scores = torch.tensor([[[8.0, NAN, 77], [16.0, INF, -4]]])
    observe_scores(
        v,
        d,
        torch.tensor([0]),
        scores,
        torch.ones(1, 1, dtype=torch.bool),
        torch.tensor([[1, 2]]),
        torch.tensor([1]),
        ratio=1,
        block_size_slots=8,
        ema_decay=0.25,
    )
    # row 0: V[0] = 1 + 6 = 7, D[1] = 1 + 6 = 7; slot 1 is NaN
    # row 1: V[0] = 1.75 + 12, D[2] = 2 + 12; slot 1 infinite; V[2] = 0 - 3, D[0] = 0 - 3
    assert v.tolist() == [[13.75, 8.0, -3.0]]
    assert d.tolist() == [[-3.0, 7.0, 14.0, 0.0]]


@pytest.mark.parametrize(
    ("policy", "accepted", "expected"),
    [
        ("prefix", [0, 2, 3], [0.5, 2.125, 3.0625]),
        ("row0", [0, 2, 3], [0.5, 0.5, 0.5]),
        ("prefix", [-1, -1, -1], [0.0, 0.0, 0.0]),
        ("row0", [-1, 0, -1], [0.0, 0.5, 0.0]),
    ],
)
def test_only_accepted_rows_are_learnt(
    policy: str, accepted: list[int], expected: list[float]
) -> None:
    """Row j carries the constant j + 1; alpha = 0.5, so V[0] is a sum of halves, by hand.

    After rows 0..2: 0.5 -> 0.25 + 1 -> 0.625 + 1.5 = 2.125; row 3 adds 2 to its half.
    """
    v, d = torch.zeros(3, 16), torch.zeros(3, 17)
    scores = torch.arange(1.0, 5.0).view(1, 4, 1).expand(3, 4, 16).contiguous()
    observe_scores(
        v,
        d,
        torch.arange(3),
        scores,
        torch.ones(3, 2, dtype=torch.bool),
        torch.tensor([[10, 11, 12, 13]] * 3),
        torch.tensor(accepted),
        ratio=1,
        block_size_slots=8,
        ema_decay=0.5,
        update_policy=policy,
    )
    assert v[:, 0].tolist() == expected
    assert v.isfinite().all()


def test_other_lanes_keep_their_bits() -> None:
    g = generator(5)
    v, d = torch.randn(5, 24, generator=g), torch.randn(5, 25, generator=g)
    before = v.clone(), d.clone()
    observe_scores(
        v,
        d,
        torch.tensor([3, 1]),
        torch.randn(2, 1, 24, generator=g),
        torch.tensor([[True, True, False], [True, False, True]]),
        torch.tensor([[23], [20]]),
        torch.tensor([0, 0]),
        ratio=1,
        block_size_slots=8,
        ema_decay=0.5,
    )
    for lane in (0, 2, 4):
        assert torch.equal(v[lane], before[0][lane])
        assert torch.equal(d[lane], before[1][lane])
    changed = (v != before[0]).nonzero().tolist()
    wanted = [[1, i] for i in [*range(8), *range(16, 21)]] + [[3, i] for i in range(16)]
    assert changed == wanted
    # q = 20 and 23: offsets q - i of the same slots
    offsets = [[1, o] for o in sorted(20 - i for i in [*range(8), *range(16, 21)])]
    offsets += [[3, o] for o in sorted(23 - i for i in range(16))]
    assert (d != before[1]).nonzero().tolist() == offsets


@pytest.mark.parametrize("state_dtype", ["bf16", "log8"])
def test_averages_are_rounded_after_each_row(state_dtype: str) -> None:
    dtype = STATE_DTYPES[state_dtype]
    v, d = torch.zeros(1, 8, dtype=dtype), torch.zeros(1, 9, dtype=dtype)
    values = [2.0, 257.0, 1.0 / 3.0, -7.7, 1e-40, 3e38, -2e38, 0.1]
    scores = torch.tensor([[values, values[::-1]]])
    observe_scores(
        v,
        d,
        torch.tensor([0]),
        scores,
        torch.ones(1, 1, dtype=torch.bool),
        torch.tensor([[7, 8]]),
        torch.tensor([1]),
        ratio=1,
        block_size_slots=8,
        ema_decay=0.9,
    )
    alpha, rest = np.float32(0.9), np.float32(1.0 - 0.9)
    for i in range(8):
        x = np.float32(0)
        for z in (np.float32(values[i]), np.float32(values[7 - i])):
            total = np.float32(np.float32(alpha * x) + np.float32(rest * z))
            x = oracle.ROUNDINGS[state_dtype](total)
        assert float(read_averages(v)[0, i]) == float(x)
    assert math.isfinite(float(read_averages(v).abs().max()))


def test_eight_bits_take_no_score_that_is_not_finite_and_keep_signs() -> None:
    """At alpha = 0.5 from 0: half the score, rounded; what is too large stands at the end."""
    v, d = torch.zeros(1, 8, dtype=torch.int8), torch.zeros(1, 9, dtype=torch.int8)
    v[0], d[0] = 5, 6
    v[0, :6], d[0, 2:8] = 0, 0
    observe_scores(
        v,
        d,
        torch.tensor([0]),
        torch.tensor([[[2.0, -2.0, 0.0, 1e-6, 1e9, -1e9, NAN, -INF]]]),
        torch.ones(1, 1, dtype=torch.bool),
        torch.tensor([[7]]),
        torch.tensor([0]),
        ratio=1,
        block_size_slots=8,
        ema_decay=0.5,
    )
    assert v.tolist() == [[89, -89, 0, 0, 127, -127, 5, 5]]
    assert d.tolist() == [[6, 6, -127, 127, 0, 0, -89, 89, 6]]
