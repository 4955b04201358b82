# SPDX-License-Identifier: Apache-2.0
"""What a session counts (SPEC 8)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spin_trtllm.replay.metrics import mean, percentile_99


@dataclass
class SpinStats:
    """Counts and metrics of a session. Metrics that nothing was measured for are None.

    A step is one decoded token of one sequence, in all layers. An entry is a step in one layer.

    Attributes:
        steps: all decode steps with a cache, those that fell back to dense included.
        cold_steps: steps that kept everything because the sequence's state was cold.
        sparse_steps: steps that skipped at least one block.
        dense_slots_scored: slots that the untouched indexer would have scored, over all entries.
        spin_slots_scored: slots that were scored; probing is not counted.
        pooled_keys_read: pooled keys that it took to rank blocks by the current query, as
            `reference.pool_keys.pooled_keys_read` counts them.
        fallbacks: decode steps that ran dense, by reason.
        probe_seconds: time spent on probing and capturing, to be taken off any timing.
        warm_entries: entries that chose their blocks by prediction.
        misses: per decoder layer, the miss rate of every warm entry; filled while probing, so
            only then does this object grow.
    """

    steps: int = 0
    cold_steps: int = 0
    sparse_steps: int = 0
    dense_slots_scored: int = 0
    spin_slots_scored: int = 0
    pooled_keys_read: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    probe_seconds: float = 0.0
    warm_entries: int = 0
    misses: dict[int, list[float]] = field(default_factory=dict)
    _sparsity_sum: float = 0.0

    @property
    def realized_sparsity(self) -> float | None:
        """Mean over the warm entries of the share of blocks that were not scored."""
        return self._sparsity_sum / self.warm_entries if self.warm_entries else None

    @property
    def mean_miss(self) -> float | None:
        """Mean over the warm entries of the share of dense top-k slots outside the kept blocks."""
        return mean(self._all_misses())

    @property
    def p99_miss(self) -> float | None:
        """99th percentile of the same, over all layers together."""
        return percentile_99(self._all_misses())

    @property
    def p99_miss_layer_mean(self) -> float | None:
        """99th percentile of each layer by itself, averaged over the layers."""
        return mean([p for p in map(percentile_99, self.misses.values()) if p is not None])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with SPEC 8's names."""
        names = (
            "steps",
            "cold_steps",
            "sparse_steps",
            "dense_slots_scored",
            "spin_slots_scored",
            "pooled_keys_read",
            "realized_sparsity",
            "mean_miss",
            "p99_miss",
            "p99_miss_layer_mean",
            "probe_seconds",
        )
        return {name: getattr(self, name) for name in names} | {"fallbacks": dict(self.fallbacks)}

    @contextmanager
    def probing(self, device: torch.device) -> Iterator[None]:
        """Time what is done only to measure."""
        started = _now(device)
        try:
            yield
        finally:
            self.probe_seconds += _now(device) - started

    def add_warm(self, warm: Tensor, kept_blocks: Tensor, blocks: int) -> None:
        """Count one layer of a step.

        Args:
            warm: bool `[S]`; kept_blocks: int64 `[S]`, `|U|`; blocks: `B`, equal for the batch.
        """
        if blocks:
            self.warm_entries += int(warm.sum())
            self._sparsity_sum += float((1 - kept_blocks[warm].double() / blocks).sum())

    def add_misses(self, layer: int, misses: Tensor) -> None:
        """Add miss rates `[S]` of warm entries in a layer."""
        self.misses.setdefault(layer, []).extend(misses.tolist())

    def _all_misses(self) -> list[float]:
        return [miss for layer in self.misses.values() for miss in layer]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
