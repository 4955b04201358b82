# SPDX-License-Identifier: Apache-2.0
"""Figure 4: ways to choose the blocks that are explored."""

from __future__ import annotations

from collections.abc import Sequence

from spin_trtllm.config import SpinConfig
from spin_trtllm.report.store import TraceFile
from spin_trtllm.report.studies.quality import policy_arms, policy_findings
from spin_trtllm.report.study import Arms, Evidence, Findings, Study

_POLICIES = ("random", "staleness", "age", "none")


def _arms(config: SpinConfig, traces: Sequence[TraceFile]) -> Arms:
    return policy_arms(config, _POLICIES)


def _compute(evidence: Evidence) -> Findings:
    weight = (
        "staleness ranks by predicted score plus age, a step of age being worth a score of "
        f"{evidence.config.staleness_weight:g}; what is best depends on the scale of the scores."
    )
    elsewhere = "The claims of random exploration, the product's, are those of Tables 2 to 5."
    return policy_findings(evidence, _POLICIES, ["staleness", "age"], [weight, elsewhere])


STUDY = Study(
    key="figure4",
    title="Figure 4: exploration policies",
    asks="Which blocks should be explored: random ones, or those not seen for long?",
    paper="At 40 to 50 % sparsity exploration recalls at least as much, exactly, as none does. "
    "No ordering among the policies is checked.",
    arms=_arms,
    compute=_compute,
)
