# SPDX-License-Identifier: Apache-2.0
"""What SPIN skipped and missed in decode steps (SPEC 8)."""

from __future__ import annotations

from dataclasses import dataclass, field

from spin_trtllm.replay.metrics import mean, percentile_99


@dataclass
class Misses:
    """Of warm steps, over all layers and sequences. An entry is a step of a sequence in one layer.

    Attributes:
        entries: how many chose their blocks by prediction.
        skipped: share of the blocks that an entry did not keep, summed over them.
        rates: by decoder layer, each row's share of its dense top-k outside the kept blocks.
    """

    entries: int = 0
    skipped: float = 0.0
    rates: dict[int, list[float]] = field(default_factory=dict)

    def add(self, other: Misses) -> None:
        """Add what was measured elsewhere."""
        self.entries += other.entries
        self.skipped += other.skipped
        for layer, rates in other.rates.items():
            self.rates.setdefault(layer, []).extend(rates)

    def to_dict(self) -> dict[str, float | None]:
        """With SPEC 8's names; empty where nothing was measured."""
        if not self.entries:
            return {}
        everything = [rate for layer in self.rates.values() for rate in layer]
        tails = [percentile_99(layer) or 0.0 for layer in self.rates.values()]
        return {
            "realized_sparsity": self.skipped / self.entries,
            "mean_miss": mean(everything),
            "p99_miss": percentile_99(everything),
            "p99_miss_layer_mean": mean(tails),
        }
