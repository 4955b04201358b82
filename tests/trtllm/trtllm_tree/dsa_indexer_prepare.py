# SPDX-License-Identifier: Apache-2.0
"""The host half of sparse/dsa/indexer.py @0b228a79: slot mappings, prefill chunk, schedules.

Upstream these are static methods of Indexer and functions beside it; here a mixin, so that each
file stays short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensorrt_llm._double import CONFIG
from tensorrt_llm.deep_gemm import get_paged_mqa_logits_metadata

_DG_SCHEDULE_BLOCK_KV = 64  # indexer.py _DG_SCHEDULE_BLOCK_KV


def _select_indexer_compress_ratio(compress_ratios: list[int]) -> int:
    """indexer.py _select_indexer_compress_ratio"""
    return 4 if 4 in compress_ratios else (1 if 1 in compress_ratios else 0)


def _effective_compress_ratio_divisor(compress_ratio: int) -> int:
    """indexer.py _effective_compress_ratio_divisor"""
    return max(1, compress_ratio)


def _compute_slot_mappings(
    global_positions: torch.Tensor,
    block_offsets: torch.Tensor,
    req_indices: torch.Tensor,
    head_dim: int,
    tokens_per_block: int,
    quant_block_size: int,
    data_bytes_per_token: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """indexer.py _compute_slot_mappings: flat byte offsets of data and scale, planar pages"""
    data = data_bytes_per_token or head_dim
    scale = head_dim // quant_block_size * 4
    stride = tokens_per_block * (data + scale)
    block = (global_positions // tokens_per_block).clamp(0, block_offsets.shape[1] - 1)
    inside = global_positions % tokens_per_block
    base = block_offsets[req_indices, block].to(torch.int64) * stride
    return base + inside * data, base + tokens_per_block * data + inside * scale


def _pick_dsl_expand(
    next_n: int,
    num_sms: int,
    batch_size: int = 0,
    max_ctx: int = 0,
    kernel_atoms: tuple[int, ...] = (1, 2, 3),
) -> tuple[int, int]:
    """indexer.py _pick_dsl_expand: fewest waves, then the larger factor"""
    atoms = [a for a in kernel_atoms if next_n % a == 0]
    if batch_size <= 0 or max_ctx <= 0:
        return (next_n // max(atoms), max(atoms)) if atoms else (next_n, 1)
    splits = -(-max_ctx // 256)
    ranked = sorted((-(-batch_size * (next_n // a) * splits // num_sms), -a, a) for a in atoms)
    waves = ranked[0][0]
    factor = max(next_n // a for w, _, a in ranked if w == waves)
    return factor, next_n // factor


@dataclass
class IndexerParams:
    """indexer.py IndexerParams: lengths in indexer slots"""

    num_contexts: int
    num_generations: int
    num_ctx_tokens: int
    head_dim: int
    quant_block_size: int
    tokens_per_block: int
    compress_ratio: int
    request_ids: list[int]
    num_past_tokens: list[int]
    seq_lens: torch.Tensor
    data_bytes_per_token: int | None = None

    def __post_init__(self) -> None:
        past = torch.tensor(self.num_past_tokens, dtype=torch.int32)
        self.cached_kv_tokens = past // self.compress_ratio
        self.all_kv_tokens = (self.seq_lens + past) // self.compress_ratio
        self.kv_lens = self.all_kv_tokens
        self.new_kv_tokens = self.all_kv_tokens - self.cached_kv_tokens


@dataclass
class IndexerPrefillChunkMetadata:
    """indexer.py IndexerPrefillChunkMetadata"""

    cu_seqlen_ks: torch.Tensor
    cu_seqlen_ke: torch.Tensor
    token_start: int
    token_end: int
    k_token_start: int
    k_token_end: int


def _positions(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.repeat_interleave(torch.arange(counts.numel()), counts.long())
    starts = counts.long().cumsum(0) - counts.long()
    return rows, torch.arange(rows.numel()) - starts[rows]


class IndexerPrepare:
    """Static half of indexer.py Indexer"""

    @staticmethod
    def build_indexer_params(metadata: Any) -> IndexerParams | None:
        """indexer.py Indexer.build_indexer_params: None for a manager without indexer keys"""
        manager = metadata.kv_cache_manager
        if manager is None or not hasattr(manager, "index_head_dim"):
            return None
        head_dim = metadata.indexer_head_dim
        return IndexerParams(
            num_contexts=metadata.num_contexts,
            num_generations=metadata.num_generations,
            num_ctx_tokens=metadata.num_ctx_tokens,
            head_dim=head_dim,
            quant_block_size=metadata.indexer_quant_block_size,
            tokens_per_block=metadata._tokens_per_block,
            compress_ratio=_effective_compress_ratio_divisor(
                _select_indexer_compress_ratio(metadata.compress_ratios)
            ),
            request_ids=metadata.request_ids,
            num_past_tokens=metadata.kv_cache_params.num_cached_tokens_per_seq,
            seq_lens=metadata.seq_lens,
            data_bytes_per_token=head_dim // 2 if manager.use_fp4 else head_dim,
        )

    @staticmethod
    def _map(metadata: Any, params: IndexerParams, positions, rows) -> tuple:
        return _compute_slot_mappings(
            positions,
            metadata.host_indexer_k_cache_block_offsets,
            rows,
            params.head_dim,
            params.tokens_per_block,
            params.quant_block_size,
            data_bytes_per_token=params.data_bytes_per_token,
        )

    @staticmethod
    def recompute_slot_mappings(metadata: Any, indexer_params: IndexerParams | None = None) -> None:
        """indexer.py Indexer.recompute_slot_mappings: where new keys go, from host lengths"""
        params = indexer_params or IndexerPrepare.build_indexer_params(metadata)
        if params is None:
            return
        rows, offsets = _positions(params.new_kv_tokens)
        data, scale = IndexerPrepare._map(
            metadata, params, params.cached_kv_tokens[rows] + offsets, rows
        )
        metadata.slot_mapping_fp8[: data.numel()].copy_(data)
        metadata.slot_mapping_scale[: scale.numel()].copy_(scale)

    @staticmethod
    def recompute_context_kv_gather_mappings(
        metadata: Any, indexer_params: IndexerParams | None = None
    ) -> None:
        """indexer.py Indexer.recompute_context_kv_gather_mappings: all keys of the contexts"""
        params = indexer_params or IndexerPrepare.build_indexer_params(metadata)
        if params is None or params.num_contexts == 0:
            return
        rows, positions = _positions(params.kv_lens[: params.num_contexts])
        data, scale = IndexerPrepare._map(metadata, params, positions, rows)
        metadata.slot_mapping_fp8_fullkv = data.to(CONFIG.device)
        metadata.slot_mapping_scale_fullkv = scale.to(CONFIG.device)

    @staticmethod
    def prepare_for_chunked_prefill(metadata: Any, indexer_params: IndexerParams) -> None:
        """indexer.py Indexer.prepare_for_chunked_prefill: here always one chunk of all contexts
        (upstream does that when MLA chunked prefill is on)"""
        n, ratio = indexer_params.num_contexts, indexer_params.compress_ratio
        seq = indexer_params.seq_lens[:n]
        past = torch.tensor(indexer_params.num_past_tokens[:n], dtype=torch.int32)
        rows, offsets = _positions(seq)
        kv = indexer_params.kv_lens[:n]
        starts = (kv.cumsum(0) - kv).to(torch.int32)[rows]
        ends = starts + (past[rows] + offsets.to(torch.int32) + 1) // ratio
        metadata.cu_seqlen_ks[: starts.numel()].copy_(starts)
        metadata.cu_seqlen_ke[: ends.numel()].copy_(ends)
        metadata.indexer_prefill_chunks = [
            IndexerPrefillChunkMetadata(
                starts.to(CONFIG.device),
                ends.to(CONFIG.device),
                0,
                int(seq.sum()),
                0,
                int(kv.sum()),
            )
        ]
        IndexerPrepare.recompute_context_kv_gather_mappings(metadata, indexer_params)

    @staticmethod
    def prepare_scheduler_metadata(metadata: Any) -> None:
        """indexer.py Indexer.prepare_scheduler_metadata: copies into the fixed buffers"""
        first, count = metadata.num_contexts, metadata.num_generations
        lens = metadata.get_indexer_kv_lens(metadata.kv_lens_cuda_runtime[first : first + count])
        metadata.gen_indexer_kv_lens_cuda_runtime = lens
        if metadata.use_expanded_buffers_for_mtp:
            tokens = count * (1 + metadata.max_draft_tokens)
            metadata.scheduler_metadata_buffer_expanded.copy_(
                get_paged_mqa_logits_metadata(
                    metadata.kv_lens_expanded_cuda[:tokens].view(-1, 1),
                    _DG_SCHEDULE_BLOCK_KV,
                    metadata.num_sms,
                )
            )
            return
        metadata.fill_decode_schedules(lens)

    @staticmethod
    def prepare(metadata: Any) -> None:
        """indexer.py Indexer.prepare: called by both metadata.prepare() with the class as owner"""
        params = IndexerPrepare.build_indexer_params(metadata)
        if params is None:
            return
        contexts = metadata.num_contexts
        metadata.num_ctx_kv_tokens = int(params.new_kv_tokens[:contexts].sum())
        IndexerPrepare.recompute_slot_mappings(metadata, params)
        if contexts > 0:
            IndexerPrepare.prepare_for_chunked_prefill(metadata, params)
        if metadata.num_generations > 0:
            IndexerPrepare.prepare_scheduler_metadata(metadata)
