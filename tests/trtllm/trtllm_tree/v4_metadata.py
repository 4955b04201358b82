# SPDX-License-Identifier: Apache-2.0
"""Mirrors sparse/deepseek_v4/metadata.py @0b03b6af: DeepseekV4TrtllmAttentionMetadata.

The old tree's file @13dabbbb has the same prepare() order, without draft tables and offload.
"""

from __future__ import annotations

import torch

from ...trtllm import TrtllmAttentionMetadata
from ..dsa.metadata import DSAtrtllmAttentionMetadata
from .indexer import DeepseekV4Indexer
from .params import DEEPSEEK_V4_SPARSE_RATIO, DeepSeekV4MetadataParams


class DeepseekV4TrtllmAttentionMetadata(DSAtrtllmAttentionMetadata):
    """metadata.py DeepseekV4TrtllmAttentionMetadata"""

    draft_sliding_block_tables = None

    def __post_init__(self) -> None:
        """DeepseekV4TrtllmAttentionMetadata.__post_init__"""
        super().__post_init__()
        params = self.sparse_metadata_params
        if not isinstance(params, DeepSeekV4MetadataParams):
            raise ValueError("DeepSeek-V4 sparse attention metadata params are not set")
        self.window_size = params.window_size
        assert self.window_size == 128
        self.compress_ratio_set = set(self.compress_ratios)
        assert not self.compress_ratio_set - {1, 4, 128}, "Unsupported compress ratios"
        self._compress_ratios_sorted = sorted(self.compress_ratio_set)
        self.num_total_compressed_tokens: dict[int, int] = {}
        self.max_ctx_compressed_tokens: dict[int, int] = {}
        names = ("compressed_kv_lens_cuda", "past_kv_lens_cuda", "new_comp_kv_lens_cuda")
        for name in names:
            setattr(
                self,
                name,
                {
                    r: self._buffer(f"{name}_{r}", (self.max_num_sequences,))
                    for r in self._compress_ratios_sorted
                },
            )
        self.empty_topk_indices_buffer = self._buffer(
            "empty_topk_indices_buffer", (self.max_num_tokens, self.sparse_mla_topk)
        )
        self.empty_topk_indices_buffer.fill_(-1)
        self.cached_token_lens_cuda = self._buffer(
            "cached_token_lens_cuda", (self.max_num_sequences,)
        )
        self.cached_token_lens_cpu = torch.zeros(self.max_num_sequences, dtype=torch.int32)

    def prepare(self) -> None:
        """DeepseekV4TrtllmAttentionMetadata.prepare: skips DSAtrtllmAttentionMetadata.prepare"""
        assert self.kv_cache_manager is not None
        assert self.request_ids is not None
        self.kv_cache_manager.compute_sliding_block_tables(self.request_ids, self.num_contexts)
        TrtllmAttentionMetadata.prepare(self)
        count = self.num_contexts + self.num_generations
        gen_tokens = self.num_tokens - self.num_ctx_tokens
        self.cached_token_lens_cpu[:count] = torch.tensor(
            self.kv_cache_params.num_cached_tokens_per_seq[:count], dtype=torch.int32
        )
        cached = self.cached_token_lens_cpu[:count]
        kv_lens = cached + self.seq_lens_kv[:count]
        self.cached_token_lens_cuda[:count].copy_(cached)
        self.prepare_for_indices_conversion()
        self.prepare_for_block_tables()
        sparse = DEEPSEEK_V4_SPARSE_RATIO in self.compress_ratio_set
        if sparse:
            self.prepare_for_indexer_k_cache()
        self.prepare_for_spec_decode(kv_lens)
        self.prepare_for_deepseek_v4_indices()
        if sparse:
            DeepseekV4Indexer.prepare(metadata=self)
        per_seq = gen_tokens // self.num_generations if self.num_generations else 0
        self.num_gen_tokens_per_seq = per_seq
        contexts = self.num_contexts
        for ratio in self._compress_ratios_sorted:
            new = kv_lens // ratio - cached // ratio
            gen = self.num_generations * -(-per_seq // ratio)
            self.num_total_compressed_tokens[ratio] = int(new[:contexts].sum()) + gen
            self.max_ctx_compressed_tokens[ratio] = int(new[:contexts].max()) if contexts else 0
        self.prepare_compressed_kv_metadata(
            self.cached_token_lens_cuda[:count] + self.seq_lens_cuda[:count],
            self.cached_token_lens_cuda[:count],
        )

    def prepare_for_block_tables(self) -> None:
        """DeepseekV4TrtllmAttentionMetadata.prepare_for_block_tables: other caches"""

    def prepare_for_deepseek_v4_indices(self, token_positions=None) -> None:
        """DeepseekV4TrtllmAttentionMetadata.prepare_for_deepseek_v4_indices: SWA and ratio 128"""

    def prepare_for_indexer_k_cache(self) -> None:
        """DeepseekV4TrtllmAttentionMetadata.prepare_for_indexer_k_cache.

        Unattached columns are BAD_PAGE (-1) on the host; the clamp covers the device table only.
        """
        host = self.host_indexer_k_cache_block_offsets
        self.kv_cache_manager.copy_batch_indexer_compress_block_tables(
            host,
            self.request_ids,
            beam_width=self.beam_width,
            num_contexts=self.num_contexts,
            num_seqs=self.num_seqs,
        )
        self.indexer_k_cache_block_offsets[: self.num_seqs].copy_(host[: self.num_seqs])
        self.indexer_k_cache_block_offsets.clamp_(min=0)

    def prepare_compressed_kv_metadata(
        self, kv_lens: torch.Tensor, cached_tokens: torch.Tensor, ctx_output_sizes=None
    ) -> None:
        """DeepseekV4TrtllmAttentionMetadata._compute_per_ratio_kv_lens"""
        count = kv_lens.shape[0]
        for ratio in self._compress_ratios_sorted:
            now, past = kv_lens // ratio, cached_tokens // ratio
            self.compressed_kv_lens_cuda[ratio][:count] = now.to(torch.int32)
            self.past_kv_lens_cuda[ratio][:count] = past.to(torch.int32)
            self.new_comp_kv_lens_cuda[ratio][:count] = (now - past).to(torch.int32)

    def on_update_kv_lens(self) -> None:
        """DeepseekV4TrtllmAttentionMetadata.on_update_kv_lens"""
        super().on_update_kv_lens()
        kv_lens = self.kv_lens_cuda[: self.num_seqs]
        self.prepare_compressed_kv_metadata(kv_lens, kv_lens - self.seq_lens_cuda[: self.num_seqs])

    def prepare_for_draft_forward(self) -> dict | None:
        """DeepseekV4TrtllmAttentionMetadata.prepare_for_draft_forward: no indexer in drafts"""
        return None

    def restore_after_draft_forward(self, saved_state: dict | None) -> None:
        """DeepseekV4TrtllmAttentionMetadata.restore_after_draft_forward"""
