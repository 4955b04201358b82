# SPDX-License-Identifier: Apache-2.0
"""Mirrors sparse/dsa/metadata.py @186080bb: DSAtrtllmAttentionMetadata.

Left out: helix, ragged verification, NVFP4 scratch, fused Triton metadata, remap groups.
`radix_aux_*` are read by dsa/indexer.py @0b228a79, which is newer than this file's source.
"""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm import deep_gemm
from tensorrt_llm._double import CONFIG
from tensorrt_llm._torch.cute_dsl_utils import IS_CUTLASS_DSL_AVAILABLE
from tensorrt_llm._utils import get_sm_version
from tensorrt_llm.deep_gemm import get_paged_mqa_logits_metadata

from ...trtllm import TrtllmAttentionMetadata
from .cache_manager import is_dsa_cache_manager
from .indexer import (
    _DG_SCHEDULE_BLOCK_KV,
    Indexer,
    _compute_slot_mappings,
    _effective_compress_ratio_divisor,
    _pick_dsl_expand,
    _select_indexer_compress_ratio,
)
from .params import DSAMetadataParams


def build_req_idx_per_token(seq_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """metadata.py build_req_idx_per_token"""
    ends = torch.cumsum(seq_lens, dim=0, dtype=torch.int32)
    tokens = torch.arange(num_tokens, device=seq_lens.device, dtype=torch.int32)
    return torch.searchsorted(ends, tokens, right=True)


class DSAtrtllmAttentionMetadata(TrtllmAttentionMetadata):
    """metadata.py DSAtrtllmAttentionMetadata"""

    indexer_prefill_chunks: list | None = None
    shared_topk_indices: torch.Tensor | None = None
    indexer_skip_topk = False
    in_mtp_draft_loop = False
    mtp_num_accepted: torch.Tensor | None = None
    skip_indexer_for_ctx_reqs = False
    skip_indexer_for_gen_reqs = False
    use_expanded_buffers_for_mtp = False
    expand_for_dsl = False
    dsl_expand_factor = 1
    dsl_atom = 1
    num_ctx_kv_tokens = 0
    gen_indexer_kv_lens_cuda_runtime: torch.Tensor | None = None
    gvr_prior_indices: torch.Tensor | None = None
    kv_lens_row_reorder: torch.Tensor | None = None
    is_ragged_verify = False
    runtime_tokens_per_gen_step = 0

    def __post_init__(self) -> None:
        """DSAtrtllmAttentionMetadata.__post_init__"""
        super().__post_init__()
        manager = self.kv_cache_manager
        if not is_dsa_cache_manager(manager):
            assert all(hasattr(manager, a) for a in ("compressed_block_sizes", "get_cache_indices"))
        params = self.sparse_metadata_params
        if not isinstance(params, DSAMetadataParams):
            raise ValueError("DSA sparse attention metadata params are not set")
        self.num_sms = deep_gemm.get_num_sms()
        self.indexer_max_chunk_size = params.indexer_max_chunk_size
        self.num_sparse_topk = self.sparse_mla_topk = params.max_sparse_topk
        self.indexer_head_dim = params.index_head_dim
        self.indexer_quant_block_size = 128
        self.enable_indexer_skip = params.enable_indexer_skip
        self.use_cute_dsl_topk = params.use_cute_dsl_topk and IS_CUTLASS_DSL_AVAILABLE
        self.compress_ratios = getattr(params, "compress_ratios", [1])
        self._indexer_compress_ratio = _select_indexer_compress_ratio(self.compress_ratios)
        self._tokens_per_block = manager.tokens_per_block
        if hasattr(manager, "compressed_block_sizes"):
            self._tokens_per_block //= _effective_compress_ratio_divisor(
                self._indexer_compress_ratio
            )
        self.create_buffers_for_indexer(capture_graph=self.is_cuda_graph)

    def _buffer(self, name: str, shape: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return self.get_empty(
            self.cuda_graph_buffers,
            shape,
            cache_name=name,
            dtype=dtype,
            capture_graph=self.is_cuda_graph,
        )

    def create_buffers_for_indexer(self, capture_graph: bool = False) -> None:
        """DSAtrtllmAttentionMetadata.create_buffers_for_indexer: names as upstream"""
        sequences, tokens = self.max_num_sequences, self.max_num_tokens
        blocks = self.kv_cache_manager.max_blocks_per_seq
        params = self.sparse_metadata_params
        self.indexer_k_cache_block_offsets = self._buffer(
            "indexer_k_cache_block_offsets", [sequences, blocks]
        )
        self.host_indexer_k_cache_block_offsets = torch.zeros(sequences, blocks, dtype=torch.int32)
        self.shared_topk_indices = None
        if params.has_shared_indexer_layers or params.mtp_index_share:
            self.shared_topk_indices = self._buffer(
                "shared_topk_indices", (tokens, self.num_sparse_topk)
            )
        self.indexer_skip_topk = self.in_mtp_draft_loop = False
        self.mtp_num_accepted = None
        self.slot_mapping_fp8 = self._buffer("slot_mapping_fp8", (tokens,), torch.int64)
        self.slot_mapping_scale = self._buffer("slot_mapping_scale", (tokens,), torch.int64)
        self.slot_mapping_fp8_fullkv = self.slot_mapping_scale_fullkv = None
        self.req_idx_per_token = self._buffer("req_idx_per_token", (tokens,))
        schedule = (self.num_sms + 1, 2)
        self.scheduler_metadata_buffer = self._buffer("scheduler_metadata_buffer", schedule)
        self.scheduler_metadata_buffer_full_next_n = self._buffer(
            "scheduler_metadata_buffer_full_next_n", schedule
        )
        self._create_kv_lens_2d_buffer(capture_graph)
        self.cu_seqlen_ks = self._buffer("cu_seqlen_ks", (tokens,))
        self.cu_seqlen_ke = self._buffer("cu_seqlen_ke", (tokens,))
        if self.enable_indexer_skip:
            self.topk_indices_buffer = self._buffer(
                "topk_indices_buffer", (tokens, self.num_sparse_topk)
            )
        aux = (sequences * (1 + self._draft_sizing_cap), 10, self.num_sparse_topk)
        self.radix_aux_indices = self._buffer("radix_aux_indices", aux)
        self.radix_aux_logits = self._buffer("radix_aux_logits", aux, torch.float32)
        self.create_expanded_buffers(capture_graph)

    @property
    def _draft_sizing_cap(self) -> int:
        """DSAtrtllmAttentionMetadata._draft_sizing_cap"""
        return max(int(getattr(self, "_draft_alloc_cap", 0) or 0), self.max_draft_tokens)

    @property
    def gen_token_stride(self) -> int:
        """DSAtrtllmAttentionMetadata.gen_token_stride"""
        return self.runtime_tokens_per_gen_step or 1 + self.max_draft_tokens

    def _create_kv_lens_2d_buffer(self, capture_graph: bool = False) -> None:
        """DSAtrtllmAttentionMetadata._create_kv_lens_2d_buffer"""
        self.kv_lens_cuda_2d = self._buffer(
            "kv_lens_cuda_2d", (self.max_num_sequences, 1 + self._draft_sizing_cap)
        )

    def create_expanded_buffers(self, capture_graph: bool = False) -> None:
        """DSAtrtllmAttentionMetadata.create_expanded_buffers"""
        rows = self.max_num_sequences * (1 + self._draft_sizing_cap)
        self.kv_lens_expanded_cuda = self._buffer("kv_lens_expanded_cuda", (rows,))
        self.block_table_expanded = self._buffer(
            "block_table_expanded", [rows, self.kv_cache_manager.max_blocks_per_seq]
        )
        self.scheduler_metadata_buffer_expanded = self._buffer(
            "scheduler_metadata_buffer_expanded", (self.num_sms + 1, 2)
        )

    def update_spec_dec_param(
        self,
        batch_size,
        is_spec_decoding_enabled,
        is_spec_dec_tree,
        is_spec_dec_dynamic_tree,
        max_draft_len,
        max_total_draft_tokens,
        spec_metadata=None,
        spec_tree_manager=None,
        num_contexts=0,
    ) -> None:
        """DSAtrtllmAttentionMetadata.update_spec_dec_param: may replace kv_lens_cuda_2d"""
        super().update_spec_dec_param(
            batch_size,
            is_spec_decoding_enabled,
            is_spec_dec_tree,
            is_spec_dec_dynamic_tree,
            max_draft_len,
            max_total_draft_tokens,
            spec_metadata,
            spec_tree_manager,
            num_contexts=num_contexts,
        )
        self.max_draft_tokens = max_draft_len
        known = int(getattr(self, "_draft_alloc_cap", 0) or 0)
        self._draft_alloc_cap = max(int(max_total_draft_tokens), known)
        previous = int(getattr(self, "_expanded_alloc_draft_cap", -1))
        if max(self._draft_sizing_cap, previous) > previous:
            self._expanded_alloc_draft_cap = self._draft_sizing_cap
            self._create_kv_lens_2d_buffer(self.is_cuda_graph)
            self.create_expanded_buffers(self.is_cuda_graph)

    def set_skip_topk(self, skip: bool) -> None:
        """DSAtrtllmAttentionMetadata.set_skip_topk"""
        self.indexer_skip_topk = skip

    def set_in_mtp_draft_loop(self, active: bool) -> None:
        """DSAtrtllmAttentionMetadata.set_in_mtp_draft_loop"""
        self.in_mtp_draft_loop = active

    def set_mtp_num_accepted(self, num_accepted: torch.Tensor | None) -> None:
        """DSAtrtllmAttentionMetadata.set_mtp_num_accepted"""
        self.mtp_num_accepted = num_accepted

    def get_indexer_kv_lens(self, kv_lens: torch.Tensor) -> torch.Tensor:
        """DSAtrtllmAttentionMetadata.get_indexer_kv_lens: the same tensor for ratio 1"""
        ratio = self._indexer_compress_ratio
        return kv_lens if ratio <= 1 else kv_lens // ratio

    def get_indexer_max_seq_len(self) -> int:
        """DSAtrtllmAttentionMetadata.get_indexer_max_seq_len"""
        ratio, length = self._indexer_compress_ratio, self.kv_cache_manager.max_seq_len
        return length if ratio <= 1 else max(1, length // ratio)

    def prepare(self) -> None:
        """DSAtrtllmAttentionMetadata.prepare (V3.2 only: V4 does not call it)"""
        super().prepare()
        assert self.kv_cache_params.use_cache is True
        cached = torch.tensor(self.kv_cache_params.num_cached_tokens_per_seq, dtype=torch.int32)
        kv_lens = cached + self.seq_lens_kv
        self.prepare_for_skip_indexer(kv_lens)
        self.prepare_for_indices_conversion()
        self.prepare_for_indexer_k_cache()
        self.prepare_for_spec_decode(kv_lens)
        Indexer.prepare(metadata=self)

    def prepare_for_indices_conversion(self) -> None:
        """DSAtrtllmAttentionMetadata.prepare_for_indices_conversion"""
        self.req_idx_per_token[: self.num_tokens].copy_(
            build_req_idx_per_token(self.seq_lens, self.num_tokens)
        )

    def prepare_for_indexer_k_cache(self) -> None:
        """DSAtrtllmAttentionMetadata._update_indexer_k_cache_block_offsets"""
        manager = self.kv_cache_manager
        pages = manager.get_pool_block_indices(
            self.num_seqs,
            request_ids=self.request_ids,
            num_contexts=self.num_contexts,
            beam_width=self.beam_width,
        )
        pages = pages * manager.indexer_k_cache_page_scale
        host = self.host_indexer_k_cache_block_offsets
        host[: self.num_seqs, : pages.shape[1]].copy_(pages)
        self.indexer_k_cache_block_offsets[: self.num_seqs].copy_(host[: self.num_seqs])
        self.indexer_k_cache_block_offsets.clamp_(min=0)

    def prepare_for_skip_indexer(self, kv_lens: torch.Tensor) -> None:
        """DSAtrtllmAttentionMetadata.prepare_for_skip_indexer: all rows short, per phase"""
        limit = self.num_sparse_topk - self.kv_cache_params.num_extra_kv_tokens
        first = self.num_contexts
        self.skip_indexer_for_ctx_reqs = bool(
            self.enable_indexer_skip and first > 0 and int(kv_lens[:first].max()) <= limit
        )
        self.skip_indexer_for_gen_reqs = bool(
            self.enable_indexer_skip
            and self.num_generations > 0
            and int(kv_lens[first : self.num_seqs].max()) <= limit
        )
        self.prepare_dense_topk_indices(kv_lens)

    def prepare_dense_topk_indices(self, kv_lens: torch.Tensor, device: bool = False) -> None:
        """DSAtrtllmAttentionMetadata.prepare_dense_topk_indices: 0..position, then -1"""
        split, end = self.num_ctx_tokens, self.num_tokens
        for wanted, tokens in (
            (self.skip_indexer_for_ctx_reqs, slice(0, split)),
            (self.skip_indexer_for_gen_reqs, slice(split, end)),
        ):
            if not wanted:
                continue
            seq = self.seq_lens
            rows = build_req_idx_per_token(seq, end)
            offset = torch.arange(end) - (seq.cumsum(0) - seq)[rows]
            lens = kv_lens[: self.num_seqs].cpu()
            position = (lens - seq)[rows] + offset
            columns = torch.arange(self.num_sparse_topk, dtype=torch.int32)
            dense = torch.where(columns <= position[:, None], columns, -1)
            self.topk_indices_buffer[tokens, :].copy_(dense[tokens])

    def prepare_for_spec_decode(self, kv_lens: torch.Tensor) -> None:
        """DSAtrtllmAttentionMetadata.prepare_for_spec_decode.

        The CuTe DSL decision is the raw parameter here, without the hardware gate that the
        indexer applies: with the 1.4.0rc4 default the expanded buffers stay off even on SM90.
        """
        use_dsl = self.sparse_metadata_params.use_cute_dsl_paged_mqa_logits
        first = self.num_contexts
        self.use_expanded_buffers_for_mtp = not use_dsl and (
            self.max_draft_tokens > 1 and get_sm_version() == 90
        )
        lens = self.get_indexer_kv_lens(kv_lens[first : self.num_seqs])
        if self.use_expanded_buffers_for_mtp:
            self._expand(lens, self.gen_token_stride)
        self.expand_for_dsl = use_dsl and self.max_draft_tokens >= 1
        self.dsl_expand_factor, self.dsl_atom = 1, self.gen_token_stride
        if self.expand_for_dsl and self.num_generations > 0:
            self.dsl_expand_factor, self.dsl_atom = _pick_dsl_expand(
                self.gen_token_stride,
                batch_size=self.num_generations,
                max_ctx=int(lens.max()) if lens.numel() else 0,
                num_sms=self.num_sms,
                kernel_atoms=(1, 2, 3) if self.kv_cache_manager.use_fp4 else (1, 2, 3, 4),
            )
            if self.dsl_expand_factor > 1:
                self._expand(lens, self.dsl_expand_factor)

    def _expand(self, lens: torch.Tensor, factor: int) -> None:
        """Lengths and tables repeated per query row (DSAtrtllmAttentionMetadata
        expand_per_gen_token and _refresh_expanded_block_table)"""
        rows = self.num_generations * factor
        self.kv_lens_expanded_cuda[:rows].copy_(lens.repeat_interleave(factor))
        host = self.host_indexer_k_cache_block_offsets[self.num_contexts : self.num_seqs]
        self.block_table_expanded[:rows].copy_(host.repeat_interleave(factor, dim=0))
        self.block_table_expanded.clamp_(min=0)

    def fill_decode_schedules(self, lens: torch.Tensor) -> None:
        """The copies shared by Indexer.prepare_scheduler_metadata and on_update_kv_lens"""
        count, cap = self.num_generations, self.kv_lens_cuda_2d.shape[1]
        self.kv_lens_cuda_2d[:count, :cap].copy_(lens.unsqueeze(-1).expand(-1, cap))
        self.scheduler_metadata_buffer.copy_(
            get_paged_mqa_logits_metadata(lens.view(-1, 1), _DG_SCHEDULE_BLOCK_KV, self.num_sms)
        )
        if self.max_draft_tokens > 0 and not self.use_expanded_buffers_for_mtp:
            self.scheduler_metadata_buffer_full_next_n.copy_(
                get_paged_mqa_logits_metadata(
                    self.kv_lens_cuda_2d[:count, :cap], _DG_SCHEDULE_BLOCK_KV, self.num_sms
                )
            )

    def on_update_kv_lens(self) -> None:
        """DSAtrtllmAttentionMetadata.on_update_kv_lens: device only, captured in the graph"""
        super().on_update_kv_lens()
        seqs, tokens, first = self.num_seqs, self.num_tokens, self.num_contexts
        seq_lens = self.seq_lens_cuda[:seqs]
        rows = build_req_idx_per_token(seq_lens, tokens)
        self.req_idx_per_token[:tokens] = rows.to(torch.int32)
        starts = torch.cumsum(seq_lens, 0) - seq_lens
        offsets = torch.arange(tokens, device=rows.device) - starts[rows]
        positions = (self.kv_lens_cuda[:seqs] - seq_lens)[rows] + offsets
        manager = self.kv_cache_manager
        head = manager.index_head_dim
        data, scale = _compute_slot_mappings(
            positions,
            self.indexer_k_cache_block_offsets,
            rows,
            head,
            self._tokens_per_block,
            manager.quant_block_size,
            data_bytes_per_token=head // 2 if manager.use_fp4 else head,
        )
        self.slot_mapping_fp8[:tokens] = data
        self.slot_mapping_scale[:tokens] = scale
        if self.num_generations > 0:
            lens = self.get_indexer_kv_lens(self.kv_lens_cuda[first:seqs])
            self.gen_indexer_kv_lens_cuda_runtime = lens
            self.fill_decode_schedules(lens)
            factor = 0
            if self.use_expanded_buffers_for_mtp:
                factor = self.gen_token_stride
            elif self.expand_for_dsl and self.dsl_expand_factor > 1:
                factor = self.dsl_expand_factor
            if factor:
                wide = self.num_generations * factor
                self.kv_lens_expanded_cuda[:wide].copy_(lens.repeat_interleave(factor))
                self.scheduler_metadata_buffer_expanded.copy_(
                    get_paged_mqa_logits_metadata(
                        self.kv_lens_expanded_cuda[:wide].view(-1, 1),
                        _DG_SCHEDULE_BLOCK_KV,
                        self.num_sms,
                    )
                )
        self.prepare_dense_topk_indices(self.kv_lens_cuda, device=True)

    def update_for_spec_dec(self) -> None:
        """DSAtrtllmAttentionMetadata.update_for_spec_dec"""
        super().update_for_spec_dec()
        self.on_update_kv_lens()


# old tree: DSAtrtllmAttentionMetadata of attention_backend/sparse/dsa.py era had 1-D lengths only
INLINED_BODY_USES_1D_LENGTHS = CONFIG.body == "inlined"
