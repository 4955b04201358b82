# SPDX-License-Identifier: Apache-2.0
"""Predicted slot scores `max(V[i], D[q - i])` and their block scores (SPEC 4, steps 2 and 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from spin_trtllm.geometry import count_blocks, query_slot, visible_slots
from spin_trtllm.reference.averages import read_averages

NEVER = float("-inf")  # score of what does not exist: below every prediction


def predict_blocks(
    v: Tensor,
    d: Tensor,
    lanes: Tensor,
    positions_tokens: Tensor,
    *,
    ratio: int,
    block_size_slots: int,
    pooling: str = "max",
) -> Tensor:
    """Block scores of every row, from the averages alone.

    Args:
        v: vertical averages `[lanes, N]`, fp32, bf16 or int8 (`log8`).
        d: diagonal averages `[lanes, N + 1]`, same dtype.
        lanes: int64 `[S]`, the state row of each sequence.
        positions_tokens: int64 `[S, R]`; -1 marks a padding row.
        ratio: raw tokens a slot.
        block_size_slots: slots a block.
        pooling: `max`, `top4` (mean of the up to four largest) or `mean`.

    Returns:
        fp32 `[S, R, B]`; `-inf` for blocks that a row cannot see.
    """
    slots = v.shape[-1]
    visible = visible_slots(positions_tokens, ratio)
    predicted = predict_entries(v, d, lanes, visible, query_slot(positions_tokens, ratio))
    scores = pool_blocks(predicted, block_size_slots, pooling)
    missing = count_blocks(slots, block_size_slots) - scores.shape[-1]
    return torch.nn.functional.pad(scores, (0, missing), value=NEVER)


def predict_entries(v: Tensor, d: Tensor, lanes: Tensor, visible: Tensor, query: Tensor) -> Tensor:
    """`zhat[i] = max(V[i], D[q - i])` on any axis of entries: slots, or blocks for A2 (SPEC 7).

    Args:
        v: `[lanes, N]`; d: `[lanes, N + 1]`; lanes: `[S]`.
        visible: int64 `[S, R]`, entries each row sees; query: int64 `[S, R]`, where it stands.

    Returns:
        fp32 `[S, R, n]` with `n` the most entries any row sees; `-inf` past a row's own.
    """
    n = int(visible.max()) if visible.numel() else 0
    entries = torch.arange(n, device=v.device)
    offsets = (query.unsqueeze(-1) - entries).clamp(0, d.shape[-1] - 1)
    vertical = read_averages(v[lanes, :n]).unsqueeze(1)
    diagonal = read_averages(d[lanes]).unsqueeze(1).expand(-1, query.shape[1], -1)
    predicted = torch.maximum(vertical, diagonal.gather(-1, offsets))
    return torch.where(entries < visible.unsqueeze(-1), predicted, NEVER)


def pool_blocks(entries: Tensor, block_size: int, pooling: str) -> Tensor:
    """Pool scores `[..., n]`, `-inf` where absent, to `[..., ceil(n / block_size)]`."""
    n = entries.shape[-1]
    blocks = count_blocks(n, block_size)
    padded = torch.nn.functional.pad(entries, (0, blocks * block_size - n), value=NEVER)
    grid = padded.unflatten(-1, (blocks, block_size))
    if pooling == "max":
        return grid.amax(-1)
    if pooling == "top4":
        grid = grid.topk(min(4, block_size), dim=-1).values
    present = grid > NEVER
    total = grid.masked_fill(~present, 0.0).sum(-1)
    count = present.sum(-1)
    return torch.where(count > 0, total / count.clamp(min=1), NEVER)
