# SPDX-License-Identifier: Apache-2.0
"""Stands for tensorrt_llm/runtime/kv_cache_manager_v2 (the page storage under the managers).

Only behaviour that is visible through KVCacheManagerV2 @00043967 is modelled: base page ids in a
host buffer, capacity, commit and prefix reuse by full blocks, suspend and resume with new ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensorrt_llm._double import CONFIG

BAD_PAGE_INDEX = -1  # runtime/kv_cache_manager_v2/_common.py BAD_PAGE_INDEX


class PagePool:
    """One pool group: `num_slots` base slots; a slot holds one page of every layer.

    page id = base id * scale for all layers; layer l's view starts l pages later, as
    get_mem_pool_base_address(..., PageIndexMode.SHARED) gives per-layer base pointers.
    """

    def __init__(
        self, num_slots: int, scale: int, page_bytes: int, separate_layers: bool = False
    ) -> None:
        self.scale = scale
        self.page_bytes = page_bytes
        self.num_slots = num_slots
        self.separate_layers = separate_layers  # V1: one tensor per layer, page id = base id
        shape = (scale, num_slots) if separate_layers else (num_slots, scale)
        self.storage = torch.zeros(*shape, page_bytes, dtype=torch.uint8, device=CONFIG.device)
        self.free = list(range(num_slots - 1, -1, -1))
        self.refs = [0] * num_slots
        self.blocks: dict[tuple, int] = {}  # committed prefix -> base id
        self.owner: dict[int, tuple] = {}

    def layer_view(self, layer: int, slots: int) -> torch.Tensor:
        """A fresh tensor over a fixed address: uint8 [page ids, slots, bytes per slot]"""
        if self.separate_layers:
            return self.storage[layer].view(self.num_slots, slots, -1)
        upper = self.num_slots * self.scale - layer
        flat = self.storage.view(-1)[layer * self.page_bytes :]
        return flat.view(upper, slots, self.page_bytes // slots)

    def allocate(self) -> int | None:
        if not self.free:
            self.evict()
        if not self.free:
            return None
        base = self.free.pop()
        self.refs[base] = 1
        return base

    def evict(self) -> None:
        """Drops committed blocks that nothing holds (the radix tree's own reference)."""
        for key, base in list(self.blocks.items()):
            if self.refs[base] == 0:
                del self.blocks[key]
                del self.owner[base]
                self._release_slot(base)

    def drop(self, base: int) -> None:
        self.refs[base] -= 1
        if self.refs[base] == 0 and base not in self.owner:
            self._release_slot(base)

    def _release_slot(self, base: int) -> None:
        if CONFIG.poison_free_pages:
            self.bytes_of(base).fill_(0xFF)
        self.free.insert(0, base)  # reused late, so page ids change over a resume

    def bytes_of(self, base: int) -> torch.Tensor:
        return self.storage[:, base] if self.separate_layers else self.storage[base]


class KVCacheHandle:
    """runtime/kv_cache_manager_v2 _KVCache: the calls that KVCacheManagerV2 makes on it"""

    def __init__(
        self, pool: PagePool, tokens_per_block: int, tokens: Sequence[int] | None, scope: object
    ) -> None:
        self.pool = pool
        self.tokens_per_block = tokens_per_block
        self.scope = scope
        self.pages: list[int] = []
        self.capacity = 0
        self.history_length = 0
        self.is_active = False
        self.committing = True
        self.enable_swa_scratch_reuse = True
        self.cuda_stream = None
        self.committed: list[int] = []
        self._buffer: torch.Tensor | None = None
        self._host: list[torch.Tensor] | None = None
        for block in range(len(tokens or []) // tokens_per_block):
            key = (scope, tuple(tokens[: (block + 1) * tokens_per_block]))
            base = pool.blocks.get(key)
            if base is None:
                break
            pool.refs[base] += 1
            self.pages.append(base)
            self.committed = list(key[1])
        self.capacity = self.history_length = len(self.committed)

    num_committed_tokens = property(lambda self: len(self.committed))
    num_blocks = property(lambda self: len(self.pages))

    def set_base_page_index_buf(self, beam: int, pool_idx: int, buf: torch.Tensor | None) -> None:
        """_KVCache.set_base_page_index_buf: page ids are mirrored into a host row, in place"""
        self._buffer = buf
        self._mirror()

    def get_base_page_indices(self, pool_idx: int) -> torch.Tensor:
        """_KVCache.get_base_page_indices"""
        return torch.tensor(self.pages, dtype=torch.int32)

    def _mirror(self) -> None:
        if self._buffer is None:
            return
        self._buffer.fill_(BAD_PAGE_INDEX)
        if self.is_active:
            self._buffer[: len(self.pages)] = torch.tensor(self.pages, dtype=torch.int32)

    def resume(self, cuda_stream: object) -> bool:
        """_KVCache.resume: pages come back from the host tier under other ids"""
        if self._host is not None:
            fresh = []
            for saved in self._host:
                base = self.pool.allocate()
                if base is None:
                    for got in fresh:
                        self.pool.drop(got)
                    return False
                self.pool.bytes_of(base).copy_(saved)
                fresh.append(base)
            self.pages, self._host = fresh, None
        self.is_active = True
        self._mirror()
        return True

    def suspend(self) -> None:
        """_KVCache.suspend: page contents move to the host tier; the host row is disconnected"""
        self._host = [self.pool.bytes_of(base).clone() for base in self.pages]
        for base in self.pages:
            self.pool.drop(base)
        self.pages = []
        self.is_active = False
        self._buffer = None  # clears base_page_index_buf; the row keeps its stale ids

    def resize(self, capacity: int | None, history_length: int | None = None) -> bool:
        """_KVCache.resize: grows or shrinks to `capacity` tokens; all or nothing"""
        if capacity is not None:
            need = -(-capacity // self.tokens_per_block)
            fresh: list[int] = []
            while len(self.pages) + len(fresh) < need:
                base = self.pool.allocate()
                if base is None:
                    for got in fresh:
                        self.pool.drop(got)
                    return False
                fresh.append(base)
            self.pages += fresh
            while len(self.pages) > need:
                self.pool.drop(self.pages.pop())
            self.capacity = capacity
            self._mirror()
        if history_length is not None:
            self.history_length = history_length
        return True

    def commit(self, tokens: Sequence[int]) -> None:
        """_KVCache.commit: full blocks enter the radix tree; equal blocks already there win"""
        if not self.committing:
            return
        size = self.tokens_per_block
        done = self.committed + list(tokens)
        for block in range(len(self.committed) // size, len(done) // size):
            key = (self.scope, tuple(done[: (block + 1) * size]))
            base = self.pages[block]
            if key not in self.pool.blocks and base not in self.pool.owner:
                self.pool.blocks[key] = base
                self.pool.owner[base] = key
        self.committed = done

    def stop_committing(self) -> None:
        """_KVCache.stop_committing"""
        self.committing = False

    def close(self) -> None:
        """_KVCache.close"""
        for base in self.pages:
            self.pool.drop(base)
        self.pages, self._host, self.is_active = [], None, False
        self._buffer = None
