# SPDX-License-Identifier: Apache-2.0
"""Figure 2 and Table 7: the rows of a draft, in the shared mask and in the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spin_trtllm.config import MASK_POLICIES, UPDATE_POLICIES, SpinConfig
from spin_trtllm.report.claims import Claim, judge
from spin_trtllm.report.drafts import Drafts
from spin_trtllm.report.store import Arm, TraceFile
from spin_trtllm.report.study import (
    QUALITY_COLUMNS,
    TAILS,
    Arms,
    Evidence,
    Findings,
    Study,
    quality_curves,
)

DRAFT_TOKENS = 3
ACCEPTANCES = (0.3, 0.6, 0.9)
_TARGETS = (0.3, 0.4, 0.5)
_MATCHED_TARGET = 0.4  # both updates are compared midway between what they realize here
_POLICIES = tuple((mask, update) for mask in MASK_POLICIES for update in UPDATE_POLICIES)
_CAPTURED = "captured"


def _label(drafts: str, mask: str, update: str, sparsity: float) -> str:
    return f"{drafts}: {mask} mask, {update} update at {sparsity:g}"


def _drafts(traces: Sequence[TraceFile]) -> dict[str, Drafts | None]:
    """How the traces are read: as they are where all have drafts, else regrouped."""
    if all(trace.open().rows > 1 for trace in traces):
        return {_CAPTURED: None}
    return {f"acceptance {a:g}": Drafts(DRAFT_TOKENS, a) for a in ACCEPTANCES}


def _arms(config: SpinConfig, traces: Sequence[TraceFile]) -> Arms:
    return {
        _label(name, mask, update, sparsity): Arm(
            replace(config.at_sparsity(sparsity), mask_policy=mask, update_policy=update),
            drafts=drafts,
        )
        for name, drafts in _drafts(traces).items()
        for mask, update in _POLICIES
        for sparsity in _TARGETS
    }


def _compute(evidence: Evidence) -> Findings:
    drafts = _drafts(evidence.traces)
    rows = [
        {
            "drafts": name,
            "acceptance_length": _acceptance_length(evidence.traces, how),
            "policies": f"{mask} mask, {update} update",
            "target_sparsity": sparsity,
            **evidence.quality(_label(name, mask, update, sparsity)),
        }
        for name, how in drafts.items()
        for mask, update in _POLICIES
        for sparsity in _TARGETS
    ]
    charts = []
    for name in drafts:
        shown = [row for row in rows if row["drafts"] == name]
        for chart in quality_curves(shown, "policies"):
            charts.append({**chart, "title": f"{chart['title']}, {name}"})
    return Findings(
        columns={
            "drafts": "drafts",
            "acceptance_length": "tokens a step",
            "policies": "policies",
            "target_sparsity": "target",
            **QUALITY_COLUMNS,
        },
        rows=rows,
        claims=[
            _claim(evidence, name, mask, tail)
            for name in drafts
            for mask in MASK_POLICIES
            for tail in TAILS
        ],
        charts=charts,
        notes=[_note(drafts), *_NOTES],
    )


def _claim(evidence: Evidence, name: str, mask: str, tail: str) -> Claim:
    def labels(update: str) -> list[str]:
        return [_label(name, mask, update, sparsity) for sparsity in _TARGETS]

    middle = _TARGETS.index(_MATCHED_TARGET)
    at, row0, prefix = evidence.at_equal_sparsity(tail, labels("row0"), labels("prefix"), middle)
    return judge(
        f"the prefix update misses less in the tail than the row-0 update ({name}, {mask} mask)",
        f"{tail}, at a realized sparsity of {at:.3f}, row-0 less prefix",
        row0 - prefix,
    )


def _acceptance_length(traces: Sequence[TraceFile], drafts: Drafts | None) -> float | None:
    """Mean tokens that a step yields: accepted drafts and one more."""
    accepted = np.concatenate([trace.open(drafts).accepted.numpy() for trace in traces])
    return float(accepted.mean()) + 1 if len(accepted) else None


def _note(drafts: dict[str, Drafts | None]) -> str:
    if _CAPTURED in drafts:
        return "Drafts and acceptances are those that were captured."
    return (
        f"These traces have steps of one token. They were regrouped into drafts of {DRAFT_TOKENS}, "
        "whose tokens are accepted with the given chance as long as those before them were. "
        "Rejected drafts are given the scores of the true tokens, so their rows miss less than "
        "those of wrong tokens might; they count, as all rows do."
    )


_NOTES = (
    "Tokens a step (the acceptance length) are a property of the traces here, not a result: "
    "whether SPIN lowers them needs a model that drafts and decodes.",
    "A union mask of several rows skips less than its target. Curves over realized sparsity, not "
    "rows of one target, compare policies fairly; the claims interpolate on them.",
)

STUDY = Study(
    key="figure2",
    title="Figure 2 and Table 7: mask and update policies",
    asks="With drafts, should the mask serve all rows or row 0, and which rows should update?",
    paper="At the same realized sparsity, updating with the accepted prefix has a lower p99 miss "
    "than updating with row 0 alone. No ordering of the masks is checked.",
    arms=_arms,
    compute=_compute,
)
