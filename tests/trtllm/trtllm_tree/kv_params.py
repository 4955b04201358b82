# SPDX-License-Identifier: Apache-2.0
"""Mirrors tensorrt_llm/_torch/metadata.py KVCacheParams."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class KVCacheParams:
    """tensorrt_llm/_torch/metadata.py KVCacheParams"""

    use_cache: bool
    num_cached_tokens_per_seq: list[int] = field(default_factory=list)
    num_extra_kv_tokens: int = 0
