# SPDX-License-Identifier: Apache-2.0
"""The averages learn from the scores of the accepted rows (SPEC 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from spin_trtllm.geometry import query_slot
from spin_trtllm.reference.averages import read_averages, store_averages
from spin_trtllm.reference.topk_slots import scored_slots


def observe_scores(
    v: Tensor,
    d: Tensor,
    lanes: Tensor,
    scores: Tensor,
    blocks: Tensor,
    positions_tokens: Tensor,
    accepted: Tensor,
    *,
    ratio: int,
    block_size_slots: int,
    ema_decay: float,
    update_policy: str = "prefix",
) -> None:
    """Update `v` and `d` in place with every finite score of the accepted rows, row by row.

    Rejected rows, padding rows, unscored slots and non-finite scores leave no trace.

    Args:
        v: `[lanes, N]`, fp32, bf16 or int8 (`log8`); d: `[lanes, N + 1]`, same dtype.
        lanes: int64 `[S]`, distinct.
        scores: fp32 `[S, R, N]`; blocks: bool `[S, B]`, what was scored.
        positions_tokens: int64 `[S, R]`; -1 marks a padding row.
        accepted: int64 `[S]`, accepted drafts, 0 .. R-1; a negative count observes nothing.
        ratio, block_size_slots, ema_decay, update_policy: SPEC 1 and 2.
    """
    scored = scored_slots(
        blocks, positions_tokens, scores.shape[-1], ratio=ratio, block_size_slots=block_size_slots
    )
    rows = accept_rows(accepted, scores.shape[1], update_policy)
    observe_entries(
        v,
        d,
        lanes,
        scores,
        scored & rows.unsqueeze(-1),
        query_slot(positions_tokens, ratio),
        ema_decay=ema_decay,
    )


def accept_rows(accepted: Tensor, rows: int, update_policy: str) -> Tensor:
    """Rows that may update the averages: bool `[S, R]` from accepted drafts int64 `[S]`."""
    index = torch.arange(rows, device=accepted.device)
    last = accepted if update_policy == "prefix" else accepted.clamp(max=0)
    return index <= last.unsqueeze(-1)


def observe_entries(
    v: Tensor,
    d: Tensor,
    lanes: Tensor,
    scores: Tensor,
    observed: Tensor,
    query: Tensor,
    *,
    ema_decay: float,
) -> None:
    """`X = alpha * X + (1 - alpha) * z` on any axis of entries: slots, or blocks for A2 (SPEC 7).

    Args:
        v: `[lanes, N]`; d: `[lanes, N + 1]`; lanes: `[S]`.
        scores: fp32 `[S, R, n]`; observed: bool `[S, R, n]`, n at most N.
        query: int64 `[S, R]`, where each row stands on the axis.
    """
    n = scores.shape[-1]
    # NaN marks what is not observed, so that one lookup per offset finds value and flag; one entry
    # more stands for every offset outside the axis.
    z = torch.where(observed & scores.isfinite(), scores, float("nan"))
    z = torch.nn.functional.pad(z, (0, 1), value=float("nan"))
    vertical, diagonal = v[lanes, :n], d[lanes]
    offsets = torch.arange(d.shape[-1], device=d.device)
    for row in range(scores.shape[1]):
        entry = query[:, row : row + 1] - offsets  # the entry at each offset of this row
        entry = torch.where((entry >= 0) & (entry < n), entry, n)
        vertical = _average(vertical, z[:, row, :n], ema_decay)
        diagonal = _average(diagonal, z[:, row].gather(-1, entry), ema_decay)
    v[lanes, :n] = vertical
    d[lanes] = diagonal


def _average(state: Tensor, z: Tensor, ema_decay: float) -> Tensor:
    """One step of the average, kept as it was where `z` is NaN."""
    # Two products and a sum, each rounded to fp32: a fused multiply-add would give other bits.
    new = read_averages(state) * ema_decay + z * (1.0 - ema_decay)
    return torch.where(z.isnan(), state, store_averages(new, state.dtype))
