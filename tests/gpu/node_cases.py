# SPDX-License-Identifier: Apache-2.0
"""Nodes, their inputs and their state, for the tests of the TensorRT plugin on a GPU.

Nodes are created, serialised, re-created for the run time and attached, as an engine does it; the
tests play their host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from plugin_host import Node, find_host
from torch import Tensor

from spin_trtllm import native
from spin_trtllm.config import SpinConfig
from spin_trtllm.geometry import count_blocks

HOST = find_host() if torch.cuda.is_available() else None
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(HOST is None, reason="the plugin or its host has not been built"),
]

DEVICE = "cuda"
LAYER, LANES, HEADS = 5, 5, 32
STEPS = 200
BASE = SpinConfig(top_k=8, block_size=16, state_dtype="bf16", seed=3)
CASES = [
    ("plain", BASE, 4, 1, 700, 64, torch.float8_e4m3fn),
    ("drafts", replace(BASE, seed=2**64 - 1), 4, 4, 700, 32, torch.float16),
    ("fp32", replace(BASE, state_dtype="fp32", ema_decay=0.7), 1, 8, 300, 64, torch.bfloat16),
    ("tiles", replace(BASE, block_size=64, top_k=100), 1, 3, 4100, 64, torch.float8_e4m3fn),
    ("row0", replace(BASE, mask_policy="row0", update_policy="row0"), 4, 3, 500, 32, torch.float16),
    ("dense", replace(BASE, target_sparsity=0.0), 4, 2, 500, 64, torch.bfloat16),
    ("sparse", replace(BASE, target_sparsity=0.9, exploration=0.3), 1, 2, 2000, 64, torch.float16),
    ("mean", replace(BASE, pooling="mean", block_size=128), 2, 2, 1500, 64, torch.float8_e4m3fn),
    ("top4", replace(BASE, pooling="top4", block_size=32), 2, 1, 900, 32, torch.bfloat16),
]
IDS = [c[0] for c in CASES]


def make_node(
    name: str, config: SpinConfig, ratio: int, slots: int, page: int, **more: Any
) -> Node:
    """A node as an engine has it, after a trip through its file."""
    assert HOST is not None
    given = {
        "ratio": ratio,
        "slots": slots,
        "layer": LAYER,
        "top_k": config.top_k,
        "block_size": config.block_size,
        "page_slots": page,
        "sparsity_ppm": config.sparsity_ppm,
        "exploration_ppm": config.exploration_ppm,
        "seed": str(config.seed),
        "pooling": native.POOLINGS[config.pooling],
        "row0_mask": int(config.mask_policy == "row0"),
        "ema_decay": config.ema_decay,
        "row0_update": int(config.update_policy == "row0"),
    }
    known = HOST.field_names(name)
    made = HOST.create(name, **{n: v for n, v in given.items() if n in known}, **more)
    assert made is not None, HOST.log()
    return made.reload().attach()


def current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


class Cache:
    """Keys in pages, a table for each sequence of a step, and queries."""

    def __init__(self, seed: int, slots: int, page: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.width = count_blocks(slots, page) + 1
        count = self.width + 20
        keys = torch.randn(count, page * native.KEY_DIM, generator=self.generator)
        scales = torch.rand(count, page, generator=self.generator) + 0.5
        parts = [keys.to(torch.float8_e4m3fn).view(torch.uint8), scales.view(torch.uint8)]
        self.pages = torch.cat(parts, 1).to(DEVICE)
        self.words = self.pages.view(torch.int32)  # as TensorRT takes them

    def table(self, sequences: int) -> Tensor:
        table = torch.zeros(sequences, self.width, dtype=torch.int32)
        for row in table:
            row[:] = torch.randperm(len(self.pages), generator=self.generator)[: self.width]
        return table.to(DEVICE)

    def query(self, sequences: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        query = torch.randn(sequences, rows, HEADS, native.KEY_DIM, generator=self.generator)
        weights = torch.randn(sequences, rows, HEADS, generator=self.generator)
        return query.to(dtype).to(DEVICE), weights.to(DEVICE)


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


def padded(size: int) -> int:
    return (size + 7) // 8 * 8


def make_state(config: SpinConfig, slots: int, rows: int, sequences: int) -> list[Tensor]:
    """State inputs of SpinIndexer: zeros, and where nothing may be read, what must not be used."""
    blocks = count_blocks(slots, config.block_size)
    places = LANES + sequences
    return [
        zeros(LANES, padded(slots), dtype=config.storage_dtype),
        zeros(LANES, padded(slots + 1) + 8, dtype=config.storage_dtype),
        torch.full((places, rows, blocks * config.block_size), float("nan"), device=DEVICE),
        zeros(places, blocks, dtype=torch.int32),
        zeros(rows + 3, LANES, dtype=torch.int64),
    ]
