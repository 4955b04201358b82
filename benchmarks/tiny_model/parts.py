# SPDX-License-Identifier: Apache-2.0
"""Small operations that attention and indexer share; weights take the type of what they meet."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tiny_model.layout import Rotation


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` in the type of `x`."""
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Divide the last dimension by its root mean square, in the type of `x`."""
    return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the last `2 * pairs` channels, in float32; channels of a pair are neighbours.

    Args:
        x: `[..., positions, channels]`, or `[..., positions, heads, channels]`.
        rotation: broadcasts against the pairs of `x`.
    """
    turned = 2 * rotation.cos.shape[-1]
    still, pairs = x.split((x.shape[-1] - turned, turned), dim=-1)
    even, odd = pairs.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotation.cos, rotation.sin
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return torch.cat((still, pairs.flatten(-2).to(x.dtype)), dim=-1)


def rotate_heads(x: Tensor, rotation: Rotation) -> Tensor:
    """`rotate` for `[batch, positions, heads, channels]`: all heads of a position turn alike."""
    return rotate(x, Rotation(rotation.cos[:, None], rotation.sin[:, None]))


def compress(
    compressor: nn.Module, x: Tensor, ratio: int, rotation: Rotation, eps: float
) -> Tensor:
    """Pool each `ratio` tokens into one slot; weights of the sum are learned, channel by channel.

    In CSA layers a slot also pools the window before its own, through channels of their own.

    Args:
        compressor: a compressor or an indexer, whose projections are used.
        x: `[batch, length, hidden]`.
        rotation: of all positions; a slot takes that of its first token.

    Returns:
        `[batch, length // ratio, head_dim]`.
    """
    slots = x.shape[1] // ratio
    x = x[:, : slots * ratio]
    values = linear(x, compressor.kv_proj.weight).unflatten(1, (slots, ratio))
    gates = linear(x, compressor.gate_proj.weight).unflatten(1, (slots, ratio))
    gates = gates + compressor.position_bias
    norm = compressor.kv_norm.weight
    if values.shape[-1] == 2 * len(norm):
        values, gates = _with_previous(values, 0.0), _with_previous(gates, float("-inf"))
    shares = gates.softmax(dim=2, dtype=torch.float32).to(values.dtype)
    pooled = rms_norm((values * shares).sum(dim=2), eps, norm)
    return rotate(pooled, rotation.at(slice(0, slots * ratio, ratio)))


def _with_previous(windows: Tensor, before_first: float) -> Tensor:
    """First half of the previous window's channels, then second half of the own, along tokens."""
    of_next, of_own = windows.chunk(2, dim=-1)
    of_previous = F.pad(of_next, (0, 0, 0, 0, 1, -1), value=before_first)
    return torch.cat((of_previous, of_own), dim=2)
