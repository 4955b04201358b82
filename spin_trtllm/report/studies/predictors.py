# SPDX-License-Identifier: Apache-2.0
"""Table 1: which scores known beforehand predict the next ones best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spin_trtllm.config import SpinConfig
from spin_trtllm.report.claims import Claim, judge
from spin_trtllm.report.intervals import mean_of
from spin_trtllm.report.record import FloatArray, Record
from spin_trtllm.report.store import Arm, TraceFile
from spin_trtllm.report.study import Arms, Evidence, Findings, Study

_PREDICTORS = ("random", "prev_layer", "prev_layer_best_of_5", "prev_iter", "prev_iter_offset1")
_FIGURES = {"pearson": "Pearson correlation", "recall": "top-K recall"}
_ORDER = (("prev_iter", "prev_layer"), ("prev_layer", "random"))


def _arms(config: SpinConfig, traces: Sequence[TraceFile]) -> Arms:
    arms = {name: Arm(config, policy=name) for name in _PREDICTORS}
    return arms | {"spin": Arm(config, predictions=config.reduction != "A2")}


def _compute(evidence: Evidence) -> Findings:
    rows = [_row(label, records) for label, records in evidence.records.items()]
    charts = [
        {
            "kind": "dots",
            "title": f"{heading} of predicted and true scores",
            "x_label": heading,
            "rows": [{"label": row["predictor"], **row[figure]} for row in rows],
        }
        for figure, heading in _FIGURES.items()
    ]
    return Findings(
        columns={"predictor": "predictor", **_FIGURES},
        rows=rows,
        claims=[
            _claim(evidence, figure, better, worse)
            for figure in _FIGURES
            for better, worse in _ORDER
        ],
        charts=charts,
        notes=[
            "prev_layer and prev_iter are given the true scores of all slots of the layer or step "
            "before, which a method that skips blocks never has; prev_layer_best_of_5 even knows "
            "the answer. They bound what prediction can do.",
            f"spin predicts from its own averages, at a target sparsity of "
            f"{evidence.config.sparsity_text}: it saw only the blocks it kept.",
            "The first indexer layer has none before it. A claim compares two predictors on the "
            "rows that both predicted; the table gives each on all of its own rows.",
        ],
    )


def _row(label: str, records: list[Record]) -> dict[str, Any]:
    figures = {name: mean_of([getattr(r, name) for r in records]) for name in _FIGURES}
    return {"predictor": label, **{name: figure.to_json() for name, figure in figures.items()}}


def _claim(evidence: Evidence, figure: str, better: str, worse: str) -> Claim:
    left, right = (
        [getattr(record, figure) for record in evidence.records[label]] for label in (better, worse)
    )
    common = [np.isfinite(x) & np.isfinite(y) for x, y in zip(left, right, strict=True)]
    difference = mean_of(_only(left, common)) - mean_of(_only(right, common))
    heading = _FIGURES[figure]
    return judge(f"{better} predicts better than {worse}", f"{heading}, difference", difference)


def _only(figures: list[FloatArray], where: list[Any]) -> list[FloatArray]:
    return [np.where(mask, x, np.nan) for x, mask in zip(figures, where, strict=True)]


STUDY = Study(
    key="table1",
    title="Table 1: predictors",
    asks="How well do scores that are known before a step predict its scores?",
    paper="The step before predicts better than the layer before, and that better than chance.",
    arms=_arms,
    compute=_compute,
)
