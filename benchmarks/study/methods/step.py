# SPDX-License-Identifier: Apache-2.0
"""One decode step in one layer as a method sees it, and the count of what was read for it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from spin_trtllm.geometry import count_blocks, visible_slots

KEY_SCALE_BYTES = 4  # of an fp8 key, next to one byte for each of its values


@dataclass(frozen=True)
class Geometry:
    """Of a model's indexers.

    Attributes:
        ratio: raw tokens a slot.
        top_k: slots the attention reads.
        heads, head_dim: of the indexer's queries.
    """

    ratio: int
    top_k: int
    heads: int
    head_dim: int

    @property
    def key_bytes(self) -> int:
        """A key as it is served: fp8 values and a scale, whatever the model here computes in."""
        return self.head_dim + KEY_SCALE_BYTES


@dataclass(frozen=True, eq=False)
class Step:
    """`S` sequences of `R` rows; `T` slots visible to the last row; `H` heads of `D` values.

    Attributes:
        layer: decoder-layer index; number: of the layer among those with an indexer, from 0.
        positions_tokens: int64 `[S, R]`; every sequence is equally long.
        queries: `[S, R, H, D]`; keys: `[S, T, D]`; hidden: `[S, R, hidden]`.
        scorer: the model's own, of this layer.
        geometry: of the model.
    """

    layer: int
    number: int
    positions_tokens: Tensor
    queries: Tensor
    keys: Tensor
    hidden: Tensor
    scorer: torch.nn.Module
    geometry: Geometry

    @property
    def rows(self) -> int:
        """`R`."""
        return self.queries.shape[1]

    @property
    def sequences(self) -> int:
        """`S`."""
        return self.keys.shape[0]

    @property
    def slots(self) -> int:
        """`T`."""
        return self.keys.shape[1]

    @property
    def visible(self) -> Tensor:
        """Slots that each row may see: bool `[S, R, T]`."""
        seen = visible_slots(self.positions_tokens, self.geometry.ratio)
        return torch.arange(self.slots, device=self.keys.device) < seen.unsqueeze(-1)

    @property
    def head_weights(self) -> Tensor:
        """How much each head's similarity counts in a score, but for a constant: `[S, R, H]`."""
        project: Any = self.scorer.weights_proj
        weights: Tensor = project(self.hidden)
        return weights

    def score(self, keys: Tensor) -> Tensor:
        """Scores of any keys `[S, n, D]` for this step's queries, fp32 `[S, R, n]`."""
        scores: Tensor = self.scorer.forward(self.queries, keys, self.hidden)  # past the hooks
        return scores

    def blocks(self, block_size_slots: int) -> int:
        """How many blocks the `T` slots make."""
        return count_blocks(self.slots, block_size_slots)


@dataclass
class Cost:
    """What the indexer read in decode steps, over all layers and sequences.

    Rows of a step share what they read, so that a key counts once. Writes do not count.

    Attributes:
        dense_keys: keys that the untouched indexer reads.
        keys: keys that were read.
        pooled_keys: keys read that stand for a whole block.
        state_bytes: averages, cached scores and cached picks that were read.
        dense_products, products: dot products of a query head and a key.
    """

    dense_keys: int = 0
    keys: int = 0
    pooled_keys: int = 0
    state_bytes: int = 0
    dense_products: int = 0
    products: int = 0

    def add(self, other: Cost) -> None:
        """Add another count to this one."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def bytes_read(self, geometry: Geometry) -> int:
        """Bytes of keys, pooled keys and state."""
        return (self.keys + self.pooled_keys) * geometry.key_bytes + self.state_bytes

    def bytes_share(self, geometry: Geometry) -> float:
        """Those bytes over what dense reads; above 1 where a method reads more."""
        return self.bytes_read(geometry) / (self.dense_keys * geometry.key_bytes)
