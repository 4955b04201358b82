# SPDX-License-Identifier: Apache-2.0
"""Figure 1: which blocks are kept, needed and missed, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor

from spin_trtllm.config import SpinConfig
from spin_trtllm.geometry import visible_slots
from spin_trtllm.reference.topk_slots import best_slots
from spin_trtllm.replay.policies import make_policy
from spin_trtllm.replay.trace import Trace, TraceStep
from spin_trtllm.report.store import TraceFile
from spin_trtllm.report.study import Arms, Evidence, Findings, Study

SHOWN_STEPS = 96
SHOWN_LAYERS = 4
INVISIBLE, SKIPPED, KEPT, HIT, MISSED = " .-#x"


def _arms(config: SpinConfig, traces: Sequence[TraceFile]) -> Arms:
    return {}  # a picture of a few steps, not a measurement


def _compute(evidence: Evidence) -> Findings:
    trace = evidence.traces[0].open()
    masks = draw_masks(trace, evidence.config)
    spread = max(1, -(-len(masks) // SHOWN_LAYERS))
    name = evidence.traces[0].path.name
    return Findings(
        columns={
            "layer": "layer",
            "kept": "blocks kept",
            "needed": "blocks needed",
            "missed": "needed blocks missed",
            "persistent": "needed again the step after",
        },
        rows=[{"layer": layer, **_summary(mask)} for layer, mask in masks.items()],
        charts=[
            {
                "kind": "mask",
                "title": f"Blocks of layer {layer}, {name}",
                "rows": masks[layer],
            }
            for layer in list(masks)[::spread]
        ],
        notes=[
            f"The first {SHOWN_STEPS} steps of {name} after the first, which is cold; shares are "
            "of visible blocks over these steps, without intervals. A block is needed when it "
            "holds a slot of the true top-K of any row.",
            "By chance, needed blocks would be needed again as often as any block is needed. "
            "Upright lines are blocks that stay needed, as the vertical averages expect; slanted "
            "ones keep their distance to the query, as the diagonal averages do.",
        ],
    )


def draw_masks(trace: Trace, config: SpinConfig) -> dict[int, list[str]]:
    """What SPIN did with each block, a character a block and a string a step, by layer.

    The characters are INVISIBLE, SKIPPED and not needed, KEPT and not needed, HIT (kept and
    needed) and MISSED (needed, not kept).
    """
    policy = make_policy("spin", config, trace)
    masks: dict[int, list[str]] = {layer: [] for layer in trace.layers}
    for step in islice(trace, SHOWN_STEPS + 1):
        outcome = policy.step(step)
        if not bool(outcome.warm.all()):
            continue
        kept = outcome.selection.blocks
        needed, visible = _needed(step, trace, config.block_size, policy.top_k_slots, kept)
        for layer, line in zip(trace.layers, zip(kept, needed, strict=True), strict=True):
            masks[layer].append(_line(*line, visible))
    return masks


def _needed(
    step: TraceStep, trace: Trace, block_size_slots: int, top_k: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Blocks with a slot of the truth of any row `[L, B]`, and visible blocks `[B]`."""
    counts = visible_slots(step.positions_tokens, trace.ratio)
    seen = torch.arange(trace.slots) < counts.unsqueeze(-1)
    truth = best_slots(step.scores, seen.expand_as(step.scores), top_k).long()
    blocks = torch.where(truth >= 0, truth // block_size_slots, like.shape[-1]).flatten(1)
    needed = torch.zeros(len(like), like.shape[-1] + 1, dtype=torch.bool)
    first_slots = torch.arange(like.shape[-1]) * block_size_slots
    return needed.scatter_(1, blocks, True)[:, :-1], first_slots < counts[-1]


def _line(kept: Tensor, needed: Tensor, visible: Tensor) -> str:
    marks = {(False, False): SKIPPED, (True, False): KEPT, (True, True): HIT}
    return "".join(
        marks.get((k, n), MISSED) if v else INVISIBLE
        for k, n, v in zip(kept.tolist(), needed.tolist(), visible.tolist(), strict=True)
    )


def _summary(mask: list[str]) -> dict[str, Any]:
    text = "".join(mask)
    visible = len(text) - text.count(INVISIBLE)
    needed = text.count(HIT) + text.count(MISSED)
    pairs = [
        after in HIT + MISSED
        for line, following in pairwise(mask)
        for before, after in zip(line, following, strict=True)
        if before in HIT + MISSED
    ]
    return {
        "kept": _share(text.count(KEPT) + text.count(HIT), visible),
        "needed": _share(needed, visible),
        "missed": _share(text.count(MISSED), needed),
        "persistent": _share(sum(pairs), len(pairs)),
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


STUDY = Study(
    key="figure1",
    title="Figure 1: selection masks",
    asks="Which blocks does a step keep, which did it need, and how does that move over time?",
    paper="A picture; no ordering is checked.",
    arms=_arms,
    compute=_compute,
)
