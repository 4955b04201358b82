# SPDX-License-Identifier: Apache-2.0
"""Ways to decide that are for study alone: other storage, no diagonals, budgets that adapt."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spin_trtllm.config import SpinConfig
from spin_trtllm.reference import Selection
from spin_trtllm.reference.averages import decode_log8, encode_log8
from spin_trtllm.reference.predict_blocks import NEVER
from spin_trtllm.replay.policies import Outcome, Policy
from spin_trtllm.replay.trace import Trace, TraceStep
from spin_trtllm.replay.variants import SpinVariant
from spin_trtllm.state import SpinState
from spin_trtllm.step import StepPlan

Rounding = Callable[[Tensor], Tensor]

_E4M3_LARGEST = 448.0


def to_e4m3(values: Tensor) -> Tensor:
    """Rounded to fp8 e4m3, without a scale."""
    return values.clamp(-_E4M3_LARGEST, _E4M3_LARGEST).to(torch.float8_e4m3fn).float()


def to_log8(values: Tensor) -> Tensor:
    """Rounded to what `state_dtype: log8` stores."""
    return decode_log8(encode_log8(values))


class RoundedState(SpinVariant):
    """Both averages rounded after every update, as a narrower storage would."""

    rounding: Rounding

    def _update(
        self, lanes: Tensor, plan: StepPlan, scores: Tensor, rows: Tensor, accepted: Tensor
    ) -> None:
        super()._update(lanes, plan, scores, rows, accepted)
        for averages in (self.state.v.flatten(0, 1), self.state.d.flatten(0, 1)):
            averages[lanes] = type(self).rounding(averages[lanes])


class E4m3State(RoundedState):
    """Averages in fp8."""

    rounding = staticmethod(to_e4m3)


class Log8State(RoundedState):
    """Averages in eight logarithmic bits."""

    rounding = staticmethod(to_log8)


class VerticalOnly(SpinVariant):
    """No diagonal average: it is never above the vertical one."""

    def _make_cold(self, lanes: Tensor) -> None:
        super()._make_cold(lanes)
        self.state.d.flatten(0, 1)[lanes] = NEVER

    def _update(
        self, lanes: Tensor, plan: StepPlan, scores: Tensor, rows: Tensor, accepted: Tensor
    ) -> None:
        super()._update(lanes, plan, scores, rows, accepted)
        self.state.d.flatten(0, 1)[lanes] = NEVER


class VerticalLog8(VerticalOnly, Log8State):
    """The vertical average alone, in eight logarithmic bits."""


class Budgeted(Policy):
    """SPIN whose target sparsity may differ by step, one row a step."""

    def __init__(self, config: SpinConfig, trace: Trace) -> None:
        super().__init__(config, trace)
        self._spins = [
            SpinVariant(
                self.config,
                SpinState([layer], sequences=1, slots=trace.slots, dtype=config.storage_dtype),
                ratio=trace.ratio,
            )
            for layer in trace.layers
        ]

    @abstractmethod
    def targets(self) -> Sequence[float]:
        """Target sparsity of each layer in the next step."""

    def learn(self, step: TraceStep, outcome: Outcome) -> None:
        """Hear what became of the step."""

    def step(self, step: TraceStep) -> Outcome:
        """One decode step, layer by layer."""
        found = []
        queries = step.query_scores if self.config.query_share_ppm else None
        for index, (spin, target) in enumerate(zip(self._spins, self.targets(), strict=True)):
            spin.config = replace(self.config, target_sparsity=target)
            here = slice(index, index + 1)
            plan = spin.plan(
                [self.layers[index]],
                [self.sequence_id],
                step.positions_tokens.unsqueeze(0),
                None if queries is None else queries[here],
            )
            scores = step.scores[here]
            found.append((plan.warm, plan.selection, spin.top_k(plan, scores)))
            spin.observe(plan, scores, torch.full(plan.warm.shape, step.accepted))
        warm, selections, picks = zip(*found, strict=True)
        parts = ("blocks", "row_blocks", "explored_blocks")
        selection = Selection(
            *(torch.cat([getattr(s, part) for s in selections]) for part in parts)
        )
        outcome = Outcome(torch.cat(warm), selection, torch.cat(picks))
        self.learn(step, outcome)
        return outcome


class Novelty(Budgeted):
    """More budget in a layer while its signal is above its own recent mean, less while below."""

    swing = 0.1  # of the target, up and down
    memory = 0.9  # of the signal's running mean

    def __init__(self, config: SpinConfig, trace: Trace) -> None:
        super().__init__(config, trace)
        base = self.config.target_sparsity
        self._mean: Tensor | None = None  # of the signal, fp32 [layers]
        self._low, self._high = max(0.0, base - self.swing), base + self.swing
        self._targets = [base] * len(trace.layers)

    def targets(self) -> Sequence[float]:
        """Of two, by the last step's signal."""
        return self._targets

    def learn(self, step: TraceStep, outcome: Outcome) -> None:
        """Compare the signal with its mean, then move the mean."""
        signal = self.signal(step, outcome)
        mean = signal if self._mean is None else self._mean
        self._mean = self.memory * mean + (1 - self.memory) * signal
        self._targets = [self._low if new else self._high for new in (signal > mean).tolist()]

    @abstractmethod
    def signal(self, step: TraceStep, outcome: Outcome) -> Tensor:
        """How new what the step read is: fp32 `[layers]`."""


class NewestRead(Novelty):
    """Signal: the share of the slots read that lie in the newest four blocks."""

    newest_blocks = 4

    def signal(self, step: TraceStep, outcome: Outcome) -> Tensor:
        """Of the last row."""
        picks = outcome.top_k[:, -1]
        visible = (int(step.positions_tokens[-1]) + 1) // self.ratio
        first = visible - self.newest_blocks * self.config.block_size
        return (picks >= first).float().mean(-1)


class Surprise(Novelty):
    """Signal: the share of the slots read that lie in explored blocks, which history left out."""

    def signal(self, step: TraceStep, outcome: Outcome) -> Tensor:
        """Of the last row."""
        picks = outcome.top_k[:, -1].clamp(min=0).long()
        explored = outcome.selection.explored_blocks
        return explored.gather(1, picks // self.config.block_size).float().mean(-1)
