# SPDX-License-Identifier: Apache-2.0
"""What one replay measured, row by row: `replay.metrics` before it averages (SPEC 8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import Tensor

from spin_trtllm.config import SpinConfig
from spin_trtllm.files import save_tensors
from spin_trtllm.geometry import count_blocks, visible_slots
from spin_trtllm.reference.topk_slots import best_slots
from spin_trtllm.replay.metrics import as_mask, correlate, mean, percentile_99
from spin_trtllm.replay.policies import Outcome, make_policy
from spin_trtllm.replay.trace import Trace, TraceStep

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Record:
    """Figures of every row of a replay; NaN where there is none. `T` steps, `L` layers, `R` rows.

    Attributes:
        warm: bool `[T, L]`; a layer that is not warm scores everything and does not count.
        sparsity: float64 `[T, L]`, share of the blocks that is skipped.
        miss: float64 `[T, L, R]`, share of the truth that is missed.
        pearson: float64 `[T, L, R]`, correlation of predicted and true scores.
        recall: float64 `[T, L, R]`, share of the truth among the best predicted slots.
    """

    warm: NDArray[np.bool_]
    sparsity: FloatArray
    miss: FloatArray
    pearson: FloatArray
    recall: FloatArray

    @property
    def steps(self) -> int:
        """All steps, cold ones included."""
        return len(self.warm)

    def figures(self) -> dict[str, float | int | None]:
        """SPEC 8's keys: to the last bit what `replay` returns."""
        # A sum depends on its order: misses go layer by layer, all others step by step.
        layers = [present(self.miss[:, layer]) for layer in range(self.miss.shape[1])]
        tails = [percentile_99(layer) for layer in layers]
        figures: dict[str, float | int | None] = {
            "mean_miss": mean([rate for layer in layers for rate in layer]),
            "p99_miss": percentile_99([rate for layer in layers for rate in layer]),
            "p99_miss_layer_mean": mean([tail for tail in tails if tail is not None]),
            "realized_sparsity": mean(present(self.sparsity)),
            "cold_steps": int((~self.warm.any(1)).sum()),
            "steps": self.steps,
        }
        recall = present(self.recall)
        if recall:
            figures["pearson"] = mean(present(self.pearson))
            figures["topk_recall"] = mean(recall)
        return figures

    def save(self, path: Path) -> None:
        """Write to a path that `atomic_file` gave."""
        tensors = {f.name: torch.from_numpy(getattr(self, f.name)) for f in fields(self)}
        save_tensors(path, tensors, {}, argument="replay record")

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read what `save` wrote."""
        return cls(**load_file(path))


def present(values: FloatArray) -> list[float]:
    """The figures that are there, in order."""
    return [float(value) for value in values[np.isfinite(values)]]


def measure(
    trace: Trace,
    config: SpinConfig,
    *,
    policy: str = "spin",
    predictions: bool = False,
    on_step: Callable[[], object] | None = None,
) -> Record:
    """Run a policy over a trace, as `replay` does, and keep the figures of every row.

    Args:
        config: parameters; `top_k` None takes the trace's.
        policy: a name of `policies.POLICIES`.
        predictions: also measure SPIN's own slot predictions (predictors always are).
        on_step: called after every step.

    Raises:
        SpinError: unknown policy, or NaN in a visible slot.
    """
    chosen = make_policy(policy, config, trace, predictions=predictions)
    rows: list[dict[str, Tensor]] = []
    for step in trace:
        outcome = chosen.step(step)
        rows.append(_judge(step, outcome, trace.ratio, config.block_size, chosen.top_k_slots))
        if on_step is not None:
            on_step()
    layers = len(trace.layers)
    shapes: dict[str, tuple[int, ...]] = {f.name: (layers, trace.rows) for f in fields(Record)}
    shapes["warm"] = shapes["sparsity"] = (layers,)
    record = {}
    for name, shape in shapes.items():
        blank = torch.zeros(0, *shape, dtype=torch.bool if name == "warm" else torch.float64)
        record[name] = torch.stack([row[name] for row in rows] or [blank]).numpy()
    return Record(**{name: v.reshape(len(rows), *shapes[name]) for name, v in record.items()})


def _judge(
    step: TraceStep, outcome: Outcome, ratio: int, block_size_slots: int, top_k: int
) -> dict[str, Tensor]:
    """One step of a `Record`, under the same names."""
    scores, warm = step.scores, outcome.warm
    visible = visible_slots(step.positions_tokens, ratio)
    seen = torch.arange(scores.shape[-1]) < visible.unsqueeze(-1)
    truth = as_mask(best_slots(scores, seen.expand_as(scores), top_k), seen)
    size = truth.sum(-1)  # 0 where no slot is visible: the shares below are NaN there
    missed = (truth & ~as_mask(outcome.top_k, seen)).sum(-1).double() / size
    blocks = int(count_blocks(visible[-1], block_size_slots))
    kept = outcome.selection.blocks.sum(-1).double()
    none = torch.full_like(missed, float("nan"))
    pearson, recall = none, none
    if outcome.predicted is not None:
        missing = scores.shape[-1] - outcome.predicted.shape[-1]
        never = float("-inf")
        predicted = torch.nn.functional.pad(outcome.predicted, (0, missing), value=never)
        best = best_slots(predicted, predicted > never, top_k)
        pearson = correlate(predicted, scores)
        recall = (truth & as_mask(best, truth)).sum(-1).double() / size
    counts = warm.unsqueeze(-1)
    return {
        "warm": warm,
        "sparsity": torch.where(warm & (blocks > 0), 1.0 - kept / blocks, float("nan")),
        "miss": torch.where(counts, missed, none),
        "pearson": torch.where(counts & pearson.isfinite(), pearson, none),
        "recall": torch.where(counts, recall, none),
    }
