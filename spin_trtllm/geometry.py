# SPDX-License-Identifier: Apache-2.0
"""Tokens, slots and blocks: the integer arithmetic of SPEC 1 and SPEC 4.

Every function takes Python integers or int64 tensors and returns the same kind. Nothing here is
float: `ceil((1 - rho) * B)` in floating point keeps 4 blocks at rho = 0.7 and B = 10, not 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

PPM = 1_000_000

Integer = TypeVar("Integer", int, torch.Tensor)


def to_ppm(fraction: float) -> int:
    """A fraction in parts per million, rounded once so that all budgets stay integer (SPEC 2)."""
    return round(fraction * PPM)


def visible_slots(position_tokens: Integer, ratio: int) -> Integer:
    """`N(p) = (p + 1) // r`: indexer keys that a query at token position `p` may see.

    A row that is only padding has position -1 and sees nothing.
    """
    return (position_tokens + 1) // ratio


def query_slot(position_tokens: Integer, ratio: int) -> Integer:
    """`q(p) = p // r`: where the query itself stands on the slot axis, so that `q - i >= 0`."""
    return position_tokens // ratio


def last_position(slots: int, ratio: int) -> int:
    """The last token position that sees at most `slots` slots."""
    return (slots + 1) * ratio - 2


def count_blocks(slots: Integer, block_size_slots: int) -> Integer:
    """`B = ceil(N / b)`: blocks that hold `slots` slots; the last one may be partial."""
    return (slots + block_size_slots - 1) // block_size_slots


def slot_byte_offset(row: int, row_stride_slots: int, slot: int, slot_bytes: int) -> int:
    """Byte offset of a slot in a row-major buffer, exact past 2**31."""
    return (row * row_stride_slots + slot) * slot_bytes


@dataclass(frozen=True)
class Budget:
    """How many blocks a row keeps, by why they are kept (SPEC 4, steps 4 to 7).

    Fields are Python integers, or int64 tensors of one shape:
    `kept_blocks = forced_blocks + ranked_blocks + explored_blocks`.

    Attributes:
        spare_blocks: of the kept ones, those that the top-k does not need; none where all visible
            blocks are kept. Only what two rankings both choose may take from them.
    """

    kept_blocks: int | torch.Tensor
    forced_blocks: int | torch.Tensor
    ranked_blocks: int | torch.Tensor
    explored_blocks: int | torch.Tensor
    spare_blocks: int | torch.Tensor


def block_budget(
    blocks: int | torch.Tensor,
    *,
    top_k: int,
    block_size_slots: int,
    sparsity_ppm: int | torch.Tensor,
    exploration_ppm: int,
) -> Budget:
    """Split the blocks a row may keep into forced, ranked and explored ones (SPEC 4).

    Args:
        blocks: `B`, visible blocks of the row; integer or int64 tensor of any shape, `>= 0`.
        top_k: `K`; at least `ceil(K / b)` blocks are kept so that the top-k can be filled.
        block_size_slots: `b`.
        sparsity_ppm: `rho` in parts per million, `0 <= rho < 1e6`; an int64 tensor has one for
            each of `blocks` that it broadcasts to.
        exploration_ppm: `gamma` in parts per million; 0 turns exploration off.
    """
    as_int = isinstance(blocks, int)
    b = torch.as_tensor(blocks, dtype=torch.int64)
    fill = count_blocks(top_k, block_size_slots)
    kept = (b - b * sparsity_ppm // PPM).clamp(min=fill).minimum(b)
    forced = b.clamp(max=2)  # {0, B-1}: none, one or two distinct blocks
    kept = kept.maximum(forced)
    explored = ((kept * exploration_ppm + PPM - 1) // PPM).minimum(kept - forced)
    ranked = kept - explored - forced
    spare = torch.where(kept < b, kept - fill, 0)
    if as_int:
        return Budget(int(kept), int(forced), int(ranked), int(explored), int(spare))
    return Budget(kept, forced, ranked, explored, spare)


def accepted_drafts(first_tokens: Integer, next_first_tokens: Integer) -> Integer:
    """`a = p0_next - p0 - 1`: accepted drafts, read off where the next step starts (SPEC 9).

    A value outside `0 .. drafts` means that the sequence jumped: its state cannot be trusted.
    """
    return next_first_tokens - first_tokens - 1
