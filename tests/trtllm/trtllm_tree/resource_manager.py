# SPDX-License-Identifier: Apache-2.0
"""Mirrors pyexecutor/resource_manager.py: BaseResourceManager and the V1 KVCacheManager.

The V1 file was not re-read for this double; what V3.2 needs of it follows from its uses in
dsa/cache_manager.py @12a71fe4 (block offsets by batch row, no index mapper).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from enum import Enum
from typing import Any

import torch
from tensorrt_llm._double import CONFIG
from tensorrt_llm._double_pool import KVCacheHandle, PagePool
from tensorrt_llm._torch.pyexecutor.llm_request import (
    LlmRequest,
    LlmRequestState,
    get_draft_token_length,
)
from tensorrt_llm.mapping import Mapping


class ResourceManagerType(Enum):
    """resource_manager.py ResourceManagerType"""

    KV_CACHE_MANAGER = "KV_CACHE_MANAGER"
    DRAFT_KV_CACHE_MANAGER = "DRAFT_KV_CACHE_MANAGER"
    SPEC_RESOURCE_MANAGER = "SPEC_RESOURCE_MANAGER"


class BaseResourceManager(ABC):
    """resource_manager.py BaseResourceManager"""

    @abstractmethod
    def get_max_resource_count(self) -> int:
        """BaseResourceManager.get_max_resource_count"""

    @abstractmethod
    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """BaseResourceManager.get_needed_resource_to_completion"""

    def add_dummy_requests(self, request_ids: list[int], **kwargs: Any) -> Any:
        """BaseResourceManager.add_dummy_requests"""
        return None

    def prepare_resources(self, scheduled_batch: Any) -> None:
        """BaseResourceManager.prepare_resources"""
        return None

    def update_resources(self, scheduled_batch: Any) -> None:
        """BaseResourceManager.update_resources"""
        return None

    def free_resources(self, request: LlmRequest) -> None:
        """BaseResourceManager.free_resources"""
        return None

    def shutdown(self) -> None:
        """BaseResourceManager.shutdown"""
        return None


class ResourceManager:
    """resource_manager.py ResourceManager: calls every manager in order"""

    def __init__(self, resource_managers: dict) -> None:
        self.resource_managers = OrderedDict(resource_managers)

    def get_resource_manager(self, name: Any) -> Any:
        """ResourceManager.get_resource_manager"""
        return self.resource_managers.get(name)

    def free_resources(self, request: LlmRequest) -> None:
        """ResourceManager.free_resources: reverse order"""
        for manager in reversed(self.resource_managers.values()):
            manager.free_resources(request)


class KVCacheManager(BaseResourceManager):
    """resource_manager.py KVCacheManager (V1, C++ underneath): no per-sequence index"""

    def __init__(
        self,
        kv_cache_config: Any,
        kv_cache_type: Any = None,
        *,
        num_layers: int,
        tokens_per_block: int,
        max_seq_len: int,
        max_batch_size: int,
        mapping: Mapping | None = None,
        max_num_tokens: int = 8192,
        num_extra_kv_tokens: int = 0,
        **kwargs: Any,
    ) -> None:
        self.mapping = mapping or Mapping()
        self.tokens_per_block = tokens_per_block
        self.max_seq_len = max_seq_len
        self.max_batch_size = max_batch_size
        self.num_extra_kv_tokens = num_extra_kv_tokens
        self.pp_layers = self.mapping.pp_layers(num_layers)
        self.num_local_layers = len(self.pp_layers)
        self.layer_offsets = {layer: i for i, layer in enumerate(self.pp_layers)}
        self.num_pools = 1
        self.enable_block_reuse = False
        blocks = -(-(max_seq_len + num_extra_kv_tokens) // tokens_per_block)
        self.max_blocks_per_seq = blocks
        pages = int(getattr(kv_cache_config, "max_pages", 0) or (max_batch_size + 1) * blocks)
        self.impl = PagePool(pages, self.num_local_layers, self._page_bytes(), True)
        self.blocks_in_primary_pool = pages
        self._sequences: dict[int, KVCacheHandle] = {}
        # rows follow the batch, not the request
        self.host_kv_cache_block_offsets = torch.zeros(
            1, max_batch_size, 2, self.max_blocks_per_seq, dtype=torch.int32
        )

    def _page_bytes(self) -> int:
        return self.tokens_per_block

    def _add(self, req: LlmRequest, tokens: int) -> bool:
        cache = self._sequences.get(req.py_request_id)
        if cache is None:
            cache = KVCacheHandle(self.impl, self.tokens_per_block, None, None)
            cache.resume(0)
            self._sequences[req.py_request_id] = cache
        return cache.resize(max(cache.capacity, tokens))

    def prepare_resources(self, scheduled_batch: Any) -> None:
        """KVCacheManager.prepare_resources: add a sequence, or tokens to a known one"""
        for req in scheduled_batch.context_requests:
            if req.is_first_context_chunk:
                assert self._add(req, req.prompt_len + self.num_extra_kv_tokens)
        for req in scheduled_batch.generation_requests:
            if req.is_dummy:
                continue
            cache = self._sequences[req.py_request_id]
            assert self._add(req, cache.capacity + 1 + get_draft_token_length(req))

    def update_resources(self, scheduled_batch: Any, *unused: Any) -> None:
        """KVCacheManager.update_resources: rewind rejected draft tokens"""
        for req in scheduled_batch.generation_requests:
            cache = self._sequences.get(req.py_request_id)
            if cache is not None and req.state != LlmRequestState.GENERATION_COMPLETE:
                cache.resize(cache.capacity - req.py_rewind_len)

    def free_resources(self, request: LlmRequest, pin_on_release: bool = False) -> None:
        """KVCacheManager.free_resources"""
        cache = self._sequences.pop(request.py_request_id, None)
        if cache is not None:
            cache.close()

    def add_dummy_requests(
        self,
        request_ids: list[int],
        token_nums: list[int] | None = None,
        is_gen: bool = False,
        prepare_resource: bool = True,
        max_num_draft_tokens: int = 0,
        **unused: Any,
    ) -> list[LlmRequest]:
        """KVCacheManager.add_dummy_requests"""
        made = []
        for i, request_id in enumerate(request_ids):
            count = token_nums[i] if token_nums is not None else 1 + max_num_draft_tokens
            req = LlmRequest(request_id, [1] * count, is_dummy_request=True)
            if prepare_resource:
                grow = 1 + max_num_draft_tokens if is_gen else 0
                self._add(req, count + self.num_extra_kv_tokens + grow)
            if is_gen:
                req.state = LlmRequestState.GENERATION_IN_PROGRESS
                req.prompt_len = count - 1
                req.py_draft_tokens = [1] * max_num_draft_tokens
            made.append(req)
        return made

    def get_batch_cache_indices(
        self, request_ids: list[int], layer_idx: int | None = None
    ) -> list[list[int]]:
        """KVCacheManager.get_batch_cache_indices"""
        return [list(self._sequences[r].pages) for r in request_ids]

    def copy_batch_block_offsets(
        self, dst_tensor, request_ids, beam_width, num_contexts, num_seqs, max_blocks=None
    ) -> None:
        """KVCacheManager.copy_batch_block_offsets: fills host rows in batch order"""
        for row, request_id in enumerate(request_ids):
            pages = torch.tensor(self._sequences[request_id].pages, dtype=torch.int32)
            host = self.host_kv_cache_block_offsets[0, row]
            host[:, : pages.numel()] = pages * self.num_local_layers
        rows = self.host_kv_cache_block_offsets[:, :num_seqs]
        dst_tensor[:, :num_seqs].copy_(rows.to(CONFIG.device))

    def get_num_free_blocks(self) -> int:
        """KVCacheManager.get_num_free_blocks"""
        return len(self.impl.free)

    def get_max_resource_count(self) -> int:
        """KVCacheManager.get_max_resource_count"""
        return self.impl.num_slots

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """KVCacheManager.get_needed_resource_to_completion"""
        return -(-(request.prompt_len + request.max_new_tokens) // self.tokens_per_block)
