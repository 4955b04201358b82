# SPDX-License-Identifier: Apache-2.0
"""Mirrors pyexecutor/kv_cache/kv_cache_manager_v2.py @00043967 (KVCacheManagerV2) and the
IndexMapper of cpp/tensorrt_llm/batch_manager/kvCacheManagerV2Utils.cpp @03e97119."""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._double import CONFIG
from tensorrt_llm._double_pool import BAD_PAGE_INDEX, KVCacheHandle, PagePool
from tensorrt_llm._torch.pyexecutor.llm_request import (
    LlmRequest,
    LlmRequestState,
    get_draft_token_length,
)
from tensorrt_llm._torch.pyexecutor.resource_manager import BaseResourceManager
from tensorrt_llm.logger import logger
from tensorrt_llm.mapping import Mapping

# named by deepseek_v4/cache_manager.py @0393e46e (page guard); its value was not read
_GUARD_PAGE_REQUEST_ID = (1 << 64) - 1 - (1 << 20)
_RESERVED_REQUEST_IDS = frozenset({_GUARD_PAGE_REQUEST_ID})


class IndexMapper:
    """kvCacheManagerV2Utils.cpp IndexMapper (bound as add_new_sequence, get_index, ...).

    Which free index is taken is not fixed upstream (first of a set); here the lowest.
    """

    def __init__(self, max_batch_size: int, max_beam_width: int) -> None:
        self._map: dict[int, int] = {}
        self._free = set(range(max_batch_size))
        self._beam = max_beam_width
        self._copy_index = torch.empty(max_batch_size * max_beam_width, dtype=torch.int32)

    def add_new_sequence(self, request_id: int) -> int:
        """IndexMapper::addNewSequence: known id or no free index is an error"""
        assert request_id not in self._map, f"request {request_id} already has an index"
        assert self._free, "No free index found"
        index = min(self._free)
        self._free.remove(index)
        self._map[request_id] = index
        return index

    def get_index(self, request_id: int) -> int:
        """IndexMapper::getIndex: raises (TLLM_CHECK) for an unknown id"""
        if request_id not in self._map:
            raise RuntimeError("Request ID not found in IndexMapper")
        return self._map[request_id]

    def remove_sequence(self, request_id: int) -> None:
        """IndexMapper::removeSequence"""
        if request_id not in self._map:
            raise RuntimeError("Request ID not found in IndexMapper")
        self._free.add(self._map.pop(request_id))

    def get_copy_index(
        self, request_ids: list[int], num_contexts: int, beam_width: int
    ) -> torch.Tensor:
        """IndexMapper::getCopyIndex: a view of one reused host buffer, in batch order"""
        for row, request_id in enumerate(request_ids):
            self._copy_index[row] = self.get_index(request_id) * self._beam
        return self._copy_index[: len(request_ids)]

    def num_free_slots(self) -> int:
        """IndexMapper num_free_slots"""
        return len(self._free)

    def size(self) -> int:
        """IndexMapper size"""
        return len(self._map)


class KVCacheManagerV2(BaseResourceManager):
    """kv_cache_manager_v2.py KVCacheManagerV2"""

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
        max_beam_width: int = 1,
        is_draft: bool = False,
        is_disagg: bool = False,
        num_reserved_index_slots: int = 1,
        num_extra_kv_tokens: int = 0,
        max_draft_len: int = 0,
        **kwargs: Any,
    ) -> None:
        self.mapping = mapping or Mapping()
        self.tokens_per_block = tokens_per_block
        self.max_seq_len = max_seq_len
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.max_beam_width = max_beam_width
        self.is_draft = is_draft
        self.num_extra_kv_tokens = num_extra_kv_tokens
        self.max_draft_len = max_draft_len
        self.pp_layers = self.mapping.pp_layers(num_layers)
        self.num_local_layers = len(self.pp_layers)
        self.layer_offsets = {layer: i for i, layer in enumerate(self.pp_layers)}
        self.enable_block_reuse = bool(getattr(kv_cache_config, "enable_block_reuse", False))
        self.num_pools = 1
        self._stream = type("Stream", (), {"cuda_stream": 0})()
        self.kv_cache_map: dict[int, KVCacheHandle] = {}
        self._allocated_draft_lens: dict[int, int] = {}
        self._early_freed_index_requests: set[int] = set()
        need = max_seq_len + num_extra_kv_tokens + max_draft_len + 1
        blocks = -(-need // tokens_per_block)
        self.max_blocks_per_seq = -(-blocks // 4) * 4
        scale, page_bytes = self._page_geometry()
        pages = int(getattr(kv_cache_config, "max_pages", 0) or max_batch_size * blocks)
        self.impl = PagePool(pages, scale, page_bytes)
        sequences = max_batch_size * self.mapping.pp_size
        capacity = sequences * (2 if is_disagg else 1) + num_reserved_index_slots
        self.index_mapper = IndexMapper(capacity, max_beam_width)
        self._prepare_page_table_tensor(capacity)

    def _page_geometry(self) -> tuple[int, int]:
        """(pages of all layers in one slot, bytes of a page); from _build_cache_config"""
        return self.num_local_layers, self.tokens_per_block

    def _prepare_page_table_tensor(self, index_mapper_capacity: int) -> None:
        """KVCacheManagerV2._prepare_page_table_tensor: rows are IndexMapper indices"""
        self.host_kv_cache_block_offsets = torch.zeros(
            self.num_pools,
            index_mapper_capacity * self.max_beam_width,
            2,
            self.max_blocks_per_seq,
            dtype=torch.int32,
        )

    # ---- requests: creation and end ----

    def _create_kv_cache(
        self,
        request_id: int,
        lora_task_id: int | None,
        input_tokens: Any,
        *,
        cache_salt: str | None = None,
        is_dummy: bool = False,
        enable_request_stats: bool = False,
        expected_prompt_length: int | None = None,
    ) -> KVCacheHandle | None:
        """KVCacheManagerV2._create_kv_cache: None when no index slot is free"""
        assert request_id not in self.kv_cache_map, f"cache of {request_id} already exists"
        if self.index_mapper.num_free_slots() == 0:
            logger.warning("No free IndexMapper slots for request", request_id)
            return None
        cache = KVCacheHandle(
            self.impl, self.tokens_per_block, input_tokens, (lora_task_id, cache_salt)
        )
        self.kv_cache_map[request_id] = cache
        index = self.index_mapper.add_new_sequence(request_id)
        cache.set_base_page_index_buf(0, 0, self.host_kv_cache_block_offsets[0, index, 0])
        return cache

    def prepare_context_cache(self, req: LlmRequest, reuse_limit: int | None = None) -> int | None:
        """KVCacheManagerV2.prepare_context_cache: create or resume; the matched depth"""
        cache = self.kv_cache_map.get(req.py_request_id)
        if cache is None:
            tokens = req.get_tokens(0)[: req.prompt_len - 1] if self.enable_block_reuse else None
            cache = self._create_kv_cache(
                req.py_request_id,
                req.lora_task_id,
                tokens,
                cache_salt=req.cache_salt,
                is_dummy=req.is_dummy,
                expected_prompt_length=req.prompt_len - 1,
            )
            if cache is None:
                return None
            if not self.enable_block_reuse:
                cache.stop_committing()
        if not self._resume_and_restore(req.py_request_id, cache):
            return None
        return cache.num_committed_tokens

    def prepare_context(self, req: LlmRequest) -> bool:
        """KVCacheManagerV2.prepare_context (first chunk sets the reused prefix)"""
        first = req.py_request_id not in self.kv_cache_map
        reused = self.prepare_context_cache(req)
        if reused is None:
            return False
        if first and self.enable_block_reuse:
            req.set_prepopulated_prompt_len(reused, self.tokens_per_block)
        return True

    def resize_context(self, req: LlmRequest, num_tokens: int) -> bool:
        """KVCacheManagerV2.resize_context; a failing first chunk is suspended"""
        cache = self.kv_cache_map.get(req.py_request_id)
        if cache is None:
            return False
        target = req.context_current_position + num_tokens + self.num_extra_kv_tokens
        before = cache.capacity
        if not cache.resize(max(before, target)):
            if req.is_first_context_chunk:
                cache.suspend()
            return False
        req.py_ctx_pre_resize_cap = before if target > before else None
        return True

    def prepare_disagg_gen_init(self, req: LlmRequest) -> bool:
        """KVCacheManagerV2.prepare_disagg_gen_init: room for a prompt that arrives by transfer"""
        if self.prepare_context_cache(req) is None:
            return False
        return self.kv_cache_map[req.py_request_id].resize(req.prompt_len, req.prompt_len)

    def revert_allocate_context(self, req: LlmRequest) -> bool:
        """KVCacheManagerV2.revert_allocate_context: may drop the cache and restart the request
        under the same id"""
        before, req.py_ctx_pre_resize_cap = req.py_ctx_pre_resize_cap, None
        cache = self.kv_cache_map.get(req.py_request_id)
        if before is None or cache is None or not cache.is_active:
            return True
        if cache.history_length > before:
            self.free_resources(req)
            req.set_prepopulated_prompt_len(0, self.tokens_per_block)
            return False
        cache.resize(before, min(cache.history_length, before))
        if before > 0:
            cache.suspend()
        return True

    def free_resources(self, request: LlmRequest, pin_on_release: bool = False) -> None:
        """KVCacheManagerV2.free_resources"""
        self._allocated_draft_lens.pop(request.py_request_id, None)
        cache = self.kv_cache_map.pop(request.py_request_id, None)
        if cache is None:
            return
        cache.close()
        if request.py_request_id in self._early_freed_index_requests:
            self._early_freed_index_requests.discard(request.py_request_id)
        else:
            self.index_mapper.remove_sequence(request.py_request_id)

    def release_index_slot(self, request_id: int) -> None:
        """KVCacheManagerV2.release_index_slot: blocks stay, the index goes (disaggregation)"""
        cache = self.kv_cache_map.get(request_id)
        if cache is not None:
            cache.set_base_page_index_buf(0, 0, None)
        self.index_mapper.remove_sequence(request_id)
        self._early_freed_index_requests.add(request_id)

    def add_dummy_requests(
        self,
        request_ids: list[int],
        token_nums: list[int] | None = None,
        is_gen: bool = False,
        materialize_history: bool = False,
        prepare_resource: bool = True,
        max_num_draft_tokens: int = 0,
        kv_reserve_draft_tokens: int | None = None,
        use_mrope: bool = False,
        max_beam_width: int = 1,
        encoder_output_lens: list[int] | None = None,
        draft_kv_cache_manager: Any = None,
        capture_sampling_params: Any = None,
    ) -> list[LlmRequest] | None:
        """KVCacheManagerV2.add_dummy_requests: real index slots and pages, nothing committed"""
        reserve = max_num_draft_tokens
        if kv_reserve_draft_tokens is not None:
            reserve = kv_reserve_draft_tokens
        made: list[LlmRequest] = []
        for i, request_id in enumerate(request_ids):
            count = token_nums[i] if token_nums is not None else 1 + max_num_draft_tokens
            req = LlmRequest(request_id, [1] * count, is_dummy_request=True)
            if is_gen:
                req.state = LlmRequestState.GENERATION_IN_PROGRESS
                req.prompt_len = count - 1
                req.py_draft_tokens = [1] * max_num_draft_tokens
            made.append(req)
            if not prepare_resource:
                continue
            cache = self._create_kv_cache(request_id, None, None, is_dummy=True)
            if cache is None or not cache.resume(0):
                for other in made:
                    self.free_resources(other)
                return None
            cache.stop_committing()
            grow = count + self.num_extra_kv_tokens + (reserve + 1 if is_gen else 0)
            if not cache.resize(grow, history_length=max(0, count - 1) if is_gen else None):
                for other in made:
                    self.free_resources(other)
                return None
        return made

    # ---- one step ----

    def is_request_active(self, request_id: int) -> bool:
        """KVCacheManagerV2.is_request_active"""
        cache = self.kv_cache_map.get(request_id)
        return cache is not None and cache.is_active

    def try_allocate_generation(self, req: LlmRequest) -> bool:
        """KVCacheManagerV2.try_allocate_generation: resume if suspended, then 1 + drafts"""
        cache = self.kv_cache_map.get(req.py_request_id)
        if cache is None or not self._resume_and_restore(req.py_request_id, cache):
            return False
        drafts = get_draft_token_length(req)
        self._allocated_draft_lens.pop(req.py_request_id, None)
        if not cache.resize(cache.capacity + 1 + drafts):
            return False
        self._allocated_draft_lens[req.py_request_id] = drafts
        return True

    def revert_allocate_generation(self, req: LlmRequest) -> None:
        """KVCacheManagerV2.revert_allocate_generation"""
        drafts = self._allocated_draft_lens.pop(req.py_request_id, None)
        cache = self.kv_cache_map.get(req.py_request_id)
        if drafts is not None and cache is not None and cache.is_active:
            cache.resize(cache.capacity - 1 - drafts)

    def suspend_request(self, req: LlmRequest) -> None:
        """KVCacheManagerV2.suspend_request: the index slot is kept"""
        cache = self.kv_cache_map.get(req.py_request_id)
        if cache is not None and cache.is_active:
            cache.suspend()

    def resume_request(self, req: LlmRequest) -> bool:
        """KVCacheManagerV2.resume_request"""
        cache = self.kv_cache_map.get(req.py_request_id)
        return cache is not None and self._resume_and_restore(req.py_request_id, cache)

    def _resume_and_restore(self, req_id: int, kv_cache: KVCacheHandle) -> bool:
        """KVCacheManagerV2._resume_and_restore"""
        if kv_cache.is_active:
            return True
        if not kv_cache.resume(self._stream.cuda_stream):
            return False
        self._restore_page_index_bufs(req_id, kv_cache)
        return True

    def _restore_page_index_bufs(self, request_id: int, kv_cache: KVCacheHandle) -> None:
        """KVCacheManagerV2._restore_page_index_bufs"""
        index = self.index_mapper.get_index(request_id)
        kv_cache.set_base_page_index_buf(0, 0, self.host_kv_cache_block_offsets[0, index, 0])

    def prepare_resources(self, scheduled_batch: Any) -> None:
        """KVCacheManagerV2.prepare_resources: nothing for the main manager"""

    def update_context_resources(self, scheduled_batch: Any) -> None:
        """KVCacheManagerV2.update_context_resources"""
        for req in scheduled_batch.context_requests:
            cache = self.kv_cache_map.get(req.py_request_id)
            if cache is None or not cache.is_active:
                continue
            if not self.enable_block_reuse:
                cache.resize(None, req.context_current_position)
            self.try_commit_blocks(req)

    def try_commit_blocks(self, request: LlmRequest) -> None:
        """KVCacheManagerV2.try_commit_blocks"""
        cache = self.kv_cache_map.get(request.py_request_id)
        if not self.enable_block_reuse or request.is_dummy_request or cache is None:
            return
        end = request.context_current_position
        if end > cache.num_committed_tokens:
            cache.commit(request.get_tokens(0)[cache.num_committed_tokens : end])
        if request.context_remaining_length == 0:
            cache.stop_committing()

    def update_resources(
        self, scheduled_batch: Any, attn_metadata: Any = None, kv_cache_dtype_byte_size=None
    ) -> None:
        """KVCacheManagerV2.update_resources: gives rejected draft slots back"""
        for req in scheduled_batch.generation_requests:
            cache = self.kv_cache_map.get(req.py_request_id)
            if cache is None or not cache.is_active:
                continue
            accepted = req.py_num_accepted_draft_tokens
            width = self._allocated_draft_lens.get(req.py_request_id, req.py_rewind_len + accepted)
            done = req.state in (LlmRequestState.GENERATION_COMPLETE, LlmRequestState.CONTEXT_INIT)
            rewound = None if done else cache.capacity - max(width - accepted, 0)
            cache.resize(rewound, req.max_beam_num_tokens - 1)
            self._allocated_draft_lens.pop(req.py_request_id, None)

    def copy_batch_block_offsets(
        self, dst_tensor, request_ids, beam_width, num_contexts, num_seqs, max_blocks=None
    ) -> None:
        """KVCacheManagerV2.copy_batch_block_offsets"""
        index = self.index_mapper.get_copy_index(request_ids, num_contexts, beam_width)
        assert index.shape[0] == num_seqs
        rows = self.host_kv_cache_block_offsets[:, index.long()]
        dst_tensor[:, :num_seqs].copy_(rows.to(CONFIG.device))

    def get_num_free_blocks(self) -> int:
        """KVCacheManagerV2.get_num_free_blocks: pool size, while empty"""
        assert not set(self.kv_cache_map) - _RESERVED_REQUEST_IDS, "only when empty"
        return self.impl.num_slots

    def _compute_shared_block_table(
        self, pool_id: int, scale: int, copy_idx: torch.Tensor
    ) -> torch.Tensor:
        """deepseek_v4/cache_manager.py @0393e46e _compute_shared_block_table"""
        base = self.host_kv_cache_block_offsets[pool_id, copy_idx.long(), 0, :]
        return torch.where(base == BAD_PAGE_INDEX, BAD_PAGE_INDEX, base * scale)

    def get_max_resource_count(self) -> int:
        """KVCacheManagerV2.get_max_resource_count"""
        return 1

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """KVCacheManagerV2.get_needed_resource_to_completion"""
        return 0

    def shutdown(self) -> None:
        """KVCacheManagerV2.shutdown"""
        for cache in self.kv_cache_map.values():
            cache.close()
        self.kv_cache_map.clear()
