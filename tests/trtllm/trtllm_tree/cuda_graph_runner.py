# SPDX-License-Identifier: Apache-2.0
"""Mirrors pyexecutor/cuda_graph_runner.py @7b437aaa (an older version: newest one not found).

No graph is captured: `metadata_for` gives the aliased metadata object that a graph would own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm._torch.memory_buffer_utils import get_memory_buffers
from tensorrt_llm._torch.pyexecutor.llm_request import (
    CUDA_GRAPH_DUMMY_REQUEST_ID,
    LlmRequest,
    cuda_graph_dummy_request_id,
)

__all__ = ["CUDA_GRAPH_DUMMY_REQUEST_ID", "CUDAGraphRunner", "ScheduledRequests"]


@dataclass
class ScheduledRequests:
    """scheduler.py ScheduledRequests"""

    context_requests: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)

    @property
    def can_run_cuda_graph(self) -> bool:
        """ScheduledRequests.can_run_cuda_graph: generation only"""
        return not self.context_requests

    @property
    def batch_size(self) -> int:
        """ScheduledRequests.batch_size"""
        return len(self.context_requests) + len(self.generation_requests)

    def all_requests(self) -> list[LlmRequest]:
        """ScheduledRequests.all_requests: contexts first"""
        return self.context_requests + self.generation_requests


class CUDAGraphRunner:
    """cuda_graph_runner.py CUDAGraphRunner: padding and metadata per captured shape"""

    def __init__(self, batch_sizes: list[int], metadata: Any, draft_len: int = 0) -> None:
        self.supported_batch_sizes = sorted(batch_sizes)
        self.max_supported_batch_size = max(batch_sizes)
        self.attn_metadata = metadata
        self.draft_len = draft_len
        self.graph_metadata: dict[tuple[int, int], Any] = {}
        self.padding_dummy_requests: dict[int, LlmRequest] = {}
        self.cuda_graph_meta_buffers = get_memory_buffers()

    def metadata_for(self, batch_size: int) -> Any:
        """CUDAGraphRunner.maybe_get_cuda_graph: one object per (batch size, draft length)"""
        key = (batch_size, self.draft_len)
        if key not in self.graph_metadata:
            self.graph_metadata[key] = self.attn_metadata.create_cuda_graph_metadata(
                batch_size, False, self.draft_len, self.cuda_graph_meta_buffers
            )
        return self.graph_metadata[key]

    def capture_order(self) -> list[int]:
        """Largest shape first, so that smaller ones fit the buffers already there"""
        return self.supported_batch_sizes[::-1]

    def pad_batch(self, batch: ScheduledRequests, kv_cache_manager: Any) -> int:
        """CUDAGraphRunner._get_padded_batch: the same dummy object, repeated"""
        size = batch.batch_size
        if not batch.can_run_cuda_graph or size > self.max_supported_batch_size:
            return 0
        padded = next(b for b in self.supported_batch_sizes if b >= size)
        if padded == size:
            return 0
        dummy = self.padding_dummy_requests.get(self.draft_len)
        if dummy is None:
            made = kv_cache_manager.add_dummy_requests(
                [cuda_graph_dummy_request_id(self.draft_len)],
                is_gen=True,
                max_num_draft_tokens=self.draft_len,
            )
            if made is None:
                return 0
            dummy = made[0]
            dummy.is_cuda_graph_dummy = True
            self.padding_dummy_requests[self.draft_len] = dummy
        batch.generation_requests.extend([dummy] * (padded - size))
        return padded - size
