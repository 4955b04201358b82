# SPDX-License-Identifier: Apache-2.0
"""Serves a double of NVIDIA/TensorRT-LLM under upstream's dotted module names.

    with install(tree="new") as double:
        from tensorrt_llm._torch.attention.backends.sparse.dsa.indexer import Indexer

Every install makes fresh module and class objects, so patches never leak into the next test.
The sources are in trtllm_tree/; each of them names the upstream file and commit it mirrors.
`tensorrt_llm._double*` are the double's own helpers and exist nowhere upstream.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCES = Path(__file__).resolve().parent / "trtllm_tree"
TORCH = "tensorrt_llm._torch"
TREES = {
    # facts: newest layout, and the one before the rename
    "new": (f"{TORCH}.attention.backends", f"{TORCH}.pyexecutor.kv_cache.kv_cache_manager_v2"),
    "old": (f"{TORCH}.attention_backend", f"{TORCH}.pyexecutor.kv_cache_manager_v2"),
}
VERSIONS = {"new": "1.4.0rc4", "old": "1.3.0rc25"}


def module_files(tree: str, body: str = "split") -> dict[str, str]:
    """dotted name -> file in trtllm_tree (or a line of source, when it has a space)"""
    backends, manager = TREES[tree]
    sparse = f"{backends}.sparse"
    indexer = "dsa_indexer.py" if body == "split" else "dsa_indexer_inlined.py"
    names = {
        "tensorrt_llm": "root.py",
        "tensorrt_llm._double": "double_config.py",
        "tensorrt_llm._double_pool": "page_pool.py",
        "tensorrt_llm._double_params": "sparse_params.py",
        "tensorrt_llm._double_prepare": "dsa_indexer_prepare.py",
        "tensorrt_llm._double_quant": "quant.py",
        "tensorrt_llm._double_ops": "ops.py",
        "tensorrt_llm._double_v2": f"from {manager} import KVCacheManagerV2",
        "tensorrt_llm._utils": "utils.py",
        "tensorrt_llm.deep_gemm": "deep_gemm.py",
        "tensorrt_llm.llmapi.llm_args": "llm_args.py",
        "tensorrt_llm.logger": "logger.py",
        "tensorrt_llm.mapping": "mapping.py",
        f"{TORCH}.cute_dsl_utils": "cute_dsl_utils.py",
        f"{TORCH}.memory_buffer_utils": "memory_buffer_utils.py",
        f"{TORCH}.metadata": "kv_params.py",
        f"{TORCH}.pyexecutor.llm_request": "llm_request.py",
        f"{TORCH}.pyexecutor.resource_manager": "resource_manager.py",
        f"{TORCH}.pyexecutor.cuda_graph_runner": "cuda_graph_runner.py",
        manager: "kv_cache_manager_v2.py",
        f"{backends}.interface": "interface.py",
        f"{backends}.trtllm": "trtllm.py",
        f"{sparse}.params": "from tensorrt_llm._double_params import *",
        f"{sparse}.dsa.params": "from tensorrt_llm._double_params import *",
        f"{sparse}.dsa.indexer": indexer,
        f"{sparse}.dsa.metadata": "dsa_metadata.py",
        f"{sparse}.dsa.cache_manager": "dsa_cache_manager.py",
        f"{sparse}.dsa.backend": "dsa_backend.py",
    }
    if body == "split":  # TopK and DeepSeek-V4 came with the split files
        names |= {
            f"{TORCH}.modules.top_k": "top_k.py",
            f"{sparse}.deepseek_v4.params": "from tensorrt_llm._double_params import *",
            f"{sparse}.deepseek_v4.indexer": "v4_indexer.py",
            f"{sparse}.deepseek_v4.metadata": "v4_metadata.py",
            f"{sparse}.deepseek_v4.cache_manager": "v4_cache_manager.py",
            f"{sparse}.deepseek_v4.backend": "v4_backend.py",
        }
    for name in list(names):
        parts = name.split(".")
        for depth in range(1, len(parts)):
            names.setdefault(".".join(parts[:depth]), "pass ")
    return names


class _Loader(importlib.abc.Loader):
    def __init__(self, finder: TreeFinder, source: str) -> None:
        self.finder, self.source = finder, source

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if " " in self.source:
            code = compile(self.source, f"<{module.__name__}>", "exec")
        else:
            path = SOURCES / self.source
            code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
        exec(code, module.__dict__)
        if module.__name__ == "tensorrt_llm._double":
            for key, value in self.finder.settings.items():
                setattr(module.CONFIG, key, value)


class TreeFinder(importlib.abc.MetaPathFinder):
    """Last on sys.meta_path: a plug-in's finder in front of it sees every import."""

    def __init__(self, files: dict[str, str], settings: dict[str, Any]) -> None:
        self.files, self.settings = files, settings

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        source = self.files.get(fullname)
        if source is None:
            return None
        package = any(name.startswith(f"{fullname}.") for name in self.files)
        loader = _Loader(self, source)
        return importlib.machinery.ModuleSpec(
            fullname, loader, origin=f"double:{source}", is_package=package
        )


class Double:
    """Handle of one install: modules by short name, and the settings."""

    def __init__(self, tree: str, body: str, finder: TreeFinder) -> None:
        self.tree, self.body, self.finder = tree, body, finder
        self.backends, self.manager_module = TREES[tree]
        self.sparse = f"{self.backends}.sparse"

    def module(self, dotted: str) -> ModuleType:
        """`dsa.indexer` (below sparse/) or a full dotted name, imported on demand"""
        name = dotted if dotted.startswith("tensorrt_llm") else f"{self.sparse}.{dotted}"
        return importlib.import_module(name)

    @property
    def config(self) -> Any:
        return self.module("tensorrt_llm._double").CONFIG

    def import_all(self) -> None:
        for name in self.finder.files:
            importlib.import_module(name)


def start(tree: str = "new", body: str = "split", eager: bool = True, **settings: Any) -> Double:
    """Installs without a context: for subprocesses. Settings are fields of DoubleConfig."""
    if any(n == "tensorrt_llm" or n.startswith("tensorrt_llm.") for n in sys.modules):
        raise RuntimeError("tensorrt_llm is imported already")
    settings = {"tree": tree, "body": body, "version": VERSIONS[tree]} | settings
    finder = TreeFinder(module_files(tree, body), settings)
    sys.meta_path.append(finder)
    double = Double(tree, body, finder)
    importlib.import_module("tensorrt_llm._double_ops").register()
    if not eager:  # leave no trace: the first import must be the test's own
        _forget()
    else:
        double.import_all()
    return double


def _forget() -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def stop(double: Double) -> None:
    sys.meta_path.remove(double.finder)
    _forget()


@contextmanager
def install(
    tree: str = "new", body: str = "split", eager: bool = True, **settings: Any
) -> Iterator[Double]:
    """tree: "new" | "old" paths. body: "split" | "inlined" (V3.2 only, no TopK module)."""
    double = start(tree, body, eager, **settings)
    try:
        yield double
    finally:
        stop(double)
