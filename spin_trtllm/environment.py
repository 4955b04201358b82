# SPDX-License-Identifier: Apache-2.0
"""What figures were made on, and when."""

from __future__ import annotations

import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from spin_trtllm import __version__


def environment(model: torch.nn.Module | None = None) -> dict[str, Any]:
    """`date` (ISO 8601), `device`, `cpu_cores` and `versions`.

    Args:
        model: of Transformers, whose device is meant; None: the CPU alone, without Transformers.
    """
    versions = {
        "spin_trtllm": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    device = torch.device("cpu")
    if model is not None:
        device = next(model.parameters()).device
        versions["transformers"] = version("transformers")
    on_gpu = device.type == "cuda"
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"{_cpu_name()} (CPU)",
        "cpu_cores": len(os.sched_getaffinity(0)),
        "versions": versions,
    }


def _cpu_name() -> str:
    """As Linux names it; elsewhere what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
