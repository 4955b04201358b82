# SPDX-License-Identifier: Apache-2.0
"""Inputs of score_slots whose pages are built byte by byte, and a float64 check of its output."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spin_trtllm import native

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
        *((name, ctypes.c_void_p) for name in ("places", "scores")),
        *((name, ctypes.c_int64) for name in ("num_pages", "page_table_stride")),
        *((name, ctypes.c_int64) for name in ("block_list_stride", "score_stride")),
        *((name, ctypes.c_int32) for name in ("page_table_width", "blocks", "sequences", "rows")),
        *((name, ctypes.c_int32) for name in ("heads", "page_slots", "block_size", "arithmetic")),
    )


def load_library() -> ctypes.CDLL | None:
    """The kernel library, or None where it has not been built."""
    path = native.library_path()
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    library.spin_score_slots.argtypes = [ctypes.POINTER(Params), ctypes.c_void_p]
    library.spin_error_string.restype = ctypes.c_char_p
    return library


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
