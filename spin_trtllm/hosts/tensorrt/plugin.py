# SPDX-License-Identifier: Apache-2.0
"""The plugin library `libspin_trt_plugin.so`: finding it, and loading it into TensorRT's registry.

TensorRT keeps silent when a library does not suit it, and the error comes much later, as a node
without a plugin. So everything is checked here, at once: that it loads, that it has what TensorRT
looks for, and that it was built from the sources that this package belongs to.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from spin_trtllm import native
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.hosts.tensorrt.flavours import import_flavour
from spin_trtllm.hosts.tensorrt.nodes import NAMESPACE, NODES, VERSION
from spin_trtllm.hosts.tensorrt.trial import why_it_fails

PLUGIN_VARIABLE = "SPIN_TRT_PLUGIN"
PLUGIN_NAME = "libspin_trt_plugin.so"

_EXPORTS = ("getCreators", "setLoggerFinder")
_MARK = re.compile(rb"libspin_trt_plugin version (\d+)")  # a constant of the library's
_LOAD = """\
import ctypes, sys
loaded = ctypes.CDLL(sys.argv[1])
for name in sys.argv[2:]:
    getattr(loaded, name)
"""


@dataclass(frozen=True, eq=False)
class Plugin:
    """A loaded plugin.

    Attributes:
        path: the library; None when something else had loaded it before.
        tensorrt: the module whose registry holds it.
        creators: TensorRT's creator objects by node name.
    """

    path: Path | None
    tensorrt: ModuleType
    creators: dict[str, Any]


def plugin_search_paths() -> list[Path]:
    """Where the library is looked for, in order. `SPIN_TRT_PLUGIN` rules out every other place."""
    chosen = os.environ.get(PLUGIN_VARIABLE)
    if chosen:
        return [Path(chosen)]
    return [path.with_name(PLUGIN_NAME) for path in native.search_paths()]


def plugin_path() -> Path | None:
    """The library that `load_plugin` would take, or None."""
    return next((path for path in plugin_search_paths() if path.is_file()), None)


def missing_plugin() -> str | None:
    """Why `plugin_path` finds none and how to change that, one line; None if it finds one."""
    return None if plugin_path() else _not_found(plugin_search_paths())


def usable_plugin() -> Path | None:
    """The library that `plugin_path` finds, tried as `try_plugin` does; None if it finds none.

    Raises:
        SpinError: there is one, and it cannot be used.
    """
    path = plugin_path()
    if path is not None:
        try_plugin(path)
    return path


def load_plugin(
    tensorrt: ModuleType | None = None, path: str | os.PathLike[str] | None = None
) -> Plugin:
    """Load SPIN's nodes into the plugin registry of a TensorRT module; once is enough.

    Args:
        tensorrt: `tensorrt`, `tensorrt_lean`, ...; None takes the best one installed.
        path: the library; None searches for it.

    Raises:
        SpinError: no TensorRT, no library, or one that TensorRT does not take.
    """
    module = import_flavour() if tensorrt is None else tensorrt
    registry = module.get_plugin_registry()
    creators = _creators(registry)
    if set(creators) == set(NODES):
        return Plugin(None, module, creators)
    library = _existing(path)
    check_plugin(library)
    if registry.load_library(str(library)) is None:
        raise SpinError(
            f"{library}: TensorRT {module.__version__} does not take it; it needs 10.3 or later"
        )
    creators = _creators(registry)
    if missing := sorted(set(NODES) - set(creators)):
        raise SpinError(f"{library}: no creator for {', '.join(missing)}; rebuild it")
    return Plugin(library, module, creators)


def _existing(path: str | os.PathLike[str] | None) -> Path:
    library = plugin_path() if path is None else Path(path)
    if library is None or not library.is_file():
        places = plugin_search_paths() if path is None else [path]
        raise SpinError(_not_found(places))
    return library.resolve()  # a bare name would be searched for along the loader's path


def _not_found(places: Iterable[str | os.PathLike[str]]) -> str:
    shown = ", ".join(str(place) for place in places)
    return f"{PLUGIN_NAME}: not found in {shown}; build it with `make plugin`"


def check_plugin(library: Path) -> None:
    """Say what the loader says; TensorRT would only return nothing.

    Raises:
        SpinError: it does not load, has not what TensorRT looks for, or is of another version.
    """
    try:
        loaded = ctypes.CDLL(str(library))
        for name in _EXPORTS:
            getattr(loaded, name)
    except (OSError, AttributeError) as error:
        raise SpinError(f"{library}: not a loadable TensorRT plugin: {error}") from error
    _check_version(library)


def try_plugin(library: Path) -> None:
    """`check_plugin` with the loader in a process of its own: a library cut short would end it.

    Raises:
        SpinError: as `check_plugin`.
    """
    reason = why_it_fails(_LOAD, str(library.absolute()), *_EXPORTS)
    if reason is not None:
        raise SpinError(f"{library}: not a loadable TensorRT plugin: {reason}")
    _check_version(library)


def _check_version(library: Path) -> None:
    """Its version is read in the file: the nodes are all that it exports."""
    mark = _MARK.search(library.read_bytes())
    found = f"version {int(mark[1])}" if mark else "no version"
    if found != f"version {native.VERSION}":
        refuse(str(library), found, f"version {native.VERSION}; rebuild it")


def _creators(registry: Any) -> dict[str, Any]:
    """Our creators in a registry, by name; asking for an absent one would log an error."""
    return {
        creator.name: creator
        for creator in registry.all_creators
        if (creator.plugin_namespace, creator.plugin_version) == (NAMESPACE, VERSION)
        and creator.name in NODES
    }
