# SPDX-License-Identifier: Apache-2.0
"""The best scored slots of each row, ties to the lower slot (end of SPEC 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from spin_trtllm.geometry import visible_slots


def topk_slots(
    scores: Tensor,
    blocks: Tensor,
    positions_tokens: Tensor,
    *,
    top_k: int,
    ratio: int,
    block_size_slots: int,
) -> Tensor:
    """`T_r`: the `min(K, scored)` best scored slots of each row.

    Slots outside the kept blocks or past a row's visible end are never read as scores, whatever
    the buffer holds there. NaN counts as `-inf`.

    Args:
        scores: fp32 `[S, R, N]`.
        blocks: bool `[S, B]`, the blocks that were scored.
        positions_tokens: int64 `[S, R]`; -1 marks a padding row.
        top_k: `K`.
        ratio, block_size_slots: SPEC 1.

    Returns:
        int32 `[S, R, K]`: best first, equal scores in slot order, padded with -1.
    """
    scored = scored_slots(
        blocks, positions_tokens, scores.shape[-1], ratio=ratio, block_size_slots=block_size_slots
    )
    return best_slots(scores, scored, top_k)


def best_slots(scores: Tensor, scored: Tensor, top_k: int) -> Tensor:
    """`topk_slots` on an explicit mask: fp32 and bool `[S, R, N]` to int32 `[S, R, K]`."""
    best = torch.full((*scores.shape[:-1], top_k), -1, dtype=torch.int64, device=scores.device)
    width = min(top_k, scores.shape[-1])
    if best.numel() == 0 or width == 0:
        return best.int()
    valid = torch.where(scored & ~scores.isnan(), scores, float("-inf"))
    # torch.topk breaks ties as it likes, so it only finds the threshold; ties are counted here.
    threshold = valid.topk(width, dim=-1).values[..., -1:]
    above = valid > threshold
    level = scored & (valid == threshold)
    room = scored.sum(-1, keepdim=True).clamp(max=width) - above.sum(-1, keepdim=True)
    picked = above | (level & (level.cumsum(-1) <= room))
    place = picked.cumsum(-1)[picked] - 1
    sequence, row, slot = picked.nonzero(as_tuple=True)
    best[sequence, row, place] = slot
    value = torch.where(best >= 0, valid.gather(-1, best.clamp(min=0)), float("-inf"))
    order = value.sort(dim=-1, descending=True, stable=True).indices  # keeps slot order and padding
    return best.gather(-1, order).int()


def scored_slots(
    blocks: Tensor, positions_tokens: Tensor, slots: int, *, ratio: int, block_size_slots: int
) -> Tensor:
    """Slots a row really has a score for: visible to it and inside a kept block.

    Args:
        blocks: bool `[S, B]`; positions_tokens: int64 `[S, R]`; slots: width `N`.

    Returns:
        bool `[S, R, N]`.
    """
    kept = blocks.repeat_interleave(block_size_slots, dim=-1)[:, :slots]
    index = torch.arange(slots, device=blocks.device)
    visible = index < visible_slots(positions_tokens, ratio).unsqueeze(-1)
    return visible & kept.unsqueeze(1)
