# SPDX-License-Identifier: Apache-2.0
"""Which TensorRT here builds engines for a target, or why none does."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from spin_trtllm.build.target import Target
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.tensorrt.flavours import (
    FLAVOURS,
    Flavour,
    import_flavour,
    installed_flavours,
)

_RTX = "tensorrt_rtx"
_RTX_SM = 120  # it knows older GPUs, too, but the kernels do not
_RTX_LIBRARY = "libtensorrt_rtx.so"


@dataclass(frozen=True)
class Builder:
    """What builds engines: its module, version, and the GPU architecture it builds for."""

    name: str
    version: str
    sm: int
    note: str = ""

    @property
    def asked_sm(self) -> int | None:
        """The architecture to ask it for; None where it builds for the GPU that is there."""
        return self.sm if self.name == _RTX else None


def choose_builder(target: Target) -> Builder | str:
    """The best builder here that builds for a target, or why there is none, one line."""
    reasons = []
    for flavour in installed_flavours():
        if flavour.builds:
            found = _builder(flavour, target.sm)
            if isinstance(found, Builder):
                return found
            reasons.append(found)
    names = " or ".join(flavour.name for flavour in FLAVOURS if flavour.builds)
    return "; ".join(reasons) or f"no TensorRT with a builder is installed ({names})"


def _builder(flavour: Flavour, sm: int) -> Builder | str:
    reason = _why_not_for(flavour.name, sm) or why_no_builder(flavour.name)
    if reason is not None:
        return reason
    try:
        version = str(import_flavour(flavour.name, builds=True).__version__)
    except SpinError as error:
        return str(error)
    return flavour.why_too_old(version) or Builder(flavour.name, version, sm, flavour.note)


def _why_not_for(name: str, sm: int) -> str | None:
    """Why a flavour cannot build for an architecture here; None if it can."""
    if name == _RTX:
        return None if sm == _RTX_SM else f"{name} builds for sm_{_RTX_SM}, not sm_{sm}"
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    here = 10 * major + minor
    return None if here == sm else f"{name} would build for this sm_{here}, not sm_{sm}"


def why_no_builder(name: str) -> str | None:
    """What a flavour lacks here to build anything at all, one line; None if nothing is known."""
    if name == _RTX:
        return _why_no_rtx()
    if torch.cuda.is_available():
        return None
    return f"{name} builds on the kind of GPU that it builds for, and there is no GPU here"


def _why_no_rtx() -> str | None:
    # its parser loads this name, which its wheel lacks, and ends the process without it
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    folders = [*(spec.submodule_search_locations or ())] if spec else []
    folders += filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    if any((Path(folder) / _RTX_LIBRARY).exists() for folder in folders):
        return None
    if ctypes.util.find_library("tensorrt_rtx"):
        return None
    return (
        f"{_RTX} needs {_RTX_LIBRARY} to read networks, which its wheel lacks: "
        f"put a link of that name to {_RTX_LIBRARY}.1 on LD_LIBRARY_PATH"
    )
