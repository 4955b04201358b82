# SPDX-License-Identifier: Apache-2.0
"""The TensorRT modules that a machine can have, and which of them does what.

They share one interface and differ in what they bring: a builder, or only a runtime. All have a
plugin registry, so the plugin loads into each.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from types import ModuleType

from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.hosts.tensorrt.trial import why_it_fails


@dataclass(frozen=True)
class Flavour:
    """One kind of TensorRT.

    Attributes:
        name: its Python module.
        builds: whether it turns networks into engines.
        note: what is special about it, one line; may be empty.
        since: its first version with state in place.
    """

    name: str
    builds: bool
    note: str = ""
    since: tuple[int, int] = (10, 3)

    @property
    def modules(self) -> tuple[str, ...]:
        """Names to import it by: the module, or the wheel of bindings that it re-exports."""
        return (self.name, f"{self.name}_bindings")

    def why_too_old(self, version: str | None) -> str | None:
        """Why a version does not do, one line; an unknown one gets the benefit of the doubt."""
        numbers = re.match(r"(\d+)\.(\d+)", version or "")
        if numbers is None or (int(numbers[1]), int(numbers[2])) >= self.since:
            return None
        since = ".".join(map(str, self.since))
        return f"{self.name} {version} is too old, it has to be {since} or later"


_IMPORT = """\
import importlib, sys
_, module, *sys.path = sys.argv
importlib.import_module(module)
"""

# In the order of preference.
FLAVOURS = (
    Flavour("tensorrt", builds=True),
    Flavour(
        "tensorrt_rtx",
        builds=True,
        note="its documentation calls plugins unsupported",
        since=(1, 0),
    ),
    Flavour("tensorrt_lean", builds=False, note="runs engines, builds none"),
    Flavour("tensorrt_dispatch", builds=False, note="runs engines, builds none"),
)


def installed_flavours() -> tuple[Flavour, ...]:
    """The flavours that can be found, best first; nothing is imported."""
    return tuple(flavour for flavour in FLAVOURS if _module_name(flavour) is not None)


def import_flavour(name: str | None = None, *, builds: bool = False) -> ModuleType:
    """Import a flavour's module.

    Args:
        name: of `FLAVOURS`; None takes the best one installed.
        builds: only one with a builder will do.

    Raises:
        SpinError: an unknown name, nothing fitting installed, or a module that fails to import.
    """
    fitting = [flavour for flavour in FLAVOURS if flavour.builds or not builds]
    names = [flavour.name for flavour in fitting]
    if name is not None and name not in names:
        refuse("tensorrt", name, ", ".join(names))
    wanted = [flavour for flavour in fitting if name in (None, flavour.name)]
    found = next((module for f in wanted if (module := _module_name(f)) is not None), None)
    if found is None:
        raise SpinError(f"tensorrt: none of {', '.join(f.name for f in wanted)} is installed")
    try:
        return importlib.import_module(found)
    except Exception as error:  # a library that it needs may be missing or be of another version
        raise SpinError(f"tensorrt: cannot import {found}: {error}") from error


def why_no_import(flavour: Flavour) -> str | None:
    """Why the module of an installed flavour does not import, one line; None if it does.

    It is imported in a process of its own, with what this one can import.
    """
    module = _module_name(flavour)
    reason = None if module is None else why_it_fails(_IMPORT, module, *sys.path)
    return reason and f"{flavour.name} does not import: {reason}"


def _module_name(flavour: Flavour) -> str | None:
    """The name that it can be imported by; None where it is not installed."""
    for module in flavour.modules:
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            continue
        if spec is not None and spec.origin is not None:  # any folder of that name would do else
            return module
    return None
