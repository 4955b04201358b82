# SPDX-License-Identifier: Apache-2.0
"""Mirrors sparse/deepseek_v4/cache_manager.py @0393e46e: the indexer's part of it."""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._double import CONFIG
from tensorrt_llm._double_v2 import KVCacheManagerV2

from .params import DEEPSEEK_V4_SPARSE_RATIO, DeepseekV4AttentionType


class DeepseekV4CacheManager(KVCacheManagerV2):
    """cache_manager.py DeepseekV4CacheManager"""

    def __init__(
        self,
        kv_cache_config: Any,
        kv_cache_type: Any = None,
        *,
        num_layers: int,
        tokens_per_block: int,
        sparse_attn_config: Any = None,
        spec_config: Any = None,
        **kwargs: Any,
    ) -> None:
        if sparse_attn_config is None:
            sparse_attn_config = kwargs.pop("sparse_attention_config", None)
        if sparse_attn_config is None:
            raise ValueError("sparse_attn_config is required for DeepseekV4CacheManager")
        assert tokens_per_block in [128, 256], "tokens_per_block must be 128 or 256"
        self.use_fp8_ds_mla = kv_cache_config.dtype == "fp8_ds_mla"
        if CONFIG.sm_version == 90 and not self.use_fp8_ds_mla:
            raise ValueError("DeepSeek-V4 on Hopper requires kv_cache_config.dtype='fp8_ds_mla'")
        if self.use_fp8_ds_mla and CONFIG.sm_version != 90 and tokens_per_block != 256:
            raise ValueError("fp8_ds_mla requires tokens_per_block=256 here")
        self.index_head_dim = sparse_attn_config.index_head_dim
        self._compress_ratios = list(sparse_attn_config.compress_ratios)
        self._max_draft_len = getattr(spec_config, "max_draft_len", 0) or 0
        if self._max_draft_len > 0:
            self._compress_ratios += [self._compress_ratios[-1]] * (self._max_draft_len - 1)
        self.compressed_block_sizes = [tokens_per_block // r for r in self._compress_ratios]
        self._init_indexer_dtype(sparse_attn_config)
        super().__init__(
            kv_cache_config,
            kv_cache_type,
            num_layers=num_layers,
            tokens_per_block=tokens_per_block,
            max_draft_len=self._max_draft_len,
            **kwargs,
        )
        self._csa_indexer_compress_pool_id = 0 if self._csa_layers else None
        self._csa_indexer_compress_scale = self.impl.scale if self._csa_layers else None

    def _init_indexer_dtype(self, sparse_attn_config: Any) -> None:
        """DeepseekV4CacheManager._init_indexer_dtype"""
        self._indexer_k_dtype = sparse_attn_config.indexer_k_dtype
        if self._indexer_k_dtype == "fp8":
            self.quant_block_size = 128
            self._indexer_data_size = self.index_head_dim
        elif self._indexer_k_dtype == "fp4":
            assert self.index_head_dim == 128
            self.quant_block_size = 32
            self._indexer_data_size = self.index_head_dim // 2
        else:
            raise ValueError(f"Unsupported indexer_k_dtype {self._indexer_k_dtype!r}")
        self._indexer_scale_size = 4
        self.use_fp4 = self._indexer_k_dtype == "fp4"

    def _page_geometry(self) -> tuple[int, int]:
        """DeepseekV4CacheManager._build_cache_config: INDEXER_COMPRESS pages of ratio-4 layers"""
        self._csa_layers = [
            layer
            for layer in self.pp_layers
            if self._compress_ratios[layer] == DEEPSEEK_V4_SPARSE_RATIO
        ]
        slots = self.tokens_per_block // DEEPSEEK_V4_SPARSE_RATIO
        per_slot = self._indexer_data_size + self._indexer_scale_size
        return max(1, len(self._csa_layers)), slots * per_slot

    def _prepare_page_table_tensor(self, index_mapper_capacity: int) -> None:
        """DeepseekV4CacheManager._prepare_page_table_tensor: uninitialised, unlike the base"""
        super()._prepare_page_table_tensor(index_mapper_capacity)
        self.host_kv_cache_block_offsets.fill_(-77)

    def get_buffers(self, layer_idx: int, attn_type: DeepseekV4AttentionType) -> torch.Tensor:
        """DeepseekV4CacheManager.get_buffers; only INDEXER_COMPRESS has storage here"""
        if attn_type != DeepseekV4AttentionType.INDEXER_COMPRESS:
            raise NotImplementedError("the double stores indexer keys only")
        if layer_idx not in self._csa_layers:
            raise KeyError((layer_idx, attn_type))
        view = self.impl.layer_view(
            self._csa_layers.index(layer_idx), self.compressed_block_sizes[layer_idx]
        )
        return view if self.use_fp4 else view.view(torch.float8_e4m3fn)

    def get_indexer_k_cache_buffers(self, layer_idx: int) -> torch.Tensor:
        """DeepseekV4CacheManager.get_indexer_k_cache_buffers: uint8 [ids, slots, 1, bytes]"""
        buffer = self.get_buffers(layer_idx, DeepseekV4AttentionType.INDEXER_COMPRESS)
        return buffer.unsqueeze(2).view(torch.uint8)

    def get_cache_indices(
        self, request_id: int, layer_idx: int, attn_type: DeepseekV4AttentionType
    ) -> list[int]:
        """DeepseekV4CacheManager.get_cache_indices"""
        return [page * self.impl.scale for page in self.kv_cache_map[request_id].pages]

    def compute_sliding_block_tables(self, request_ids: list[int], num_contexts: int) -> None:
        """DeepseekV4CacheManager.compute_sliding_block_tables: unknown ids raise here already"""
        self._num_tables = self.index_mapper.get_copy_index(request_ids, num_contexts, 1).size(0)

    def copy_batch_block_offsets(
        self, dst_tensor, request_ids, beam_width, num_contexts, num_seqs, max_blocks=None
    ) -> None:
        """DeepseekV4CacheManager.copy_batch_block_offsets: sliding-window tables only, so the
        generic `kv_cache_block_offsets` says nothing about indexer pages"""
        assert beam_width == 1
        dst_tensor.fill_(-1)

    def copy_batch_indexer_compress_block_tables(
        self,
        host_block_table: torch.Tensor,
        request_ids: list[int],
        beam_width: int,
        num_contexts: int,
        num_seqs: int,
    ) -> None:
        """DeepseekV4CacheManager.copy_batch_indexer_compress_block_tables"""
        assert beam_width == 1
        copy_idx = self.index_mapper.get_copy_index(request_ids, num_contexts, beam_width)
        if self._csa_indexer_compress_scale is None:
            raise RuntimeError("Missing INDEXER_COMPRESS pool metadata")
        host_block_table[:num_seqs] = self._compute_shared_block_table(
            self._csa_indexer_compress_pool_id, self._csa_indexer_compress_scale, copy_idx
        )

    def get_max_resource_count(self) -> int:
        """DeepseekV4CacheManager.get_max_resource_count: bytes"""
        return self.impl.storage.numel()
