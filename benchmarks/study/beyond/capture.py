# SPDX-License-Identifier: Apache-2.0
"""Traces of dense decoding along true answers, with what each query said of pooled blocks.

A trace holds query scores of one kind of pooled keys, so every document is decoded once for each of
`VIEWS`. At sparsity 0 nothing is skipped: all its traces have the same scores.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.study.decoding import Batch, read_documents, side_by_side
from benchmarks.study.documents import documents_of
from spin_trtllm.config import SpinConfig, preset
from spin_trtllm.generate import forward
from spin_trtllm.hosts.transformers import decoder, enable
from spin_trtllm.reference import quantize_query, score_blocks


class View(NamedTuple):
    """Whose pooled keys the queries were asked about.

    Attributes:
        block_size_slots: slots a block.
        pooling: `mean` or `minmax`.
        fp8: whether pooled keys were rounded as they are counted; else they are the model's.
    """

    block_size_slots: int
    pooling: str
    fp8: bool = False

    def __str__(self) -> str:
        return f"{self.block_size_slots}-{self.pooling}{'-fp8' if self.fp8 else ''}"


VIEWS = (
    View(16, "mean"),
    View(8, "mean"),
    View(32, "mean"),
    View(64, "mean"),
    View(16, "minmax"),
    View(16, "mean", fp8=True),
)
TASKS = {"recall": 4, "text": 240}  # questions a document, about 240 decode steps of either
SIDE_BY_SIDE = 4


def trace_path(folder: Path, task: str, document: int, view: View = VIEWS[0]) -> Path:
    """Where a document's trace is: by default the one that serves where no query ranks."""
    return folder / f"{task}-{document}-{view}.safetensors"


def capture(
    model: torch.nn.Module,
    folder: Path,
    *,
    task: str,
    documents: int,
    context_bytes: int,
    filler: bytes,
) -> Iterator[Path]:
    """Write the traces of a task that are not there yet, and yield each.

    Args:
        task: of `TASKS`; documents, context_bytes, filler: see `documents_of`.
    """
    made = list(
        documents_of(
            task,
            documents=documents,
            context_bytes=context_bytes,
            queries=TASKS[task],
            filler=filler,
        )
    )
    for start in range(0, documents, SIDE_BY_SIDE):
        ids = range(start, min(start + SIDE_BY_SIDE, documents))
        missing = [
            v for v in VIEWS if not all(trace_path(folder, task, i, v).exists() for i in ids)
        ]
        if not missing:
            continue
        batch = read_documents(model, [made[i] for i in ids])
        for view in missing:
            yield from _capture_view(model, batch, folder, task, list(ids), view)


def _capture_view(
    model: torch.nn.Module,
    batch: Batch,
    folder: Path,
    task: str,
    ids: list[int],
    view: View,
) -> Iterator[Path]:
    asked = side_by_side([turns[0] for turns in batch.documents]).to(batch.logits.device)
    cache = copy.deepcopy(batch.cache)
    session = enable(
        model,
        dense_config(view),
        max_sequences=len(ids),
        sequence_ids=ids,
        capture=True,
        strict=True,
    )
    with session, _rounding(view):
        for token in asked[:, :-1].split(1, 1):
            forward(model, token, cache)
    assert session.capture is not None
    for number in ids:
        path = trace_path(folder, task, number, view)
        session.capture.save_trace(path, number, source=f"{task}, document {number}, answers fed")
        yield path


def to_fp8(keys: Tensor) -> Tensor:
    """Keys `[S, B, P, D]` rounded to e4m3 with one power-of-two scale each, as served keys are."""
    rounded, scales = quantize_query(keys, keys.new_ones(keys.shape[:-1], dtype=torch.float32))
    return (rounded.float() * scales.unsqueeze(-1)).to(keys.dtype)


def _rounding(view: View) -> AbstractContextManager[object]:
    """The host's queries score rounded pooled keys in here, if the view has them."""
    if not view.fp8:
        return nullcontext()

    def score(query: Tensor, weights: Tensor, pooled: Tensor) -> Tensor:
        return score_blocks(query, weights, to_fp8(pooled))

    return patch.object(decoder, "score_blocks", score)


def dense_config(view: View) -> SpinConfig:
    """Nothing skipped, every block scored by the query all the same."""
    return replace(
        preset("tiny-deepseek-v4"),
        block_size=view.block_size_slots,
        target_sparsity=0.0,
        query_share=1.0,
        query_pooling=view.pooling,
    )
