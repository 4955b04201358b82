# SPDX-License-Identifier: Apache-2.0
"""`trtllm-build --tensorrt`: networks always, engines where a builder is, and nothing half-made."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from checkpoints import FLASH, TINY, V32, checkpoint_dir
from safetensors.torch import save_file
from tensorrt_build import (
    ENGINES,
    LAYERS,
    NETWORKS,
    arguments,
    layers_in,
    manifest,
)
from tensorrt_wheels import stub_plugin

from spin_trtllm import native
from spin_trtllm.build import tensorrt_builder
from spin_trtllm.build.cli import main
from spin_trtllm.build.engine import ENGINE_FILES, load_engine
from spin_trtllm.build.target import Target
from spin_trtllm.hosts.tensorrt import (
    FLAVOURS,
)


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
