# SPDX-License-Identifier: Apache-2.0
"""The TensorRT plugin as a file: what it exports and needs, and a fuzzer that cannot break it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_host import (
    BUILT,
    NODES,
    PLUGIN_SOURCES,
    ROOT,
    compile_plugin,
    find_host,
    tensorrt_headers,
)
from plugin_host import plugin_path as find_plugin

FUZZ_SECONDS = os.environ.get("SPIN_FUZZ_SECONDS", "60")


def symbols(*options: str, versions: bool = False) -> set[str]:
    plugin, nm = find_plugin(), shutil.which("nm")
    if plugin is None or nm is None:
        pytest.skip("the plugin has not been built, or there is no nm")
    listed = subprocess.run(
        [nm, "-D", *options, str(plugin)], capture_output=True, text=True, check=True
    )
    names = (line.split()[-1] for line in listed.stdout.splitlines())
    return {name if versions else name.split("@")[0] for name in names}


def test_it_exports_what_tensorrt_looks_up_and_nothing_else() -> None:
    assert symbols("--defined-only") == {"getCreators", "setLoggerFinder"}


def test_it_needs_neither_tensorrt_nor_the_cuda_runtime() -> None:
    wanted = symbols("--undefined-only")
    assert not [n for n in wanted if "nvinfer" in n or "TensorRT" in n or n.startswith("cuda")]
    assert not [n for n in wanted if n.startswith("spin_")]
    assert "memcpy" in wanted  # the list is one


def test_it_runs_with_the_cpp_runtime_of_gcc_8() -> None:
    """Numbers from and to text are in later ones only; Ubuntu 20.04 has that of GCC 10."""
    wanted = symbols("--undefined-only", "--with-symbol-versions", versions=True)
    versions = [v for n in wanted for v in re.findall(r"GLIBCXX_([\d.]+)", n)]
    assert versions  # the list is one
    assert max(tuple(map(int, v.split("."))) for v in versions) <= (3, 4, 25)


def test_it_offers_every_node() -> None:
    host = find_host()
    if host is None:
        pytest.skip("the plugin or its host cannot be built here")
    assert host.creators() == [f"spin/1/{node}/PLUGIN CREATOR_V3ONE" for node in NODES]


def test_the_read_me_lists_every_field() -> None:
    host = find_host()
    if host is None:
        pytest.skip("the plugin or its host cannot be built here")
    text = (PLUGIN_SOURCES / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|(?:[^|]*\|){3}(.*)\|$", text, re.MULTILINE)
    marks = {name: [m.strip() == "x" for m in cells.split("|")] for name, cells in rows}
    for column, node in enumerate(NODES):
        listed = {name for name, cells in marks.items() if len(cells) == 4 and cells[column]}
        assert listed == set(host.field_names(node)), node


def test_a_chosen_folder_of_headers_rules_out_every_other(tmp_path: Path) -> None:
    def find(folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(PLUGIN_SOURCES / "find_headers.py")]
        env = os.environ | {"TENSORRT_INCLUDE_DIR": str(folder)}
        return subprocess.run(command, env=env, capture_output=True, text=True)

    assert (find(tmp_path).returncode, find(tmp_path).stdout) == (1, "")
    (tmp_path / "NvInferRuntime.h").touch()
    assert (find(tmp_path).returncode, find(tmp_path).stdout) == (0, f"{tmp_path}\n")


def configure(build: Path, headers: Path) -> tuple[str, str]:
    """What CMake says of the plugin, and its targets, with these headers."""
    missing = [name for name in ("cmake", "nvcc") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    env = os.environ | {"TENSORRT_INCLUDE_DIR": str(headers)}
    made = ["cmake", "-S", str(ROOT / "plugins"), "-B", str(build)]
    done = subprocess.run(made, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = ["cmake", "--build", str(build), "--target", "help"]
    targets = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    return " ".join(done.stderr.split()), targets


def test_headers_that_do_not_compile_cost_the_plugin_only(tmp_path: Path) -> None:
    """An install goes on with the kernels, says why, and notices better headers the next time."""
    old = tmp_path / "headers"
    old.mkdir()
    (old / "NvInferRuntime.h").write_text("#error TensorRT 8, say\n")
    said, targets = configure(tmp_path / "build", old)
    assert "the TensorRT plugin does not compile, installing without it: " in said
    assert "error: #error TensorRT 8, say" in said
    assert "spin_kernels" in targets
    assert "spin_trt_plugin" not in targets

    good = tensorrt_headers()
    if good is None:
        pytest.skip("no TensorRT headers: make plugin")
    said, targets = configure(tmp_path / "build", good)
    assert said == ""
    assert "spin_trt_plugin" in targets


def test_random_fields_shapes_and_addresses_break_nothing() -> None:
    fuzz = BUILT / "fuzz"
    flags = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    missing = compile_plugin(fuzz, ("fuzz.cpp", "stubs.cpp"), *flags)
    if missing:
        pytest.skip(missing)
    ran = subprocess.run([fuzz, FUZZ_SECONDS], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    tried, created, enqueued = (int(n) for n in re.findall(r"\d+", ran.stdout))
    assert tried > created > 1000
    assert enqueued > 1000
