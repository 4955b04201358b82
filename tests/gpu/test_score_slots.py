# SPDX-License-Identifier: Apache-2.0
"""score_slots on a GPU, against float64 on the same fp8 values."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from cases import capturing
from score_slots_cases import (
    EXACT,
    FAST,
    KEY_BYTES,
    KEY_DIM,
    POISON,
    PORTABLE,
    WILD_PAGE,
    load_library,
    make_case,
    poisoned,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return load_library() or pytest.skip("the kernel library has not been built")


MIXED = [0, 1, 63, 64, 65, 129, 0, 1000, 4097]


@pytest.mark.parametrize("arithmetic", [EXACT, FAST, PORTABLE])
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("page_slots", [32, 64])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_scores_match_float64(library, arithmetic, heads, rows, page_slots, block_size):
    case = make_case(
        MIXED,
        rows=rows,
        heads=heads,
        page_slots=page_slots,
        block_size=block_size,
        arithmetic=arithmetic,
    )
    case.run(library)
    case.check()


@pytest.mark.parametrize("arithmetic", [EXACT, FAST, PORTABLE])
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("rows", [1, 2])
def test_long_sequences(library, arithmetic, heads, rows):
    """Every consumer takes many tiles, and the ring comes around often."""
    case = make_case([150_000, 45_013, 70_007], heads=heads, rows=rows, arithmetic=arithmetic)
    case.run(library)
    case.check()


@pytest.mark.parametrize("arithmetic", [EXACT, FAST, PORTABLE])
@pytest.mark.parametrize("page_slots", [32, 64])
def test_without_a_list_every_block_is_scored(library, arithmetic, page_slots):
    case = make_case(MIXED, page_slots=page_slots, keep=None, arithmetic=arithmetic)
    case.run(library)
    case.check()


@pytest.mark.parametrize("arithmetic", [EXACT, FAST, PORTABLE])
def test_rows_are_scored_alike_alone_and_together(library, arithmetic):
    together = make_case([700, 64, 0, 4097], rows=8, arithmetic=arithmetic)
    together.run(library)
    for rows in range(1, 8):
        query = together.query[:, :rows].contiguous()
        weights = together.weights[:, :rows].contiguous()
        scores = poisoned(4 * rows, together.scores.stride(0))
        replace(together, query=query, weights=weights, scores=scores).run(library)
        expected = together.scores.unflatten(0, (4, 8))[:, :rows].flatten(0, 1)
        assert torch.equal(scores.view(torch.int32), expected.contiguous().view(torch.int32))


@pytest.mark.parametrize("page_slots", [32, 64])
def test_every_tail_length(library, page_slots):
    case = make_case(list(range(130)), page_slots=page_slots, keep=0.5)
    case.run(library)
    case.check()


@pytest.mark.parametrize("sequences", [1, 32, 33, 64])
@pytest.mark.parametrize("keep", [None, 0.5])
def test_all_zero_lengths_write_nothing(library, sequences, keep):
    case = make_case([0] * sequences, rows=2, keep=keep)
    if keep is not None:  # stale lists of finished sequences
        case.block_list.zero_()
        case.block_count.fill_(1)
    case.run(library)
    case.check()


def test_zero_counts_write_nothing(library):
    case = make_case([640, 64, 1000])
    case.block_count.zero_()
    case.run(library)
    case.check()


def test_no_sequences_launch_nothing(library):
    case = make_case([64])
    params = case.params()
    params.sequences = 0
    params.query = params.scores = None
    assert library.spin_score_slots(ctypes.byref(params), None) == 0


def test_bytes_of_a_page(library):
    """Slots 0, 1 and 63 of the last page, each byte placed by hand."""
    case = make_case([64], keep=None)
    last = case.pages.shape[0] - 1
    case.page_table[0, 0] = last
    case.query.fill_(0)
    case.query[0, 0, 5, 17] = 2.0
    case.weights.fill_(0)
    case.weights[0, 0, 5] = 0.5
    one, three = 0x38, 0x44  # 1.0 and 3.0 in e4m3
    flat = case.pages.flatten()
    for slot, code, scale in [(0, one, 0.25), (1, three, 7.0), (63, three, 1024.0)]:
        at = last * 64 * 132
        flat[at + slot * 128 : at + (slot + 1) * 128] = 0
        flat[at + slot * 128 + 17] = code
        as_bytes = torch.tensor([scale]).view(torch.uint8).cuda()
        flat[at + 64 * 128 + slot * 4 : at + 64 * 128 + (slot + 1) * 4] = as_bytes
    case.run(library)
    assert case.scores[0, [0, 1, 63]].tolist() == [0.25, 21.0, 3072.0]


def test_offsets_beyond_two_gigabytes(library):
    case = make_case([64, 200, 31])
    used = case.page_table.clamp_max(case.pages.shape[0] - 1).unique().long()
    pool_shape = 2**31 // (64 * KEY_BYTES) + 100, 64 * KEY_BYTES
    pool = torch.empty(pool_shape, dtype=torch.uint8, device="cuda")
    shift = pool.shape[0] - case.pages.shape[0]
    pool[used + shift] = case.pages[used]
    valid = case.page_table != WILD_PAGE
    far = replace(case, pages=pool, page_table=torch.where(valid, case.page_table + shift, -7))
    assert int(far.page_table.max()) == pool.shape[0] - 1
    far.run(library)
    far.check()


def test_more_sequences_than_one_launch_holds(library):
    case = make_case([i % 97 for i in range(1100)], heads=32, keep=None)
    case.run(library)
    case.check()


@pytest.mark.parametrize("arithmetic", [EXACT, FAST, PORTABLE])
def test_repeats_are_bit_identical(library, arithmetic):
    case = make_case([20000, 5, 777, 0, 64 * 300], rows=2, arithmetic=arithmetic)
    first = case.run(library).view(torch.int32).clone()
    for _ in range(20):
        case.scores.view(torch.int32).fill_(POISON)
        assert torch.equal(case.run(library).view(torch.int32), first)


def test_batch_order_and_neighbours_do_not_matter(library):
    case = make_case([20000, 5, 777, 0, 64 * 300, 129], rows=2)
    case.run(library)
    order = torch.tensor([4, 0, 3, 5, 2], device="cuda")
    part = replace(
        case,
        query=case.query[order],
        weights=case.weights[order],
        page_table=case.page_table[order],
        visible_slots=case.visible_slots[order],
        block_list=case.block_list[order],
        block_count=case.block_count[order],
        scores=poisoned(len(order) * 2, case.scores.stride(0)),
    )
    part.run(library)
    expected = case.scores.view(torch.int32).unflatten(0, (-1, 2))[order].flatten(0, 1)
    assert torch.equal(part.scores.view(torch.int32), expected)


def test_a_graph_captured_at_small_lengths_replays_at_large_ones(library):
    case = make_case([9000, 4097, 640, 70], rows=2)
    lengths, counts = case.visible_slots.clone(), case.block_count.clone()
    case.visible_slots.copy_(torch.tensor([64, 1, 0, 64]))
    case.block_count.copy_(torch.tensor([1, 1, 0, 1]))
    case.run(library)  # loads the kernel outside the capture
    with capturing() as graph:
        case.run(library)
    for share in (1.0, 0.5, 0.0, 1.0):
        case.visible_slots.copy_((lengths * share).int())
        case.block_count.copy_((counts * share).int())
        case.scores.view(torch.int32).fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        case.check()


def test_a_nan_key_stays_visible(library):
    case = make_case([70], keep=None)
    case.pages[case.page_table[0, 0].long(), 3 * KEY_DIM + 9] = 0x7F
    case.run(library)
    assert case.scores[0, :70].isnan().nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("struct_bytes", 8),
        ("query", None),
        ("query", 8),
        ("weights", None),
        ("pages", None),
        ("pages", 24),
        ("page_table", None),
        ("visible_slots", None),
        ("block_count", None),
        ("scores", None),
        ("num_pages", -1),
        ("page_table_stride", 0),
        ("block_list_stride", 0),
        ("score_stride", 10),
        ("page_table_width", -1),
        ("blocks", -1),
        ("sequences", -1),
        ("rows", 0),
        ("rows", 9),
        ("heads", 16),
        ("page_slots", 128),
        ("block_size", 8),
        ("arithmetic", 3),
    ],
)
def test_an_argument_error_names_the_field(library, field, value):
    params = make_case([640]).params()
    setattr(params, field, value)
    status = library.spin_score_slots(ctypes.byref(params), None)
    assert status > 0
    assert library.spin_error_string(status).decode().startswith(field)
