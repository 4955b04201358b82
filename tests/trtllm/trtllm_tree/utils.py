# SPDX-License-Identifier: Apache-2.0
"""Mirrors the few names of tensorrt_llm/_utils.py that the indexer files import."""

from __future__ import annotations

import torch
from tensorrt_llm._double import CONFIG


def get_sm_version() -> int:
    """tensorrt_llm/_utils.py get_sm_version"""
    return CONFIG.sm_version


def is_sm_100f() -> bool:
    """tensorrt_llm/_utils.py is_sm_100f; precondition of the CuTe DSL logits (indexer @0b228a79)"""
    return CONFIG.sm_version in (100, 103)


def prefer_pinned() -> bool:
    """tensorrt_llm/_utils.py prefer_pinned"""
    return False


def maybe_pin_memory(tensor: torch.Tensor) -> torch.Tensor:
    """tensorrt_llm/_utils.py maybe_pin_memory"""
    return tensor


def mpi_rank() -> int:
    """tensorrt_llm/_utils.py mpi_rank"""
    return 0
