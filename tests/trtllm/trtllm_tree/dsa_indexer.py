# SPDX-License-Identifier: Apache-2.0
"""Mirrors sparse/dsa/indexer.py @0b228a79: Indexer, decode and prefill.

Test seams that upstream does not have: `projection` (query, weights and V3.2 key per token).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensorrt_llm import deep_gemm
from tensorrt_llm._double import CONFIG
from tensorrt_llm._double_prepare import (  # noqa: F401  (public names of this module upstream)
    _DG_SCHEDULE_BLOCK_KV,
    IndexerParams,
    IndexerPrefillChunkMetadata,
    IndexerPrepare,
    _compute_slot_mappings,
    _effective_compress_ratio_divisor,
    _pick_dsl_expand,
    _select_indexer_compress_ratio,
)
from tensorrt_llm._double_quant import quantize_fp4, quantize_fp8
from tensorrt_llm._torch.cute_dsl_utils import IS_CUTLASS_DSL_AVAILABLE
from tensorrt_llm._torch.modules.top_k import TopK, TopKImplementation
from tensorrt_llm._utils import get_sm_version, is_sm_100f
from tensorrt_llm.deep_gemm import fp8_fp4_paged_mqa_logits, fp8_paged_mqa_logits
from torch import nn


class Indexer(IndexerPrepare, nn.Module):
    """indexer.py Indexer"""

    projection: Callable[..., tuple[torch.Tensor, ...]]

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
        self.compress_ratio = compress_ratio
        self.softmax_scale = self.head_dim**-0.5
        self.weight_scale_factor = self.softmax_scale * self.n_heads**-0.5
        self.scale_fmt = "ue8m0"
        self.use_fp4 = sparse_params.indexer_k_dtype == "fp4"
        self.aux_stream = aux_stream
        self._prev_topk_copy_pending = False
        self.use_cute_dsl_topk = sparse_params.use_cute_dsl_topk and IS_CUTLASS_DSL_AVAILABLE
        self.use_cute_dsl_paged_mqa_logits = (
            sparse_params.use_cute_dsl_paged_mqa_logits
            and IS_CUTLASS_DSL_AVAILABLE
            and is_sm_100f()
        )
        self._enable_heuristic_topk = (
            sparse_params.enable_heuristic_topk and get_sm_version() >= 100
        )
        self._use_self_sampling_topk = False
        self.use_gvr_emission = False
        self.mtp_index_share = sparse_params.mtp_index_share
        if CONFIG.body == "split":
            gvr = self._enable_heuristic_topk and IS_CUTLASS_DSL_AVAILABLE
            radix = (
                TopKImplementation.CUTE_DSL_RADIX
                if self.use_cute_dsl_topk
                else TopKImplementation.CUDA_RADIX
            )
            self.top_k = TopK(
                self.index_topk,
                prefill_implementation=TopKImplementation.CUDA_RADIX,
                decode_implementation=TopKImplementation.CUTE_DSL_GVR if gvr else radix,
                compress_ratio=compress_ratio,
                gvr_self_sampling=self._use_self_sampling_topk,
            )

    def _update_k_cache(self, k_fp8: torch.Tensor, k_scale: torch.Tensor, metadata: Any) -> None:
        """indexer.py Indexer._update_k_cache: V3.2 scatters here"""
        if metadata.kv_cache_manager is None or metadata.slot_mapping_fp8 is None:
            return
        torch.ops.trtllm.indexer_k_cache_scatter_op(
            k_fp8,
            k_scale,
            metadata.kv_cache_manager.get_indexer_k_cache_buffers(self.layer_idx),
            metadata.slot_mapping_fp8,
            metadata.slot_mapping_scale,
            k_fp8.shape[0],
        )

    def _call_mqa_logits(
        self, q_fp8, k_fp8, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, q_scale, clean_logits=True
    ) -> torch.Tensor:
        """indexer.py Indexer._call_mqa_logits: prefill"""
        if self.use_fp4:
            return deep_gemm.fp8_fp4_mqa_logits(
                (q_fp8, q_scale.reshape(-1, self.n_heads)),
                (k_fp8.view(torch.int8), k_scale.view(torch.int32).reshape(-1)),
                weights,
                cu_seqlen_ks,
                cu_seqlen_ke,
                clean_logits=clean_logits,
            )
        return deep_gemm.fp8_mqa_logits(
            q_fp8,
            (k_fp8, k_scale.reshape(-1)),
            weights,
            cu_seqlen_ks,
            cu_seqlen_ke,
            clean_logits=clean_logits,
        )

    def _call_paged_mqa_logits(
        self,
        q_decode: torch.Tensor,
        k_cache: torch.Tensor,
        weights_decode: torch.Tensor,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
        scheduler_metadata_buffer: torch.Tensor,
        max_seq_len: int,
        q_scale: torch.Tensor | None,
    ) -> torch.Tensor:
        """indexer.py Indexer._call_paged_mqa_logits: DeepGEMM only, CuTe DSL bypasses it"""
        args = (
            k_cache,
            weights_decode,
            context_lens,
            block_table,
            scheduler_metadata_buffer,
            max_seq_len,
        )
        if self.use_fp4:
            return fp8_fp4_paged_mqa_logits((q_decode, q_scale), *args)
        return fp8_paged_mqa_logits(q_decode, *args)

    def sparse_attn_indexer(
        self,
        metadata: Any,
        hidden_states: torch.Tensor,
        q_fp8: torch.Tensor,
        k_fp8: torch.Tensor,
        k_scale: torch.Tensor,
        weights: torch.Tensor,
        q_scale: torch.Tensor | None = None,
        is_generation: bool | None = None,
    ) -> torch.Tensor:
        """indexer.py Indexer.sparse_attn_indexer, in upstream's order"""
        manager = metadata.kv_cache_manager
        assert manager is None or manager.quant_block_size in (32, 128)
        num_contexts, num_generations = metadata.num_contexts, metadata.num_generations
        num_ctx_tokens, num_tokens = metadata.num_ctx_tokens, metadata.num_tokens
        num_gen_tokens = num_tokens - num_ctx_tokens
        if self.top_k.needs_gvr_prior:
            raise NotImplementedError("GVR priors are outside the double")
        if is_generation is None:
            has_prefill, has_decode = num_contexts > 0, num_generations > 0
            token_offset, cache_name = num_ctx_tokens, "indexer_topk_out_buffer"
        else:
            has_prefill = not is_generation and num_contexts > 0
            has_decode = is_generation and num_generations > 0
            token_offset = 0
            expected = num_gen_tokens if is_generation else num_ctx_tokens
            assert hidden_states.shape[0] == expected, "phase-specific call, wrong token count"
            cache_name = f"indexer_topk_out_buffer_{'gen' if is_generation else 'ctx'}"
        out = metadata.get_empty(
            metadata.cuda_graph_buffers,
            (hidden_states.shape[0], self.index_topk),
            cache_name=cache_name,
            dtype=torch.int32,
            capture_graph=metadata.is_cuda_graph,
        )
        if has_prefill and not metadata.skip_indexer_for_ctx_reqs:
            self._prefill(metadata, q_fp8, weights, q_scale, out)
        elif has_prefill:
            out[:num_ctx_tokens, :] = metadata.topk_indices_buffer[:num_ctx_tokens, :]
        if has_prefill:
            self.top_k.update_gvr_prior_from_prefill(
                out[:num_ctx_tokens],
                metadata.seq_lens_cuda[:num_contexts],
                None,
                request_offset=num_generations,
            )
        reuse_topk = (
            self.mtp_index_share
            and metadata.in_mtp_draft_loop
            and metadata.indexer_skip_topk
            and metadata.shared_topk_indices is not None
        )
        rows = slice(token_offset, token_offset + num_gen_tokens)
        if has_decode and not metadata.skip_indexer_for_gen_reqs and reuse_topk:
            out[rows, :] = metadata.shared_topk_indices[:num_generations, :]
        elif has_decode and not metadata.skip_indexer_for_gen_reqs:
            self._decode(metadata, q_fp8, weights, q_scale, rows, out)
        elif has_decode:
            out[rows, :] = metadata.topk_indices_buffer[num_ctx_tokens:num_tokens, :]
        if self.mtp_index_share and metadata.in_mtp_draft_loop and not reuse_topk:
            self._share(metadata, out, rows, has_prefill, has_decode, is_generation)
        return out

    def _prefill(self, metadata, q_fp8, weights, q_scale, out) -> None:
        """Indexer.sparse_attn_indexer, context part over metadata.indexer_prefill_chunks"""
        k_cache = metadata.kv_cache_manager.get_indexer_k_cache_buffers(self.layer_idx)
        for chunk in metadata.indexer_prefill_chunks:
            tokens = slice(chunk.token_start, chunk.token_end)
            if chunk.k_token_start >= chunk.k_token_end:
                out[tokens, :].fill_(-1)
                continue
            keys, scales = torch.ops.trtllm.indexer_k_cache_gather_op(
                k_cache,
                metadata.slot_mapping_fp8_fullkv,
                metadata.slot_mapping_scale_fullkv,
                chunk.k_token_start,
                chunk.k_token_end - chunk.k_token_start,
                self.head_dim // 2 if self.use_fp4 else self.head_dim,
            )
            logits = self._call_mqa_logits(
                q_fp8[tokens],
                keys,
                scales,
                weights[tokens],
                chunk.cu_seqlen_ks,
                chunk.cu_seqlen_ke,
                q_scale[tokens] if self.use_fp4 else None,
                clean_logits=False,
            )
            self.top_k(
                logits,
                out[tokens, :],
                is_prefill=True,
                row_starts=chunk.cu_seqlen_ks,
                row_ends=chunk.cu_seqlen_ke,
            )

    def _decode(self, metadata, q_fp8, weights, q_scale, rows, out) -> None:
        """Indexer.sparse_attn_indexer, generation part"""
        first, batch = metadata.num_contexts, metadata.num_generations
        gen_seq_lens = metadata.seq_lens[first : first + batch]
        assert int(gen_seq_lens.max()) == int(gen_seq_lens.min()), "generation rows need padding"
        q_decode = q_fp8[rows, ...]
        tokens = q_decode.shape[0]
        next_n = tokens // batch
        if not metadata.use_expanded_buffers_for_mtp or next_n == 1:
            q_decode = q_decode.view(batch, -1, *q_fp8.shape[1:])
            context_lens = metadata.kv_lens_cuda_2d[:batch, :next_n].contiguous()
            block_table = metadata.indexer_k_cache_block_offsets[first : first + batch]
            schedule = (
                metadata.scheduler_metadata_buffer
                if next_n == 1
                else metadata.scheduler_metadata_buffer_full_next_n
            )
        else:
            q_decode = q_decode.view(-1, 1, *q_fp8.shape[1:])
            context_lens = metadata.kv_lens_expanded_cuda[:tokens].view(-1, 1)
            block_table = metadata.block_table_expanded[:tokens]
            schedule = metadata.scheduler_metadata_buffer_expanded
        assert tokens == batch * next_n
        weights_decode = weights[rows, ...]
        k_cache = metadata.kv_cache_manager.get_indexer_k_cache_buffers(self.layer_idx)
        width = metadata.get_indexer_max_seq_len()
        scales = q_scale[rows, ...] if self.use_fp4 else None
        if scales is not None:
            scales = scales.view(q_decode.shape[0], q_decode.shape[1], self.n_heads)
        if self.use_cute_dsl_paged_mqa_logits:
            logits = self._cute_logits(
                metadata, q_decode, scales, k_cache, weights_decode, block_table, width, next_n
            )
        else:
            logits = self._call_paged_mqa_logits(
                q_decode,
                k_cache,
                weights_decode,
                context_lens,
                block_table,
                schedule,
                width,
                scales,
            )
        extra = {}
        if CONFIG.top_k_api == "aux":
            assert metadata.radix_aux_indices is not None
            assert metadata.radix_aux_logits is not None
            extra = {
                "radix_aux_indices": metadata.radix_aux_indices,
                "radix_aux_logits": metadata.radix_aux_logits,
            }
        scan_lengths = metadata.gen_indexer_kv_lens_cuda_runtime
        assert scan_lengths is not None
        self.top_k(
            logits,
            out[rows, :],
            is_prefill=False,
            sequence_lengths=metadata.kv_lens_cuda_runtime[first : first + batch],
            scan_lengths=scan_lengths,
            next_n=next_n,
            max_seq_len=width,
            gvr_ext_kwargs=None,
            **extra,
        )

    def _cute_logits(
        self, metadata, q_decode, scales, k_cache, weights, block_table, width, next_n
    ) -> torch.Tensor:
        """Indexer.sparse_attn_indexer, CuTe DSL branch, with the caller-side atom split"""
        lens = metadata.gen_indexer_kv_lens_cuda_runtime
        schedule = metadata.scheduler_metadata_buffer
        factor, atom = metadata.dsl_expand_factor, metadata.dsl_atom
        if factor > 1 and next_n == factor * atom:
            wide = metadata.num_generations * factor
            q_decode = q_decode.reshape(wide, atom, *q_decode.shape[2:])
            if scales is not None:
                scales = scales.reshape(wide, atom, self.n_heads)
            lens = metadata.kv_lens_expanded_cuda[:wide]
            block_table = metadata.block_table_expanded[:wide]
            schedule = metadata.scheduler_metadata_buffer_expanded
        args = (k_cache, weights, lens, block_table, schedule, width)
        if self.use_fp4:
            return torch.ops.trtllm.cute_dsl_fp4_paged_mqa_logits(
                q_decode.view(torch.uint8), scales, *args
            )
        return torch.ops.trtllm.cute_dsl_fp8_paged_mqa_logits(q_decode, *args)

    def _share(self, metadata, out, rows, has_prefill, has_decode, is_generation) -> None:
        """Indexer.sparse_attn_indexer, tail: last accepted row kept for the draft loop"""
        kept = None
        if has_decode:
            gen = out[rows]
            kept = self._mtp_last_accepted_rows(
                gen,
                metadata,
                metadata.num_contexts,
                metadata.num_generations,
                gen.shape[0] // metadata.num_generations,
            )
        if has_prefill:
            last = metadata.seq_lens_cuda[: metadata.num_contexts].long().cumsum(0) - 1
            kept = out[last] if kept is None else torch.cat([out[last], kept])
        if kept is None:
            return
        if metadata.shared_topk_indices is None:
            metadata.shared_topk_indices = kept.contiguous()
            return
        start = metadata.num_contexts if is_generation else 0
        target = metadata.shared_topk_indices[start : start + kept.shape[0], : kept.shape[1]]
        target.copy_(kept)

    def _mtp_last_accepted_rows(
        self, gen_topk, metadata, num_contexts, num_generations, next_n
    ) -> torch.Tensor:
        """indexer.py Indexer._mtp_last_accepted_rows"""
        accepted = metadata.mtp_num_accepted
        if accepted is None:
            return gen_topk[next_n - 1 :: next_n]
        count = accepted[num_contexts : num_contexts + num_generations].long()
        base = torch.arange(num_generations, device=gen_topk.device) * next_n
        return gen_topk[base + (count - 1).clamp(0, next_n - 1)]

    def maybe_join_prev_topk_copy(self) -> None:
        """indexer.py Indexer.maybe_join_prev_topk_copy"""
        self._prev_topk_copy_pending = False

    def _quantize(self, q: torch.Tensor, weights: torch.Tensor) -> tuple:
        """Indexer._prep_q_or_k and _weight_scale: fp8 folds q_scale into the weights"""
        if self.use_fp4:
            codes, scale = quantize_fp4(q)
            return codes, scale, weights.float() * self.weight_scale_factor
        codes, scale = quantize_fp8(q)
        return codes, scale, weights.float() * scale.squeeze(-1) * self.weight_scale_factor

    def pre_indexer_proj(self, qr, hidden_states, position_ids) -> tuple:
        """indexer.py Indexer.pre_indexer_proj -> (q, k, k_scale, weights, q_scale)"""
        q, weights, k = self.projection(self, hidden_states, position_ids)
        q_fp8, q_scale, weights = self._quantize(q, weights)
        k_fp8, k_scale = (quantize_fp4 if self.use_fp4 else quantize_fp8)(k)
        return q_fp8, k_fp8, k_scale, weights, q_scale

    def forward_from_projected(
        self, metadata, hidden_states, indexer_intermediates, is_generation=None
    ) -> torch.Tensor:
        """indexer.py Indexer.forward_from_projected: slices the phase out of a full batch"""
        start = metadata.num_ctx_tokens if is_generation else 0
        end = metadata.num_ctx_tokens if is_generation is False else metadata.num_tokens
        q_fp8, k_fp8, k_scale, weights, q_scale = indexer_intermediates
        return self.sparse_attn_indexer(
            metadata,
            hidden_states,
            q_fp8[start:end],
            k_fp8,
            k_scale,
            weights[start:end],
            q_scale=q_scale[start:end] if q_scale is not None else None,
            is_generation=is_generation,
        )

    def forward(self, qr, hidden_states, metadata, position_ids) -> torch.Tensor:
        """indexer.py Indexer.forward"""
        parts = list(self.pre_indexer_proj(qr, hidden_states, position_ids))
        self._update_k_cache(parts[1], parts[2], metadata)
        return self.forward_from_projected(metadata, hidden_states, parts)
