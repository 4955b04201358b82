# SPDX-License-Identifier: Apache-2.0
"""Which blocks a step keeps: forced, ranked and explored, joined over the rows (SPEC 4 and 6)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spin_trtllm.geometry import Budget, block_budget, count_blocks, visible_slots
from spin_trtllm.reference.rank_blocks import first_blocks, rank_blocks

_MASK_64 = 2**64 - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class Selection:
    """Blocks of one step.

    Attributes:
        blocks: bool `[S, B]`, the shared mask `U`.
        row_blocks: bool `[S, R, B]`, what each row chose by itself.
        explored_blocks: bool `[S, B]`, blocks that at least one row explored, even where another
            row ranked them (`row0`: that row 0 explored).
    """

    blocks: Tensor
    row_blocks: Tensor
    explored_blocks: Tensor


def select_blocks(
    block_scores: Tensor,
    positions_tokens: Tensor,
    warm: Tensor,
    sequence_ids: Tensor,
    layers: Tensor,
    *,
    ratio: int,
    block_size_slots: int,
    top_k: int,
    sparsity_ppm: int | Tensor,
    exploration_ppm: int,
    seed: int,
    mask_policy: str = "union",
    priorities: Tensor | None = None,
    query_scores: Tensor | None = None,
    query_share_ppm: int = 0,
    query_merge: str = "split",
) -> Selection:
    """Choose the blocks to score.

    Args:
        block_scores: fp32 `[S, R, B]` from `predict_blocks`.
        positions_tokens: int64 `[S, R]`; -1 marks a padding row, which chooses nothing.
        warm: bool `[S]`; a sequence that is not warm keeps every visible block.
        sequence_ids: int64 `[S]`, request ids (ids of 2**63 and above as their two's complement).
        layers: int64 `[S]`, decoder-layer index.
        ratio, block_size_slots, top_k, exploration_ppm, seed: SPEC 1 and 2.
        sparsity_ppm: `rho_ppm`; int32 or int64 `[S]` gives each entry its own.
        mask_policy: `union`, or `row0` (row 0's blocks and the newest block of the last row).
        priorities: `[S, R, B]`, replaces SPEC 6's priorities for study; lowest explored first.
        query_scores: fp32 `[S, R, B]` from `score_blocks`, -inf where there is none.
        query_share_ppm, query_merge: what the current query ranks (SPEC 4, step 7).
    """
    width = block_scores.shape[-1]
    index = torch.arange(width, device=block_scores.device)
    present = count_blocks(visible_slots(positions_tokens, ratio), block_size_slots)  # [S, R]
    visible = index < present.unsqueeze(-1)
    budget = block_budget(
        present,
        top_k=top_k,
        block_size_slots=block_size_slots,
        sparsity_ppm=sparsity_ppm if isinstance(sparsity_ppm, int) else sparsity_ppm.view(-1, 1),
        exploration_ppm=exploration_ppm,
    )
    if priorities is None:
        priorities = explore_priorities(
            sequence_ids, layers, positions_tokens[:, 0], width, seed=seed
        ).unsqueeze(1)
    chosen, explored = choose_blocks(
        block_scores,
        visible,
        budget,
        priorities,
        query_scores=query_scores,
        query_share_ppm=query_share_ppm,
        query_merge=query_merge,
    )
    hot = warm.view(-1, 1, 1)
    return join_rows(torch.where(hot, chosen, visible), explored & hot, present, mask_policy)


def choose_blocks(
    block_scores: Tensor,
    visible: Tensor,
    budget: Budget,
    priorities: Tensor,
    *,
    query_scores: Tensor | None = None,
    query_share_ppm: int = 0,
    query_merge: str = "split",
) -> tuple[Tensor, Tensor]:
    """Steps 5 to 9 of SPEC 4 for every row: all chosen blocks, and the explored ones among them.

    Args:
        block_scores: fp32 `[S, R, B]`; visible: bool `[S, R, B]`; budget: tensors `[S, R]`.
        priorities: `[S, R or 1, B]`, lowest first; equal ones: lower block first.
        query_scores, query_share_ppm, query_merge: as for `select_blocks`.
    """
    index = torch.arange(visible.shape[-1], device=visible.device)
    newest = visible.sum(-1, keepdim=True) - 1
    forced = visible & ((index == 0) | (index == newest))
    candidates = visible & ~forced
    ranked = rank_blocks(
        candidates,
        block_scores,
        budget.ranked_blocks,
        query_scores=query_scores,
        query_share_ppm=query_share_ppm,
        query_merge=query_merge,
        spare_blocks=budget.spare_blocks,
    )
    rest = candidates & ~ranked
    last = float("inf") if priorities.is_floating_point() else torch.iinfo(priorities.dtype).max
    turn = torch.where(rest, priorities, last)
    due = turn.sort(dim=-1, stable=True).indices
    explored = first_blocks(due, budget.explored_blocks)
    return forced | ranked | explored, explored


def join_rows(
    row_blocks: Tensor, row_explored: Tensor, present_blocks: Tensor, mask_policy: str
) -> Selection:
    """The mask that all rows of a sequence share (end of SPEC 4).

    Args:
        row_blocks, row_explored: bool `[S, R, B]`.
        present_blocks: int64 `[S, R]`, visible blocks of each row; 0 for padding rows.
    """
    if mask_policy == "union":
        return Selection(row_blocks.any(1), row_blocks, row_explored.any(1))
    newest = present_blocks.amax(1, keepdim=True) - 1  # positions grow, so the last row sees most
    index = torch.arange(row_blocks.shape[-1], device=row_blocks.device)
    return Selection(row_blocks[:, 0] | (index == newest), row_blocks, row_explored[:, 0])


def explore_priorities(
    sequence_ids: Tensor, layers: Tensor, first_tokens: Tensor, blocks: int, *, seed: int
) -> Tensor:
    """Priority of every block, the smallest explored first: a pure function of SPEC 6.

    Args:
        sequence_ids, layers, first_tokens: int64 `[S]`; `first_tokens` is `p0`, shared by the rows.
        blocks: how many block indices to rate.
        seed: 0 .. 2**64-1.

    Returns:
        int64 `[S, blocks]` in 0 .. 2**32-1.
    """
    start = torch.tensor(as_int64(mix(seed)), device=sequence_ids.device)
    key = _mix_tensor(_mix_tensor(start ^ sequence_ids) ^ (layers << 40) ^ first_tokens)
    index = torch.arange(blocks, device=sequence_ids.device)
    return _shift_right(_mix_tensor(key.unsqueeze(-1) ^ index), 32)


def mix(x: int) -> int:
    """SPEC 6's 64-bit mixer on a Python integer."""
    x = (x + _GOLDEN) & _MASK_64
    x = (x ^ (x >> 30)) * _MIX_1 & _MASK_64
    x = (x ^ (x >> 27)) * _MIX_2 & _MASK_64
    return x ^ (x >> 31)


def _mix_tensor(x: Tensor) -> Tensor:
    x = x + as_int64(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * as_int64(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * as_int64(_MIX_2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Unsigned shift of int64, whose own shift drags the sign bit along."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def as_int64(x: int) -> int:
    """The int64 that holds the 64-bit pattern of `x`, 0 .. 2**64-1."""
    return x - 2**64 if x >= 2**63 else x
