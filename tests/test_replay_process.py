# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm replay` as a process of its own: exit codes, pipes, memory."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from malformed_traces import MALFORMED
from oracle import replay as oracle_replay
from replay_cli import (
    DEFAULTS,
    ROOT,
    check,
    make_trace,
    process,
    save,
)
from safetensors.numpy import load_file


def test_a_process_replays(tmp_path: Path) -> None:
    trace = make_trace(first=90)
    path = save(tmp_path, trace)
    done = process("replay", path, "--json", "--block-size", "8", "--dump", tmp_path / "t.dump")
    assert (done.returncode, done.stderr) == (0, "")
    wanted = oracle_replay(trace, **{**DEFAULTS, "block_size": 8})
    check((json.loads(done.stdout), load_file(tmp_path / "t.dump")), wanted)


def test_a_process_refuses_a_bad_trace(tmp_path: Path) -> None:
    spoil, _ = MALFORMED["NaN last"]
    spoil(tmp_path / "bad.trace")
    done = process("replay", tmp_path / "bad.trace", "--json", "--dump", tmp_path / "out")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "NaN at step 4, layer 6, row 1, slot 36" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["bad.trace"]


def test_a_process_refuses_a_truncated_trace(tmp_path: Path) -> None:
    spoil, _ = MALFORMED["truncated to -41"]
    spoil(tmp_path / "bad.trace")
    done = process("trace-info", tmp_path / "bad.trace")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "not a whole safetensors file" in done.stderr


def test_a_reader_that_leaves_sees_no_traceback(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "spin_trtllm.cli", "replay", save(tmp_path, make_trace())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert child.stdout is not None
    child.stdout.close()  # as in `spin-trtllm replay TRACE | true`
    assert child.stderr is not None
    assert child.stderr.read() == b""
    assert child.wait() == 1
    child.stderr.close()


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize(
    "arguments",
    [
        ["replay", "TRACE"],
        ["replay", "TRACE", "--json"],
        ["trace-info", "TRACE"],
        ["trace-info", "TRACE", "--json"],
        ["--version"],
        ["--help"],
        [],
    ],
    ids=" ".join,
)
def test_a_full_disk_behind_stdout_is_one_line(arguments: list[str], tmp_path: Path) -> None:
    path = save(tmp_path, make_trace())
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "spin_trtllm.cli"]
            + [path if argument == "TRACE" else argument for argument in arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert done.stderr == "error: output: cannot write: No space left on device\n"
    assert done.returncode == 1


def test_a_dump_with_too_long_a_name(tmp_path: Path) -> None:
    done = process("replay", save(tmp_path, make_trace()), "--dump", tmp_path / ("x" * 300))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: dump: ")
    assert "File name too long" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["t.trace"]


def test_a_closed_stdout_is_no_traceback(tmp_path: Path) -> None:
    path = save(tmp_path, make_trace())
    line = f"{sys.executable} -m spin_trtllm.cli replay {path} --json >&-"
    done = subprocess.run(
        ["sh", "-c", line], stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
    )
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- memory
def write_large(path: Path, steps: int, layers: int, slots: int) -> None:
    """A trace of zeros with one step of random scores repeated, written step by step."""
    shapes = {
        "scores": ("F32", [steps, layers, 1, slots], 4),
        "positions": ("I64", [steps, 1], 8),
        "accepted": ("I64", [steps], 8),
    }
    entries: dict[str, Any] = {
        "__metadata__": {
            "format": "spin-trace/1",
            "ratio": "4",
            "top_k": "512",
            "layers": ",".join(map(str, range(layers))),
            "sequence_id": "1",
        }
    }
    end = 0
    for name, (dtype, shape, width) in shapes.items():
        start, end = end, end + width * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    scores = np.random.default_rng(1).standard_normal((layers, slots), dtype=np.float32)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(steps):
            file.write(scores.tobytes())
        first = 4 * slots - 1 - steps
        file.write(np.arange(first, first + steps, dtype=np.int64).tobytes())
        file.write(np.zeros(steps, dtype=np.int64).tobytes())


# Run in the child: of what a process inherits from its parent, VmHWM counts nothing, ru_maxrss all.
MEASURED = """
import sys
from spin_trtllm.commands import replay

def show_peak():
    status = open("/proc/self/status").read()
    print(status.split("VmHWM:")[1].split()[0])

show_peak()
try:
    replay.command([sys.argv[1], "--json"])
except SystemExit as done:
    show_peak()
    sys.exit(done.code)
"""


def replay_bytes(trace: Path) -> int:
    """Resident memory that a replay of a trace adds, at its peak, to what its imports take.

    Some builds of torch take 150 MB more than others.
    """
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(trace)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    before, metrics, after = done.stdout.splitlines()
    assert json.loads(metrics)["steps"] > 0
    return (int(after) - int(before)) * 1024


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_a_large_trace_is_streamed(tmp_path: Path) -> None:
    """100 times the steps, 200 MB more file: hardly more memory."""
    write_large(tmp_path / "small", 2, 8, 32_768)
    write_large(tmp_path / "large", 200, 8, 32_768)
    assert (tmp_path / "large").stat().st_size > 200_000_000
    small, large = replay_bytes(tmp_path / "small"), replay_bytes(tmp_path / "large")
    assert large - small < 50_000_000
    assert large < 100_000_000
