# SPDX-License-Identifier: Apache-2.0
"""Scores of whole blocks for the current query, from their pooled keys (SPEC 4, step 7)."""

from __future__ import annotations

import torch
from torch import Tensor


def score_blocks(query: Tensor, weights: Tensor, pooled: Tensor) -> Tensor:
    """The indexer's formula on pooled keys.

    On means it is `sum_h w[h] * relu(q[h] . mean)`. On smallest and largest components it is an
    upper bound for the score of every slot in the block: the sum of what each head can give most.

    Args:
        query: `[S, R, H, D]`; weights: `[S, R, H]`; any float dtype.
        pooled: `[S, B, P, D]` from `pool_keys`.

    Returns:
        fp32 `[S, R, B]`.
    """
    query, weights, pooled = query.float(), weights.float().unsqueeze(-1), pooled.float()
    if pooled.shape[2] == 1:
        return (weights * _multiply(query, pooled[:, :, 0]).relu()).sum(2)
    low, high = pooled.unbind(2)
    up, down = query.clamp(min=0.0), query.clamp(max=0.0)
    most = (_multiply(up, high) + _multiply(down, low)).relu()
    least = (_multiply(up, low) + _multiply(down, high)).relu()
    # A head of negative weight gives most where its product is smallest.
    return (weights * torch.where(weights > 0, most, least)).sum(2)


def _multiply(query: Tensor, keys: Tensor) -> Tensor:
    """`[S, R, H, D]` and `[S, B, D]` to `[S, R, H, B]`."""
    return torch.einsum("srhd,sbd->srhb", query, keys)
