# SPDX-License-Identifier: Apache-2.0
"""The indexer's scores on the kept blocks only (SPEC 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from spin_trtllm.reference.topk_slots import scored_slots


def score_slots(
    query: Tensor,
    keys: Tensor,
    weights: Tensor,
    blocks: Tensor,
    positions_tokens: Tensor,
    *,
    ratio: int,
    block_size_slots: int,
) -> Tensor:
    """`z[i] = sum_h w[h] * relu(q[h] . k[i])` in fp32 for the visible slots of kept blocks.

    Args:
        query: `[S, R, H, D]`; keys: `[S, N, D]`; weights: `[S, R, H]`; any float dtype.
        blocks: bool `[S, B]`, the shared mask.
        positions_tokens: int64 `[S, R]`; -1 marks a padding row.
        ratio, block_size_slots: SPEC 1.

    Returns:
        fp32 `[S, R, N]`; `-inf` where nothing was scored. Scores may be negative.
    """
    scored = scored_slots(
        blocks, positions_tokens, keys.shape[1], ratio=ratio, block_size_slots=block_size_slots
    )
    scores = torch.full(scored.shape, float("-inf"), device=keys.device)
    for s in range(keys.shape[0]):
        kept = scored[s].any(0).nonzero().squeeze(-1)
        dots = torch.einsum("rhd,nd->rhn", query[s].float(), keys[s, kept].float()).relu_()
        scores[s, :, kept] = torch.einsum("rh,rhn->rn", weights[s].float(), dots)
    return scores.masked_fill_(~scored, float("-inf"))
