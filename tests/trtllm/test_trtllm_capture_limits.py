# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong with a capture, serving goes on as if there were none, and says so once."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hook_standin
import pytest
import torch
from hook_batch import GRAPH_DUMMY, HostBatch
from hook_helpers import SMALL, engine_of, hook
from hook_record import Record
from safetensors import safe_open

from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.trtllm import activate
from spin_trtllm.hosts.trtllm import capture as captures
from spin_trtllm.hosts.trtllm import indexer as hooks
from spin_trtllm.hosts.trtllm.capture_settings import CaptureSettings, read_capture
from spin_trtllm.hosts.trtllm.recording import Recording
from spin_trtllm.replay.trace import Trace

LAYERS, ROWS = 2, 1


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.levelno >= logging.WARNING]


def answers(folder: Path | None, **limits: Any) -> tuple[list[Any], HostBatch, Any]:
    """What a batch of two selects in eight steps, captured or not."""
    capture = None if folder is None else CaptureSettings(folder, **limits)
    counters = hook(SMALL, capture=capture)
    batch = HostBatch(1)
    rows = [batch.join(500), batch.join(550)]
    return [batch.step(rows).selected for _ in range(8)], batch, counters


def assert_alike(one: list[Any], two: list[Any]) -> None:
    assert all(a.equal(b) for a, b in zip(one, two, strict=True))


@pytest.fixture
def want() -> list[Any]:
    """What SPIN answers without a capture."""
    selected = answers(None)[0]
    hooks.unpatch()
    return selected


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_folder_that_cannot_be_written_is_found_out_at_the_start(
    kind: str, want: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "traces"
    if kind == "file":
        folder.write_text("mine")
    selected, batch, counters = answers(folder)
    assert_alike(selected, want)
    (line,) = warnings_of(caplog)
    assert line.startswith("SPIN's capture is off: SpinError: TLLM_SPIN_CAPTURE: cannot write in")
    assert engine_of(batch).capture is None
    assert counters.snapshot().dense_rows == {}


def test_a_folder_that_goes_away_ends_the_capture(
    want: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    monkeypatch.setattr(captures, "_check_folder", lambda _: folder.rmdir())
    selected, batch, counters = answers(folder)
    engine = engine_of(batch)
    assert engine.capture is not None
    selected.append(batch.step([batch.join(500)]).selected)
    assert_alike(selected[:8], want)
    (line,) = warnings_of(caplog)
    assert line.startswith("SPIN's capture is off: SpinError: trace: cannot write ")
    assert engine.capture is None
    counts = counters.snapshot()
    assert counts.capture_steps == {"failed": 1}
    assert counts.dense_rows == {}
    assert engine.obstacle is None


def test_a_full_disk_leaves_no_file_and_ends_the_capture(
    want: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on the size of files is a disk that is full, to whoever writes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        selected, batch, counters = answers(tmp_path, sequences=2, steps=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_alike(selected, want)
    (line,) = warnings_of(caplog)
    assert line.startswith("SPIN's capture is off: SpinError: trace: cannot write: ")
    assert list(tmp_path.iterdir()) == []
    assert engine_of(batch).capture is None
    assert counters.snapshot().capture_steps == {"failed": 1}


def test_what_an_earlier_server_left_stays(want: list[Any], tmp_path: Path) -> None:
    first, second = tmp_path / "rank0-request5.safetensors", tmp_path / "rank0-request6.safetensors"
    first.write_text("mine")
    second.symlink_to(tmp_path / "nowhere")
    assert_alike(answers(tmp_path, steps=8)[0], want)
    assert first.read_text() == "mine"
    assert second.is_symlink()
    names = {path.name for path in tmp_path.iterdir()} - {first.name, second.name}
    assert names == {"rank0-request5-2.safetensors", "rank0-request6-2.safetensors"}


def test_what_another_server_writes_meanwhile_stays(
    want: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that shares the folder and has a sequence of the same number."""
    save, others = Recording.save, []

    def save_late(recording: Recording, path: Any, **about: Any) -> None:
        other = tmp_path / f"rank0-request{recording.request_id}.safetensors"
        other.write_text("another's")
        others.append(other)
        save(recording, path, **about)

    monkeypatch.setattr(Recording, "save", save_late)
    assert_alike(answers(tmp_path, steps=8)[0], want)
    assert [other.read_text() for other in others] == ["another's"] * 2
    seconds = {other.with_stem(f"{other.stem}-2") for other in others}
    assert set(tmp_path.iterdir()) == {*others, *seconds}
    assert [len(Trace(second)) for second in seconds] == [8, 8]


@pytest.mark.parametrize("place", ["next_step", "wants", "add", "put", "save"])
def test_any_failure_ends_the_capture_and_nothing_else(
    place: str,
    want: list[Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = Recording if place in ("put", "save") else captures.Capture

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(owner, place, fail)
    selected, batch, counters = answers(tmp_path, sequences=2, steps=4)
    assert_alike(selected, want)
    assert warnings_of(caplog) == ["SPIN's capture is off: RuntimeError: unforeseen"]
    assert list(tmp_path.iterdir()) == []
    engine = engine_of(batch)
    assert (engine.capture, engine.obstacle) == (None, None)
    counts = counters.snapshot()
    assert (counts.capture_steps, counts.dense_rows) == ({"failed": 1}, {})


def test_a_failure_lets_go_of_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, batch, _ = answers(tmp_path)
    capture = engine_of(batch).capture
    assert capture is not None
    recordings = [weakref.ref(recording) for recording in capture._open.values()]
    assert len(recordings) == 2
    monkeypatch.setattr(hooks, "scores_in", None)
    batch.step(list(batch.requests))
    assert [recording() for recording in recordings] == [None, None]
    capture.close()  # as the end of the process does
    assert list(tmp_path.iterdir()) == []


def test_bytes_are_bounded_in_memory_and_in_files(
    want: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Room for almost 6 steps of the first sequence, and so for none of the second."""
    limit = 4 * LAYERS * ROWS * 6 * ((500 + 8) // 4) - 1
    selected, _, counters = answers(tmp_path, steps=8, limit_bytes=limit)
    assert_alike(selected, want)
    (path,) = tmp_path.iterdir()
    assert len(Trace(path)) == 5
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert path.stat().st_size - header - 8 - 5 * (ROWS + 1) * 8 <= limit
    assert counters.snapshot().capture_steps == {"no_room": 1, "written": 5}
    assert warnings_of(caplog) == [
        "SPIN captures nothing of a step: TLLM_SPIN_CAPTURE_MIB has no room for another sequence"
    ]


def test_room_that_a_short_sequence_did_not_use_is_there_for_the_next(tmp_path: Path) -> None:
    limit = 4 * LAYERS * ROWS * 6 * (500 + 6) // 4
    hook(SMALL, capture=CaptureSettings(tmp_path, sequences=1, steps=6, limit_bytes=limit))
    batch, record = HostBatch(1), Record(SMALL)
    short = batch.join(500)
    batch.step([short])
    batch.finish(short)
    long = batch.join(500)
    for _ in range(6):
        record.add(batch.step([long]), engine_of(batch))
    (path,) = tmp_path.iterdir()
    assert (len(record.check(path)), Trace(path).sequence_id) == (6, long)


def test_with_graphs_nothing_is_captured_and_the_log_says_what_to_do(
    want: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counters = hook(SMALL, capture=CaptureSettings(tmp_path, steps=4))
    batch = HostBatch(1)
    eager, graph = batch.metadata, batch.new_metadata(batch.metadata.cuda_graph_buffers)
    graph.is_cuda_graph = True
    batch.metadata = graph
    batch.step([GRAPH_DUMMY])  # as the host captures
    rows = [batch.join(500), batch.join(550)]
    for metadata in (graph, graph, eager, eager, eager):  # eager where a request prefills
        batch.metadata = metadata
        batch.step(rows)
    assert list(tmp_path.iterdir()) == []
    assert counters.snapshot().capture_steps == {"cuda_graph": 6}
    assert warnings_of(caplog) == [
        "SPIN captures nothing of a step: CUDA graphs are on; `cuda_graph_config: null` in "
        "llm_args.yaml turns them off"
    ]


@pytest.mark.parametrize("next_n", [1, 2])
@pytest.mark.parametrize("cause", ["short_sequences", "heuristic_top_k", "draft_loop"])
def test_a_dense_step_ends_the_traces_before_it(cause: str, next_n: int, tmp_path: Path) -> None:
    """SPIN is cold after it. With drafts its tokens pass for accepted ones, and a replay would not
    follow."""
    counters = hook(SMALL, capture=CaptureSettings(tmp_path))
    batch, record = HostBatch(1, drafts=next_n - 1), Record(SMALL)
    rows = [batch.join(500), batch.join(550)]
    for _ in range(4):
        record.add(batch.step(rows, next_n=next_n), engine_of(batch))
    owner, name = {
        "short_sequences": (batch.metadata, "skip_indexer_for_gen_reqs"),  # the whole step
        "heuristic_top_k": (batch.indexers[1], "_enable_heuristic_topk"),  # its later layer
        "draft_loop": (batch.metadata, "in_mtp_draft_loop"),
    }[cause]
    setattr(owner, name, True)
    batch.step(rows, next_n=next_n)
    setattr(owner, name, False)
    for _ in range(3):
        batch.step(rows, next_n=next_n)
    whole = 4 if next_n == 1 or cause == "heuristic_top_k" else 3  # accepted drafts are known of
    assert [len(record.check(path)) for path in tmp_path.iterdir()] == [whole] * 2
    assert counters.snapshot().capture_steps == {cause: 1, "written": 2 * whole}


@pytest.mark.parametrize("calls", [(0, None, None), (0, 0, 2), (0, None, 2)])
def test_layers_that_python_does_not_run_once_end_a_trace(
    calls: tuple[int | None, ...], tmp_path: Path
) -> None:
    """Such as those of piecewise graphs, whose steps look eager."""
    counters = hook(SMALL, capture=CaptureSettings(tmp_path))
    batch, record = HostBatch(1, layers=(2, 4, 6), drafts=1), Record(SMALL)
    number = batch.join(500)
    for _ in range(4):
        record.add(batch.step([number], next_n=2), engine_of(batch))
    none = SimpleNamespace(sparse_attn_indexer=lambda *_: torch.zeros(2, 8, dtype=torch.int32))
    indexers = batch.indexers
    batch.indexers = [none if n is None else indexers[n] for n in calls]
    batch.step([number], next_n=2)
    batch.indexers = indexers
    for _ in range(3):
        batch.step([number], next_n=2)
    (path,) = tmp_path.iterdir()
    assert len(record.check(path)) == 4
    assert counters.snapshot().capture_steps == {"unfinished_step": 1, "written": 4}


def test_a_draft_loop_after_a_whole_step_ends_the_traces(tmp_path: Path) -> None:
    """It keeps what waits from being observed, whichever sequences' it is."""
    counters = hook(SMALL, capture=CaptureSettings(tmp_path))
    batch, record = HostBatch(1), Record(SMALL)
    number = batch.join(500)
    for _ in range(4):
        record.add(batch.step([number]), engine_of(batch))
    batch.metadata.in_mtp_draft_loop = True
    batch._call(batch.indexers[0], *batch._inputs(1), 0, 0.0)
    batch.metadata.in_mtp_draft_loop = False
    for _ in range(3):
        batch.step([number])
    (path,) = tmp_path.iterdir()
    assert len(record.check(path)) == 4
    assert counters.snapshot().capture_steps == {"written": 4}


@pytest.mark.parametrize("jump_tokens", [8, -3])
def test_a_sequence_that_jumps_ends_its_trace(jump_tokens: int, tmp_path: Path) -> None:
    hook(SMALL, capture=CaptureSettings(tmp_path))
    batch, record = HostBatch(1), Record(SMALL)
    number = batch.join(500)
    request = batch.requests[number]
    for _ in range(4):
        record.add(batch.step([number]), engine_of(batch))
    batch._grow(request, request.tokens, request.tokens + max(jump_tokens, 0))
    request.tokens += jump_tokens
    for _ in range(3):
        batch.step([number])
    (path,) = tmp_path.iterdir()
    assert len(record.check(path)) == 4


def test_a_process_that_ends_writes_what_is_open(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
sys.path[:0] = {sys.path!r}
from hook_batch import HostBatch
from hook_helpers import SMALL, hook
from spin_trtllm.hosts.trtllm.capture_settings import CaptureSettings
hook(SMALL, capture=CaptureSettings(Path({str(tmp_path)!r})))
batch = HostBatch(1)
number = batch.join(500)
for _ in range(3):
    batch.step([number])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    (path,) = tmp_path.iterdir()
    assert len(Trace(path)) == 3


def test_the_environment_reaches_the_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "spin.yaml"
    config.write_text(SpinConfig.from_dict(SMALL).to_yaml())
    folder = tmp_path / "traces"
    folder.mkdir()
    for name, value in {
        "TLLM_SPIN": config,
        "TLLM_SPIN_BACKEND": "host",
        "TLLM_SPIN_CAPTURE": folder,
        "TLLM_SPIN_CAPTURE_STEPS": 3,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(activate, "_outcomes", {})
    assert activate.install(hook_standin.__name__)
    batch = HostBatch(1)
    number = batch.join(500)
    for _ in range(3):
        batch.step([number])
    assert [len(Trace(path)) for path in folder.iterdir()] == [3]


def test_a_visible_nan_is_never_selected_and_an_invisible_score_is_none(tmp_path: Path) -> None:
    nan, infinity = float("nan"), float("inf")
    recording = Recording(5, 1, (2,), ratio=1, steps=2, rows=2, slots=6)
    for start in (1, 3):
        assert recording.goes_on(start, 2)
        recording.put(0, torch.tensor([[nan, 1.0, 7.0, 8.0, nan, 9.0], [infinity, -infinity] * 3]))
        recording.close_step()
    assert not recording.goes_on(4, 2)
    recording.save(tmp_path / "trace", top_k=2, source="")
    with safe_open(tmp_path / "trace", framework="torch") as file:
        (first,), _ = file.get_tensor("scores")
    assert str(first.tolist()) == str(
        [[-infinity, 1.0, *[nan] * 4], [infinity, -infinity, infinity, *[nan] * 3]]
    )
    assert Trace(tmp_path / "trace").accepted.tolist() == [1, 0]


def test_settings_of_a_capture(tmp_path: Path) -> None:
    asked = {"TLLM_SPIN_CAPTURE": str(tmp_path)}
    assert read_capture({}) is None
    assert read_capture({"TLLM_SPIN_CAPTURE": "", "TLLM_SPIN_CAPTURE_STEPS": "x"}) is None
    assert read_capture(asked) == CaptureSettings(tmp_path, 8, 256, 0, 4 * 2**30, None)
    names = {"SEQUENCES": "3", "STEPS": "2", "TOKENS": "4096", "MIB": "7", "LAYERS": "6,2,2"}
    asked |= {f"TLLM_SPIN_CAPTURE_{name}": text for name, text in names.items()}
    assert read_capture(asked) == CaptureSettings(tmp_path, 3, 2, 4096, 7 * 2**20, (2, 6))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("SEQUENCES", t) for t in ("0", "-1", "1.5", "many", "1" * 10, "٣")),
        ("STEPS", "1"),
        ("TOKENS", "-1"),
        ("MIB", "0"),
        *(("LAYERS", t) for t in ("2,", "a", "2;4", "-2")),
    ],
)
def test_settings_of_a_capture_refuse_nonsense(name: str, text: str, tmp_path: Path) -> None:
    variable = f"TLLM_SPIN_CAPTURE_{name}"
    with pytest.raises(SpinError, match=f"{variable}: got "):
        read_capture({"TLLM_SPIN_CAPTURE": str(tmp_path), variable: text})


def test_layers_that_the_rank_does_not_have(
    want: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    selected, batch, _ = answers(tmp_path, layers=(3, 5))
    assert_alike(selected, want)
    assert engine_of(batch).capture is None
    assert warnings_of(caplog) == [
        "SPIN's capture is off: SpinError: this rank has no indexer in layers 3, 5"
    ]
