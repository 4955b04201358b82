# SPDX-License-Identifier: Apache-2.0
"""What this machine has: versions, devices, the kernel library, hosts and their hook points.

Nothing of a host is imported here: packages are found by their metadata, and hook points are read
in their source text. What only shows when it is loaded, TensorRT and the plugin, is loaded in a
process of its own. So a broken or half-installed host can be described, too. No probe raises.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from spin_trtllm import __version__
from spin_trtllm.build.handover import has_own_build
from spin_trtllm.build.tensorrt_builder import why_no_builder
from spin_trtllm.hosts.tensorrt.flavours import FLAVOURS, Flavour, why_no_import
from spin_trtllm.hosts.tensorrt.plugin import usable_plugin
from spin_trtllm.hosts.triton.server import SERVER_VARIABLE, find_server, missing
from spin_trtllm.hosts.trtllm.activate import has_hooks, startup_file
from spin_trtllm.hosts.trtllm.settings import SPIN_VARIABLE

Result = TypeVar("Result")

ENGINE_BUILDER = "engine builder"
TRITON_SERVER = "tritonserver (program)"
REFERENCE_RUNS = "not built: the reference runs"

# Distributions in the order they are shown.
_DISTRIBUTIONS = ("torch", "transformers", "safetensors", "cuda-python")


@dataclass(frozen=True)
class Device:
    """A CUDA device: `sm` is its compute capability, 90 for sm_90."""

    index: int
    name: str
    sm: int
    memory_bytes: int


@dataclass(frozen=True)
class KernelLibrary:
    """SPIN's CUDA kernels, alone or as a plugin; `note` says where they are, or what is wrong."""

    found: bool
    note: str


@dataclass(frozen=True)
class Hook:
    """A place where SPIN attaches to a host; `note` says what was found there."""

    name: str
    matches: bool
    note: str


@dataclass(frozen=True)
class Host:
    """Something that can run SPIN.

    Attributes:
        name: module or program.
        found: whether it can be imported or started.
        version: as its metadata says, if it has any.
        hooks: where SPIN attaches; empty if it needs no such place.
    """

    name: str
    found: bool
    version: str | None
    hooks: tuple[Hook, ...] = ()

    @property
    def matches(self) -> bool:
        """Whether it is there and every hook point is as expected."""
        return self.found and all(hook.matches for hook in self.hooks)

    def fault(self, *but: str) -> str | None:
        """What was found at its first hook point that does not match; None if all others match.

        Args:
            but: names of hook points that do not count.
        """
        faults = (hook.note for hook in self.hooks if not hook.matches and hook.name not in but)
        return next(faults, None)


@dataclass(frozen=True)
class Activation:
    """How SPIN gets into a TensorRT-LLM process.

    Attributes:
        has_hooks: whether this version of spin-trtllm brings hooks for it.
        startup_file: the `.pth` file through which every Python of this environment starts.
        spin_file: what `TLLM_SPIN` names in this process.
    """

    has_hooks: bool
    startup_file: str | None
    spin_file: str | None


@dataclass(frozen=True)
class Report:
    """All that was found."""

    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    kernel_library: KernelLibrary
    tensorrt_plugin: KernelLibrary
    activation: Activation
    hosts: tuple[Host, ...]
    has_own_build: bool

    def host(self, name: str) -> Host:
        """The host of that name."""
        return next(host for host in self.hosts if host.name == name)


@dataclass(frozen=True)
class _Expected:
    """A method whose first parameters after `self` SPIN relies on."""

    class_name: str
    method: str
    parameters: tuple[str, ...]


_TRANSFORMERS_FILE = "models/deepseek_v4/modeling_deepseek_v4.py"
_TRANSFORMERS_HOOKS = (
    _Expected("DeepseekV4IndexerScorer", "forward", ("q", "compressed_kv", "hidden_states")),
    _Expected("DeepseekV4Indexer", "forward", ("hidden_states", "q_residual", "position_ids")),
)

# The tree was renamed about 1.3.0rc27; older releases before the split had one file, dsa.py.
_TENSORRT_LLM_FILES = (
    "_torch/attention/backends/sparse/dsa/indexer.py",
    "_torch/attention_backend/sparse/dsa/indexer.py",
)
_TENSORRT_LLM_HOOK = _Expected(
    "Indexer",
    "sparse_attn_indexer",
    ("metadata", "hidden_states", "q_fp8", "k_fp8", "k_scale", "weights"),
)


def probe() -> Report:
    """Look at everything."""
    return Report(
        versions=_versions(),
        devices=_quietly(_devices, ()),
        kernel_library=_kernel_library(),
        tensorrt_plugin=_tensorrt_plugin(),
        activation=_activation(),
        hosts=(
            _transformers(),
            _tensorrt_llm(),
            *map(_tensorrt, FLAVOURS),
            _module_host("onnx"),
            _triton_server(),
            _module_host("tritonserver"),
            _module_host("pytriton", distribution="nvidia-pytriton"),
            _module_host("tritonclient"),
        ),
        has_own_build=_quietly(has_own_build, False),
    )


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "spin_trtllm": __version__,
    }
    return versions | {name: _version(name) for name in _DISTRIBUTIONS}


def _devices() -> tuple[Device, ...]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        sm = 10 * properties.major + properties.minor
        found.append(Device(index, properties.name, sm, properties.total_memory))
    return tuple(found)


def _kernel_library() -> KernelLibrary:
    """The library that `spin_trtllm.native` finds, and whether it loads."""
    if importlib.util.find_spec("spin_trtllm.native") is None:
        return KernelLibrary(False, REFERENCE_RUNS)
    try:
        native = importlib.import_module("spin_trtllm.native")
        path = native.library_path()
        if path is None:
            return KernelLibrary(False, REFERENCE_RUNS)
        native.load()
    except Exception as error:
        return KernelLibrary(False, f"{error}; the reference runs")
    return KernelLibrary(True, str(path))


def _tensorrt_plugin() -> KernelLibrary:
    """The library that `load_plugin` finds, and whether TensorRT could take it."""
    try:
        path = usable_plugin()
    except Exception as error:
        return KernelLibrary(False, str(error))
    return KernelLibrary(path is not None, "not built" if path is None else str(path))


def _activation() -> Activation:
    startup = _quietly(startup_file, None)
    return Activation(
        has_hooks=_quietly(has_hooks, False),
        startup_file=str(startup) if startup else None,
        spin_file=os.environ.get(SPIN_VARIABLE) or None,
    )


def _transformers() -> Host:
    home = _home("transformers")
    source = _source(home, (_TRANSFORMERS_FILE,))
    hooks = tuple(_hook(expected, source) for expected in _TRANSFORMERS_HOOKS)
    return Host("transformers", home is not None, _version("transformers"), hooks)


def _tensorrt_llm() -> Host:
    home = _home("tensorrt_llm")
    hook = _hook(_TENSORRT_LLM_HOOK, _source(home, _TENSORRT_LLM_FILES))
    return Host("tensorrt_llm", home is not None, _version("tensorrt_llm"), (hook,))


def _tensorrt(flavour: Flavour) -> Host:
    """Its module may be there as the bindings alone, whose wheel is named after its CUDA, too."""
    found = any(_home(module) is not None for module in flavour.modules)
    names = [flavour.name, *(f"{flavour.name}_cu{major}_bindings" for major in (13, 12, 11))]
    versions = [version for name in names if (version := _version(name))]
    version = versions[0] if versions else None
    if not found:
        return Host(flavour.name, False, version)
    hooks = [
        _sound(f"{flavour.name} import", partial(why_no_import, flavour)),
        _sound(f"{flavour.name} version", partial(flavour.why_too_old, version)),
    ]
    if flavour.builds:
        hooks.append(_sound(ENGINE_BUILDER, partial(why_no_builder, flavour.name)))
    return Host(flavour.name, True, version, tuple(hooks))


def _sound(name: str, why_not: Callable[[], str | None]) -> Hook:
    """A hook point that needs nothing but that there is no reason against it."""
    unknown: str | None = f"{name} cannot be tried"
    reason = _quietly(why_not, unknown)
    return Hook(name, reason is None, reason or "as it should be")


def _triton_server() -> Host:
    """The one that `spin-trtllm triton` would start, and what it lacks."""
    server = _quietly(lambda: find_server(os.environ.get(SERVER_VARIABLE) or None), None)
    if server is None:
        return Host(TRITON_SERVER, False, None)
    lacks = _quietly(lambda: list(missing(server)), ["it cannot be looked at"])
    return Host(
        TRITON_SERVER, True, None, tuple(Hook("its Python backend", False, line) for line in lacks)
    )


def _module_host(name: str, *, distribution: str | None = None) -> Host:
    return Host(name, _home(name) is not None, _version(distribution or name))


def _hook(expected: _Expected, source: str | None) -> Hook:
    """Compare a method's parameters in source text with those that SPIN relies on."""
    name = f"{expected.class_name}.{expected.method}"
    if source is None:
        return Hook(name, False, "its module is missing")
    parameters = _quietly(partial(_parameters, source, expected), None)
    if parameters is None:
        return Hook(name, False, "missing")
    shown = f"({', '.join(parameters)})"
    return Hook(name, parameters[: len(expected.parameters)] == expected.parameters, shown)


def _parameters(source: str, expected: _Expected) -> tuple[str, ...] | None:
    """Parameters of a method after `self`; None if the class or the method is not there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are about the host's coding style
        tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == expected.class_name:
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == expected.method:
                    return tuple(argument.arg for argument in member.args.args[1:])
    return None


def _source(home: Path | None, names: tuple[str, ...]) -> str | None:
    """Text of the first of these files that exists under a package."""
    paths = [home / name for name in names] if home else []
    existing = [path for path in paths if path.is_file()]
    if not existing:
        return None
    return _quietly(partial(existing[0].read_text, encoding="utf-8"), None)


def _home(module: str) -> Path | None:
    """Where a top-level package or module lies, without importing it.

    A folder without `__init__.py` counts as missing: any folder of that name would do.
    """
    spec = _quietly(partial(importlib.util.find_spec, module), None)
    if spec is None or spec.origin is None:
        return None
    folders = spec.submodule_search_locations
    return Path(folders[0] if folders else spec.origin)


def _version(distribution: str) -> str | None:
    return _quietly(partial(importlib.metadata.version, distribution), None)


def _quietly(look: Callable[[], Result], otherwise: Result) -> Result:
    """A probe's result, or `otherwise` if it fails: a doctor does not fall ill of its patient."""
    try:
        return look()
    except Exception:
        return otherwise
