# SPDX-License-Identifier: Apache-2.0
"""Mirrors sparse/params.py, sparse/dsa/params.py and sparse/deepseek_v4/params.py.

Field names as read at their uses in dsa/indexer.py @0b228a79, dsa/metadata.py @186080bb and
deepseek_v4/metadata.py @0b03b6af; defaults of the configuration classes of 1.4.0rc4.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


@dataclass
class SparseParams:
    """sparse/params.py SparseParams"""


@dataclass
class SparseMetadataParams:
    """sparse/params.py SparseMetadataParams"""


@dataclass
class DSAParams(SparseParams):
    """dsa/params.py DSAParams"""

    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 2048
    indexer_k_dtype: str = "fp8"
    indexer_rope_interleave: bool = False
    use_cute_dsl_topk: bool = False
    use_cute_dsl_paged_mqa_logits: bool = True
    enable_heuristic_topk: bool = False
    use_self_sampling_topk: bool = True
    use_gvr_emission: bool = False
    mtp_index_share: bool = False
    is_full_indexer_layer: bool = True


@dataclass
class DSAMetadataParams(SparseMetadataParams):
    """dsa/params.py DSAMetadataParams"""

    indexer_max_chunk_size: int = 32768
    max_sparse_topk: int = 2048
    index_head_dim: int = 128
    enable_indexer_skip: bool = True
    use_cute_dsl_topk: bool = False
    use_cute_dsl_paged_mqa_logits: bool = True
    enable_heuristic_topk: bool = False
    use_self_sampling_topk: bool = True
    mtp_index_share: bool = False
    has_shared_indexer_layers: bool = False
    q_split_threshold: int = 8192


DEEPSEEK_V4_SPARSE_RATIO = 4  # deepseek_v4/params.py DEEPSEEK_V4_SPARSE_RATIO


class DeepseekV4AttentionType(IntEnum):
    """deepseek_v4/params.py DeepseekV4AttentionType @50aec1cb"""

    SWA = 0
    COMPRESSOR_KV = 1
    COMPRESSOR_SCORE = 2
    INDEXER_COMPRESSOR_KV = 3
    INDEXER_COMPRESSOR_SCORE = 4
    COMPRESS = 5
    INDEXER_COMPRESS = 6


@dataclass
class DeepSeekV4Params(DSAParams):
    """deepseek_v4/params.py DeepSeekV4Params"""

    index_topk: int = 512
    indexer_k_dtype: str = "fp4"
    compress_ratios: list[int] = field(default_factory=lambda: [1])
    window_size: int = 128


@dataclass
class DeepSeekV4MetadataParams(DSAMetadataParams):
    """deepseek_v4/params.py DeepSeekV4MetadataParams"""

    max_sparse_topk: int = 512
    enable_indexer_skip: bool = False
    compress_ratios: list[int] = field(default_factory=lambda: [1])
    window_size: int = 128
    enable_kv_cache_offload: bool = False
