# SPDX-License-Identifier: Apache-2.0
"""Run a part of the study, in as many calls as it takes.

    python -m benchmarks.study.run --part quick --output build/study
    python -m benchmarks.study.run --part curve-8k --output build/study --seconds 500 \\
        --corpus build/tiny_model/corpus.zip

A cell is skipped when its result is there and was made from the same inputs. A call that stops for
`--seconds` exits with code 75; the same command then goes on from there. `--list` shows what is
left and about how long it takes. `--part` may be given several times. `--processes 12` keeps a
GPU busy (NVIDIA's MPS lets them run at once); one that finds no memory leaves its
cells to the next call.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from benchmarks.study.cells import DENSE, MEASURED, PARTS, Cell
from benchmarks.study.estimate import Estimate
from benchmarks.study.pool import run_side_by_side
from benchmarks.study.study import Study
from benchmarks.tiny_model.corpus import load_corpus
from spin_trtllm import tiny
from spin_trtllm.demo import environment, license_text
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.transformers import load_model

AGAIN = os.EX_TEMPFAIL


def open_study(
    checkpoint: Path,
    corpus: Path | None,
    output: Path,
    device: str,
    measured: frozenset[Cell] = frozenset(),
) -> Study:
    """Load a model and the text.

    Args:
        corpus: whose held-out text is the filler; None takes the clone's Apache License.
        output: directory, made if it does not exist.
        measured: see `Study`.

    Raises:
        SpinError: as the parts that it loads.
    """
    model, _ = load_model(checkpoint, device=device)
    files = (checkpoint / name for name in ("model.safetensors", "config.json"))
    weights = " ".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    filler = license_text() if corpus is None else load_corpus(corpus).held_out.tobytes()
    output.mkdir(parents=True, exist_ok=True)
    return Study(model, weights, filler, output, measured)


def run_part(study: Study, part: tuple[Cell, ...], seconds: float) -> list[Cell]:
    """Run the cells that are left, as long as there is time for the next one.

    Returns:
        The cells that are still left.
    """
    started = time.perf_counter()
    left = study.left(part)
    for question, group in groupby(left.copy(), key=lambda cell: cell.question):
        batches = None
        for cell in group:
            estimate = estimate_of(study, part)
            needed = estimate.cell(cell)
            if batches is None:
                needed += estimate.reading(question)
            if time.perf_counter() - started + needed > seconds:
                return left
            if batches is None:
                batches = study.read(question)
            result = study.run(cell, batches)
            left.remove(cell)
            print(_line(result, cell, len(part) - len(left), len(part)), flush=True)
    return left


def measured_in(parts: Sequence[str]) -> frozenset[Cell]:
    """Cells of these parts whose result must say what was skipped and missed."""
    cells = (cell for name in parts if name in MEASURED for cell in PARTS[name])
    return frozenset(cell for cell in cells if cell.method != DENSE[0])


def estimate_of(study: Study, part: tuple[Cell, ...]) -> Estimate:
    """From the cells of a part that were run on this kind of device."""
    here = environment(study.model)["device"]
    done = [(cell, result) for cell in part if (result := study.result(cell)) is not None]
    device = next(study.model.parameters()).device.type
    return Estimate(
        device, [(c, r["seconds"]) for c, r in done if r["environment"]["device"] == here]
    )


def _line(result: dict, cell: Cell, done: int, cells: int) -> str:
    right = [one for document in result["right"] for one in document]
    share = result["cost"]["bytes_share"]
    return (
        f"[{done}/{cells}] {cell.name}: {sum(right)} of {len(right)} right, "
        f"{share:.3f} of dense's bytes, {result['seconds']:.1f} s"
    )


def main() -> None:
    """Run a part, or list what is left of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, required=True, action="append")
    parser.add_argument("--output", type=Path, required=True, help="directory of the results")
    parser.add_argument("--checkpoint", type=Path, help="default: the tiny model's")
    parser.add_argument("--corpus", type=Path, help="held-out text; default: the Apache License")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no cell beyond")
    parser.add_argument("--processes", type=int, default=1, help="that share the device")
    parser.add_argument("--list", action="store_true", help="show what is left, and stop")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a decode step is many small operations
    part = tuple(dict.fromkeys(cell for name in arguments.part for cell in PARTS[name]))
    if arguments.processes < 1:
        parser.exit(2, f"--processes: got {arguments.processes}, allowed: 1 or more\n")
    if arguments.corpus is None and arguments.part != ["quick"]:
        # The license alone would repeat in long contexts, which then hold what is to be predicted.
        parser.exit(2, "--corpus: got none, allowed: a corpus file, except for --part quick\n")
    try:
        checkpoint = arguments.checkpoint or tiny.checkpoint_path()
        opening = partial(
            open_study,
            checkpoint,
            arguments.corpus,
            arguments.output,
            arguments.device,
            measured_in(arguments.part),
        )
        study = opening()
        if not arguments.list and arguments.processes > 1:
            cells = study.left(part)
            estimate = estimate_of(study, part)
            run_side_by_side(
                opening, run_part, cells, estimate, arguments.processes, arguments.seconds
            )
        elif not arguments.list:
            run_part(study, part, arguments.seconds)
        left = study.left(part)
        estimate = estimate_of(study, part)
    except SpinError as error:
        parser.exit(2, f"{error}\n")
    for cell in left:
        print(f"left: {cell.name}, {estimate.cell(cell):.0f} s")
    print(f"{len(left)} of {len(part)} cells left, {estimate.total(left):.0f} s")
    if left and not arguments.list:
        parser.exit(AGAIN)


if __name__ == "__main__":
    main()
