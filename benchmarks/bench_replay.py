# SPDX-License-Identifier: Apache-2.0
"""Time and memory of `spin-trtllm replay` on a long trace: 1,000 steps x 21 layers x 24,576 slots.

The trace (about 2 GB) is written to a temporary folder from drifting synthetic scores, and the
replay runs in its own process so that its peak memory is its own.

    python benchmarks/bench_replay.py [--steps 1000] [--layers 21] [--slots 24576] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"
RATIO, TOP_K = 4, 512


def write_long_trace(path: Path, *, steps: int, layers: int, slots: int) -> int:
    """Stream a trace to disk without holding it: a slowly drifting field plus noise.

    Returns:
        bytes written.
    """
    generator = np.random.default_rng(7)
    first_token = slots * RATIO - 1 - steps
    positions = np.arange(first_token, first_token + steps, dtype=np.int64).reshape(steps, 1)
    accepted = np.zeros(steps, dtype=np.int64)
    score_bytes = 4 * steps * layers * slots
    header = {
        "__metadata__": {
            "format": "spin-trace/1",
            "ratio": str(RATIO),
            "top_k": str(TOP_K),
            "layers": ",".join(str(2 * i + 2) for i in range(layers)),
            "sequence_id": "1",
            "source": "benchmarks/bench_replay.py",
        },
        "scores": {"dtype": "F32", "shape": [steps, layers, 1, slots], "data_offsets": [0]},
        "positions": {"dtype": "I64", "shape": [steps, 1]},
        "accepted": {"dtype": "I64", "shape": [steps]},
    }
    end = score_bytes
    header["scores"]["data_offsets"] = [0, end]
    for name, array in (("positions", positions), ("accepted", accepted)):
        header[name]["data_offsets"] = [end, end + array.nbytes]
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    field = generator.standard_normal((layers, slots), dtype=np.float32)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for step in range(steps):
            field *= np.float32(0.95)
            field += np.float32(0.31) * generator.standard_normal(field.shape, dtype=np.float32)
            visible = (int(positions[step, 0]) + 1) // RATIO
            scores = field.copy()
            scores[:, visible:] = np.nan
            file.write(scores.tobytes())
        file.write(positions.tobytes() + accepted.tobytes())
    return path.stat().st_size


def run_replay(trace: Path) -> tuple[float, int, dict[str, float]]:
    """Seconds, peak resident bytes and metrics of one replay in a process of its own."""
    start = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "spin_trtllm.cli", "replay", str(trace), "--json"],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    output = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"replay failed with status {status}")
    return time.perf_counter() - start, usage.ru_maxrss * 1024, json.loads(output)


def main() -> None:
    """Write the trace, replay it a few times, print a table row and save the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=21)
    parser.add_argument("--slots", type=int, default=24576)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "replay-cpu.json")
    shape = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "long.trace"
        size = write_long_trace(trace, steps=shape.steps, layers=shape.layers, slots=shape.slots)
        runs = [run_replay(trace) for _ in range(shape.repeats)]
    seconds = [run[0] for run in runs]
    result = {
        "shape": {"steps": shape.steps, "layers": shape.layers, "rows": 1, "slots": shape.slots},
        "trace_bytes": size,
        "seconds_median": statistics.median(seconds),
        "seconds_spread": max(seconds) - min(seconds),
        "peak_resident_bytes": max(run[1] for run in runs),
        "bytes_per_second": size / statistics.median(seconds),
        "metrics": runs[0][2],
        "cpu_cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": date.today().isoformat(),
    }
    print(
        f"{size / 1e9:.2f} GB trace: {result['seconds_median']:.1f} s "
        f"(spread {result['seconds_spread']:.1f} s), "
        f"{result['bytes_per_second'] / 1e6:.0f} MB/s, "
        f"peak {result['peak_resident_bytes'] / 1e9:.2f} GB on {result['cpu_cores']} cores"
    )
    shape.output.parent.mkdir(parents=True, exist_ok=True)
    shape.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
