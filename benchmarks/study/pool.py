# SPDX-License-Identifier: Apache-2.0
"""Cells run by several processes on one device: alone, a process mostly waits for its launches."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.synchronize import Lock

import torch

from benchmarks.study.cells import Cell, Question
from benchmarks.study.estimate import Estimate
from benchmarks.study.study import Study

CELLS_OF_A_JOB = 8  # so many share one reading of their documents

Open = Callable[[], Study]
RunPart = Callable[[Study, tuple[Cell, ...], float], object]

_study: Study  # of this process, where it is one of a pool


def jobs_of(cells: Sequence[Cell]) -> Iterator[tuple[Cell, ...]]:
    """Cells in groups of one question each, not too many together; with drafts one alone."""
    same: dict[Question, list[Cell]] = defaultdict(list)
    for cell in cells:
        same[cell.question].append(cell)
    for question, group in same.items():
        size = CELLS_OF_A_JOB if question.drafts is None else 1  # those take minutes each
        for start in range(0, len(group), size):
            yield tuple(group[start : start + size])


def run_side_by_side(
    open_study: Open,
    run_part: RunPart,
    cells: Sequence[Cell],
    estimate: Estimate,
    processes: int,
    seconds: float,
) -> None:
    """Run what there is time for, the longest jobs first, so that none is left alone at the end.

    A job that finds no memory is left for another call.

    One process reads at a time: all of them together would not find the memory.

    Args:
        open_study: makes a process's own study; it and `run_part` travel there by name.
        estimate: of how long the cells take.
        seconds: see `run_part`.
    """
    until = time.time() + seconds  # a clock that processes share
    spawn = get_context("spawn")
    with ProcessPoolExecutor(
        processes, spawn, initializer=_open, initargs=(open_study, spawn.Lock())
    ) as pool:
        jobs = sorted(jobs_of(cells), key=estimate.total, reverse=True)
        for done in as_completed([pool.submit(_work, run_part, job, until) for job in jobs]):
            done.result()


def _open(open_study: Open, reading: Lock) -> None:
    global _study
    torch.set_num_threads(1)
    _study = replace(open_study(), reading=reading)


def _work(run_part: RunPart, job: tuple[Cell, ...], until: float) -> None:
    try:
        run_part(_study, job, until - time.time())
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        print(f"out of memory, left: {job[0].question.name}", flush=True)
