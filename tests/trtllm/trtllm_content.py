# SPDX-License-Identifier: Apache-2.0
"""What the simulated model contains: queries, weights and keys as functions of the tokens.

Content-addressed, so that a reused prefix has the keys that its pages already hold, and a slot
that was built from rejected drafts differs from the one that replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

TOKENS = 997  # vocabulary
QUERIES, KEYS, PLACES = 251, 2039, 4096


@lru_cache(maxsize=64)
def _tables(layer: int, heads: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 + layer)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return (
        normal(QUERIES, heads, 128),
        normal(QUERIES, heads),
        normal(KEYS, 128),
        normal(PLACES, 128),
    )


def queries(
    layer: int, heads: int, tokens: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 query [T, heads, 128] and head weights [T, heads], some of them negative"""
    q, weights, _, _ = _tables(layer, heads)
    rows = (tokens.long() * 31 + positions.long() * 7) % QUERIES
    return q[rows], weights[rows]


def key(layer: int, heads: int, slot: int, tokens: Sequence[int]) -> torch.Tensor:
    """fp32 key [128] of one slot from the raw tokens it covers"""
    _, _, content, place = _tables(layer, heads)
    mixed = slot
    for token in tokens:
        mixed = (mixed * 1009 + token) % KEYS
    return content[mixed] + 0.5 * place[slot % PLACES]


def scores(
    quantize: object,
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Scores of raw keys by the definition: quantise each side, then
    sum_h weight_h * q_scale_h * 128**-0.5 * heads**-0.5 * relu(q_h . k) * k_scale"""
    q, q_scale = quantize(query)
    k, k_scale = quantize(keys)
    heads = query.shape[0]
    dots = (q.double() @ (k.double() * k_scale.double()).T).relu()
    mixed = weights.double() * q_scale.double().squeeze(-1) * 128**-0.5 * heads**-0.5
    return mixed @ dots
