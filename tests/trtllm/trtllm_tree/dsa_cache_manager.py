# SPDX-License-Identifier: Apache-2.0
"""Mirrors sparse/dsa/cache_manager.py @12a71fe4."""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._double_v2 import KVCacheManagerV2
from tensorrt_llm._torch.pyexecutor.resource_manager import KVCacheManager

from .params import DSAParams


def _get_indexer_k_cache_bytes_per_token(
    index_head_dim: int, quant_block_size: int, use_fp4: bool
) -> int:
    """cache_manager.py _get_indexer_k_cache_bytes_per_token: 132 fp8, 68 fp4"""
    data = index_head_dim // 2 if use_fp4 else index_head_dim
    return data + index_head_dim // quant_block_size * 4


class _IndexerCache:
    """What DSACacheManager.__init__ and DSACacheManagerV2.__init__ set before the base class"""

    def _init_indexer(self, sparse_attention_config: Any) -> None:
        params = sparse_attention_config.to_sparse_params()
        if not isinstance(params, DSAParams):
            raise ValueError("DSA cache requires DSA sparse parameters")
        self.quant_block_size = 128
        self.index_head_dim = params.index_head_dim
        self.use_fp4 = params.indexer_k_dtype == "fp4"
        self._per_token = _get_indexer_k_cache_bytes_per_token(
            self.index_head_dim, self.quant_block_size, self.use_fp4
        )


class DSACacheManager(_IndexerCache, KVCacheManager):
    """cache_manager.py DSACacheManager: V1 manager plus one indexer pool per layer"""

    indexer_k_cache_page_scale = 1  # DSACacheManager: one INDEX_KEY page per physical slot

    def __init__(
        self, kv_cache_config: Any, kv_cache_type: Any = None, *, sparse_attention_config, **kwargs
    ) -> None:
        self._init_indexer(sparse_attention_config)
        super().__init__(kv_cache_config, kv_cache_type, **kwargs)
        self.num_blocks = self.blocks_in_primary_pool
        self.indexer_k_cache_pool_per_layer = [
            self.impl.storage[layer] for layer in range(self.num_local_layers)
        ]

    def _page_bytes(self) -> int:
        return self.tokens_per_block * self._per_token

    def get_indexer_k_cache_buffers(self, layer_idx: int) -> torch.Tensor:
        """DSACacheManager.get_indexer_k_cache_buffers"""
        pool = self.indexer_k_cache_pool_per_layer[self.layer_offsets[layer_idx]]
        return pool.view(self.num_blocks, self.tokens_per_block, 1, self._per_token)

    def get_pool_block_indices(
        self, num_seqs: int, *, request_ids=None, num_contexts: int = 0, beam_width: int = 1
    ) -> torch.Tensor:
        """DSACacheManager.get_pool_block_indices: host rows in batch order, decoded"""
        encoded = self.host_kv_cache_block_offsets[0, :num_seqs, 0, :]
        blocks = encoded // self.num_local_layers
        return blocks.clamp(min=0, max=self.blocks_in_primary_pool - 1).to(torch.int32)

    def get_batch_indexer_k_cache_indices(self, request_ids: list[int]) -> list[list[int]]:
        """DSACacheManager.get_batch_indexer_k_cache_indices"""
        return self.get_batch_cache_indices(request_ids, 0)


class DSACacheManagerV2(_IndexerCache, KVCacheManagerV2):
    """cache_manager.py DSACacheManagerV2"""

    indexer_k_cache_page_scale = 1  # DSACacheManagerV2: converter scale of Role.INDEX_KEY

    def __init__(
        self, kv_cache_config: Any, kv_cache_type: Any = None, *, sparse_attention_config, **kwargs
    ) -> None:
        self._init_indexer(sparse_attention_config)
        super().__init__(kv_cache_config, kv_cache_type, **kwargs)
        self.indexer_k_cache_page_scale = self.impl.scale
        self.num_blocks = self.impl.num_slots

    def _page_geometry(self) -> tuple[int, int]:
        return self.num_local_layers, self.tokens_per_block * self._per_token

    def get_indexer_k_cache_buffers(self, layer_idx: int) -> torch.Tensor:
        """DSACacheManagerV2.get_indexer_k_cache_buffers"""
        view = self.impl.layer_view(self.layer_offsets[layer_idx], self.tokens_per_block)
        return view.unsqueeze(2)

    def get_pool_block_indices(
        self, num_seqs: int, *, request_ids=None, num_contexts: int = 0, beam_width: int = 1
    ) -> torch.Tensor:
        """DSACacheManagerV2.get_pool_block_indices: stable slots in batch order"""
        if request_ids is None or len(request_ids) != num_seqs:
            raise ValueError("DSACacheManagerV2 requires request_ids to map stable slots")
        index = self.index_mapper.get_copy_index(list(request_ids), num_contexts, beam_width)
        rows = self.host_kv_cache_block_offsets[0, index.long(), 0, :]
        return rows.clamp(min=0, max=self.num_blocks - 1).to(torch.int32)


def is_dsa_cache_manager(manager: Any) -> bool:
    """cache_manager.py is_dsa_cache_manager"""
    return isinstance(manager, (DSACacheManager, DSACacheManagerV2))
