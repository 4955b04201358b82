# SPDX-License-Identifier: Apache-2.0
"""Mirrors the sparse-attention classes of tensorrt_llm/llmapi/llm_args.py (field names and
defaults of the 1.4.0rc4 API pages; conversion methods as the cache managers call them)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm._double_params import (
    DeepSeekV4MetadataParams,
    DeepSeekV4Params,
    DSAMetadataParams,
    DSAParams,
)


@dataclass
class KvCacheConfig:
    """llm_args.py KvCacheConfig; `max_pages` is the double's own way to size the pool"""

    dtype: str = "auto"
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    tokens_per_block: int = 32
    free_gpu_memory_fraction: float = 0.9
    max_pages: int = 0


@dataclass
class DeepSeekSparseAttentionConfig:
    """llm_args.py DeepSeekSparseAttentionConfig"""

    algorithm: str = "dsa"
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 2048
    indexer_max_chunk_size: int = 32768
    skip_indexer_for_short_seqs: bool = True
    use_cute_dsl_topk: bool = False
    use_cute_dsl_paged_mqa_logits: bool = True
    q_split_threshold: int = 8192
    indexer_rope_interleave: bool = False
    enable_heuristic_topk: bool = False
    use_self_sampling_topk: bool = True
    use_gvr_emission: bool = False
    indexer_k_dtype: str = "fp8"
    index_share_for_mtp_iteration: bool | None = None
    _params = DSAParams
    _metadata_params = DSAMetadataParams

    def _common(self) -> dict[str, Any]:
        return {
            "index_head_dim": self.index_head_dim,
            "use_cute_dsl_topk": self.use_cute_dsl_topk,
            "use_cute_dsl_paged_mqa_logits": self.use_cute_dsl_paged_mqa_logits,
            "enable_heuristic_topk": self.enable_heuristic_topk,
            "use_self_sampling_topk": self.use_self_sampling_topk,
            "mtp_index_share": bool(self.index_share_for_mtp_iteration),
        }

    def to_sparse_params(self, pretrained_config: Any = None, layer_idx: int = 0) -> DSAParams:
        """llm_args.py to_sparse_params"""
        return self._params(
            index_n_heads=self.index_n_heads,
            index_topk=self.index_topk,
            indexer_k_dtype=self.indexer_k_dtype,
            indexer_rope_interleave=self.indexer_rope_interleave,
            use_gvr_emission=self.use_gvr_emission,
            **self._common(),
        )

    def to_sparse_metadata_params(self) -> DSAMetadataParams:
        """llm_args.py to_sparse_metadata_params"""
        return self._metadata_params(
            indexer_max_chunk_size=self.indexer_max_chunk_size,
            max_sparse_topk=self.index_topk,
            enable_indexer_skip=self.skip_indexer_for_short_seqs,
            q_split_threshold=self.q_split_threshold,
            **self._common(),
        )

    def supports_backend(self, backend: str) -> bool:
        """llm_args.py supports_backend"""
        return backend == "pytorch"


@dataclass
class DeepSeekV4SparseAttentionConfig(DeepSeekSparseAttentionConfig):
    """llm_args.py DeepSeekV4SparseAttentionConfig"""

    algorithm: str = "deepseek_v4"
    index_topk: int = 512
    skip_indexer_for_short_seqs: bool = False
    indexer_k_dtype: str = "fp4"
    compress_ratios: list[int] = field(default_factory=lambda: [1])
    window_size: int = 128
    _params = DeepSeekV4Params
    _metadata_params = DeepSeekV4MetadataParams

    def _common(self) -> dict[str, Any]:
        return super()._common() | {
            "compress_ratios": list(self.compress_ratios),
            "window_size": self.window_size,
        }
