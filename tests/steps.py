# SPDX-License-Identifier: Apache-2.0
"""One small `SpinStep` for many tests, and an oracle for each of its sequences."""

from __future__ import annotations

from typing import Any

import torch
from oracle import OracleSequence
from torch import Tensor

from spin_trtllm.config import SpinConfig
from spin_trtllm.state import SpinState
from spin_trtllm.step import SpinStep, StepPlan

LAYERS = (3, 7, 12)
SLOTS, RATIO, BLOCK, TOP_K = 44, 4, 8, 10
BLOCKS = 6  # ceil(44 / 8)
CONFIG = SpinConfig(block_size=BLOCK, target_sparsity=0.5, exploration=0.2, top_k=TOP_K, seed=5)
INF, NAN = float("inf"), float("nan")


def make(config: SpinConfig = CONFIG, sequences: int = 4, layers: Any = LAYERS) -> SpinStep:
    state = SpinState(layers, sequences=sequences, slots=SLOTS, dtype=config.storage_dtype)
    return SpinStep(config, state, ratio=RATIO)


def referee(sequence_id: int, layers: Any = LAYERS, **changes: Any) -> OracleSequence:
    parameters = {
        "block_size": BLOCK,
        "sparsity": 0.5,
        "exploration": 0.2,
        "seed": 5,
        **changes,
    }
    return OracleSequence(RATIO, TOP_K, layers, sequence_id, SLOTS, **parameters)


def rows(*positions: list[int]) -> Tensor:
    return torch.tensor(list(positions), dtype=torch.int64)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def once(
    step: SpinStep, position: int, drafts: int = 0, accepted: int | None = 0, seed: int = 0
) -> StepPlan:
    """One step of sequence 1 on all layers; accepted None leaves the result open."""
    positions = rows(list(range(position, position + drafts + 1)))
    plan = step.plan(LAYERS, [1], positions)
    scores = noise(seed, len(LAYERS), drafts + 1, SLOTS)
    if accepted is not None:
        step.observe(plan, scores, torch.full((len(LAYERS),), accepted))
    return plan


def snapshot(step: SpinStep) -> tuple[Tensor, ...]:
    s = step.state
    return s.v.clone(), s.d.clone(), s.warm.clone(), s.next_tokens.clone()


def same(step: SpinStep, before: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(snapshot(step), before, strict=True))
