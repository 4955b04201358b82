# SPDX-License-Identifier: Apache-2.0
"""Mirrors backends/interface.py @1262edbc: AttentionMetadata."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensorrt_llm._double import CONFIG
from tensorrt_llm._torch.metadata import KVCacheParams


class AttentionMetadata:
    """interface.py AttentionMetadata (a dataclass upstream; keywords only, same names)"""

    kv_cache_params: KVCacheParams | None = None
    cuda_graph_buffers: Any = None
    is_cuda_graph: bool = False
    draft_kv_cache_manager: Any = None
    request_ids: list[int] | None = None
    prompt_lens: list[int] | None = None
    runtime_features: Any = None
    enable_context_mla_with_cached_kv: bool = True

    def __init__(
        self,
        *,
        max_num_requests: int,
        max_num_tokens: int,
        max_num_sequences: int | None = None,
        kv_cache_manager: Any = None,
        draft_kv_cache_manager: Any = None,
        mapping: Any = None,
        sparse_metadata_params: Any = None,
        cuda_graph_buffers: Any = None,
        is_cuda_graph: bool = False,
        max_draft_tokens: int = 0,
    ) -> None:
        self.max_num_requests = max_num_requests
        self.max_num_tokens = max_num_tokens
        self.max_num_sequences = max_num_sequences or max_num_requests
        self.kv_cache_manager = kv_cache_manager
        self.draft_kv_cache_manager = draft_kv_cache_manager
        self.mapping = mapping
        self.sparse_metadata_params = sparse_metadata_params
        self.cuda_graph_buffers = cuda_graph_buffers
        self.is_cuda_graph = is_cuda_graph
        self.max_draft_tokens = max_draft_tokens
        self.beam_width = 1
        self._seq_lens: torch.Tensor | None = None
        self._seq_lens_cuda: torch.Tensor | None = None
        self._num_contexts = self._num_generations = 0
        self._num_ctx_tokens = self._num_tokens = 0
        self.__post_init__()

    def __post_init__(self) -> None:
        """interface.py AttentionMetadata.__post_init__; run again by create_cuda_graph_metadata"""

    def on_update(self) -> None:
        """interface.py AttentionMetadata.on_update: derived counts, set when inputs are assigned"""
        if self._seq_lens is None:
            return
        if self._seq_lens.shape[0] >= self._num_contexts:
            self._num_ctx_tokens = int(self._seq_lens[: self._num_contexts].sum())
            self._num_generations = self._seq_lens.shape[0] - self._num_contexts
        self._num_tokens = int(self._seq_lens.sum())

    @property
    def seq_lens(self) -> torch.Tensor | None:
        """interface.py AttentionMetadata.seq_lens: query tokens per sequence, host"""
        return self._seq_lens

    @seq_lens.setter
    def seq_lens(self, value: torch.Tensor | None) -> None:
        self._seq_lens = value
        self.on_update()
        if value is None:
            return
        if self.is_cuda_graph and self._seq_lens_cuda is not None:
            self._seq_lens_cuda.copy_(value)  # never reallocated under a graph
        else:
            self._seq_lens_cuda = value.clone().to(CONFIG.device)

    @property
    def num_contexts(self) -> int:
        """interface.py AttentionMetadata.num_contexts"""
        return self._num_contexts

    @num_contexts.setter
    def num_contexts(self, value: int) -> None:
        self._num_contexts = value
        self.on_update()

    # interface.py AttentionMetadata: read-only views of the derived counts
    num_generations = property(lambda self: self._num_generations)
    num_ctx_tokens = property(lambda self: self._num_ctx_tokens)
    num_tokens = property(lambda self: self._num_tokens)
    seq_lens_cuda = property(lambda self: self._seq_lens_cuda)
    seq_lens_kv = property(lambda self: self._seq_lens)

    @property
    def num_seqs(self) -> int:
        """interface.py AttentionMetadata.num_seqs"""
        return self._seq_lens.shape[0]

    def prepare(self) -> None:
        """interface.py AttentionMetadata.prepare"""

    def on_update_kv_lens(self) -> None:
        """interface.py AttentionMetadata.on_update_kv_lens"""

    def update_for_spec_dec(self) -> None:
        """interface.py AttentionMetadata.update_for_spec_dec"""

    def create_cuda_graph_metadata(
        self,
        max_batch_size: int,
        sub_cross_metadata: bool = False,
        max_draft_tokens: int = 0,
        buffers: Any = None,
        encode_only: bool = False,
    ) -> AttentionMetadata:
        """interface.py AttentionMetadata.create_cuda_graph_metadata: shallow copy, own lengths,
        __post_init__ once more so that every buffer comes from the shared pool by name"""
        if self.is_cuda_graph:
            return self
        graph = copy.copy(self)
        graph.is_cuda_graph = True
        graph.cuda_graph_buffers = buffers
        graph._seq_lens_cuda = None
        graph._num_contexts = 0
        graph.max_draft_tokens = max_draft_tokens
        graph.seq_lens = torch.ones(max_batch_size, dtype=torch.int32) * (1 + max_draft_tokens)
        graph.num_contexts = 0
        graph.__post_init__()
        return graph

    @staticmethod
    def get_empty(
        buffers: Any,
        tensor_shape: Any,
        dtype: torch.dtype,
        cache_name: str,
        capture_graph: bool = False,
    ) -> torch.Tensor:
        """interface.py AttentionMetadata.get_empty: without a pool a new zeroed tensor each call,
        so names alias only between graph metadata objects"""
        if buffers is None:
            return torch.zeros(tuple(tensor_shape), dtype=dtype, device=CONFIG.device)
        return buffers.get_buffer(tensor_shape, dtype, cache_name, capture_graph)
