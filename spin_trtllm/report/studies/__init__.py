# SPDX-License-Identifier: Apache-2.0
"""The studies, in the order of the report."""

from __future__ import annotations

from spin_trtllm.report.studies import (
    exploration,
    masks,
    predictors,
    quality,
    reductions,
    updates,
)
from spin_trtllm.report.study import Study

STUDIES: dict[str, Study] = {
    module.STUDY.key: module.STUDY
    for module in (predictors, quality, masks, updates, reductions, exploration)
}
