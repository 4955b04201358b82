# SPDX-License-Identifier: Apache-2.0
"""The indexer in training: its scores, what the attention then reads, the loss that teaches it.

Top-k hands on positions only, so the language-model loss has no gradient for the indexer. It learns
from the attention instead: its scores, as a distribution over slots, should be the attention's own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tiny_model.layout import Rotation, View
from benchmarks.tiny_model.parts import linear, rotate_heads

_CHUNK_ELEMENTS = 1 << 29  # of per-head scores at a time, where no gradient needs them all
_LEAST_MASS = 1e-3  # rows that attend to slots less than this have nothing to teach


def index_scores(
    indexer: nn.Module,
    x: Tensor,
    latent: Tensor,
    keys: Tensor,
    rotation: Rotation,
    dtype: torch.dtype,
) -> Tensor:
    """Score of every slot for every query row: heads' rectified products, weighted and summed.

    Args:
        x: `[batch, rows, hidden]`, input of the attention.
        latent: `[batch, rows, q_lora_rank]`, the latent queries that attention and indexer share.
        keys: `[batch, slots, index_head_dim]`.
        rotation: of the rows' positions.
        dtype: of the arithmetic.

    Returns:
        float32 `[batch, rows, slots]`.
    """
    heads, head_dim = indexer.num_heads, indexer.head_dim
    queries = linear(latent, indexer.q_b_proj.weight).unflatten(-1, (heads, head_dim))
    queries = rotate_heads(queries, rotation).to(dtype)
    weights = linear(x, indexer.scorer.weights_proj.weight).float()
    weights = (weights * (heads * head_dim) ** -0.5).to(dtype)
    keys = keys.to(dtype).transpose(1, 2)

    batch, rows = x.shape[:2]
    chunk = max(64, _CHUNK_ELEMENTS // (batch * heads * max(1, keys.shape[-1])))
    if torch.is_grad_enabled():
        chunk = rows
    scores: list[Tensor] = []
    for q, w in zip(queries.split(chunk, dim=1), weights.split(chunk, dim=1), strict=True):
        products = torch.matmul(q.flatten(1, 2), keys).relu_().unflatten(1, (-1, heads))
        scores.append(torch.matmul(w.unsqueeze(2), products).squeeze(2).float())
    return torch.cat(scores, dim=1)


def hide_unpicked(view: View, window: int, scores: Tensor, top_k: int) -> Tensor:
    """The view's bias with every slot hidden that is not among a row's best `top_k`.

    Args:
        scores: float32 `[batch, length, slots]`.

    Returns:
        `[batch, length, 1, columns]`.
    """
    scores = scores.masked_fill(~view.visible, float("-inf"))
    picked = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    picked.scatter_(2, scores.topk(top_k, dim=-1, sorted=False).indices, True)
    bias = view.bias.repeat(len(scores), 1, 1, 1)
    _, slots, _ = bias.split(view.widths(window), dim=-1)
    slots.masked_fill_(~picked.unsqueeze(2), float("-inf"))
    return bias


def indexer_loss(shares: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
    """Kullback-Leibler divergence of the indexer's distribution over slots from the attention's.

    Args:
        shares: float32 `[batch, rows, slots]`, attention paid to each slot, summed over heads.
        scores: float32 `[batch, rows, slots]`, the indexer's.
        visible: bool `[rows, slots]`.

    Returns:
        Mean over the rows that attend to slots at all, in nats; a scalar >= 0.
    """
    mass = shares.sum(dim=-1, keepdim=True)
    target = shares / mass.clamp(min=1e-6)
    taught = (mass.squeeze(-1) > _LEAST_MASS).float()
    # Finite, for a target of 0 times -inf would not be 0.
    predicted = F.log_softmax(scores.masked_fill(~visible, -1e9), dim=-1)
    divergence = (torch.xlogy(target, target) - target * predicted).sum(dim=-1)
    return (divergence * taught).sum() / taught.sum().clamp(min=1)
