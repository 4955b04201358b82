# SPDX-License-Identifier: Apache-2.0
"""The best scored slots of each row, ties to the lower slot (end of SPEC 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from spin_trtllm.geometry import visible_slots

_INFINITIES = (float("inf"), float("-inf"))  # nan_to_num leaves these as they are


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
    width = min(top_k, scores.shape[-1])
    shape = (*scores.shape[:-1], top_k)
    if 0 in (*shape, width):
        return torch.full(shape, -1, dtype=torch.int32, device=scores.device)
    valid = torch.where(scored, scores, float("-inf")).nan_to_num_(float("-inf"), *_INFINITIES)
    # torch.topk breaks ties as it likes. That matters only where the last slot taken ties with the
    # first one left, which one more value shows.
    values, slots = valid.topk(min(width + 1, scores.shape[-1]), dim=-1)
    last = values[..., width - 1]
    clear = last > values[..., width] if values.shape[-1] > width else last > float("-inf")
    if bool(clear.all()):
        best = slots[..., :width].sort(dim=-1).values
    else:
        best = _first_of_ties(valid, scored, last.unsqueeze(-1), width)
    value = torch.where(best >= 0, valid.gather(-1, best.clamp(min=0)), float("-inf"))
    order = value.sort(dim=-1, descending=True, stable=True).indices  # keeps slot order and padding
    best = best.gather(-1, order).int()
    return torch.nn.functional.pad(best, (0, top_k - width), value=-1)


def _first_of_ties(valid: Tensor, scored: Tensor, threshold: Tensor, width: int) -> Tensor:
    """Slots above the threshold, and the lowest scored ones at it: int64 `[S, R, width]`."""
    above = valid > threshold
    level = scored & (valid == threshold)
    room = scored.sum(-1, keepdim=True).clamp(max=width) - above.sum(-1, keepdim=True)
    picked = above | (level & (level.cumsum(-1) <= room))
    best = torch.full((*valid.shape[:-1], width), -1, device=valid.device)
    sequence, row, slot = picked.nonzero(as_tuple=True)
    best[sequence, row, picked.cumsum(-1)[sequence, row, slot] - 1] = slot
    return best


def scored_slots(
    blocks: Tensor, positions_tokens: Tensor, slots: int, *, ratio: int, block_size_slots: int
) -> Tensor:
    """Slots a row really has a score for: visible to it and inside a kept block.

    Args:
        blocks: bool `[S, B]`; positions_tokens: int64 `[S, R]`; slots: width `N`.

    Returns:
        bool `[S, R, N]`.
    """
    kept = expand_blocks(blocks, slots, block_size_slots)
    index = torch.arange(slots, device=blocks.device)
    visible = index < visible_slots(positions_tokens, ratio).unsqueeze(-1)
    return visible & kept.unsqueeze(1)


def expand_blocks(blocks: Tensor, slots: int, block_size_slots: int) -> Tensor:
    """Slots of marked blocks: bool `[S, B]` to bool `[S, slots]`."""
    return blocks.repeat_interleave(block_size_slots, -1)[:, :slots]
