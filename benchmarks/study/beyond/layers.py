# SPDX-License-Identifier: Apache-2.0
"""A target for each layer, as `spin-trtllm calibrate` finds it on the sweep's traces.

    python -m benchmarks.study.beyond.layers --output build/layers.json \\
        shipped=build/beyond seed-1=build/beyond-seed-1

Each directory is a sweep's. Eight replays of eight traces take half a minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.study.beyond.arms import baseline
from benchmarks.study.beyond.capture import TASKS, VIEWS
from benchmarks.study.beyond.findings import EQUAL_AT
from spin_trtllm.calibration.run import Figures, calibrate, plan_calibration
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_file

PLACES = 5  # decimals that are kept


def traces_of(sweep: Path) -> list[str]:
    """Traces of a sweep's directory that serve where no query ranks.

    Raises:
        SpinError: there is none.
    """
    found = [
        str(path)
        for task in TASKS
        for path in sorted((sweep / "traces").glob(f"{task}-*-{VIEWS[0]}.*"))
    ]
    return found or refuse("sweep", str(sweep), "a directory of benchmarks.study.beyond")


def layers_of(traces: Sequence[str], target_sparsity: float) -> dict[str, Any]:
    """What calibration finds at a mean target, as plain values for JSON."""
    config = replace(baseline(), target_sparsity=target_sparsity)
    found = calibrate(plan_calibration(traces, config), config)
    assert found.held_out is not None  # a sweep has several documents
    return {
        "target_sparsity": target_sparsity,
        "layers": {str(layer): round(own, PLACES) for layer, own in found.config.layer_sparsity},
        "before": _described(found.before),
        "after": _described(found.after),
        "held_out": _described(found.held_out),
    }


def _described(figures: Figures) -> dict[str, Any]:
    return {
        "mean_miss": round(float(figures.mean_miss.mean()), PLACES),
        "mean_miss_of_layers": [round(miss, PLACES) for miss in figures.mean_miss.tolist()],
        "p99_miss": round(figures.p99_miss, PLACES),
    }


def main() -> None:
    """Calibrate and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweeps", nargs="+", metavar="NAME=DIRECTORY", help="of a checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as in replay: a step is too small to share
    try:
        found: dict[str, list[dict[str, Any]]] = {}
        for given in arguments.sweeps:
            name, _, folder = given.partition("=")
            traces = traces_of(Path(folder))
            found[name] = []
            for target in EQUAL_AT:
                found[name].append(layers_of(traces, target))
                print(f"{name}: {found[name][-1]}", flush=True)
        with atomic_file(arguments.output) as path:
            path.write_text(json.dumps(found) + "\n", encoding="utf-8")
        print(arguments.output)
    except SpinError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
