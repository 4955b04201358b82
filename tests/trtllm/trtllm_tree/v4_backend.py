# SPDX-License-Identifier: Apache-2.0
"""Mirrors sparse/deepseek_v4/backend.py: who constructs the indexer, and when."""

from __future__ import annotations

from typing import Any

from .indexer import DeepseekV4Indexer
from .metadata import DeepseekV4TrtllmAttentionMetadata
from .params import DEEPSEEK_V4_SPARSE_RATIO


class DeepseekV4TrtllmAttention:
    """backend.py DeepseekV4TrtllmAttention: an indexer on ratio-4 layers only"""

    Metadata = DeepseekV4TrtllmAttentionMetadata

    def __init__(self, layer_idx: int, sparse_params: Any, **unused: Any) -> None:
        self.layer_idx = layer_idx
        self.compress_ratio = sparse_params.compress_ratios[layer_idx]
        self.indexer = None
        if self.compress_ratio == DEEPSEEK_V4_SPARSE_RATIO:
            self.indexer = DeepseekV4Indexer(
                None, None, None, True, sparse_params, None, self.compress_ratio, layer_idx, None
            )
