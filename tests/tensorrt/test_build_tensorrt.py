# SPDX-License-Identifier: Apache-2.0
"""`trtllm-build --tensorrt`: networks always, engines where a builder is, and nothing half-made."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from checkpoints import FLASH, TINY, V32, checkpoint_dir
from safetensors.torch import save_file
from tensorrt_wheels import ROOT, RTX, need_plugin, stub_plugin, wheel_environment

from spin_trtllm import native
from spin_trtllm.build import tensorrt, tensorrt_builder, tensorrt_engines
from spin_trtllm.build.cli import main
from spin_trtllm.build.engine import ENGINE_FILES, load_engine
from spin_trtllm.build.target import Target
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.tensorrt import (
    FLAVOURS,
    PRECISIONS,
    import_flavour,
    installed_flavours,
)
from spin_trtllm.hosts.tensorrt.builder import BuiltEngine, EngineJob

LAYERS = (1, 3, 4, 6)
NETWORKS = [f"layer_{layer}.onnx" for layer in LAYERS]
ENGINES = [f"layer_{layer}.engine" for layer in LAYERS]
SIZES = ("--max_batch_size", 4, "--max_seq_len", 8000)


def arguments(output: Path, *more: object, checkpoint: Path = TINY) -> list[str]:
    places = ("--checkpoint_dir", checkpoint, "--output_dir", output)
    return [str(a) for a in ("--use_spin", "--tensorrt", *places, *SIZES, *more)]


@pytest.fixture
def build(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Call `trtllm-build --tensorrt`; returns its exit code and what it printed."""

    def call(*more: object, checkpoint: Path = TINY) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(arguments(tmp_path / "engine", *more, checkpoint=checkpoint))
        return stopped.value.code, *capsys.readouterr()

    return call


def manifest(output: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((output / "tensorrt" / "manifest.json").read_text())
    return values


def layers_in(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "tensorrt").glob("layer_*"))


# -- without a builder ----------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No TensorRT here, whatever the machine has, and a plugin."""
    monkeypatch.setattr(tensorrt_builder, "installed_flavours", lambda: ())
    plugin = stub_plugin(tmp_path_factory.mktemp("plugin"))
    monkeypatch.setenv("SPIN_TRT_PLUGIN", str(plugin))


@pytest.mark.usefixtures("alone")
def test_only_onnx_is_made_and_said_so(build: Any, tmp_path: Path) -> None:
    code, out, err = build("--target_sm", 90)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert re.match(r"\[5/7\] export networks \.\.\. 4 networks in \d+\.\d s, ", lines[4])
    # 4 layers x (4 lanes x 2 averages x 2,048 slots + 8 places x 2,048 scores) x 4 bytes, and books
    assert lines[4].endswith(" MiB, projections in bf16, to be bound to a state of 529.0 KiB")
    reason = "no TensorRT with a builder is installed (tensorrt or tensorrt_rtx)"
    assert lines[5] == f"[6/7] build engines ... none, only ONNX: {reason}"
    folder = tmp_path / "engine" / "tensorrt"
    assert f"TensorRT: only ONNX, no engines in {folder}" in lines
    files = ["build_engines.sh", *NETWORKS, "libspin_trt_plugin.so", "manifest.json"]
    assert sorted(os.listdir(folder)) == files
    assert manifest(tmp_path / "engine")["why_no_engines"] == reason
    assert sorted(os.listdir(tmp_path / "engine")) == sorted([*ENGINE_FILES, "tensorrt"])
    assert os.listdir(tmp_path) == ["engine"]
    assert load_engine(tmp_path / "engine").max_seq_len == 8000


@pytest.mark.usefixtures("alone")
def test_the_manifest_describes_the_networks(build: Any, tmp_path: Path) -> None:
    build("--max_draft_len", 2, "--precision", "fp16", "--spin_state_dtype", "bf16")
    values = manifest(tmp_path / "engine")
    assert values["sizes"] == {
        "max_sequences": 4,
        "rows": 3,
        "slots": 2048,  # 8,000 tokens in whole pages of 64 slots
        "page_slots": 64,
    }
    assert [int(layer) for layer in values["layers"]] == list(LAYERS)
    kinds = {"fp32": 1, "bf16": 16, "int32": 6, "int64": 7}
    for files in values["layers"].values():
        model = onnx.load(tmp_path / "engine" / "tensorrt" / files["network"])
        onnx.checker.check_model(model)
        found = {value.name: value.type.tensor_type for value in model.graph.input}
        for name, tensor in values["state"].items():
            assert found[name].elem_type == kinds[tensor["dtype"]]
            assert [dim.dim_value for dim in found[name].shape.dim] == tensor["shape"]
        named = {d.dim_param for t in found.values() for d in t.shape.dim if d.dim_param}
        assert named == set(values["ranges"])
        assert found["hidden"].elem_type == onnx.TensorProto.FLOAT16


@pytest.mark.usefixtures("alone")
def test_every_network_has_its_layers_target(build: Any, tmp_path: Path) -> None:
    file = tmp_path / "layers.yaml"
    file.write_text("{target_sparsity: 0.3, layer_sparsity: {3: 0.75, 6: 0.0}}")
    code, _, err = build("--spin_config", file)
    assert (code, err) == (0, "")
    found = []
    for network in NETWORKS:
        model = onnx.load(tmp_path / "engine" / "tensorrt" / network)
        (node,) = (node for node in model.graph.node if node.domain == "spin")
        found.append(*(a.i for a in node.attribute if a.name == "sparsity_ppm"))
    assert found == [300_000, 750_000, 300_000, 0]


def put_trtexec(folder: Path, then: str = "") -> str:
    """A `trtexec` that writes down its arguments instead of an engine; the PATH to find it."""
    (folder / "trtexec").write_text(
        "#!/bin/sh\n"
        'for a; do case $a in --saveEngine=*) printf "%s\\n" "$@" >"${a#*=}" ;; esac; done\n' + then
    )
    (folder / "trtexec").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.usefixtures("alone")
def test_the_script_builds_what_is_not_there(build: Any, tmp_path: Path) -> None:
    """With a `trtexec` that writes down its arguments, in a folder that was moved."""
    build("--max_draft_len", 1)
    folder = tmp_path / "my engines"
    (tmp_path / "engine" / "tensorrt").rename(folder)
    (folder / "layer_3.engine").write_text("there")
    (folder / "libspin_trt_plugin.so").touch()
    path = put_trtexec(tmp_path)
    subprocess.run(
        [folder / "build_engines.sh", "--verbose"], check=True, env=os.environ | {"PATH": path}
    )
    assert sorted(path.name for path in folder.glob("*.engine")) == ENGINES
    assert (folder / "layer_3.engine").read_text() == "there"
    given = (folder / "layer_1.engine").read_text().splitlines()
    assert given[0] == f"--onnx={folder}/layer_1.onnx"
    assert f"--staticPlugins={folder}/libspin_trt_plugin.so" in given
    assert given[-1] == "--verbose"
    shapes = dict(line.removeprefix("--").split("=") for line in given if "Shapes" in line)
    assert shapes["minShapes"] == (
        "hidden:1x2x320,query_latent:1x2x160,pages:1x2112,page_table:1x1,lanes:1,positions:1x2,"
        "sequence_ids:1"
    )
    assert shapes["maxShapes"].startswith("hidden:4x2x320,")
    assert ",page_table:4x32," in shapes["optShapes"]


@pytest.mark.usefixtures("alone")
def test_the_script_takes_no_half_engine_for_one(build: Any, tmp_path: Path) -> None:
    build()
    script = tmp_path / "engine" / "tensorrt" / "build_engines.sh"
    path = put_trtexec(tmp_path, then="exit 3\n")
    stopped = subprocess.run([script], env=os.environ | {"PATH": path})
    assert stopped.returncode == 3
    assert not list(script.parent.glob("*.engine"))
    put_trtexec(tmp_path)
    subprocess.run([script], check=True, env=os.environ | {"PATH": path})
    assert sorted(path.name for path in script.parent.glob("*.engine*")) == ENGINES


@pytest.mark.usefixtures("alone")
def test_the_script_without_networks_says_so(build: Any, tmp_path: Path) -> None:
    build()
    script = tmp_path / "engine" / "tensorrt" / "build_engines.sh"
    for network in script.parent.glob("*.onnx"):
        network.unlink()
    env = os.environ | {"PATH": put_trtexec(tmp_path)}
    tried = subprocess.run([script], capture_output=True, text=True, env=env)
    assert (tried.returncode, tried.stderr.count("\n")) == (2, 1)
    assert "layer_*.onnx: not there; trtllm-build" in tried.stderr


@pytest.fixture
def no_plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where a plugin library is looked for, in vain."""
    path = tmp_path / "absent" / "libspin_trt_plugin.so"
    monkeypatch.setenv("SPIN_TRT_PLUGIN", str(path))
    return path


@pytest.mark.usefixtures("alone")
def test_without_the_plugin_the_build_and_its_script_say_so(
    build: Any, tmp_path: Path, no_plugin: Path
) -> None:
    code, out, err = build()
    assert (code, err) == (0, "")
    folder = tmp_path / "engine" / "tensorrt"
    (line,) = (line for line in out.splitlines() if "libspin_trt_plugin.so" in line)
    advice = "build it with `make plugin`"
    assert line == (
        f"TensorRT: libspin_trt_plugin.so: not found in {no_plugin}; {advice} and put it there"
    )
    assert manifest(tmp_path / "engine")["plugin"] is None
    tried = subprocess.run([folder / "build_engines.sh"], capture_output=True, text=True)
    plugin = folder / "libspin_trt_plugin.so"
    expected = f"build_engines.sh: {plugin}: not there; {advice} and put it there\n"
    assert (tried.returncode, tried.stderr) == (2, expected)


@pytest.mark.usefixtures("alone")
def test_with_the_plugin_nothing_is_said_of_it(build: Any, tmp_path: Path) -> None:
    code, out, _ = build()
    assert code == 0
    assert "libspin_trt_plugin.so" not in out
    shipped = tmp_path / "engine" / "tensorrt" / "libspin_trt_plugin.so"
    assert shipped.read_bytes() == Path(os.environ["SPIN_TRT_PLUGIN"]).read_bytes()


def text_file(folder: Path) -> Path:
    path = folder / "text.so"
    path.write_text("no library")
    return path


def empty_file(folder: Path) -> Path:
    path = folder / "empty.so"
    path.touch()
    return path


def another_library(folder: Path) -> Path:
    return Path(shutil.copy(sys.modules["_ctypes"].__file__ or "", folder / "another.so"))


def cut_short(folder: Path) -> Path:
    path = stub_plugin(folder)
    with path.open("ab") as file:
        file.truncate(5000)  # its segments are longer: to touch them is a bus error
    return path


def stale(folder: Path) -> Path:
    return stub_plugin(folder, "libspin_trt_plugin version 1")


def older_still(folder: Path) -> Path:
    return stub_plugin(folder, "before plugins had one")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (text_file, "not a loadable TensorRT plugin: "),
        (empty_file, "not a loadable TensorRT plugin: "),
        (another_library, "undefined symbol: getCreators"),
        (cut_short, "not a loadable TensorRT plugin: it ends its process by SIGBUS"),
        (older_still, f"got 'no version', allowed: version {native.VERSION}; rebuild it"),
        (stale, f"got 'version 1', allowed: version {native.VERSION}; rebuild it"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_what_is_no_plugin_is_not_shipped(
    build: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], Path],
    reason: str,
) -> None:
    plugin = make(tmp_path)
    monkeypatch.setenv("SPIN_TRT_PLUGIN", str(plugin))
    code, _, err = build("--onnx_only")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: {plugin}: ")
    assert reason in err
    assert os.listdir(tmp_path) == [plugin.name]


@pytest.mark.usefixtures("alone")
def test_layers_have_their_own_weights(build: Any, tmp_path: Path) -> None:
    build()
    weights = set()
    for name in NETWORKS:
        model = onnx.load(tmp_path / "engine" / "tensorrt" / name)
        weights |= {t.raw_data for t in model.graph.initializer if t.name == "query_projection"}
    assert len(weights) == len(LAYERS)


@pytest.mark.usefixtures("alone")
def test_only_onnx_can_be_asked_for(build: Any, tmp_path: Path, engines: Any) -> None:
    engines.fails_at = 0  # would a builder be called
    code, out, err = build("--onnx_only")
    assert (code, err) == (0, "")
    assert "[6/7] build engines ... none, only ONNX: as asked by --onnx_only\n" in out
    assert layers_in(tmp_path / "engine") == NETWORKS


def test_a_dry_run_makes_networks_and_writes_nothing(build: Any, tmp_path: Path) -> None:
    code, out, _ = build("--dry_run")
    assert code == 0
    assert "4 networks" in out
    assert "[6/7] build engines ... none, only ONNX: a dry run" in out
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("alone")
def test_force_replaces_ours_and_spares_what_was_added(build: Any, tmp_path: Path) -> None:
    build()
    assert build("--force", "--precision", "fp16")[0] == 0
    assert manifest(tmp_path / "engine")["options"]["precision"] == "fp16"
    (tmp_path / "engine" / "tensorrt" / "notes.txt").write_text("mine")
    code, _, err = build("--force")
    assert (code, err.count("\n")) == (2, 1)
    assert "holds: got 'tensorrt'" in err
    assert (tmp_path / "engine" / "tensorrt" / "notes.txt").read_text() == "mine"


@pytest.mark.usefixtures("alone")
def test_force_replaces_what_the_script_has_made(build: Any, tmp_path: Path) -> None:
    build()
    for name in (*ENGINES[:2], f"{ENGINES[2]}.part"):
        (tmp_path / "engine" / "tensorrt" / name).write_text("by trtexec")
    code, _, err = build("--force")
    assert (code, err) == (0, "")
    assert not list((tmp_path / "engine" / "tensorrt").glob("*.engine*"))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--precision", "int8"), "precision: got 'int8', allowed: fp32, fp16, bf16, fp8"),
        (("--key_rotation", "dct"), "key_rotation: got 'dct', allowed: hadamard, none"),
        (("--max_draft_len", 8), "max_draft_len: got 8, allowed: an integer in 0 .. 7"),
        (("--spin_block_size", 8), "block_size: got 8, allowed: 16, 32, 64, 128"),
    ],
)
def test_a_bad_option_is_one_line(
    build: Any, tmp_path: Path, options: tuple[object, ...], line: str
) -> None:
    code, _, err = build(*options)
    assert (code, err.count("\n")) == (2, 1)
    assert line in err
    assert os.listdir(tmp_path) == []


def test_options_without_tensorrt_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = arguments(tmp_path / "engine", "--max_draft_len", 0)
    given.remove("--tensorrt")
    with pytest.raises(SystemExit, match="2"):
        main(given)
    assert "--max_draft_len: got 0, allowed: only with --tensorrt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (V32, "architecture with --tensorrt: got 'DeepseekV32ForCausalLM'"),
        (FLASH, "checkpoint_dir: cannot read"),  # its weight file is no safetensors
        (FLASH | {"rope_scaling": {"type": "linear"}}, "rope_type: got 'linear'"),
    ],
)
def test_a_bad_checkpoint_is_one_line(
    build: Any, tmp_path: Path, config: dict[str, Any], line: str
) -> None:
    model = checkpoint_dir(tmp_path, config)
    code, _, err = build(checkpoint=model)
    assert (code, err.count("\n")) == (2, 1)
    assert line in err
    assert os.listdir(tmp_path) == ["model"]


def test_query_latents_of_two_widths_are_one_line(build: Any, tmp_path: Path) -> None:
    """Networks share their shapes, as the attention's latent has one width."""
    few = {"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4], "hidden_size": 256}
    model = checkpoint_dir(tmp_path, FLASH | few | {"index_n_heads": 4})
    tensors = {}
    for layer, width in ((1, 64), (3, 96)):
        stem = f"layers.{layer}.attn.indexer."
        tensors[f"{stem}wq_b.weight"] = torch.zeros(512, width)
        tensors[f"{stem}weights_proj.weight"] = torch.zeros(4, 256)
    save_file(tensors, model / "model.safetensors")
    code, _, err = build(checkpoint=model)
    assert (code, err.count("\n")) == (2, 1)
    assert "query_latent width of layer 3: got 96, allowed: 64, as in layer 1" in err
    assert os.listdir(tmp_path) == ["model"]


def test_tensors_beyond_tensorrts_limit_are_refused_before_weights_are_read(
    build: Any, tmp_path: Path
) -> None:
    model = checkpoint_dir(tmp_path)  # its weights could not be read
    sizes = ("--max_batch_size", 4096, "--max_seq_len", 1048576, "--max_draft_len", 7)
    code, _, err = build(*sizes, checkpoint=model)
    assert (code, err.count("\n")) == (2, 1)
    assert "elements of scores: got 17179869184, allowed: at most 2147483647" in err
    assert os.listdir(tmp_path) == ["model"]


def test_nothing_is_made_beside_an_output_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    mkdir = Path.mkdir

    def watched(path: Path, *given: Any, **more: Any) -> None:
        made.append(path)
        mkdir(path, *given, **more)

    monkeypatch.setattr(Path, "mkdir", watched)
    model = shutil.copytree(TINY, tmp_path / "model")
    made.clear()
    with pytest.raises(SystemExit, match="2"):
        main(arguments(model / "engine", checkpoint=model))
    assert made == []


@pytest.mark.usefixtures("alone")
def test_a_failed_build_leaves_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint_dir(tmp_path)  # its weights cannot be read
    (tmp_path / "there").mkdir()
    for parts in ("new/er/engine", "there/new/engine", "x/" + "y" * 300 + "/engine"):
        with pytest.raises(SystemExit, match="2"):
            main(arguments(tmp_path / parts, checkpoint=model))
        assert sorted(os.listdir(tmp_path)) == ["model", "there"]
        assert os.listdir(tmp_path / "there") == []


# -- which builder --------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with these TensorRT modules and this GPU."""

    def have(*names: str, gpu: tuple[int, int] | None = None, version: str = "10.9.0") -> None:
        flavours = tuple(flavour for flavour in FLAVOURS if flavour.name in names)
        module = type("Module", (), {"__version__": version})
        monkeypatch.setattr(tensorrt_builder, "installed_flavours", lambda: flavours)
        monkeypatch.setattr(tensorrt_builder, "import_flavour", lambda name, builds: module)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)

    return have


def test_full_tensorrt_is_preferred(machine: Any) -> None:
    machine("tensorrt_rtx", "tensorrt", "tensorrt_lean", gpu=(9, 0))
    found = tensorrt_builder.choose_builder(Target(90, "as asked"))
    assert found == tensorrt_builder.Builder("tensorrt", "10.9.0", 90)


@pytest.mark.parametrize(
    ("names", "gpu", "sm", "reason"),
    [
        (("tensorrt",), None, 90, "there is no GPU here"),
        (("tensorrt",), (10, 0), 90, "would build for this sm_100, not sm_90"),
        (("tensorrt_rtx",), (9, 0), 90, "tensorrt_rtx builds for sm_120, not sm_90"),
        (("tensorrt_lean",), (9, 0), 90, "no TensorRT with a builder is installed"),
    ],
)
def test_why_there_is_no_builder(
    machine: Any, names: tuple[str, ...], gpu: tuple[int, int] | None, sm: int, reason: str
) -> None:
    machine(*names, gpu=gpu)
    found = tensorrt_builder.choose_builder(Target(sm, "as asked"))
    assert isinstance(found, str)
    assert reason in found


def test_a_tensorrt_without_state_in_place_builds_nothing(machine: Any) -> None:
    machine("tensorrt", gpu=(9, 0), version="10.2.0.19")
    found = tensorrt_builder.choose_builder(Target(90, "as asked"))
    assert found == "tensorrt 10.2.0.19 is too old, it has to be 10.3 or later"
    machine("tensorrt", gpu=(9, 0), version="10.3.0")
    assert not isinstance(tensorrt_builder.choose_builder(Target(90, "as asked")), str)


# -- with a builder -------------------------------------------------------------------------------


class PlayedBuilder:
    """Writes engines of one byte, and fails when it has built `fails_at` of them."""

    def __init__(self) -> None:
        self.fails_at: int | None = None
        self.built: list[str] = []

    def __call__(self, jobs: Sequence[EngineJob], **more: Any) -> list[BuiltEngine]:
        self.built = []
        for number, job in enumerate(jobs):
            if number == self.fails_at:
                raise SpinError(f"{Path(job.network).name}: out of memory")
            Path(job.engine).write_bytes(b"x")
            self.built.append(Path(job.engine).name)
        return [BuiltEngine(job.engine, 1.0 + n, 1) for n, job in enumerate(jobs)]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, alone: None) -> PlayedBuilder:
    """A TensorRT that is here."""
    played = PlayedBuilder()
    builder = tensorrt_builder.Builder("tensorrt", "10.9.0", 90)
    monkeypatch.setattr(tensorrt_engines, "choose_builder", lambda target: builder)
    monkeypatch.setattr(tensorrt_engines, "build_engines", played)
    return played


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
