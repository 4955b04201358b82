# SPDX-License-Identifier: Apache-2.0
"""SPIN (Shadow Predictive Indexer, arXiv 2610.09025) for DeepSeek-V4 deployments."""

from __future__ import annotations

import os
from pathlib import Path

from spin_trtllm.config import SpinConfig, preset
from spin_trtllm.errors import SpinError
from spin_trtllm.state import SpinState
from spin_trtllm.step import SpinStep, StepPlan

__version__ = "0.1.0"

__all__ = [
    "SpinConfig",
    "SpinError",
    "SpinState",
    "SpinStep",
    "StepPlan",
    "__version__",
    "enable",
    "preset",
]


def enable(config: SpinConfig | str | os.PathLike[str]) -> Path:
    """Switch SPIN on for TensorRT-LLM: `spin_trtllm.hosts.trtllm.enable`."""
    from spin_trtllm.hosts import trtllm  # a host is loaded by who wants it

    return trtllm.enable(config)
