# SPDX-License-Identifier: Apache-2.0
"""Reference operations on slots, each against an independent computation."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spin_trtllm.reference import (
    observe_scores,
    predict_blocks,
    score_slots,
    topk_slots,
)
from spin_trtllm.reference.predict_blocks import pool_blocks
from spin_trtllm.reference.topk_slots import best_slots, scored_slots

INF, NAN = float("inf"), float("nan")
quick = settings(max_examples=60, deadline=None, derandomize=True)
B = 8  # slots a block, in most tests


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def visible(position: int, ratio: int, blocks: list[bool]) -> list[int]:
    """Visible slots of the kept blocks, by the definition."""
    return [i for i in range((position + 1) // ratio) if blocks[i // B]]


# ---------------------------------------------------------------- score_slots
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ratio", [1, 4])
def test_scores_against_float64(dtype: torch.dtype, ratio: int) -> None:
    g, s, r, h, d, n = generator(1), 3, 2, 16, 32, 30
    query = torch.randn(s, r, h, d, generator=g).to(dtype)
    keys = torch.randn(s, n, d, generator=g).to(dtype)
    weights = torch.randn(s, r, h, generator=g).to(dtype)  # negative weights too
    blocks = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    last = n * ratio - 1
    positions = torch.tensor([[last - 1, last], [5 * ratio, 5 * ratio + 1], [9, 10]])
    z = score_slots(query, keys, weights, blocks, positions, ratio=ratio, block_size_slots=B)
    assert z.dtype == torch.float32
    assert z.shape == (s, r, n)
    dots = torch.einsum("srhd,snd->srhn", query.double(), keys.double()).clamp(min=0)
    expected = torch.einsum("srh,srhn->srn", weights.double(), dots)
    assert (expected < 0).any()
    assert (expected > 0).any()
    seen = 0
    for i in range(s):
        for row in range(r):
            slots = visible(int(positions[i, row]), ratio, blocks[i].tolist())
            others = [j for j in range(n) if j not in slots]
            torch.testing.assert_close(
                z[i, row, slots].double(), expected[i, row, slots], rtol=1e-5, atol=1e-4
            )
            assert (z[i, row, others] == -INF).all()
            seen += len(slots)
    assert seen > 40


def test_a_score_by_hand() -> None:
    # heads (1, 0) and (0, 1); key (2, -3): relu gives 2 and 0; weights -1.5 and 7 give -3
    query = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    keys = torch.tensor([[[2.0, -3.0], [-1.0, 4.0]]])
    weights = torch.tensor([[[-1.5, 7.0]]])
    positions, blocks = torch.tensor([[1]]), torch.ones(1, 1, dtype=torch.bool)
    z = score_slots(query, keys, weights, blocks, positions, ratio=1, block_size_slots=8)
    assert z.tolist() == [[[-3.0, 28.0]]]


def test_keys_of_skipped_blocks_are_never_touched() -> None:
    g = generator(2)
    query, weights = torch.randn(1, 1, 4, 8, generator=g), torch.randn(1, 1, 4, generator=g)
    keys = torch.randn(1, 24, 8, generator=g)
    poisoned = keys.clone()
    poisoned[:, 8:16] = NAN
    poisoned[:, 20:] = INF
    blocks, positions = torch.tensor([[True, False, True]]), torch.tensor([[19]])
    arguments = {"ratio": 1, "block_size_slots": 8}
    clean = score_slots(query, keys, weights, blocks, positions, **arguments)
    dirty = score_slots(query, poisoned, weights, blocks, positions, **arguments)
    assert torch.equal(clean, dirty)
    assert (clean[0, 0, 8:16] == -INF).all()
    assert (clean[0, 0, 20:] == -INF).all()
    assert clean[0, 0, :8].isfinite().all()


def test_scoring_nothing() -> None:
    empty = score_slots(
        torch.zeros(0, 2, 4, 8),
        torch.zeros(0, 16, 8),
        torch.zeros(0, 2, 4),
        torch.zeros(0, 2, dtype=torch.bool),
        torch.zeros(0, 2, dtype=torch.int64),
        ratio=4,
        block_size_slots=8,
    )
    assert empty.shape == (0, 2, 16)
    padding = score_slots(
        torch.ones(1, 2, 4, 8),
        torch.ones(1, 16, 8),
        torch.ones(1, 2, 4),
        torch.ones(1, 2, dtype=torch.bool),
        torch.full((1, 2), -1),
        ratio=4,
        block_size_slots=8,
    )
    assert (padding == -INF).all()


# ---------------------------------------------------------------- topk_slots
def literal_topk(row: list[float], slots: list[int], k: int) -> list[int]:
    ranked = sorted(slots, key=lambda i: (-(row[i] if row[i] == row[i] else -INF), i))[:k]
    return ranked + [-1] * (k - len(ranked))


@quick
@given(
    seed=st.integers(0, 2**31),
    k=st.integers(1, 70),
    n=st.integers(1, 60),
    ratio=st.sampled_from((1, 4)),
    palette=st.sampled_from(
        (
            (0.0,),
            (0.0, -0.0),
            (0.0, 0.0, 0.0, 1.0, -1.0),
            (NAN, 1.0, -INF, INF),
            (NAN,),
            (-INF,),
            None,
        )
    ),
)
def test_topk_against_sorting(
    seed: int, k: int, n: int, ratio: int, palette: tuple[float, ...] | None
) -> None:
    source = random.Random(seed)
    draw = source.random if palette is None else lambda: source.choice(palette)
    scores = torch.tensor([[[draw() for _ in range(n)] for _ in range(3)] for _ in range(2)])
    blocks = torch.tensor([[source.random() < 0.6 for _ in range(-(-n // B))] for _ in range(2)])
    positions = torch.tensor([[source.randrange(n * ratio) for _ in range(3)] for _ in range(2)])
    positions[1, 2] = -1
    found = topk_slots(scores, blocks, positions, top_k=k, ratio=ratio, block_size_slots=B)
    assert found.dtype == torch.int32
    assert found.shape == (2, 3, k)
    for s in range(2):
        for row in range(3):
            slots = visible(int(positions[s, row]), ratio, blocks[s].tolist())
            assert found[s, row].tolist() == literal_topk(scores[s, row].tolist(), slots, k)


def test_lowest_slots_win_a_plateau() -> None:
    """ReLU makes most scores exactly zero: the lower slots win, at every repeat."""
    scores = torch.zeros(1, 1, 1000)
    scores[0, 0, 990:] = torch.arange(10, 0, -1).float()
    scores[0, 0, 500] = -0.0
    blocks, positions = torch.ones(1, 125, dtype=torch.bool), torch.tensor([[999]])
    expected = [*range(990, 1000), *range(502)]
    for _ in range(50):
        found = topk_slots(scores, blocks, positions, top_k=512, ratio=1, block_size_slots=8)
        assert found[0, 0].tolist() == expected


@pytest.mark.parametrize("poison", [INF, NAN, 3e38])
def test_topk_never_reads_outside_what_was_scored(poison: float) -> None:
    scores = torch.randn(2, 2, 40, generator=generator(3))
    blocks = torch.tensor([[1, 0, 1, 0, 1], [0, 1, 1, 0, 1]], dtype=torch.bool)
    positions = torch.tensor([[30, 36], [33, 34]])
    dirty = torch.full_like(scores, poison)
    for s in range(2):
        for row in range(2):
            slots = visible(int(positions[s, row]), 1, blocks[s].tolist())
            dirty[s, row, slots] = scores[s, row, slots]
            assert len(slots) < 40
    arguments = {"top_k": 12, "ratio": 1, "block_size_slots": B}
    clean = topk_slots(scores, blocks, positions, **arguments)
    assert torch.equal(topk_slots(dirty, blocks, positions, **arguments), clean)
    arguments = {"ratio": 1, "block_size_slots": B, "ema_decay": 0.5}
    states = []
    for buffer in (scores, dirty):
        v, d = torch.zeros(2, 40), torch.zeros(2, 41)
        accepted = torch.tensor([1, 0])
        observe_scores(v, d, torch.arange(2), buffer, blocks, positions, accepted, **arguments)
        states.append(torch.cat([v, d], 1))
    assert torch.equal(*states)
    assert states[0].any()


@pytest.mark.parametrize("batch", [32, 33, 64])
def test_lengths_below_one_slot_give_padding_only(batch: int) -> None:
    positions = torch.arange(batch).remainder(3).unsqueeze(1)  # tokens 0..2 at ratio 4: no slot
    blocks = torch.ones(batch, 4, dtype=torch.bool)
    scores = torch.full((batch, 1, 32), NAN)
    found = topk_slots(scores, blocks, positions, top_k=8, ratio=4, block_size_slots=8)
    assert (found == -1).all()
    v, d = torch.zeros(batch, 32), torch.zeros(batch, 33)
    predicted = predict_blocks(v, d, torch.arange(batch), positions, ratio=4, block_size_slots=8)
    assert predicted.shape == (batch, 1, 4)
    assert (predicted == -INF).all()


def test_topk_of_no_slots_or_no_rows() -> None:
    nothing = torch.zeros(2, 1, 0)
    mask = torch.zeros(2, 1, 0, dtype=torch.bool)
    assert best_slots(nothing, mask, 5).tolist() == [[[-1] * 5]] * 2
    assert best_slots(torch.zeros(0, 1, 9), torch.zeros(0, 1, 9, dtype=torch.bool), 5).shape == (
        0,
        1,
        5,
    )
    assert best_slots(torch.zeros(1, 1, 9), torch.ones(1, 1, 9).bool(), 0).shape == (1, 1, 0)


def test_scored_slots_are_visible_and_kept() -> None:
    blocks = torch.tensor([[True, False, True]])
    found = scored_slots(blocks, torch.tensor([[-1, 2, 70]]), 20, ratio=4, block_size_slots=8)
    assert found.int().tolist() == [[[0] * 20, [0] * 20, [1] * 8 + [0] * 8 + [1] + [0] * 3]]


# ---------------------------------------------------------------- predict_blocks
def test_prediction_by_hand() -> None:
    # N = 5 slots, blocks of 8 would be one: use two blocks of a 10-slot state.
    v = torch.tensor([[1.0, -2, 0, 0, 0, 0, 0, 0, 0, -5]])
    d = torch.tensor([[-1.0, 3, 0, 0, 0, 0, 0, 0, -4, -9, 100]])
    positions = torch.tensor([[9, 8, 0, -1]])
    found = predict_blocks(v, d, torch.tensor([0]), positions, ratio=1, block_size_slots=8)
    # row 0, q = 9: slots 8 and 9 have offsets 1 and 0: max(0, 3), max(-5, -1)
    # row 1, q = 8: slot 7 has offset 1, so block 0 gets 3; slot 8 has max(0, -1) = 0
    # row 2, q = 0: only slot 0 with offset 0: max(1, -1) = 1; block 1 is not there
    assert found.tolist() == [[[1.0, 3.0], [3.0, 0.0], [1.0, -INF], [-INF, -INF]]]


@quick
@given(seed=st.integers(0, 2**31), ratio=st.sampled_from((1, 4)), dtype=st.booleans())
def test_prediction_against_loops(seed: int, ratio: int, dtype: bool) -> None:
    g, n = generator(seed), 37
    storage = torch.bfloat16 if dtype else torch.float32
    v, d = (
        torch.randn(4, n, generator=g).to(storage),
        torch.randn(4, n + 1, generator=g).to(storage),
    )
    lanes = torch.randperm(4, generator=g)[:2]
    positions = torch.randint(0, n * ratio, (2, 3), generator=g)
    found = predict_blocks(v, d, lanes, positions, ratio=ratio, block_size_slots=B)
    assert found.shape == (2, 3, 5)
    for s in range(2):
        lane_v, lane_d = v[lanes[s]].tolist(), d[lanes[s]].tolist()
        for row in range(3):
            p = int(positions[s, row])
            expected = [-INF] * 5
            for i in range((p + 1) // ratio):
                zhat = max(lane_v[i], lane_d[p // ratio - i])
                expected[i // B] = max(expected[i // B], zhat)
            assert found[s, row].tolist() == expected


@pytest.mark.parametrize("pooling", ["max", "top4", "mean"])
def test_pooling_by_hand(pooling: str) -> None:
    values = torch.tensor([8.0, 4, 2, 1, 0, 0, 0, 1, -3, -5, -INF])
    by_hand = {"max": [8.0, -3.0], "top4": [3.75, -4.0], "mean": [2.0, -4.0]}
    assert pool_blocks(values, 8, pooling).tolist() == by_hand[pooling]
    absent = pool_blocks(torch.full((9,), -INF), 8, pooling)
    assert absent.tolist() == [-INF, -INF]
    assert pool_blocks(torch.zeros(2, 0), 8, pooling).shape == (2, 0)


@quick
@given(seed=st.integers(0, 2**31), n=st.integers(1, 40), size=st.sampled_from((8, 16)))
def test_pooling_against_numpy(seed: int, n: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(n).astype(np.float32)
    blocks = [values[i : i + size].astype(np.float64) for i in range(0, n, size)]
    expected = {
        "max": [b.max() for b in blocks],
        "mean": [b.mean() for b in blocks],
        "top4": [np.sort(b)[-4:].mean() for b in blocks],
    }
    for pooling, wanted in expected.items():
        found = pool_blocks(torch.from_numpy(values), size, pooling)
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-6)
