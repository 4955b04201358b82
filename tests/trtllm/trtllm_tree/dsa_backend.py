# SPDX-License-Identifier: Apache-2.0
"""Mirrors sparse/dsa/backend.py: who constructs the V3.2 indexer."""

from __future__ import annotations

from typing import Any

from .indexer import Indexer
from .metadata import DSAtrtllmAttentionMetadata


class DSATrtllmAttention:
    """backend.py DSATrtllmAttention"""

    Metadata = DSAtrtllmAttentionMetadata

    def __init__(self, layer_idx: int, sparse_params: Any, **unused: Any) -> None:
        self.layer_idx = layer_idx
        self.indexer = Indexer(None, None, None, True, sparse_params, None, 1, layer_idx, None)
