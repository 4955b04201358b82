# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm doctor` on machines with more, less, and stranger things than this one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click.testing
import pytest
import torch
from tensorrt_wheels import stub_plugin

from spin_trtllm import probe as probing
from spin_trtllm.commands.doctor import command
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.tensorrt import FLAVOURS
from spin_trtllm.probe import Activation, Device, Hook, Host, KernelLibrary, probe
from spin_trtllm.verdicts import Verdict, verdicts

NEW_TREE = "_torch/attention/backends/sparse/dsa/indexer.py"
OLD_TREE = "_torch/attention_backend/sparse/dsa/indexer.py"
INDEXER = """
raise RuntimeError("a doctor does not import this")
class Indexer:
    def forward(self, x): ...
    def sparse_attn_indexer(self, metadata, hidden_states, q_fp8, k_fp8, k_scale, weights,
                            q_scale=None, is_generation=None): ...
"""
FIRST_RELEASE = """
class Indexer:
    def sparse_attn_indexer(self, metadata, hidden_states, q_fp8, k, weights): ...
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a package on the path: files by name, and a version unless it is None."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def add(package: str, files: dict[str, str], version: str | None = "1.4.0rc4") -> None:
        for name, text in files.items():
            path = site / package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if version is not None:
            metadata = site / f"{package}-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        importlib.invalidate_caches()

    return add


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where every optional package is missing."""

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")


def doctor(*arguments: str) -> str:
    result = click.testing.CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def verdict(use: str, **changes: Any) -> Verdict:
    """The verdict on one use, with parts of this machine's report replaced."""
    report = probing.Report(**(vars(probe()) | changes))
    return next(v for v in verdicts(report) if v.use.startswith(use))


def replaced(*hosts: Host) -> tuple[Host, ...]:
    """This machine's hosts, with some of them replaced."""
    given = {host.name: host for host in hosts}
    return tuple(given.get(other.name, other) for other in probe().hosts)


def test_json_is_one_object_with_stable_keys() -> None:
    values = json.loads(doctor("--json"))
    assert list(values) == [
        "schema_version",
        "versions",
        "devices",
        "kernel_library",
        "tensorrt_plugin",
        "activation",
        "hosts",
        "verdicts",
    ]
    assert list(values["versions"]) == [
        "python",
        "platform",
        "spin_trtllm",
        "torch",
        "transformers",
        "safetensors",
        "cuda-python",
    ]
    # Wheels of PyPI do not name their CUDA in what they are installed as.
    assert values["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert [host["name"] for host in values["hosts"]] == [
        "transformers",
        "tensorrt_llm",
        "tensorrt",
        "tensorrt_rtx",
        "tensorrt_lean",
        "tensorrt_dispatch",
        "onnx",
        "tritonserver (program)",
        "tritonserver",
        "pytriton",
        "tritonclient",
    ]
    assert set(values["verdicts"][0]) == {"use", "runs", "why", "fix"}
    assert set(values["hosts"][0]) == {"name", "found", "version", "hooks", "matches"}


def test_text_has_every_section() -> None:
    text = doctor()
    titles = ("Versions", "CUDA devices", "Kernel library", "Activation in TensorRT-LLM")
    for title in (*titles, "Hosts", "Hook points"):
        assert f"{title}\n" in text
    for judged in verdicts(probe()):
        assert f"{judged.use} " in text
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.usefixtures("nothing")
def test_a_bare_machine_gets_a_fix_for_everything_that_does_not_run() -> None:
    report = probe()
    assert not any(host.found for host in report.hosts)
    assert report.kernel_library == KernelLibrary(False, "not built: the reference runs")
    judged = verdicts(report)
    assert [v.use for v in judged if v.runs] == ["trtllm-build --use_spin"]
    assert all(v.fix for v in judged if not v.runs)
    assert "transformers  not installed" in doctor()


def test_the_installed_transformers_matches() -> None:
    pytest.importorskip("transformers", minversion="5.12")
    host = probe().host("transformers")
    assert [hook.matches for hook in host.hooks] == [True, True]
    assert verdict("embedded host").runs


@pytest.mark.parametrize(
    ("source", "note"),
    [
        ("class DeepseekV4Indexer: ...", "missing"),
        ("class DeepseekV4IndexerScorer:\n def forward(self, q, k): ...", "(q, k)"),
        ("this is not Python", "missing"),
        (None, "its module is missing"),
    ],
)
def test_another_transformers_does_not_match(
    install: Any, monkeypatch: pytest.MonkeyPatch, source: str | None, note: str
) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    files = {"__init__.py": ""}
    if source is not None:
        files["models/deepseek_v4/modeling_deepseek_v4.py"] = source
    install("transformers", files, "5.7.0")
    host = probe().host("transformers")
    assert (host.version, host.matches, host.hooks[0].note) == ("5.7.0", False, note)
    judged = verdict("embedded host")
    assert not judged.runs
    assert judged.fix == "pip install 'spin-trtllm[transformers]'"


@pytest.mark.parametrize("file", [NEW_TREE, OLD_TREE])
def test_tensorrt_llm_is_read_in_both_trees_and_never_imported(install: Any, file: str) -> None:
    install("tensorrt_llm", {"__init__.py": INDEXER, file: INDEXER})
    host = probe().host("tensorrt_llm")
    assert (host.found, host.version, host.matches) == (True, "1.4.0rc4", True)
    assert "tensorrt_llm" not in sys.modules
    assert "matches: (metadata, hidden_states," in doctor()


def test_a_tensorrt_llm_with_another_hook_point_runs_dense(install: Any) -> None:
    install("tensorrt_llm", {"__init__.py": "", OLD_TREE: FIRST_RELEASE}, "1.2.0")
    judged = verdict("trtllm-serve")
    assert not judged.runs
    assert judged.why == (
        "tensorrt_llm 1.2.0: Indexer.sparse_attn_indexer "
        "(metadata, hidden_states, q_fp8, k, weights)"
    )


def test_a_tensorrt_llm_without_its_module_is_said_to_be_so(install: Any) -> None:
    install("tensorrt_llm", {})
    assert "1.4.0rc4, but its module is missing" in doctor()


def test_a_folder_that_happens_to_have_the_name_is_no_host(install: Any) -> None:
    install("tensorrt", {"notes.txt": ""}, None)
    assert not probe().host("tensorrt").found


def test_their_own_build_is_found(install: Any) -> None:
    assert not verdict("trtllm-build without").runs
    install("tensorrt_llm", {"__init__.py": INDEXER, "commands/build.py": ""}, "1.3.0rc20")
    assert verdict("trtllm-build without").runs


def test_serving_without_hooks_is_never_promised() -> None:
    hosts = replaced(Host("tensorrt_llm", True, "1.4.0rc4"))
    changes = READY | {"activation": NO_HOOKS}
    found = verdict("trtllm-serve", devices=H200, hosts=hosts, **changes)
    assert not found.runs
    assert "this version" in found.why
    assert found.fix


def put_server(folder: Path) -> Path:
    program = folder / "tritonserver"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


def test_a_triton_server_is_found_where_its_command_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPIN_TRITONSERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = verdict("Triton")
    assert (found.runs, found.why) == (False, "no tritonserver is here")
    assert "docs/triton.md" in found.fix
    program = put_server(tmp_path)
    assert probe().host("tritonserver (program)").found
    monkeypatch.setenv("PATH", "")
    assert not probe().host("tritonserver (program)").found
    monkeypatch.setenv("SPIN_TRITONSERVER", str(program))
    assert probe().host("tritonserver (program)").found


TRITON = Host("tritonserver (program)", True, None)
EMBEDDED = Host("transformers", True, "5.20.0")


@pytest.mark.parametrize(
    ("hosts", "why", "runs"),
    [
        ((TRITON, EMBEDDED), "spin-trtllm triton; engine transformers", True),
        (
            (TRITON, Host("transformers", False, None)),
            "it has no engine: transformers is not installed",
            False,
        ),
        (
            (Host(TRITON.name, True, None, (Hook("backend", False, "numpy: got 2.1"),)), EMBEDDED),
            "numpy: got 2.1",
            False,
        ),
    ],
)
def test_triton_needs_its_backend_and_an_engine(
    hosts: tuple[Host, ...], why: str, runs: bool
) -> None:
    others = (Host("tensorrt_llm", False, None),)
    found = verdict("Triton", hosts=replaced(*hosts, *others))
    assert found.why.startswith(why)
    assert found.runs is runs
    assert bool(found.fix) is not runs


def test_triton_can_have_both_engines() -> None:
    hosts = replaced(TRITON, EMBEDDED, Host("tensorrt_llm", True, "1.4.0rc4"))
    found = verdict("Triton", devices=H200, hosts=hosts, **READY)
    assert found.why == "spin-trtllm triton; engine tensorrt_llm or transformers"


def test_devices_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=150 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert probe().devices == (Device(0, "NVIDIA H200", 90, 150 * 2**30),)
    assert "cuda:0  NVIDIA H200, sm_90, 150.0 GiB" in doctor()


def test_a_broken_driver_does_not_break_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError("driver and library differ")

    monkeypatch.setattr(torch.cuda, "device_count", fail)
    assert probe().devices == ()
    assert doctor("--json")


NO_HOOKS = Activation(False, "/site/spin_trtllm_activate.pth", None)
READY: dict[str, Any] = {
    "kernel_library": KernelLibrary(True, ""),
    "activation": Activation(True, "/site/spin_trtllm_activate.pth", None),
}
H200 = (Device(0, "NVIDIA H200", 90, 2**37),)
A100 = (Device(0, "NVIDIA A100", 80, 2**36),)


@pytest.mark.parametrize(
    ("devices", "library", "runs"),
    [((), True, False), (A100, True, False), (H200, False, False), (H200, True, True)],
)
def test_kernels_need_a_device_and_the_library(
    devices: tuple[Device, ...], library: bool, runs: bool
) -> None:
    kernels = KernelLibrary(library, "")
    assert verdict("CUDA kernels", devices=devices, kernel_library=kernels).runs is runs


def test_the_kernel_library_is_asked_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    native: Any = ModuleType("spin_trtllm.native")
    native.__spec__ = importlib.util.spec_from_loader("spin_trtllm.native", None)
    monkeypatch.setitem(sys.modules, "spin_trtllm.native", native)
    native.library_path = lambda: None
    assert probe().kernel_library == KernelLibrary(False, "not built: the reference runs")
    native.library_path = lambda: Path("/lib/libspin.so")
    native.load = lambda: None
    assert probe().kernel_library == KernelLibrary(True, "/lib/libspin.so")

    def refuse_version() -> None:
        raise SpinError("/lib/libspin.so: got 'version 99'")

    native.load = refuse_version
    note = "/lib/libspin.so: got 'version 99'; the reference runs"
    assert probe().kernel_library == KernelLibrary(False, note)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "never run under a real TensorRT-LLM"),
        ({"activation": NO_HOOKS}, "this version does not use it yet"),
        ({"activation": Activation(True, None, None)}, "no start-up file"),
        ({"kernel_library": KernelLibrary(False, "not built")}, "not built"),
        ({"devices": A100}, "no GPU of sm_90"),
    ],
)
def test_serving_needs_hooks_kernels_and_a_start_up_file(changes: dict[str, Any], why: str) -> None:
    hosts = replaced(Host("tensorrt_llm", True, "1.4.0rc4"))
    found = verdict("trtllm-serve", **{"devices": H200, "hosts": hosts} | READY | changes)
    assert found.runs is (not changes)
    assert why in found.why
    assert bool(found.fix) is bool(changes)


TENSORRT: dict[str, Any] = {
    "devices": H200,
    "tensorrt_plugin": KernelLibrary(True, "/lib/libspin_trt_plugin.so"),
}


@pytest.mark.parametrize(
    ("host", "changes", "why"),
    [
        (Host("tensorrt", True, "10.13.0"), {}, "tensorrt 10.13.0; never run in TensorRT itself"),
        (Host("tensorrt_lean", True, None), {}, "tensorrt_lean; never run"),
        (Host("tensorrt_rtx", True, "1.7.1"), {}, "none of tensorrt, tensorrt_lean, tensorrt_disp"),
        (Host("tensorrt", True, "11.4.0"), {"devices": A100}, "no GPU of sm_90"),
        (
            Host("tensorrt", True, "11.4.0"),
            {"tensorrt_plugin": KernelLibrary(False, "not built")},
            "not built",
        ),
    ],
)
def test_the_plugin_needs_a_tensorrt_and_a_gpu(
    host: Host, changes: dict[str, Any], why: str
) -> None:
    others = [Host(f.name, False, None) for f in FLAVOURS if f.name != host.name]
    found = verdict("TensorRT plugin", **TENSORRT | changes | {"hosts": replaced(host, *others)})
    assert why in found.why
    assert found.runs is ("never run" in found.why)
    assert bool(found.fix) is not found.runs


NO_IMPORT = "tensorrt does not import: libnvinfer.so.10: not there"


@pytest.mark.parametrize(
    ("hosts", "why", "runs"),
    [
        (("tensorrt",), NO_IMPORT, False),
        (("tensorrt", "tensorrt_lean"), "tensorrt_lean 10.9; never run", True),
    ],
)
def test_a_tensorrt_that_does_not_import_is_none(
    hosts: tuple[str, ...], why: str, runs: bool
) -> None:
    broken = (Hook("tensorrt import", False, NO_IMPORT),)
    given = [
        Host(f.name, f.name in hosts, "10.9", broken if f.name == "tensorrt" else ())
        for f in FLAVOURS
    ]
    found = verdict("TensorRT plugin", **TENSORRT | {"hosts": replaced(*given)})
    assert found.why.startswith(why)
    assert found.runs is runs
    build = verdict("trtllm-build --use_spin --tensorrt", hosts=replaced(*given))
    assert build.why == f"ONNX only: {NO_IMPORT}"


def test_a_tensorrt_that_cannot_build_can_run_engines() -> None:
    given = [Host(f.name, False, None) for f in FLAVOURS if f.name != "tensorrt"]
    given.append(Host("tensorrt", True, "10.9", (Hook("engine builder", False, "no GPU"),)))
    assert verdict("TensorRT plugin", **TENSORRT | {"hosts": replaced(*given)}).runs
    build = verdict("trtllm-build --use_spin --tensorrt", hosts=replaced(*given))
    assert build.why == "ONNX only: no GPU"


def test_a_wheel_of_bindings_is_a_tensorrt(
    install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("tensorrt_rtx_bindings", {"__init__.py": ""}, None)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert probe().host("tensorrt_rtx").found
    needs = "ONNX only: tensorrt_rtx needs libtensorrt_rtx.so to read networks"
    assert verdict("trtllm-build --use_spin --tensorrt").why.startswith(needs)
    (tmp_path / "libtensorrt_rtx.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert "engines by tensorrt_rtx" in verdict("trtllm-build --use_spin --tensorrt").why


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise ImportError('libnvinfer.so: not there')", "libnvinfer.so: not there"),
        ("import os; os.abort()", "it ends its process by SIGABRT"),
    ],
)
def test_a_broken_tensorrt_is_noticed_and_harmless(install: Any, text: str, reason: str) -> None:
    install("tensorrt_lean", {"__init__.py": text}, "10.9.0")
    assert probe().host("tensorrt_lean").fault() == f"tensorrt_lean does not import: {reason}"
    assert "tensorrt_lean" not in sys.modules


def test_an_old_tensorrt_is_noticed(install: Any) -> None:
    install("tensorrt_lean", {"__init__.py": ""}, "10.2.0")
    fault = "tensorrt_lean 10.2.0 is too old, it has to be 10.3 or later"
    assert probe().host("tensorrt_lean").fault() == fault


def test_the_plugin_is_tried_by_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "plugin.so"
    monkeypatch.setenv("SPIN_TRT_PLUGIN", str(library))
    assert probe().tensorrt_plugin == KernelLibrary(False, "not built")
    library.write_text("no library")
    assert "not a loadable TensorRT plugin" in probe().tensorrt_plugin.note
    made = stub_plugin(tmp_path)
    monkeypatch.setenv("SPIN_TRT_PLUGIN", str(made))
    assert probe().tensorrt_plugin == KernelLibrary(True, str(made))
    stub_plugin(tmp_path, "libspin_trt_plugin version 1")
    assert "got 'version 1', allowed: version" in probe().tensorrt_plugin.note
    stub_plugin(tmp_path, "before plugins had one")
    assert "got 'no version', allowed: version" in probe().tensorrt_plugin.note


def test_a_plugin_cut_short_does_not_end_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = stub_plugin(tmp_path)
    os.truncate(library, 5000)
    monkeypatch.setenv("SPIN_TRT_PLUGIN", str(library))
    assert "it ends its process by SIGBUS" in doctor()


def test_activation_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr("site.ENABLE_USER_SITE", False)
    monkeypatch.delenv("TLLM_SPIN", raising=False)
    text = doctor()
    assert "spin_trtllm_activate.pth is not in site-packages" in text
    assert "TLLM_SPIN      not set: whatever starts here runs dense" in text
    startup = tmp_path / "spin_trtllm_activate.pth"
    startup.touch()
    monkeypatch.setenv("TLLM_SPIN", "/engine/spin.yaml")
    activation = json.loads(doctor("--json"))["activation"]
    assert activation["startup_file"] == str(startup)
    assert activation["spin_file"] == "/engine/spin.yaml"
