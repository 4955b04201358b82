# SPDX-License-Identifier: Apache-2.0
"""score_slots on a GPU, against float64 on the same fp8 values. Pages are built byte by byte."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KEY_DIM, KEY_BYTES = 128, 132
EXACT, FAST, PORTABLE = 0, 1, 2
# Largest error over the sum of the magnitudes of what is added up. FAST aligns addends to 14 bits.
TOLERANCE = {EXACT: 1e-5, FAST: 5e-3, PORTABLE: 1e-5}
POISON = 0x7FC0DEAD  # a NaN that no arithmetic makes
WILD_PAGE = 2**31 - 1


class Params(ctypes.Structure):
    """SpinScoreSlotsParams."""

    _fields_ = (
        ("struct_bytes", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("query", "weights", "pages", "page_table")),
        *((name, ctypes.c_void_p) for name in ("visible_slots", "block_list", "block_count")),
        ("scores", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_pages", "page_table_stride")),
        *((name, ctypes.c_int64) for name in ("block_list_stride", "score_stride")),
        *((name, ctypes.c_int32) for name in ("page_table_width", "blocks", "sequences", "rows")),
        *((name, ctypes.c_int32) for name in ("heads", "page_slots", "block_size", "arithmetic")),
    )


def load_library() -> ctypes.CDLL:
    package = Path(__file__).parents[2] / "spin_trtllm"
    path = Path(os.environ.get("SPIN_LIBRARY") or package / "lib" / "libspin.so")
    if not path.exists():
        pytest.skip(f"{path} has not been built")
    library = ctypes.CDLL(str(path))
    library.spin_score_slots.argtypes = [ctypes.POINTER(Params), ctypes.c_void_p]
    library.spin_error_string.restype = ctypes.c_char_p
    return library


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return load_library()


@dataclass
class Case:
    """Arguments of one call, all on the GPU; `keys` and `scales` are what `pages` holds."""

    query: torch.Tensor  # e4m3 [S, R, H, 128]
    weights: torch.Tensor  # [S, R, H]
    pages: torch.Tensor  # uint8 [num_pages, page_slots * 132]
    page_table: torch.Tensor  # int32 [S, width], possibly strided
    visible_slots: torch.Tensor  # int32 [S]
    block_list: torch.Tensor | None  # int32 [S, blocks]
    block_count: torch.Tensor | None
    scores: torch.Tensor  # [S * R, stride]
    block_size: int
    arithmetic: int = EXACT

    @property
    def page_slots(self) -> int:
        return self.pages.shape[1] // KEY_BYTES

    def params(self) -> Params:
        def address(tensor: torch.Tensor | None) -> int | None:
            return None if tensor is None else tensor.data_ptr()

        sequences, rows, heads, _ = self.query.shape
        listed = self.block_list
        return Params(
            struct_bytes=ctypes.sizeof(Params),
            query=address(self.query),
            weights=address(self.weights),
            pages=address(self.pages),
            page_table=address(self.page_table),
            visible_slots=address(self.visible_slots),
            block_list=address(listed),
            block_count=address(self.block_count),
            scores=address(self.scores),
            num_pages=self.pages.shape[0],
            page_table_stride=self.page_table.stride(0),
            block_list_stride=0 if listed is None else listed.stride(0),
            score_stride=self.scores.stride(0),
            page_table_width=self.page_table.shape[1],
            blocks=0 if listed is None else listed.shape[1],
            sequences=sequences,
            rows=rows,
            heads=heads,
            page_slots=self.page_slots,
            block_size=self.block_size,
            arithmetic=self.arithmetic,
        )

    def run(self, library: ctypes.CDLL) -> torch.Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        status = library.spin_score_slots(ctypes.byref(self.params()), stream)
        assert status == 0, library.spin_error_string(status)
        return self.scores

    def listed_slots(self, sequence: int) -> list[tuple[int, int]]:
        """(column, slot) of all that must be written, by SPEC 4 and the header's words alone."""
        visible = int(self.visible_slots[sequence])
        b = self.block_size
        if self.block_list is None:
            return [(slot, slot) for slot in range(visible)]
        blocks = self.block_list[sequence, : int(self.block_count[sequence])].tolist()
        slots = [(i * b + k, block * b + k) for i, block in enumerate(blocks) for k in range(b)]
        return [(column, slot) for column, slot in slots if slot < visible]

    def keys(self, sequence: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and scales of slots, as float64, from the bytes of the pages."""
        page = self.page_table[sequence, slots // self.page_slots].long()
        at = slots % self.page_slots
        data = self.pages[:, : self.page_slots * KEY_DIM].unflatten(1, (-1, KEY_DIM))[page, at]
        scale = self.pages[:, self.page_slots * KEY_DIM :].unflatten(1, (-1, 4))[page, at]
        as_keys = data.contiguous().view(torch.float8_e4m3fn).double()
        return as_keys, scale.contiguous().view(torch.float32).squeeze(-1).double()

    def check(self) -> float:
        """Compares every element of `scores`; returns the largest error over its magnitude."""
        rows = self.query.shape[1]
        worst = 0.0
        bits = self.scores.view(torch.int32)
        written = torch.zeros_like(bits, dtype=torch.bool)
        for s in range(self.query.shape[0]):
            pairs = self.listed_slots(s)
            if not pairs:
                continue
            columns, slots = torch.tensor(pairs, device="cuda").T
            keys, scale = self.keys(s, slots)
            dots = torch.einsum("rhd,nd->rnh", self.query[s].double(), keys).relu_()
            terms = dots * self.weights[s].double()[:, None] * scale[:, None]
            got = self.scores[s * rows : (s + 1) * rows, columns].double()
            magnitude = terms.abs().sum(-1).clamp_min(1e-300)
            error = ((got - terms.sum(-1)).abs() / magnitude).max().item()
            assert error <= TOLERANCE[self.arithmetic], f"sequence {s}: error {error:.3g}"
            worst = max(worst, error)
            written[s * rows : (s + 1) * rows, columns] = True
        assert bool((bits[~written] == POISON).all()), "wrote where no slot is"
        assert not bool((bits[written] == POISON).any()), "left a score unwritten"
        return worst


def poisoned(rows: int, stride: int) -> torch.Tensor:
    return torch.full((rows, stride), POISON, dtype=torch.int32, device="cuda").view(torch.float32)


def make_case(
    lengths: Sequence[int],
    *,
    rows: int = 1,
    heads: int = 64,
    page_slots: int = 64,
    block_size: int = 64,
    keep: float | None = 0.6,
    arithmetic: int = EXACT,
    seed: int = 0,
    width: int | None = None,
) -> Case:
    """Random queries and keys; `keep` is the kept share of blocks, None for no list.

    Table entries and list entries past what is valid hold values that must never be used, pages
    that no sequence owns hold 0xFF (NaN keys and scales), and the table is a strided view.
    """
    rng = torch.Generator().manual_seed(seed)
    sequences = len(lengths)
    longest = max(1, *lengths)
    width = width or -(-longest // page_slots)
    owned = [-(-length // page_slots) for length in lengths]
    num_pages = sum(owned) + 3
    # The last page of the pool is always in use: offsets reach the end of the allocation.
    order = torch.cat([torch.tensor([num_pages - 1]), torch.randperm(num_pages - 1, generator=rng)])
    table = torch.full((sequences, width + 5), WILD_PAGE, dtype=torch.int32)
    pages = torch.full((num_pages, page_slots * KEY_BYTES), 0xFF, dtype=torch.uint8)
    start = 0
    for s, count in enumerate(owned):
        table[s, :count] = order[start : start + count].int()
        start += count
    used = order[:start]
    keys = torch.randn(start, page_slots * KEY_DIM, generator=rng) * 3
    slot_number = torch.arange(start * page_slots, dtype=torch.float32).view(start, page_slots)
    scales = torch.exp2(slot_number % 13 - 6) * (1 + slot_number / 65536)
    pages[used, : page_slots * KEY_DIM] = keys.to(torch.float8_e4m3fn).view(torch.uint8)
    pages[used, page_slots * KEY_DIM :] = scales.view(torch.uint8).view(start, page_slots * 4)

    block_list = block_count = None
    if keep is not None:
        blocks = -(-longest // block_size)
        block_list = torch.full((sequences, blocks + 3), -1, dtype=torch.int32)
        block_count = torch.zeros(sequences, dtype=torch.int32)
        for s, length in enumerate(lengths):
            count = -(-length // block_size)
            kept = torch.rand(count, generator=rng) < keep
            kept[-1:] = True
            chosen = kept.nonzero().flatten().int()
            block_list[s, : len(chosen)] = chosen
            block_count[s] = len(chosen)
        block_list, block_count = block_list.cuda(), block_count.cuda()
    stride = width * page_slots + 7
    query = torch.randn(sequences, rows, heads, KEY_DIM, generator=rng) * 2
    return Case(
        query=query.to(torch.float8_e4m3fn).cuda(),
        weights=torch.randn(sequences, rows, heads, generator=rng).cuda(),
        pages=pages.cuda(),
        page_table=table.cuda()[:, :width],
        visible_slots=torch.tensor(lengths, dtype=torch.int32).cuda(),
        block_list=block_list,
        block_count=block_count,
        scores=poisoned(sequences * rows, stride),
        block_size=block_size,
        arithmetic=arithmetic,
    )


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
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
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
