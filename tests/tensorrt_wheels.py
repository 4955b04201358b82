# SPDX-License-Identifier: Apache-2.0
"""TensorRT's wheels of `requirements/tensorrt.txt`, each in a folder of its own (`make tensorrt`).

They share module names and have no place in one environment, so every test runs them in a process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spin_trtllm import native
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.tensorrt.plugin import PLUGIN_NAME, usable_plugin

ROOT = Path(__file__).parent.parent
FOLDER_VARIABLE = "SPIN_TENSORRT_WHEELS"

# what is installed where, and its module
LEAN_10, LEAN_11, RTX = "lean-10", "lean-11", "rtx"
VERSIONS = {LEAN_10: "10.16.1.11", LEAN_11: "11.4.0.106", RTX: "1.7.1.116"}

_RTX_LIBRARY = "libtensorrt_rtx.so"
_STUB = """
void *getCreators(int *count) { *count = 0; return 0; }
void setLoggerFinder(void *finder) { (void)finder; }
const char mark[] = "%s";
"""


def wheel_folder(name: str) -> Path:
    """The folder of one set of wheels; the test is skipped where it could not be installed."""
    folders = Path(os.environ.get(FOLDER_VARIABLE) or ROOT / ".venv" / "tensorrt")
    if not any((folders / name).glob("tensorrt_*_bindings")):
        pytest.skip(f"TensorRT wheels {name} are not in {folders}: make tensorrt")
    return folders / name


def need_plugin() -> Path:
    """The plugin library; the test is skipped where it was not built, or from other sources."""
    try:
        path = usable_plugin()
    except SpinError as error:
        pytest.skip(str(error))
    if path is None:
        pytest.skip("libspin_trt_plugin.so is not built: make plugin")
    return path


def stub_plugin(folder: Path, mark: str = f"libspin_trt_plugin version {native.VERSION}") -> Path:
    """A library that passes for the plugin until TensorRT asks it for its nodes."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = folder / PLUGIN_NAME
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=_STUB % mark, text=True, check=True)
    return library


def wheel_environment(name: str, scratch: Path) -> dict[str, str]:
    """The environment of a process that uses a set of wheels.

    TensorRT-RTX's ONNX parser loads its own library by a name that its wheel lacks, and ends the
    process otherwise; a link under that name, outside the wheel, is all it takes.
    """
    folder = wheel_folder(name)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(folder)))}
    if name == RTX:
        link = scratch / _RTX_LIBRARY
        if not link.is_symlink():
            link.symlink_to(folder / "tensorrt_rtx_libs" / f"{_RTX_LIBRARY}.1")
        paths = (str(scratch), os.environ.get("LD_LIBRARY_PATH", ""))
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def run_probe(script: str, wheels: str, scratch: Path, request: Any) -> Any:
    """Run a script of this folder in a process with these wheels: JSON in, JSON out."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "tensorrt" / script), str(scratch / "answer.json")],
        input=json.dumps(request),
        text=True,
        capture_output=True,
        env=wheel_environment(wheels, scratch),
        cwd=scratch,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-4000:]}"
    return json.loads((scratch / "answer.json").read_text())
