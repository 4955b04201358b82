# SPDX-License-Identifier: Apache-2.0
"""What an indexer network is sized for, and the shapes that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spin_trtllm import native
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import check_integer, refuse
from spin_trtllm.geometry import count_blocks
from spin_trtllm.hosts.tensorrt.nodes import PAGE_SLOTS

MAX_ELEMENTS = 2**31 - 1  # of a tensor in TensorRT
PAGE_WORDS_PER_SLOT = native.KEY_BYTES // 4

# Dimensions that an engine may be built for a range of.
SEQUENCES, PAGES, TABLE_PAGES = "sequences", "pages", "table_pages"


@dataclass(frozen=True)
class IndexerSizes:
    """What a network is sized for.

    Attributes:
        max_sequences: sequences that decode at once; as many lanes hold a state each.
        rows: queries a sequence and step, 1 and the drafts.
        slots: capacity `N` of a sequence, in whole pages.
        page_slots: slots a page of the key cache.

    Raises:
        SpinError: a size out of range.
    """

    max_sequences: int
    rows: int
    slots: int
    page_slots: int = 64

    def __post_init__(self) -> None:
        check_integer("max_sequences", self.max_sequences, 1, 65536)
        check_integer("rows", self.rows, 1, native.MAX_ROWS)
        if self.page_slots not in PAGE_SLOTS:
            refuse("page_slots", self.page_slots, ", ".join(map(str, PAGE_SLOTS)))
        check_integer("slots", self.slots, self.page_slots, 2**31 - 1)
        if self.slots % self.page_slots:
            refuse("slots", self.slots, f"a multiple of {self.page_slots}, the slots of a page")

    @property
    def ranges(self) -> dict[str, tuple[int, int, int]]:
        """Least, usual and largest value of each dimension that an engine has a range of."""
        table = self.slots // self.page_slots
        most = MAX_ELEMENTS // (self.page_slots * PAGE_WORDS_PER_SLOT)
        pages = min(self.max_sequences * table, most)
        return {
            SEQUENCES: (1, self.max_sequences, self.max_sequences),
            PAGES: (1, pages, most),
            TABLE_PAGES: (1, table, table),
        }


def state_shapes(config: SpinConfig, sizes: IndexerSizes) -> dict[str, tuple[int, ...]]:
    """Shape of each state tensor; all zero is the state at the start.

    `v` and `d` have the configuration's `state_dtype`, `scores` is fp32, `compact_of_block` int32
    and `books` int64.

    Raises:
        SpinError: a tensor that is larger than TensorRT's may be.
    """
    blocks = count_blocks(sizes.slots, config.block_size)
    lanes = sizes.max_sequences
    places = lanes + sizes.max_sequences  # the second half is for sequences without a lane
    shapes = {
        "v": (lanes, sizes.slots),
        "d": (lanes, sizes.slots + 8),  # one offset more than slots, in steps of 8
        "scores": (places, sizes.rows, blocks * config.block_size),
        "compact_of_block": (places, blocks),
        "books": (sizes.rows + 3, lanes),
    }
    for name, shape in shapes.items():
        check_elements(name, shape)
    return shapes


def check_elements(name: str, shape: Sequence[int]) -> None:
    """Refuse a tensor that is larger than TensorRT's may be.

    Raises:
        SpinError: more than `MAX_ELEMENTS`.
    """
    elements = math.prod(shape)
    if elements > MAX_ELEMENTS:
        allowed = f"at most {MAX_ELEMENTS}, with fewer sequences, rows or slots"
        refuse(f"elements of {name}", elements, allowed)
