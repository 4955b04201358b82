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
from spin_trtllm.hosts.tensorrt.flavours import FLAVOURS, import_flavour, installed_flavours

_RTX = "tensorrt_rtx"
_RTX_SMS = (75, 80, 86, 89, 120)
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
        if not flavour.builds:
            continue
        reason = _why_not(flavour.name, target.sm)
        if reason is None:
            try:
                version = str(import_flavour(flavour.name, builds=True).__version__)
                return Builder(flavour.name, version, target.sm, flavour.note)
            except SpinError as error:
                reason = str(error)
        reasons.append(reason)
    names = " or ".join(flavour.name for flavour in FLAVOURS if flavour.builds)
    return "; ".join(reasons) or f"no TensorRT with a builder is installed ({names})"


def _why_not(name: str, sm: int) -> str | None:
    """Why a builder cannot build for an architecture; None if it can."""
    if name == _RTX:
        return _why_not_rtx(sm)
    if not torch.cuda.is_available():
        return f"{name} builds on the kind of GPU that it builds for, and there is no GPU here"
    major, minor = torch.cuda.get_device_capability()
    here = 10 * major + minor
    return None if here == sm else f"{name} would build for this sm_{here}, not sm_{sm}"


def _why_not_rtx(sm: int) -> str | None:
    if sm not in _RTX_SMS:
        allowed = ", ".join(f"sm_{known}" for known in _RTX_SMS)
        return f"{_RTX} builds for {allowed}, not sm_{sm}"
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
