# SPDX-License-Identifier: Apache-2.0
"""The rules of the study's rivals on traces, which have scores but neither keys nor queries."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.study.methods.rule import Rule
from benchmarks.study.methods.step import Geometry, Step
from spin_trtllm.config import SpinConfig
from spin_trtllm.geometry import visible_slots
from spin_trtllm.reference import Selection
from spin_trtllm.reference.predict_blocks import NEVER
from spin_trtllm.reference.topk_slots import best_slots, expand_blocks
from spin_trtllm.replay.policies import Outcome, Policy
from spin_trtllm.replay.trace import Trace, TraceStep
from spin_trtllm.state import NOWHERE


class RulePolicy(Policy):
    """A rule in the place of SPIN. As with SPIN, the first step scores everything.

    Args:
        make: the rule at a target sparsity in parts per million.
    """

    def __init__(self, make: Callable[[int], Rule], config: SpinConfig, trace: Trace) -> None:
        super().__init__(config, trace)
        self._rule = make(config.sparsity_ppm)
        self._rule.block_size_slots = config.block_size
        self._next_token = NOWHERE
        self.state_bytes_read = torch.zeros(len(trace.layers))  # of the last step, by layer

    def step(self, step: TraceStep) -> Outcome:
        """One decode step, layer by layer; then the rule learns from all layers."""
        first = int(step.positions_tokens[0])
        warm = first == self._next_token
        self._next_token = first + step.accepted + 1
        if not warm:
            self._rule.forget()
        found = [self._decide(step, number, warm) for number in range(len(self.layers))]
        views, blocks, scores, picks, state_bytes = zip(*found, strict=True)
        for view, scored in zip(views, scores, strict=True):
            self._rule.learn(view, scored, step.accepted)
        self.state_bytes_read = torch.tensor(state_bytes, dtype=torch.float64)
        chosen = torch.cat(blocks)
        rows = chosen.unsqueeze(1).expand(-1, self.rows, -1)
        selection = Selection(chosen, rows, torch.zeros_like(chosen))
        return Outcome(torch.full((len(self.layers),), warm), selection, torch.cat(picks).int())

    def _decide(
        self, step: TraceStep, number: int, warm: bool
    ) -> tuple[Step, Tensor, Tensor, Tensor, int]:
        """What the rule sees, keeps `[1, B]`, scores `[1, R, T]`, picks, and reads besides keys."""
        rule, view = self._rule, self._view(step, number)
        blocks = rule.keep(view) if warm else None
        if blocks is None:
            blocks = torch.ones(1, view.blocks(self.config.block_size), dtype=torch.bool)
        kept = expand_blocks(blocks, view.slots, self.config.block_size)
        scores = step.scores[number, :, : view.slots].unsqueeze(0)
        scored = scores.masked_fill(~kept.unsqueeze(1), NEVER)
        state_bytes = rule.extra_cost(view, int(kept.sum())).state_bytes
        everything = bool(kept.all())
        picks = (
            best_slots(scored, view.visible, self.top_k_slots)
            if everything
            else rule.pick(view, scored)
        )
        rule.picked(view, picks.long())
        padded = F.pad(blocks, (0, self.blocks - blocks.shape[-1]))
        return view, padded, scored, picks, state_bytes

    def _view(self, step: TraceStep, number: int) -> Step:
        slots = int(visible_slots(step.positions_tokens, self.ratio)[-1])
        return Step(
            self.layers[number],
            number,
            step.positions_tokens.unsqueeze(0),
            queries=torch.empty(1, self.rows, 0, 0),
            keys=torch.empty(1, slots, 0),
            hidden=torch.empty(1, self.rows, 0),
            scorer=torch.nn.Identity(),
            geometry=Geometry(self.ratio, self.top_k_slots, heads=0, head_dim=0),
        )
