# SPDX-License-Identifier: Apache-2.0
"""Mirrors tensorrt_llm/mapping.py Mapping: the fields that the indexer and managers read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Mapping:
    """tensorrt_llm/mapping.py Mapping"""

    world_size: int = 1
    rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    enable_attention_dp: bool = False

    def pp_layers(self, num_layers: int) -> list[int]:
        """tensorrt_llm/mapping.py Mapping.pp_layers"""
        base, extra = divmod(num_layers, self.pp_size)
        first = self.pp_rank * base + min(self.pp_rank, extra)
        return list(range(first, first + base + (self.pp_rank < extra)))
