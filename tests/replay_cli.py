# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm replay` called in this process: traces, options, what comes back."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strategies
from safetensors.numpy import load_file

import spin_trtllm
from spin_trtllm.cli import main

ROOT = Path(spin_trtllm.__file__).parents[1]
METRICS = [
    "mean_miss",
    "p99_miss",
    "p99_miss_layer_mean",
    "realized_sparsity",
    "cold_steps",
    "steps",
]
FIGURES = ("mean_miss", "p99_miss", "p99_miss_layer_mean", "realized_sparsity")
DUMPED = ("blocks", "row_blocks", "explored", "topk", "v", "d")
# The command's defaults, by the oracle's names.
DEFAULTS = {"block_size": 64, "sparsity": 0.4, "ema_decay": 0.5, "exploration": 0.05}
NEG_INF = -math.inf

Trace = dict[str, Any]
Dump = dict[str, np.ndarray]
Capture = pytest.CaptureFixture[str]


def make_trace(
    steps: int = 12,
    layers: tuple[int, ...] = (2, 6),
    rows: int = 3,
    first: int = 60,
    ratio: int = 1,
    top_k: int = 6,
    seed: int = 0,
    jumps: tuple[int, ...] = (),
    spare_slots: int = 2,
) -> Trace:
    """Random scores with some persistence and ties; `jumps` are steps that start 2 tokens late."""
    rng = np.random.default_rng(seed)
    accepted = rng.integers(0, rows, steps)
    starts, position = [], first
    for t in range(steps):
        position += 2 * (t in jumps)
        starts.append(position)
        position += int(accepted[t]) + 1
    positions = np.array(starts, dtype=np.int64).reshape(-1, 1) + np.arange(rows)
    slots = (max(starts, default=first) + rows) // ratio + spare_slots
    stripe = rng.standard_normal((len(layers), 1, slots))
    scores = stripe + rng.standard_normal((steps, len(layers), rows, slots))
    scores = np.where(scores < -1.5, 0.0, scores).astype(np.float32)
    seen = np.arange(slots) < ((positions + 1) // ratio)[:, None, :, None]
    return {
        "scores": np.where(seen, scores, np.float32(np.nan)),
        "positions": positions,
        "accepted": accepted.astype(np.int64),
        "ratio": ratio,
        "top_k": top_k,
        "layers": list(layers),
        "sequence_id": 11,
    }


def save(folder: Path, trace: Trace, name: str = "t.trace", source: str | None = None) -> str:
    path = folder / name
    strategies.write_trace(path, trace, source)
    return str(path)


def call(capsys: Capture, *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `spin-trtllm ARGUMENTS`, in this process."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


def replay(capsys: Capture, trace: str, *options: Any) -> tuple[dict[str, Any], Dump]:
    """Metrics and dump of a replay that must succeed."""
    dump = Path(trace).with_suffix(".dump")
    arguments = ["replay", trace, "--json", "--dump", dump, *map(str, options)]
    code, out, err = call(capsys, *arguments)
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    return json.loads(out), load_file(dump)


def refused(capsys: Capture, *arguments: str | Path) -> str:
    """The one line on stderr of a call that must fail with exit code 2."""
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert "Traceback" not in err
    return err


def check(found: tuple[dict[str, Any], Dump], expected: dict[str, Any]) -> None:
    metrics, dump = found
    assert list(metrics) == METRICS
    for name in DUMPED:
        assert dump[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(dump[name], expected[name], err_msg=name)
    for name in FIGURES:
        assert metrics[name] == pytest.approx(expected["metrics"][name], abs=1e-12)
    assert metrics["steps"] == expected["metrics"]["steps"]
    assert metrics["cold_steps"] == expected["metrics"]["cold_steps"]


def process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spin_trtllm.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
