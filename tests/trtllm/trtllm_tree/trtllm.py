# SPDX-License-Identifier: Apache-2.0
"""Mirrors backends/trtllm.py @017aa0ca: TrtllmAttentionMetadata."""

from __future__ import annotations

import torch

from .interface import AttentionMetadata


class TrtllmAttentionMetadata(AttentionMetadata):
    """trtllm.py TrtllmAttentionMetadata"""

    def __post_init__(self) -> None:
        """trtllm.py TrtllmAttentionMetadata.__post_init__: buffers by name"""
        super().__post_init__()
        shape = (self.max_num_sequences,)
        self.kv_lens_cuda = self.get_empty(
            self.cuda_graph_buffers,
            shape,
            cache_name="kv_lens_cuda",
            dtype=torch.int32,
            capture_graph=self.is_cuda_graph,
        )
        self.kv_lens = torch.zeros(shape, dtype=torch.int32)
        manager = self.kv_cache_manager
        self.kv_cache_block_offsets = self.get_empty(
            self.cuda_graph_buffers,
            (1, self.max_num_sequences, 2, manager.max_blocks_per_seq),
            cache_name="kv_cache_block_offsets",
            dtype=torch.int32,
            capture_graph=self.is_cuda_graph,
        )
        self.kv_lens_cuda_runtime: torch.Tensor | None = None
        self.kv_lens_runtime: torch.Tensor | None = None

    def prepare(self) -> None:
        """trtllm.py TrtllmAttentionMetadata.prepare: host lengths, block offsets, views.

        `kv_lens` (host) includes num_extra_kv_tokens, `kv_lens_cuda` does not.
        """
        super().prepare()
        cached = torch.tensor(self.kv_cache_params.num_cached_tokens_per_seq, dtype=torch.int32)
        kv_lens = cached + self.seq_lens_kv
        extra = self.kv_cache_params.num_extra_kv_tokens
        self.kv_lens[: self.num_seqs].copy_(kv_lens + extra)
        self.kv_lens_cuda[: self.num_seqs].copy_(kv_lens[: self.num_seqs])
        assert self.request_ids is not None
        assert int(self.kv_lens[: self.num_seqs].max()) <= self.kv_cache_manager.max_seq_len, (
            "KV length above the manager's max_seq_len"
        )
        self.kv_cache_manager.copy_batch_block_offsets(
            self.kv_cache_block_offsets,
            self.request_ids,
            self.beam_width,
            self.num_contexts,
            self.num_seqs,
            max_blocks=None,
        )
        # trtllm.py _bind_runtime_views
        self.kv_lens_cuda_runtime = self.kv_lens_cuda[: self.num_seqs]
        self.kv_lens_runtime = kv_lens[: self.num_seqs]

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
        """trtllm.py / interface.py update_spec_dec_param, same parameter names"""
        self.is_spec_decoding_enabled = is_spec_decoding_enabled
