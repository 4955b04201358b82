# SPDX-License-Identifier: Apache-2.0
"""Finding TensorRT and the plugin, and what they refuse or lack, in one line each."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorrt_wheels import need_plugin

from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.tensorrt import (
    FLAVOURS,
    NODES,
    allow_aliasing,
    import_flavour,
    installed_flavours,
    load_plugin,
    plugin_path,
)
from spin_trtllm.hosts.tensorrt.builder import EngineJob, build_engines


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a module of this text on the path; no other TensorRT is there."""
    monkeypatch.syspath_prepend(tmp_path)
    find = importlib.util.find_spec

    def find_ours(name: str) -> Any:
        return find(name) if (tmp_path / f"{name}.py").exists() else None

    monkeypatch.setattr(importlib.util, "find_spec", find_ours)

    def add(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, name, raising=False)

    yield add
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_the_best_flavour_is_taken(install: Any) -> None:
    install("tensorrt_lean", "__version__ = '10.9'")
    assert [flavour.name for flavour in installed_flavours()] == ["tensorrt_lean"]
    assert import_flavour().__name__ == "tensorrt_lean"
    with pytest.raises(SpinError, match="none of tensorrt, tensorrt_rtx is installed"):
        import_flavour(builds=True)
    install("tensorrt_bindings", "__version__ = '10.9'")
    assert import_flavour().__name__ == "tensorrt_bindings"
    assert import_flavour("tensorrt_lean").__name__ == "tensorrt_lean"


def test_a_flavour_that_is_none_or_broken_is_one_line(install: Any) -> None:
    with pytest.raises(SpinError, match="tensorrt: got 'cuda', allowed: tensorrt, tensorrt_rtx,"):
        import_flavour("cuda")
    install("tensorrt", "raise OSError('libnvinfer.so.10: cannot open shared object file')")
    with pytest.raises(SpinError, match=r"tensorrt: cannot import tensorrt: libnvinfer\.so\.10"):
        import_flavour()


class Registry:
    """A plugin registry that takes these creators from any library."""

    def __init__(self, names: tuple[str, ...], handle: object) -> None:
        self.all_creators: list[Any] = [
            SimpleNamespace(name="SpinIndexer", plugin_namespace="", plugin_version="1")
        ]
        self._names, self._handle = names, handle

    def load_library(self, path: str) -> object:
        self.all_creators += [
            SimpleNamespace(name=name, plugin_namespace="spin", plugin_version="1")
            for name in self._names
        ]
        return self._handle


def module_with(names: tuple[str, ...], handle: object) -> Any:
    registry = Registry(names, handle)
    return SimpleNamespace(__version__="10.9", get_plugin_registry=lambda: registry)


@pytest.fixture
def library() -> Path:
    return need_plugin()


def test_a_library_that_tensorrt_does_not_take_is_noticed(library: Path) -> None:
    with pytest.raises(SpinError, match=r"TensorRT 10\.9 does not take it; it needs 10\.3"):
        load_plugin(module_with((), None), library)
    with pytest.raises(SpinError, match="no creator for SpinObserve, SpinPredictBlocks; rebuild"):
        load_plugin(module_with(("SpinIndexer", "SpinSparseIndexer"), 1), library)
    loaded = load_plugin(module_with(tuple(NODES), 1), library)
    assert (loaded.path, set(loaded.creators)) == (library.resolve(), set(NODES))


def test_the_plugin_is_looked_for_where_the_kernels_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPIN_TRT_PLUGIN", raising=False)
    monkeypatch.setenv("SPIN_LIBRARY", str(tmp_path / "libspin.so"))
    assert plugin_path() is None
    with pytest.raises(SpinError, match=r"libspin_trt_plugin\.so: not found in .*make plugin"):
        load_plugin(module_with((), None))
    (tmp_path / "libspin_trt_plugin.so").touch()
    assert plugin_path() == tmp_path / "libspin_trt_plugin.so"
    monkeypatch.setenv("SPIN_TRT_PLUGIN", str(tmp_path / "other.so"))
    assert plugin_path() is None


def test_an_old_tensorrt_has_no_aliases() -> None:
    old: Any = SimpleNamespace(__version__="10.2.0", PreviewFeature=SimpleNamespace())
    with pytest.raises(SpinError, match=r"aliased: got 1, allowed: 0 with TensorRT 10\.2\.0"):
        allow_aliasing(None, old)


def test_without_the_builder_the_process_says_so(tmp_path: Path) -> None:
    there = {flavour.name for flavour in installed_flavours()}
    absent = next((f.name for f in FLAVOURS if f.builds and f.name not in there), None)
    if absent is None:
        pytest.skip("every builder is installed")
    job = EngineJob(str(tmp_path / "a.onnx"), str(tmp_path / "a.engine"))
    with pytest.raises(SpinError, match=f"tensorrt: none of {absent} is installed"):
        build_engines([job], builder=absent, plugin="none.so", ranges={})
    assert list(tmp_path.iterdir()) == []


ENDLESS = """
import os, pathlib, time
pathlib.Path(os.environ["BUILDER_PID"]).write_text(str(os.getpid()))
time.sleep(600)
"""
ASKING = """
from spin_trtllm.hosts.tensorrt.builder import EngineJob, build_engines
job = EngineJob("a.onnx", "a.engine")
build_engines([job], builder="tensorrt_rtx", plugin="none.so", ranges={})
"""


def test_the_builder_ends_with_who_asked_for_engines(tmp_path: Path) -> None:
    """Even if that was killed; a builder that goes on would write a stale engine."""
    (tmp_path / "tensorrt_rtx.py").write_text(ENDLESS)
    written = tmp_path / "pid"
    root = str(Path(__file__).parents[2])
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join((root, str(tmp_path))),
        "BUILDER_PID": str(written),
    }
    asking = subprocess.Popen([sys.executable, "-c", ASKING], env=env, cwd=tmp_path)
    try:
        wait_for(lambda: written.exists() and written.read_text() != "")
        builder = int(written.read_text())
        assert is_alive(builder)
    finally:
        asking.kill()
        asking.wait()
    try:
        wait_for(lambda: not is_alive(builder), seconds=10)
    finally:
        if is_alive(builder):
            os.kill(builder, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    """Whether it runs; one that ended and was not asked for its status yet does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False
