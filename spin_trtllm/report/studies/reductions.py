# SPDX-License-Identifier: Apache-2.0
"""Figure 3: slot averages with and without a block budget, or block averages; and the pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spin_trtllm.config import POOLINGS, SpinConfig
from spin_trtllm.report.claims import Claim, judge
from spin_trtllm.report.store import Arm, TraceFile
from spin_trtllm.report.study import (
    QUALITY_COLUMNS,
    SPARSITIES,
    TAILS,
    Arms,
    Evidence,
    Findings,
    Study,
    quality_curves,
)

_CLAIMED = ("A1-max", "A2-max")
_TARGETS = (0.1, *SPARSITIES, 0.6)  # of those two: neighbours on either side, to interpolate
_BUDGETED = tuple(f"{reduction}-{pooling}" for reduction in ("A1", "A2") for pooling in POOLINGS)


def _label(variant: str, sparsity: float) -> str:
    return f"{variant} at {sparsity:g}"


def _arms(config: SpinConfig, traces: Sequence[TraceFile]) -> Arms:
    # Without a budget there is no share of it that the query could rank, and none for each layer.
    unbudgeted = replace(config, reduction="A0", query_share=0.0, layer_sparsity=())
    arms = {"A0": Arm(unbudgeted)}
    for variant in _BUDGETED:
        reduction, pooling = variant.split("-")
        for sparsity in _TARGETS if variant in _CLAIMED else SPARSITIES:
            changed = replace(config.at_sparsity(sparsity), reduction=reduction, pooling=pooling)
            arms[_label(variant, sparsity)] = Arm(changed)
    return arms


def _compute(evidence: Evidence) -> Findings:
    rows = [
        {
            "variant": variant,
            "target_sparsity": sparsity,
            **evidence.quality(_label(variant, sparsity)),
        }
        for variant in _BUDGETED
        for sparsity in SPARSITIES
    ]
    rows.insert(0, {"variant": "A0", "target_sparsity": None, **evidence.quality("A0")})
    return Findings(
        columns={"variant": "variant", "target_sparsity": "target", **QUALITY_COLUMNS},
        rows=rows,
        claims=[_claim(evidence, sparsity, tail) for sparsity in SPARSITIES for tail in TAILS],
        charts=quality_curves(rows, "variant"),
        notes=[
            "A0 keeps the blocks of its K best predicted slots and explores nothing, so it has "
            "one sparsity of its own, and no target.",
            "A1 (the product) ranks blocks by slot averages; A2 keeps averages of blocks only, "
            "which takes less memory. At one target both have the same budget, but rows of a step "
            "share their blocks, and may agree on fewer: the claims interpolate to the same "
            "realized sparsity, as curves over it compare fairly.",
        ],
    )


def _claim(evidence: Evidence, sparsity: float, tail: str) -> Claim:
    a1, a2 = ([_label(variant, target) for target in _TARGETS] for variant in _CLAIMED)
    at, slots, blocks = evidence.at_equal_sparsity(tail, a1, a2, _TARGETS.index(sparsity))
    return judge(
        f"A1 with max pooling misses no more in the tail than A2, at {sparsity:.0%} sparsity",
        f"{tail}, at a realized sparsity of {at:.3f}, A2-max less A1-max",
        blocks - slots,
        or_equal=True,
    )


STUDY = Study(
    key="figure3",
    title="Figure 3: reductions and pooling",
    asks="Averages per slot or per block, with which pooling, and is a block budget needed?",
    paper="With max pooling, the p99 miss of A1 is no higher than that of A2.",
    arms=_arms,
    compute=_compute,
)
