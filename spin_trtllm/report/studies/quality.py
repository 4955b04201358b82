# SPDX-License-Identifier: Apache-2.0
"""Tables 2 to 5: what is missed as more is skipped, with and without exploration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spin_trtllm.config import SpinConfig
from spin_trtllm.report.claims import Claim, judge
from spin_trtllm.report.intervals import mean_of
from spin_trtllm.report.record import FloatArray
from spin_trtllm.report.store import Arm, TraceFile
from spin_trtllm.report.study import (
    QUALITY_COLUMNS,
    SPARSITIES,
    Arms,
    Evidence,
    Findings,
    Study,
    quality_curves,
)

CLAIMED_SPARSITIES = (0.4, 0.5)
WHY_NOT_ANSWERS = (
    "The paper's claim about exploration is of answers recalled exactly. A trace has no answers; "
    "what stands in for them here are the share of the true top-K that is read (one less the mean "
    "miss), and the share of rows that read all of it."
)
_POLICIES = ("random", "none")


def label_of(policy: str, sparsity: float) -> str:
    """Label of the arm with this exploration policy at this target sparsity."""
    return f"{policy} at {sparsity:g}"


def policy_arms(config: SpinConfig, policies: Sequence[str]) -> Arms:
    """An arm for each exploration policy at each target sparsity."""
    return {
        label_of(policy, sparsity): Arm(
            replace(config.at_sparsity(sparsity), exploration_policy=policy)
        )
        for policy in policies
        for sparsity in SPARSITIES
    }


def policy_findings(
    evidence: Evidence, policies: Sequence[str], claimed: Sequence[str], notes: list[str]
) -> Findings:
    """Table and curves of exploration policies; claims of some of them against `none`."""
    rows = [
        {
            "exploration": policy,
            "target_sparsity": sparsity,
            **evidence.quality(label_of(policy, sparsity)),
            "complete": mean_of(_complete(evidence, label_of(policy, sparsity))).to_json(),
        }
        for policy in policies
        for sparsity in SPARSITIES
    ]
    columns = {"exploration": "exploration", "target_sparsity": "target", **QUALITY_COLUMNS}
    return Findings(
        columns={**columns, "complete": "rows that miss nothing"},
        rows=rows,
        claims=[
            claim
            for policy in claimed
            for sparsity in CLAIMED_SPARSITIES
            for claim in _claims(evidence, policy, sparsity)
        ],
        charts=quality_curves(rows, "exploration"),
        notes=[WHY_NOT_ANSWERS, *notes],
    )


def _claims(evidence: Evidence, policy: str, sparsity: float) -> list[Claim]:
    explored, none = label_of(policy, sparsity), label_of("none", sparsity)
    text = f"{policy} exploration recalls at least as much as none, at {sparsity:.0%} sparsity"
    missed = mean_of(evidence.misses(none)) - mean_of(evidence.misses(explored))
    whole = mean_of(_complete(evidence, explored)) - mean_of(_complete(evidence, none))
    return [
        judge(text, "share of the top-K read, difference", missed, or_equal=True),
        judge(text, "rows that miss nothing, difference", whole, or_equal=True),
    ]


def _complete(evidence: Evidence, label: str) -> list[FloatArray]:
    """1 where a row misses nothing, 0 where it misses something."""
    return [np.where(np.isnan(x), np.nan, x == 0) for x in evidence.misses(label)]


def _arms(config: SpinConfig, traces: Sequence[TraceFile]) -> Arms:
    return policy_arms(config, _POLICIES)


def _compute(evidence: Evidence) -> Findings:
    explored = f"Explored is a share of {evidence.config.exploration:g} of the kept blocks."
    return policy_findings(evidence, _POLICIES, ["random"], [explored])


STUDY = Study(
    key="tables2-5",
    title="Tables 2 to 5: quality against sparsity",
    asks="What is missed at 20 to 50 % sparsity, with random exploration and without?",
    paper="At 40 to 50 % sparsity exploration recalls at least as much, exactly, as none does.",
    arms=_arms,
    compute=_compute,
)
