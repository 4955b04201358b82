# SPDX-License-Identifier: Apache-2.0
"""`trtllm-build --tensorrt` with a builder: engines outlive failures, stops and second builds."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from tensorrt_build import (
    ENGINES,
    NETWORKS,
    PlayedBuilder,
    arguments,
    layers_in,
    manifest,
)
from tensorrt_wheels import ROOT, RTX, need_plugin, stub_plugin, wheel_environment

from spin_trtllm.build import tensorrt, tensorrt_engines
from spin_trtllm.hosts.tensorrt import (
    PRECISIONS,
    import_flavour,
    installed_flavours,
)


def test_the_report_says_how_long_engines_took(
    build: Any, tmp_path: Path, engines: PlayedBuilder
) -> None:
    code, out, err = build()
    assert (code, err) == (0, "")
    line = (
        "4 engines for sm_90 by tensorrt 10.9.0 in 10.0 s, the slowest layer_6.engine in 4.0 s, 4 B"
    )
    assert f"[6/7] build engines ... {line}\n" in out
    layers = manifest(tmp_path / "engine")["layers"].values()
    assert [layer["engine_seconds"] for layer in layers] == [1.0, 2.0, 3.0, 4.0]


def test_a_builder_that_fails_leaves_networks_and_what_it_had_built(
    build: Any, tmp_path: Path, engines: PlayedBuilder
) -> None:
    engines.fails_at = 2
    code, out, err = build()
    assert (code, err) == (1, "error: engines: layer_4.onnx: out of memory\n")
    assert "none, only ONNX: layer_4.onnx: out of memory; 2 wait for the next call\n" in out
    folder = tmp_path / "engine" / "tensorrt"
    files = ["build_engines.sh", *NETWORKS, "libspin_trt_plugin.so", "manifest.json"]
    assert sorted(os.listdir(folder)) == files
    assert manifest(tmp_path / "engine")["why_no_engines"] == "layer_4.onnx: out of memory"

    engines.fails_at = None
    code, out, err = build("--force")
    assert (code, err) == (0, "")
    assert engines.built == ENGINES[2:]
    assert "2 kept from an interrupted build" in out
    layers = manifest(tmp_path / "engine")["layers"].values()
    assert [layer["engine_seconds"] for layer in layers] == [None, None, 1.0, 2.0]
    assert os.listdir(tmp_path) == ["engine"]


@pytest.fixture(params=["links", "no links"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems with hard links and without."""

    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    if request.param == "no links":
        monkeypatch.setattr(os, "link", unsupported)


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize(
    ("owner", "name", "error", "status"),
    [
        (shutil, "copy", OSError(errno.ENOSPC, "No space left on device"), 2),
        (tensorrt, "make_executable", KeyboardInterrupt(), 130),
        (os, "replace", OSError(errno.ENOSPC, "No space left on device"), 2),
    ],
    ids=["plugin", "stopped", "rename"],
)
def test_engines_outlive_an_output_that_cannot_be_written(
    owner: Any,
    name: str,
    error: BaseException,
    status: int,
    build: Any,
    tmp_path: Path,
    engines: PlayedBuilder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = getattr(owner, name)

    def fail(*given: Any) -> Any:
        if name == "replace" and Path(given[1]) != tmp_path / "engine":
            return real(*given)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        assert build()[0] == status
    assert not (tmp_path / "engine").exists()
    assert engines.built == ENGINES

    code, out, err = build()
    assert (code, err, engines.built) == (0, "", [])
    assert "4 kept from an interrupted build" in out
    folder = tmp_path / "engine" / "tensorrt"
    assert [(folder / name).read_bytes() for name in ENGINES] == [b"x"] * 4
    assert os.listdir(tmp_path) == ["engine"]


@pytest.mark.parametrize("how", ["no_gpu", "onnx_only"])
def test_engines_wait_while_none_can_be_built(
    how: str,
    build: Any,
    tmp_path: Path,
    engines: PlayedBuilder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines.fails_at = 2
    assert build()[0] == 1
    engines.fails_at = None
    with monkeypatch.context() as patch:
        if how == "no_gpu":
            patch.setattr(tensorrt_engines, "choose_builder", lambda target: "no GPU here")
        code, out, _ = build("--force", *(["--onnx_only"] if how == "onnx_only" else []))
    assert (code, layers_in(tmp_path / "engine")) == (0, NETWORKS)
    assert "none, only ONNX" in out

    code, _, _ = build("--force")
    assert (code, engines.built) == (0, ENGINES[2:])
    assert os.listdir(tmp_path) == ["engine"]


def test_a_builder_that_fails_at_once_leaves_nothing_beside_the_output(
    build: Any, tmp_path: Path, engines: PlayedBuilder
) -> None:
    engines.fails_at = 0
    code, _, _ = build()
    assert code == 1
    assert os.listdir(tmp_path) == ["engine"]


BUSY = """
import sys
from spin_trtllm.build import cli, pipeline
real = pipeline.export_networks
def wait(*given):
    made = real(*given)
    print("exported", file=sys.stderr, flush=True)
    sys.stdin.read()
    return made
pipeline.export_networks = wait
cli.main(sys.argv[1:])
"""


@pytest.fixture
def busy(tmp_path: Path, alone: None) -> Iterator[Any]:
    """Start builds that wait within their work folder for their input to end."""
    started: list[subprocess.Popen[str]] = []

    def start(output: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", BUSY, *arguments(output, "--onnx_only")]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        started.append(process)
        assert process.stderr is not None
        assert process.stderr.readline() == "exported\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_build_of_an_output_is_refused(build: Any, tmp_path: Path, busy: Any) -> None:
    first = busy(tmp_path / "engine")
    code, _, err = build("--precision", "fp16")
    assert (code, err.count("\n")) == (2, 1)
    assert f"output_dir: another build of {str(tmp_path / 'engine')!r} is at work in " in err
    out, err = first.communicate("")
    assert (first.returncode, err) == (0, ""), out
    assert manifest(tmp_path / "engine")["options"]["precision"] == "bf16"
    for name in NETWORKS:
        model = onnx.load(tmp_path / "engine" / "tensorrt" / name)
        kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
        assert kinds["hidden"] == onnx.TensorProto.BFLOAT16
    assert os.listdir(tmp_path) == ["engine"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_build_leaves_nothing(tmp_path: Path, busy: Any, number: signal.Signals) -> None:
    process = busy(tmp_path / "new" / "engine")
    process.send_signal(number)
    process.communicate()
    assert process.returncode == 128 + number
    assert os.listdir(tmp_path) == []


def test_signals_are_left_as_they_were(build: Any) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    build("--dry_run")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def as_process(
    scratch: Path, given: list[str], **environment: str
) -> subprocess.CompletedProcess[str]:
    """`trtllm-build` where TensorRT-RTX is installed."""
    command = [sys.executable, "-m", "spin_trtllm.build.cli", *given]
    env = wheel_environment(RTX, scratch) | environment
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)


@pytest.mark.parametrize(
    ("precision", "rotation", "drafts"),
    list(zip(PRECISIONS, ("hadamard", "hadamard", "none", "none"), (0, 7, 0, 7), strict=True)),
)
def test_engines_are_built_where_a_builder_is(
    tmp_path: Path, precision: str, rotation: str, drafts: int
) -> None:
    need_plugin()
    output = tmp_path / "engine"
    options = ("--precision", precision, "--key_rotation", rotation, "--max_draft_len", drafts)
    done = as_process(tmp_path, arguments(output, "--target_sm", 120, *options))
    assert (done.returncode, done.stderr) == (0, "")
    line = next(line for line in done.stdout.splitlines() if line.startswith("[6/7]"))
    assert "... 4 engines for sm_120 by tensorrt_rtx 1.7.1.116 (its documentation" in line
    values = manifest(output)
    assert values["builder"]["name"] == "tensorrt_rtx"
    for files in values["layers"].values():
        assert b"SpinIndexer" in (output / "tensorrt" / files["engine"]).read_bytes()
        assert files["engine_seconds"] > 0
    assert f"TensorRT: engines in {output / 'tensorrt'}" in done.stdout


def test_an_interrupted_build_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """It is stopped after two engines; these stay, and are not built again."""
    need_plugin()
    output = tmp_path / "engine"
    program = (
        "import sys\n"
        "from spin_trtllm.build import cli, tensorrt_engines as engines\n"
        "real = engines.build_engines\n"
        "def half(jobs, **more):\n"
        "    real(jobs[:2], **more)\n"
        "    raise KeyboardInterrupt\n"
        "engines.build_engines = half\n"
        "cli.main(sys.argv[1:])\n"
    )
    given = arguments(output, "--target_sm", 120)
    env = wheel_environment(RTX, tmp_path)
    done = subprocess.run([sys.executable, "-c", program, *given], cwd=ROOT, env=env)
    assert done.returncode == 130
    (work,) = tmp_path.glob(".spin.tensorrt.*")
    assert sorted(path.name for path in work.glob("*.engine")) == ENGINES[:2]
    (work / "layer_5.engine").write_text("of another model")
    assert not output.exists()

    done = as_process(tmp_path, given)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 engines for sm_120" in done.stdout
    assert "2 kept from an interrupted build" in done.stdout
    assert sorted(path.name for path in (output / "tensorrt").glob("*.engine")) == ENGINES
    assert not work.exists()


def test_without_its_own_library_rtx_is_not_tried(tmp_path: Path) -> None:
    need_plugin()
    given = arguments(tmp_path / "engine", "--target_sm", 120)
    done = as_process(tmp_path, given, LD_LIBRARY_PATH="")
    assert (done.returncode, done.stderr) == (0, "")
    assert "only ONNX: tensorrt_rtx needs libtensorrt_rtx.so to read networks" in done.stdout


def test_a_refused_network_is_one_line_and_the_networks_stay(tmp_path: Path) -> None:
    """What is known of the reason is told: here a plugin library without nodes."""
    (tmp_path / "stub").mkdir()
    plugin = stub_plugin(tmp_path / "stub")
    given = arguments(tmp_path / "engine", "--target_sm", 120)
    done = as_process(tmp_path, given, SPIN_TRT_PLUGIN=str(plugin))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: engines: {plugin}: TensorRT 1.7.1.116 does not take it")
    assert done.stderr.count("\n") == 1
    assert layers_in(tmp_path / "engine") == NETWORKS
    assert not list(tmp_path.glob(".spin.*"))


# -- the document ---------------------------------------------------------------------------------


def test_the_documents_network_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "tensorrt.md").read_text(encoding="utf-8")
    run, own = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    compile(run, "docs/tensorrt.md", "exec")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    exec(compile(own, "docs/tensorrt.md", "exec"), names := {})
    onnx.checker.check_model(onnx.load("layer_3.onnx"))
    assert names["outputs"] == {"v": "v_out", "d": "d_out"}
    assert names["node"].op_type == "SpinObserve"


# -- with full TensorRT and a GPU: never here, so that it runs wherever it can --------------------


def test_an_engine_runs_in_full_tensorrt(build: Any, tmp_path: Path) -> None:
    if "tensorrt" not in {flavour.name for flavour in installed_flavours()}:
        pytest.skip("full TensorRT is not installed")  # this very folder has its name, too
    if not torch.cuda.is_available():
        pytest.skip("no GPU: TensorRT builds on the GPU that it builds for")
    need_plugin()
    from tensorrt_session import TensorrtSession

    code, out, err = build("--precision", "fp32")
    assert (code, err) == (0, ""), out
    assert "4 engines for sm_" in out, out
    session = TensorrtSession(import_flavour("tensorrt"), tmp_path / "engine" / "tensorrt", layer=1)
    session.check_against_the_reference(steps=40)
