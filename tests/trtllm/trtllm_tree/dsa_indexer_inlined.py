# SPDX-License-Identifier: Apache-2.0
"""Mirrors an older body: attention_backend/sparse/dsa/indexer.py @61e0bf1b.

No TopK module, no fp4, no _call_paged_mqa_logits, 1-D context lengths, a fresh uninitialised
output each call, raw-token widths, `use_custom_topk` before `is_generation`.
"""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._double_prepare import (  # noqa: F401
    _DG_SCHEDULE_BLOCK_KV,
    IndexerParams,
    IndexerPrefillChunkMetadata,
    IndexerPrepare,
    _compute_slot_mappings,
    _effective_compress_ratio_divisor,
    _pick_dsl_expand,
    _select_indexer_compress_ratio,
)
from tensorrt_llm._double_quant import quantize_fp8
from tensorrt_llm._torch.cute_dsl_utils import IS_CUTLASS_DSL_AVAILABLE
from tensorrt_llm.deep_gemm import fp8_mqa_logits, fp8_paged_mqa_logits
from torch import nn


class Indexer(IndexerPrepare, nn.Module):
    """indexer.py Indexer @61e0bf1b"""

    projection: Any

    def __init__(
        self,
        quant_config: Any,
        pos_embd_params: Any,
        mla_params: Any,
        skip_create_weights_in_init: bool,
        sparse_params: Any,
        dtype: torch.dtype | None,
        compress_ratio: int = 1,
        layer_idx: int = 0,
        aux_stream: Any = None,
    ) -> None:
        nn.Module.__init__(self)
        self.n_heads = sparse_params.index_n_heads
        self.head_dim = sparse_params.index_head_dim
        self.index_topk = sparse_params.index_topk
        self.layer_idx = layer_idx
        self.weight_scale_factor = self.head_dim**-0.5 * self.n_heads**-0.5
        self.use_cute_dsl_topk = sparse_params.use_cute_dsl_topk and IS_CUTLASS_DSL_AVAILABLE
        self._enable_heuristic_topk = False

    def _update_k_cache(self, k_fp8: torch.Tensor, k_scale: torch.Tensor, metadata: Any) -> None:
        """Indexer._update_k_cache @61e0bf1b"""
        torch.ops.trtllm.indexer_k_cache_scatter_op(
            k_fp8,
            k_scale,
            metadata.kv_cache_manager.get_indexer_k_cache_buffers(self.layer_idx),
            metadata.slot_mapping_fp8,
            metadata.slot_mapping_scale,
            k_fp8.shape[0],
        )

    def sparse_attn_indexer(
        self,
        metadata: Any,
        hidden_states: torch.Tensor,
        q_fp8: torch.Tensor,
        k_fp8: torch.Tensor,
        k_scale: torch.Tensor,
        weights: torch.Tensor,
        use_custom_topk: bool = True,
        is_generation: bool | None = None,
    ) -> torch.Tensor:
        """Indexer.sparse_attn_indexer @61e0bf1b (the torch fallback is not modelled)"""
        assert use_custom_topk
        assert metadata.kv_cache_manager.quant_block_size == 128
        first, batch = metadata.num_contexts, metadata.num_generations
        split, total = metadata.num_ctx_tokens, metadata.num_tokens
        offset = split if is_generation is None else 0
        has_prefill = first > 0 and is_generation is not True
        has_decode = batch > 0 and is_generation is not False
        out = torch.full(
            (hidden_states.shape[0], self.index_topk),
            1 << 28,  # torch.empty upstream
            dtype=torch.int32,
            device=hidden_states.device,
        )
        if has_prefill and metadata.skip_indexer_for_ctx_reqs:
            out[:split, :] = metadata.topk_indices_buffer[:split, :]
        elif has_prefill:
            cache = metadata.kv_cache_manager.get_indexer_k_cache_buffers(self.layer_idx)
            for chunk in metadata.indexer_prefill_chunks:
                tokens = slice(chunk.token_start, chunk.token_end)
                keys, scales = torch.ops.trtllm.indexer_k_cache_gather_op(
                    cache,
                    metadata.slot_mapping_fp8_fullkv,
                    metadata.slot_mapping_scale_fullkv,
                    chunk.k_token_start,
                    chunk.k_token_end - chunk.k_token_start,
                    self.head_dim,
                )
                bounds = (chunk.cu_seqlen_ks, chunk.cu_seqlen_ke)
                logits = fp8_mqa_logits(q_fp8[tokens], (keys, scales), weights[tokens], *bounds)
                torch.ops.trtllm.indexer_topk_prefill(
                    logits, *bounds, out[tokens, :], self.index_topk
                )
        rows = slice(offset, offset + total - split)
        if has_decode and metadata.skip_indexer_for_gen_reqs:
            out[rows, :] = metadata.topk_indices_buffer[split:total, :]
        elif has_decode:
            self._decode(metadata, q_fp8[rows], weights[rows], out[rows, :], first, batch)
        return out

    def _decode(self, metadata, q, weights, out, first, batch) -> None:
        """Indexer.sparse_attn_indexer @61e0bf1b, generation part"""
        tokens = q.shape[0]
        next_n = tokens // batch
        lens = metadata.kv_lens_cuda_runtime[first : first + batch]
        if not metadata.use_expanded_buffers_for_mtp or next_n == 1:
            query = q.view(batch, -1, *q.shape[1:])
            context_lens = lens
            table = metadata.indexer_k_cache_block_offsets[first : first + batch]
            schedule = metadata.scheduler_metadata_buffer
        else:
            query = q.view(-1, 1, *q.shape[1:])
            context_lens = metadata.kv_lens_expanded_cuda[:tokens]
            table = metadata.block_table_expanded[:tokens]
            schedule = metadata.scheduler_metadata_buffer_expanded
        logits = fp8_paged_mqa_logits(
            query,
            metadata.kv_cache_manager.get_indexer_k_cache_buffers(self.layer_idx),
            weights,
            context_lens,
            table,
            schedule,
            metadata.kv_cache_manager.max_seq_len,
        )
        torch.ops.trtllm.indexer_topk_decode(
            logits, lens, out, next_n, self.index_topk, pre_idx=None, heuristic_scratch=None
        )

    def pre_indexer_proj(self, qr, hidden_states, position_ids) -> tuple:
        """Indexer.pre_indexer_proj @61e0bf1b: four results, no q_scale"""
        q, weights, k = self.projection(self, hidden_states, position_ids)
        q_fp8, q_scale = quantize_fp8(q)
        k_fp8, k_scale = quantize_fp8(k)
        return (
            q_fp8,
            k_fp8,
            k_scale,
            weights.float() * q_scale.squeeze(-1) * (self.weight_scale_factor),
        )

    def forward(self, qr, hidden_states, metadata, position_ids) -> torch.Tensor:
        """Indexer.forward @61e0bf1b"""
        q_fp8, k_fp8, k_scale, weights = self.pre_indexer_proj(qr, hidden_states, position_ids)
        self._update_k_cache(k_fp8, k_scale, metadata)
        return self.sparse_attn_indexer(metadata, hidden_states, q_fp8, k_fp8, k_scale, weights)
