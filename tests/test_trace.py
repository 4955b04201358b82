# SPDX-License-Identifier: Apache-2.0
"""Trace files: what is written is read, and every malformed one is refused in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from malformed_traces import (
    GOOD_METADATA,
    INF,
    MALFORMED,
    RATIO,
    STREAMED,
    good_bytes,
    good_tensors,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from spin_trtllm.errors import SpinError
from spin_trtllm.replay.trace import Trace, TraceStep, write_trace


def read_all(path: Path) -> list[TraceStep]:
    return list(Trace(path))


# ---------------------------------------------------------------- tests
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name: str, tmp_path: Path) -> None:
    spoil, words = MALFORMED[name]
    path = tmp_path / "bad.trace"
    spoil(path)
    with pytest.raises(SpinError) as caught:
        read_all(path)
    message = str(caught.value)
    assert message.isprintable()
    assert message.startswith("trace")
    assert "bad.trace" in message
    for word in words:
        assert word in message
    if name in STREAMED:
        Trace(path)  # opening does not read the scores


def test_the_good_trace_is_good(tmp_path: Path) -> None:
    """What every spoiled trace above differs from."""
    path = tmp_path / "good.trace"
    path.write_bytes(good_bytes(tmp_path))
    trace = Trace(path)
    assert (trace.steps, len(trace), trace.rows, trace.slots) == (5, 5, 2, 40)
    assert (trace.ratio, trace.top_k, trace.sequence_id, trace.layers) == (4, 8, 7, (2, 6))
    assert trace.source == ""
    assert len(read_all(path)) == 5
    assert len(read_all(path)) == 5  # and again


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_written_is_read(dtype: torch.dtype, tmp_path: Path) -> None:
    path, parts = tmp_path / "a.trace", good_tensors()
    parts["scores"][1, 0, 0, :3] = torch.tensor([-INF, -0.0, INF])
    written = parts["scores"].to(dtype)
    write_trace(
        path,
        written,
        parts["positions"],
        parts["accepted"],
        ratio=RATIO,
        top_k=8,
        layers=[2, 6],
        sequence_id=2**64 - 1,
        source="a test, ünïcode",
    )
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {
            **GOOD_METADATA,
            "sequence_id": "18446744073709551615",
            "source": "a test, ünïcode",
        }
        assert file.get_slice("scores").get_dtype() == {4: "F32", 2: "F16"}[dtype.itemsize]
    trace = Trace(path)
    assert trace.source == "a test, ünïcode"
    assert trace.sequence_id == 2**64 - 1
    assert torch.equal(trace.positions_tokens, parts["positions"])
    assert torch.equal(trace.accepted, parts["accepted"])
    for t, step in enumerate(trace):
        assert step.index == t
        assert step.accepted == int(parts["accepted"][t])
        assert torch.equal(step.positions_tokens, parts["positions"][t])
        assert step.scores.dtype == torch.float32
        hidden = written[t].isnan()
        assert hidden.any()
        assert torch.equal(step.scores, torch.where(hidden, -INF, written[t].float()))
    assert t == 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    steps=st.integers(0, 4),
    layers=st.lists(st.integers(0, 2**20), min_size=1, max_size=3, unique=True),
    row_count=st.integers(1, 3),
    slots=st.integers(1, 20),
    ratio=st.sampled_from((1, 4, 2**31 - 1)),
    half=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_round_trip_of_any_shape(
    steps: int,
    layers: list[int],
    row_count: int,
    slots: int,
    ratio: int,
    half: bool,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rng = np.random.default_rng(seed)
    most = max((slots + 1) * ratio - 1 - row_count, 0)
    first = rng.integers(0, most + 1, steps)
    if row_count > (slots + 1) * ratio - 1:
        row_count = 1
    positions = torch.from_numpy(first)[:, None] + torch.arange(row_count)
    accepted = torch.from_numpy(rng.integers(0, row_count, steps))
    shape = (steps, len(layers), row_count, slots)
    scores = torch.from_numpy(rng.standard_normal(shape).astype(np.float16 if half else np.float32))
    path = tmp_path_factory.getbasetemp() / "any.trace"
    facts = {"ratio": ratio, "top_k": 5, "layers": layers, "sequence_id": seed}
    write_trace(path, scores, positions, accepted, **facts)
    trace = Trace(path)
    assert (trace.steps, len(trace.layers), trace.rows, trace.slots) == shape
    assert {name: getattr(trace, name) for name in facts} == {**facts, "layers": tuple(layers)}
    found = list(trace)
    assert len(found) == steps
    for t, step in enumerate(found):
        for row in range(row_count):
            n = (int(positions[t, row]) + 1) // ratio
            assert torch.equal(step.scores[:, row, :n], scores[t, :, row, :n].float())
            assert (step.scores[:, row, n:] == -INF).all()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ratio", 0, "metadata ratio"),
        ("layers", [], "metadata layers"),
        ("sequence_id", -1, "metadata sequence_id"),
        ("layers", [1], "layers"),
    ],
)
def test_nothing_is_written_that_cannot_be_read(
    tmp_path: Path, name: str, value: object, said: str
) -> None:
    facts = {"ratio": 4, "top_k": 8, "layers": [2, 6], "sequence_id": 7} | {name: value}
    with pytest.raises(SpinError, match=said):
        write_trace(tmp_path / "a.trace", *good_tensors().values(), **facts)
    assert list(tmp_path.iterdir()) == []


def test_garbage_where_nothing_is_visible_is_allowed(tmp_path: Path) -> None:
    """A writer need not clean what no row sees: it is never read as a score."""
    parts = good_tensors()
    parts["scores"] = parts["scores"].nan_to_num(INF)
    path = tmp_path / "a.trace"
    save_file(parts, path, GOOD_METADATA)
    assert (read_all(path)[0].scores[:, :, 35:] == -INF).all()


def test_extra_tensors_and_metadata_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    extra = {"aaa": torch.zeros(3), "zzz": torch.zeros(5, dtype=torch.float64)}
    save_file({**good_tensors(), **extra}, path, {**GOOD_METADATA, "mood": "good"})
    wanted = good_tensors()["scores"].nan_to_num(-INF)
    assert torch.equal(torch.stack([step.scores for step in Trace(path)]), wanted)


def test_spaces_around_layers_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    save_file(good_tensors(), path, {**GOOD_METADATA, "layers": " 2 , 6 "})
    assert Trace(str(path)).layers == (2, 6)


def test_a_pipe_is_no_trace(tmp_path: Path) -> None:
    """Refused before it is opened, which would wait for a writer for ever."""
    path = tmp_path / "pipe.trace"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(
            SpinError, match=r"^trace: got .*pipe\.trace', allowed: a regular file$"
        ):
            Trace(path)
    finally:
        os.close(writer)


def test_a_trace_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    path.write_bytes(good_bytes(tmp_path))
    trace, seen = Trace(path), []
    step_bytes = 2 * 2 * 40 * 4  # scores come last in the file

    def read() -> None:
        for step in trace:
            seen.append(step.index)
            os.truncate(path, len(good_bytes(tmp_path)) - 2 * step_bytes + 10)

    with pytest.raises(SpinError) as caught:
        read()
    assert str(caught.value) == f"trace {path}: scores: got 'an end in step 3', allowed: 5 steps"
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Error while serializing: I/O error:\n No space left on device"),
        OSError(28, "No space left on device"),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(tensors: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr("spin_trtllm.files.save_file", half)
    facts = {"ratio": 4, "top_k": 8, "layers": [2, 6], "sequence_id": 7}
    with pytest.raises(SpinError, match=r"^trace: cannot write: .*No space left") as caught:
        write_trace(tmp_path / "a.trace", *good_tensors().values(), **facts)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    parts = good_tensors()
    facts = {"ratio": 4, "top_k": 8, "layers": [2, 6], "sequence_id": 7}
    with pytest.raises(SpinError, match=r"^trace: cannot write .*No such file"):
        write_trace(tmp_path / "no" / "a.trace", *parts.values(), **facts)
    with pytest.raises(SpinError, match=r"^trace: .* is no regular file, allowed: a file name$"):
        write_trace(tmp_path, *parts.values(), **facts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape", [[0, 2, 2, 2**62], [0, 2, 2**40, 8], [0, 2, 2, 2**31 - 1]])
def test_shapes_that_no_memory_holds(tmp_path: Path, shape: list[int]) -> None:
    """No step, so the file is tiny and whole; a step would not fit."""
    entries = {
        "__metadata__": GOOD_METADATA,
        "scores": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]},
        "positions": {"dtype": "I64", "shape": [0, shape[2]], "data_offsets": [0, 0]},
        "accepted": {"dtype": "I64", "shape": [0], "data_offsets": [0, 0]},
    }
    text = json.dumps(entries).encode()
    path = tmp_path / "absurd.trace"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(SpinError, match=r"^trace .*: (scores shape: got|not a whole)"):
        Trace(path)
