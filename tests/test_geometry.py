# SPDX-License-Identifier: Apache-2.0
"""Integer unit arithmetic: tables worked out by hand, and exact fractions."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spin_trtllm.geometry import (
    Budget,
    accepted_drafts,
    block_budget,
    count_blocks,
    last_position,
    query_slot,
    slot_byte_offset,
    to_ppm,
    visible_slots,
)

quick = settings(max_examples=300, deadline=None, derandomize=True)
MOST_TOKENS = 1_048_576
MOST_BLOCKS = 131_072  # a million tokens at ratio 1 and block size 8

block_sizes = st.sampled_from((8, 16, 32, 64, 128))
ratios = st.sampled_from((1, 2, 4, 7))
blocks = st.one_of(st.integers(0, 12), st.integers(0, MOST_BLOCKS), st.just(MOST_BLOCKS))
sparsities = st.one_of(
    st.integers(0, 999_999), st.sampled_from((0, 1, 400_000, 700_000, 990_000, 999_999))
)
explorations = st.one_of(
    st.integers(0, 1_000_000), st.sampled_from((0, 1, 50_000, 999_999, 1_000_000))
)
top_ks = st.one_of(st.integers(1, 4096), st.integers(1, 2**31 - 1))


def parts(budget: Budget) -> tuple[int, int, int, int]:
    """kept, forced, ranked, explored."""
    found = (
        budget.kept_blocks,
        budget.forced_blocks,
        budget.ranked_blocks,
        budget.explored_blocks,
    )
    assert all(type(x) is int for x in found)
    return found  # type: ignore[return-value]


def plan(b: int, rho: float, gamma: float = 0.0, top_k: int = 1, size: int = 8) -> tuple[int, ...]:
    return parts(
        block_budget(
            b,
            top_k=top_k,
            block_size_slots=size,
            sparsity_ppm=to_ppm(rho),
            exploration_ppm=to_ppm(gamma),
        )
    )


# ---------------------------------------------------------------- tokens, slots, blocks
def test_ten_positions_at_ratio_4() -> None:
    assert [visible_slots(p, 4) for p in range(10)] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert [query_slot(p, 4) for p in range(10)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_ratio_1_sees_itself() -> None:
    assert [visible_slots(p, 1) for p in range(4)] == [1, 2, 3, 4]
    assert [query_slot(p, 1) for p in range(4)] == [0, 1, 2, 3]


def test_blocks_around_one_page() -> None:
    assert [count_blocks(n, 64) for n in (0, 1, 63, 64, 65, 128, 129)] == [0, 1, 1, 1, 2, 2, 3]
    assert count_blocks(4097, 64) == 65


def test_a_padding_row_sees_nothing() -> None:
    for ratio in (1, 2, 4):
        assert visible_slots(-1, ratio) == 0
        assert visible_slots(torch.tensor([-1]), ratio).tolist() == [0]


@quick
@given(position=st.integers(0, MOST_TOKENS - 1), ratio=ratios, size=block_sizes)
@example(position=MOST_TOKENS - 1, ratio=1, size=8)
@example(position=0, ratio=4, size=64)
def test_units_against_fractions(position: int, ratio: int, size: int) -> None:
    slots = floor(Fraction(position + 1, ratio))
    assert visible_slots(position, ratio) == slots
    assert query_slot(position, ratio) == floor(Fraction(position, ratio))
    assert count_blocks(slots, size) == ceil(Fraction(slots, size))
    as_tensor = torch.tensor([position], dtype=torch.int64)
    assert visible_slots(as_tensor, ratio).tolist() == [slots]
    assert query_slot(as_tensor, ratio).tolist() == [position // ratio]
    assert count_blocks(torch.tensor([slots]), size).tolist() == [count_blocks(slots, size)]
    # every visible slot has an offset >= 0, and one more would not be complete
    assert query_slot(position, ratio) - (slots - 1) >= 0 or slots == 0
    assert slots * ratio <= position + 1 < (slots + 1) * ratio


def test_byte_offsets_past_two_gigabytes() -> None:
    # 8191 * 262144 = 2147221504 and 8192 * 262144 = 2**31, by hand
    assert slot_byte_offset(8191, 262_144, 0, 1) == 2_147_221_504
    assert slot_byte_offset(8192, 262_144, 0, 1) == 2_147_483_648
    assert slot_byte_offset(8192, 262_656, 5, 4) == 8_606_711_828  # (8192 * 262656 + 5) * 4


def test_accepted_drafts_are_read_off_the_next_start() -> None:
    assert [accepted_drafts(100, following) for following in (101, 102, 104)] == [0, 1, 3]
    assert accepted_drafts(100, 100) == -1
    starts, following = torch.tensor([5, 9, 7]), torch.tensor([6, 12, -1])
    assert accepted_drafts(starts, following).tolist() == [0, 2, -9]


def test_the_last_position_of_a_capacity() -> None:
    assert last_position(24, 1) == 23
    assert last_position(44, 4) == 178  # 179 completes slot 44
    assert last_position(0, 4) == 2  # three tokens, and no slot yet


@quick
@given(slots=st.integers(0, MOST_TOKENS), ratio=ratios)
def test_the_last_position_against_fractions(slots: int, ratio: int) -> None:
    last = last_position(slots, ratio)
    assert floor(Fraction(last + 1, ratio)) == slots
    assert floor(Fraction(last + 2, ratio)) == slots + 1


# ---------------------------------------------------------------- parts per million
@pytest.mark.parametrize(
    ("fraction", "ppm"),
    [
        (0.0, 0),
        (0.05, 50_000),
        (0.29, 290_000),  # int(0.29e6) would be 289999
        (0.4, 400_000),
        (0.57, 570_000),  # int(0.57e6) would be 569999
        (0.7, 700_000),
        (0.999999, 999_999),
        (1.0, 1_000_000),
        (1e-6, 1),
        (4e-7, 0),
        (6e-7, 1),
    ],
)
def test_ppm_rounds_to_nearest(fraction: float, ppm: int) -> None:
    assert to_ppm(fraction) == ppm


@quick
@given(ppm=st.integers(0, 1_000_000))
def test_ppm_is_exact_for_six_decimals(ppm: int) -> None:
    assert to_ppm(float(f"{ppm // 1_000_000}.{ppm % 1_000_000:06d}")) == ppm


# ---------------------------------------------------------------- budgets
def test_the_case_that_floating_point_gets_wrong() -> None:
    assert ceil((1 - 0.7) * 10) == 4  # why there is no float here
    assert plan(10, 0.7) == (3, 2, 1, 0)


@pytest.mark.parametrize(
    ("b", "rho", "gamma", "top_k", "size", "expected"),
    [
        (0, 0.4, 0.05, 512, 64, (0, 0, 0, 0)),
        (1, 0.4, 0.05, 512, 64, (1, 1, 0, 0)),
        (2, 0.99, 1.0, 1, 8, (2, 2, 0, 0)),
        (3, 0.99, 1.0, 1, 8, (2, 2, 0, 0)),  # floor(2.97) dropped leaves 1, forced makes it 2
        (5, 0.4, 0.05, 1, 8, (3, 2, 0, 1)),  # 5 - 2 kept; ceil(0.15) = 1 explored
        (5, 0.4, 0.0, 1, 8, (3, 2, 1, 0)),
        (100, 0.4, 0.05, 512, 64, (60, 2, 55, 3)),  # ceil(0.05 * 60) = 3
        (101, 0.4, 0.05, 512, 64, (61, 2, 55, 4)),  # floor(40.4) dropped; ceil(3.05) = 4
        (100, 0.99, 0.05, 512, 64, (8, 2, 5, 1)),  # ceil(512 / 64) = 8 blocks fill the top-k
        (5, 0.99, 0.05, 512, 64, (5, 2, 2, 1)),  # the top-k asks for more blocks than there are
        (100, 0.99, 0.05, 513, 64, (9, 2, 6, 1)),
        (100, 0.0, 0.05, 512, 64, (100, 2, 93, 5)),
        (10, 0.5, 1.0, 1, 8, (5, 2, 0, 3)),  # exploration takes all that is not forced
        (10, 0.5, 0.2, 1, 8, (5, 2, 2, 1)),  # ceil(0.2 * 5) is exactly 1
        (10, 0.5, 0.200001, 1, 8, (5, 2, 1, 2)),
        (131_072, 0.4, 0.05, 2048, 8, (78_644, 2, 74_709, 3_933)),
        (131_072, 0.999999, 0.000001, 1, 8, (2, 2, 0, 0)),
    ],
)
def test_budget_by_hand(
    b: int, rho: float, gamma: float, top_k: int, size: int, expected: tuple[int, ...]
) -> None:
    assert plan(b, rho, gamma, top_k, size) == expected


@quick
@given(b=blocks, top_k=top_ks, size=block_sizes, rho=sparsities, gamma=explorations)
@example(b=10, top_k=1, size=8, rho=700_000, gamma=0)
@example(b=MOST_BLOCKS, top_k=2048, size=8, rho=999_999, gamma=1_000_000)
def test_budget_against_fractions(b: int, top_k: int, size: int, rho: int, gamma: int) -> None:
    settings_ = {
        "top_k": top_k,
        "block_size_slots": size,
        "sparsity_ppm": rho,
        "exploration_ppm": gamma,
    }
    forced = len({0, b - 1}) if b else 0
    dropped = floor(Fraction(rho, 1_000_000) * b)
    kept = max(min(b, max(ceil(Fraction(top_k, size)), b - dropped)), forced)
    explored = min(ceil(Fraction(gamma, 1_000_000) * kept), kept - forced)
    expected = (kept, forced, kept - explored - forced, explored)
    found = parts(block_budget(b, **settings_))
    assert found == expected
    assert found[0] == sum(found[1:]) <= b
    assert min(found) >= 0
    assert bool(found[3]) == (gamma > 0 and kept > forced)  # when on, at least one is explored
    # The tensor path, next to other rows, gives the same.
    rows = block_budget(torch.tensor([[b, 0], [MOST_BLOCKS, b]]), **settings_)
    for name, value in zip(("kept", "forced", "ranked", "explored"), expected, strict=True):
        tensor = getattr(rows, f"{name}_blocks")
        assert tensor.dtype == torch.int64
        assert tensor.shape == (2, 2)
        assert tensor[0, 0] == tensor[1, 1] == value
        assert tensor[0, 1] == 0
    spare = 0 if kept == b else kept - ceil(Fraction(top_k, size))
    assert block_budget(b, **settings_).spare_blocks == spare
    assert torch.as_tensor(rows.spare_blocks)[0].tolist() == [spare, 0]


@quick
@given(b=st.integers(0, 4096), rho=sparsities)
def test_more_sparsity_never_keeps_more(b: int, rho: int) -> None:
    less = plan(b, rho / 1e6)[0]
    more = plan(b, min(rho + 1000, 999_999) / 1e6)[0]
    assert more <= less
    assert plan(b, 0.0)[0] == b
