# SPDX-License-Identifier: Apache-2.0
"""What a variant missed on a document, and the bytes that it read for it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from benchmarks.study.beyond.arms import Arm
from benchmarks.study.beyond.rivals import RulePolicy
from spin_trtllm.files import atomic_file
from spin_trtllm.geometry import visible_slots
from spin_trtllm.reference.pool_keys import key_bytes_read
from spin_trtllm.reference.topk_slots import best_slots, expand_blocks
from spin_trtllm.replay.metrics import as_mask
from spin_trtllm.replay.policies import Policy
from spin_trtllm.replay.trace import Trace
from spin_trtllm.report.record import FloatArray


class Document:
    """The truth of one document, at one row a step.

    Attributes:
        truth: bool `[steps, layers, slots]`, the dense top-K.
        mass: fp32 `[steps, layers, slots]`, the softmax of the scores on these slots, 1 in all: the
            indexer was taught the attention's own distribution as such.
    """

    def __init__(self, trace: Trace) -> None:
        truths, masses = [], []
        for step in trace:
            scores = step.scores[:, 0]
            seen = torch.arange(trace.slots) < visible_slots(step.positions_tokens, trace.ratio)
            truth = as_mask(best_slots(scores, seen.expand_as(scores), trace.top_k), scores)
            truths.append(truth)
            masses.append(scores.masked_fill(~truth, float("-inf")).softmax(-1))
        self.truth, self.mass = torch.stack(truths), torch.stack(masses)


@dataclass(frozen=True)
class Figures:
    """Of a replay, by step and layer: float64 `[steps, layers]`, NaN where the layer was cold.

    Attributes:
        miss: share of the dense top-K that was not read.
        missed_mass: of its softmax mass.
        read: bytes of keys, pooled keys, averages and what rivals keep, over those of all keys.
        written: bytes of averages, sums or scores of slots, over the same; picks do not count.
    """

    miss: FloatArray
    missed_mass: FloatArray
    read: FloatArray
    written: FloatArray


def measure(policy: Policy, trace: Trace, document: Document, arm: Arm, key_bytes: int) -> Figures:
    """Replay a trace of single rows.

    Averages are read of all slots, to predict, and of the kept ones again, to update. What a rival
    reads besides keys is what the study's methods count.

    Args:
        key_bytes: of one key, 132 in DeepSeek-V4's fp8.
    """
    state_bytes = arm.bytes_a_slot
    rows = []
    for step in trace:
        outcome = policy.step(step)
        slots = int(visible_slots(step.positions_tokens, trace.ratio)[-1])
        kept = expand_blocks(outcome.selection.blocks, slots, policy.config.block_size).sum(1)
        lost = document.truth[step.index] & ~as_mask(outcome.top_k[:, 0], step.scores)
        keys = [_key_bytes_read(policy, slots, n, key_bytes) for n in kept.tolist()]
        averages = (slots + kept) * state_bytes
        state = policy.state_bytes_read if isinstance(policy, RulePolicy) else averages
        read = torch.tensor(keys, dtype=torch.float64) + state
        figures = torch.stack(
            [
                lost.sum(-1).double() / document.truth[step.index].sum(-1),
                (document.mass[step.index] * lost).sum(-1).double(),
                read / (slots * key_bytes),
                kept.double() * state_bytes / (slots * key_bytes),
            ]
        )
        rows.append(torch.where(outcome.warm, figures, float("nan")))
    return Figures(*torch.stack(rows, 1).numpy())


def _key_bytes_read(policy: Policy, slots: int, kept_slots: int, key_bytes: int) -> float:
    config = policy.config
    pooling = config.query_pooling if config.query_share_ppm else None
    return float(
        key_bytes_read(
            slots,
            kept_slots,
            block_size_slots=config.block_size,
            key_bytes=key_bytes,
            query_pooling=pooling,
        )
    )


def save(path: Path, figures: list[Figures]) -> None:
    """Write the figures of an arm at one target, by document, whole or not at all."""
    arrays = {
        f"{field.name}-{document}": getattr(one, field.name)
        for document, one in enumerate(figures)
        for field in fields(Figures)
    }
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


def load(path: Path, documents: int) -> list[Figures]:
    """Read what `save` wrote."""
    with np.load(path) as arrays:
        return [
            Figures(*(arrays[f"{field.name}-{n}"] for field in fields(Figures)))
            for n in range(documents)
        ]
