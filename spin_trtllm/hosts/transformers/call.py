# SPDX-License-Identifier: Apache-2.0
"""One decode step in one layer, as it passes through the hooks, and what it does with tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spin_trtllm.hosts.transformers.sequences import CacheRows
from spin_trtllm.step import StepPlan

ABSENT = float("-inf")  # score of a slot that was not scored


@dataclass(eq=False)
class Call:
    """`S` sequences of one query row each; `T` visible slots; `K` = top-k.

    Attributes:
        layer: decoder-layer index.
        rows: the sequences, in row order.
        positions_tokens: int64 `[S, 1]`.
        dense: the host scores everything itself, and SPIN neither decides nor learns.
        inputs: queries `[S, 1, H, D]`, keys `[S, T, D]` and hidden states `[S, 1, hidden]`, as the
            host gave them to the scorer.
        plan: what SPIN decided; None as long as it has not.
        kept: bool `[S, T]`, slots inside kept blocks.
        slots: int64 `[S, n]`, slots whose keys are scored; rows that keep fewer than others are
            filled up with slots they skip. None when all slots are scored.
        picks: int64 `[S, 1, K]`, slots the attention reads, -1 for none; None: the host's own.
    """

    layer: int
    rows: CacheRows
    positions_tokens: Tensor
    dense: bool = False
    inputs: tuple[Tensor, Tensor, Tensor] | None = None
    plan: StepPlan | None = None
    kept: Tensor | None = None
    slots: Tensor | None = None
    picks: Tensor | None = None


def head_weights(scorer: torch.nn.Module, hidden: Tensor) -> Tensor:
    """What the host's scorer multiplies the heads with: fp32 `[S, 1, H]`, all its factors in one.

    Args:
        hidden: `[S, 1, hidden]`.
    """
    host: Any = scorer
    weights: Tensor = host.weights_proj(hidden).float()
    return weights * (host.weights_scaling * host.softmax_scale)


def gather_keys(keys: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The keys of kept slots, in slot order.

    Args:
        keys: `[S, T, D]`; kept: bool `[S, T]`.

    Returns:
        Slots int64 `[S, n]` and their keys `[S, n, D]`; `n` is the most that any row keeps.
    """
    width = int(kept.sum(1).max())
    slots = (~kept).byte().sort(dim=1, stable=True).indices[:, :width]
    return slots, keys.gather(1, slots.unsqueeze(-1).expand(-1, -1, keys.shape[-1]))


def scatter_scores(scores: Tensor, slots: Tensor, kept: Tensor) -> Tensor:
    """Put scores back in their slots.

    Args:
        scores: fp32 `[S, 1, n]`; slots: int64 `[S, n]`; kept: bool `[S, T]`.

    Returns:
        fp32 `[S, 1, T]`, -inf outside the kept slots.
    """
    full = scores.new_full((kept.shape[0], 1, kept.shape[1]), ABSENT)
    full.scatter_(-1, slots.unsqueeze(1), scores)
    return full.masked_fill_(~kept.unsqueeze(1), ABSENT)


def miss_rates(truth: Tensor, kept: Tensor) -> Tensor:
    """Share of each row's dense top-k that lies outside the kept blocks (SPEC 8).

    Args:
        truth: int `[S, K]`, padded with -1, at least one slot a row; kept: bool `[S, T]`.

    Returns:
        fp64 `[S]`.
    """
    real = truth >= 0
    found = kept.gather(1, truth.clamp(min=0).long()) & real
    return 1 - found.sum(1).double() / real.sum(1)
