# SPDX-License-Identifier: Apache-2.0
"""Runs cells and keeps their results: one JSON file each, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.study.cells import Cell, Question
from benchmarks.study.decoding import Answer, Batch, answer, read_documents
from benchmarks.study.documents import documents_of
from benchmarks.study.methods import METHODS, Cost, Misses, model_geometry
from benchmarks.study.speculation import speculate
from spin_trtllm import __version__
from spin_trtllm.config import SpinConfig, preset
from spin_trtllm.demo import environment
from spin_trtllm.errors import SpinError
from spin_trtllm.files import atomic_file

VERSION = 1  # of what cells mean: a change that alters figures raises it


@dataclass(frozen=True, eq=False)
class Study:
    """What all cells of an output directory share.

    Attributes:
        model: of Transformers, on its device.
        weights: digests of the model's weights and configuration.
        filler: text around the facts, and to predict.
        output: directory of the results.
        measured: cells whose result must say what was skipped and missed; others may.
        reading: held while documents are read, which takes far more memory than answering.
    """

    model: torch.nn.Module
    weights: str
    filler: bytes
    output: Path
    measured: frozenset[Cell] = frozenset()
    reading: AbstractContextManager[object] = field(default_factory=nullcontext)

    def path(self, cell: Cell) -> Path:
        """Where a cell's result is, or will be."""
        return self.output / f"{cell.name}.json"

    @property
    def source(self) -> str:
        """Digest of what all cells share: model, text, SPIN's preset and versions."""
        text = hashlib.sha256(self.filler).hexdigest()
        usual = SpinConfig().to_dict()
        # What the preset sets, so that an option which is new and off makes no result void.
        spin = {k: v for k, v in preset("tiny-deepseek-v4").to_dict().items() if v != usual[k]}
        return _digest([VERSION, __version__, self.weights, text, spin])

    def inputs(self, cell: Cell) -> str:
        """Digest of all that decides a cell's answers, but for the machine."""
        return _digest([self.source, asdict(cell)])

    def result(self, cell: Cell) -> dict[str, Any] | None:
        """A cell's result; None where there is none, or one of other inputs or fewer figures.

        Raises:
            SpinError: a file that is no result.
        """
        path = self.path(cell)
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return None if self._lacks(cell, found) else found
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SpinError(f"study: {str(path)!r} is no result: {error!r}") from error

    def _lacks(self, cell: Cell, found: dict[str, Any]) -> bool:
        """Whether a result is of other inputs, or was made before what is needed was recorded."""
        if found["inputs"] != self.inputs(cell):
            return True
        totals = cell.question.drafts is not None and isinstance(found["accepted"], int)
        return totals or (cell in self.measured and "mean_miss" not in found)

    def left(self, cells: Sequence[Cell]) -> list[Cell]:
        """Cells without a result."""
        return [cell for cell in cells if self.result(cell) is None]

    def read(self, question: Question) -> list[Batch]:
        """The documents of a question, read once for all methods."""
        documents = list(
            documents_of(
                question.task,
                documents=question.documents,
                context_bytes=question.context_bytes,
                queries=question.queries,
                filler=self.filler,
            )
        )
        size = question.side_by_side
        with self.reading:
            batches = [
                read_documents(self.model, documents[start : start + size])
                for start in range(0, len(documents), size)
            ]
            torch.cuda.empty_cache()  # what reading took, tens of GiB, is for the others now
        return batches

    def run(self, cell: Cell, batches: list[Batch]) -> dict[str, Any]:
        """Answer the questions of `read` with a cell's method, and write the result."""
        started = time.perf_counter()
        answered = _follow if cell.question.drafts is None else _speculate
        found, cost = answered(self.model, cell, batches)
        geometry = model_geometry(self.model)
        result = {
            "cell": asdict(cell),
            "inputs": self.inputs(cell),
            "source": self.source,
            **found,
            "cost": {
                **asdict(cost),
                "bytes_read": cost.bytes_read(geometry),
                "bytes_share": cost.bytes_share(geometry),
            },
            "seconds": time.perf_counter() - started,
            "environment": environment(self.model),
        }
        with atomic_file(self.path(cell)) as path:
            path.write_text(json.dumps(result) + "\n", encoding="utf-8")
        return result


def _follow(
    model: torch.nn.Module, cell: Cell, batches: list[Batch]
) -> tuple[dict[str, Any], Cost]:
    """Answers with the true text fed: a list for each document."""
    (batch,) = batches
    ids = range(len(batch.documents))
    with METHODS[cell.method].on(model, ids, cell.setting) as run:
        answers = answer(model, batch, run)
        cost, misses = run.cost, run.misses
    found: dict[str, Any] = {"steps": batch.steps}
    for name in (of.name for of in fields(Answer)):
        found[name] = [[getattr(one, name) for one in some] for some in answers]
    return found | misses.to_dict(), cost


def _speculate(
    model: torch.nn.Module, cell: Cell, batches: list[Batch]
) -> tuple[dict[str, Any], Cost]:
    """Answers that were generated: a list for each document."""
    drafts = cell.question.drafts
    assert drafts is not None
    found, cost, misses = [], Cost(), Misses()
    for number, batch in enumerate(batches):
        with METHODS[cell.method].on(model, [number], cell.setting, drafts=True) as run:
            found.append(speculate(model, batch, run, drafts=drafts))
            cost.add(run.cost)
            misses.add(run.misses)
    rows = sorted({rows for one in found for rows in one.steps})
    return {
        "steps": sum(batch.steps for batch in batches),
        "right": [one.right for one in found],
        "tokens": [one.tokens for one in found],
        "steps_of_rows": {str(n): sum(one.steps.get(n, 0) for one in found) for n in rows},
        "verifications": [sum(one.steps.values()) for one in found],
        "proposed": [one.proposed for one in found],
        "accepted": [one.accepted for one in found],
        **misses.to_dict(),
    }, cost


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
