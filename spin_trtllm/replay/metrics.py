# SPDX-License-Identifier: Apache-2.0
"""Miss rate, realized sparsity and prediction quality (SPEC 8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from spin_trtllm.geometry import count_blocks, visible_slots
from spin_trtllm.reference.topk_slots import best_slots

if TYPE_CHECKING:
    from spin_trtllm.replay.policies import Outcome
    from spin_trtllm.replay.trace import TraceStep


class Metrics:
    """Accumulates SPEC 8 over the steps of a trace.

    A truth slot is missed when the attention does not get to read it. For policies that choose
    among the slots of `U` this is SPEC 8's "outside U", since a true top-K slot inside `U` is also
    a top-K slot of `U`; for the rivals that read slots they did not score it is the fair reading.
    """

    def __init__(self, *, layers: int, ratio: int, block_size_slots: int, top_k: int) -> None:
        self._ratio, self._block_size, self._top_k = ratio, block_size_slots, top_k
        self._misses: list[list[float]] = [[] for _ in range(layers)]
        self._sparsity: list[float] = []
        self._pearson: list[float] = []
        self._recall: list[float] = []
        self.steps = 0
        self.cold_steps = 0

    def add(self, step: TraceStep, outcome: Outcome) -> None:
        """Count one step."""
        self.steps += 1
        warm = outcome.warm
        if not bool(warm.any()):
            self.cold_steps += 1
            return
        visible = visible_slots(step.positions_tokens, self._ratio)
        seen = torch.arange(step.scores.shape[-1]) < visible.unsqueeze(-1)
        truth = as_mask(best_slots(step.scores, seen.expand_as(step.scores), self._top_k), seen)
        size = truth.sum(-1)
        missed = (truth & ~as_mask(outcome.top_k, seen)).sum(-1)
        for layer in warm.nonzero().squeeze(-1).tolist():
            rates = (missed[layer].double() / size[layer])[size[layer] > 0]
            self._misses[layer].extend(rates.tolist())
        self._add_sparsity(outcome, int(count_blocks(visible[-1], self._block_size)))
        if outcome.predicted is not None:
            self._add_prediction(step.scores, outcome.predicted, truth, warm)

    def _add_sparsity(self, outcome: Outcome, blocks: int) -> None:
        if blocks:
            kept = outcome.selection.blocks[outcome.warm].sum(-1).double()
            self._sparsity.extend((1.0 - kept / blocks).tolist())

    def _add_prediction(
        self, scores: Tensor, predicted: Tensor, truth: Tensor, warm: Tensor
    ) -> None:
        predicted = torch.nn.functional.pad(
            predicted, (0, scores.shape[-1] - predicted.shape[-1]), value=float("-inf")
        )
        pearson = correlate(predicted, scores)[warm]
        self._pearson.extend(pearson[pearson.isfinite()].tolist())
        best = best_slots(predicted, predicted > float("-inf"), self._top_k)
        size = truth.sum(-1)
        hits = (truth & as_mask(best, truth)).sum(-1).double()
        self._recall.extend((hits / size)[(size > 0) & warm.unsqueeze(-1)].tolist())

    def result(self) -> dict[str, float | int | None]:
        """SPEC 8's keys, and `pearson` and `topk_recall` where scores were predicted.

        A figure with nothing to average is None.
        """
        everything = [rate for layer in self._misses for rate in layer]
        tails = [percentile_99(layer) for layer in self._misses]
        result: dict[str, float | int | None] = {
            "mean_miss": mean(everything),
            "p99_miss": percentile_99(everything),
            "p99_miss_layer_mean": mean([tail for tail in tails if tail is not None]),
            "realized_sparsity": mean(self._sparsity),
            "cold_steps": self.cold_steps,
            "steps": self.steps,
        }
        if self._recall:
            result["pearson"] = mean(self._pearson)
            result["topk_recall"] = mean(self._recall)
        return result


def as_mask(slots: Tensor, like: Tensor) -> Tensor:
    """Slot lists `[..., K]`, -1 padded, as a bool mask `[..., N]` of the width of `like`."""
    width = like.shape[-1]
    mask = torch.zeros(*slots.shape[:-1], width + 1, dtype=torch.bool)
    where = torch.where(slots >= 0, slots, width).long()
    return mask.scatter_(-1, where, True)[..., :width]


def correlate(predicted: Tensor, scores: Tensor) -> Tensor:
    """Pearson correlation over the slots where both are finite: `[..., N]` to `[...]`.

    NaN where one of them is constant.
    """
    both = predicted.isfinite() & scores.isfinite()
    count = both.sum(-1, keepdim=True).clamp(min=1)
    x = torch.where(both, predicted, 0.0).double()
    y = torch.where(both, scores, 0.0).double()
    x = torch.where(both, x - x.sum(-1, keepdim=True) / count, 0.0)
    y = torch.where(both, y - y.sum(-1, keepdim=True) / count, 0.0)
    return (x * y).sum(-1) / (x.square().sum(-1) * y.square().sum(-1)).sqrt()


def mean(values: list[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    return float(np.mean(values)) if values else None


def percentile_99(values: list[float]) -> float | None:
    """99th percentile with linear interpolation; None of nothing."""
    return float(np.percentile(values, 99)) if values else None
