# SPDX-License-Identifier: Apache-2.0
"""The ranked part of a selection: by history, by the current query, or both (SPEC 4, step 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from spin_trtllm.geometry import PPM

LOWEST = torch.finfo(torch.float32).min
_LIMIT = 2.0**126  # a difference of two scores clamped to this is finite


def rank_blocks(
    candidates: Tensor,
    block_scores: Tensor,
    ranked_blocks: Tensor | int,
    *,
    query_scores: Tensor | None = None,
    query_share_ppm: int = 0,
    query_merge: str = "split",
    spare_blocks: Tensor | int = 0,
) -> Tensor:
    """The blocks kept for their scores; of equal scores, the lower block.

    Args:
        candidates: bool `[S, R, B]`, blocks to choose from.
        block_scores: fp32 `[S, R, B]`, from history (`predict_blocks`).
        ranked_blocks: int64 `[S, R]`, how many to choose; at most the candidates.
        query_scores: fp32 `[S, R, B]`, from the current query (`score_blocks`).
        query_share_ppm: share of `ranked_blocks` that the query ranks, rounded up; 0: none.
        query_merge: `split`, the query chooses among what history left; `union`, among all, and
            blocks that both choose are not made up for; `max`, one ranking by the larger of both
            scores, each scaled to 0 .. 1 over the candidates and weighted with its share.
        spare_blocks: int64 `[S, R]`, how many fewer `union` may choose.

    Returns:
        bool `[S, R, B]`: `ranked_blocks` of the candidates; for `union`, up to `spare_blocks`
        fewer.
    """
    if query_scores is None or not query_share_ppm:
        return best_blocks(candidates, block_scores, ranked_blocks)
    if query_merge == "max":
        share = query_share_ppm / PPM
        history = scale_scores(block_scores, candidates) * (1.0 - share)
        query = scale_scores(query_scores, candidates) * share
        return best_blocks(candidates, torch.maximum(history, query), ranked_blocks)
    by_query = (ranked_blocks * query_share_ppm + PPM - 1) // PPM
    by_history = best_blocks(candidates, block_scores, ranked_blocks - by_query)
    if query_merge == "union":
        both = by_history & best_blocks(candidates, query_scores, by_query)
        by_query = by_query - both.sum(-1).clamp(max=spare_blocks)
    return by_history | best_blocks(candidates & ~by_history, query_scores, by_query)


def best_blocks(candidates: Tensor, scores: Tensor, counts: Tensor | int) -> Tensor:
    """The `counts` best candidates, equal scores lower block first; NaN counts as -inf.

    Args:
        candidates: bool `[S, R, B]`; scores: fp32 `[S, R, B]`; counts: int64 `[S, R]`.
    """
    # A candidate, however low its score, ranks above what is no candidate.
    valid = scores.nan_to_num(LOWEST, float("inf"), LOWEST)
    ranking = torch.where(candidates, valid, float("-inf"))
    return first_blocks(ranking.sort(dim=-1, descending=True, stable=True).indices, counts)


def first_blocks(order: Tensor, counts: Tensor | int) -> Tensor:
    """Mask of the first `counts` entries of an order `[S, R, B]`; counts is `[S, R]`."""
    place = torch.arange(order.shape[-1], device=order.device)
    take = place < torch.as_tensor(counts, device=order.device).unsqueeze(-1)
    return torch.zeros_like(take).scatter_(-1, order, take)


def scale_scores(scores: Tensor, candidates: Tensor) -> Tensor:
    """Scores of the candidates on 0 .. 1: the lowest finite one at 0, the highest at 1.

    All are 0 where the finite ones are equal. -inf and NaN are at 0, +inf at 1, and what lies
    beyond 2**126 is taken for 2**126. Each difference and the quotient round once, to fp32.
    """
    finite = candidates & scores.isfinite()
    bounded = scores.nan_to_num(-_LIMIT).clamp(-_LIMIT, _LIMIT)
    low = torch.where(finite, bounded, _LIMIT).amin(-1, keepdim=True)
    high = torch.where(finite, bounded, -_LIMIT).amax(-1, keepdim=True)
    return torch.where(high > low, ((bounded - low) / (high - low)).clamp(0.0, 1.0), 0.0)
