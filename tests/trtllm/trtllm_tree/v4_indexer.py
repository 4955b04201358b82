# SPDX-License-Identifier: Apache-2.0
"""Mirrors sparse/deepseek_v4/indexer.py @4fd977cc and compressor.py @15f98f48.

Test seam: `Compressor.key_of(layer, request_id, slot) -> fp32 [128]` gives a slot's raw key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensorrt_llm._double import CONFIG
from tensorrt_llm._double_quant import quantize_fp4, quantize_fp8, write_slots

from ..dsa.indexer import Indexer


class Compressor:
    """deepseek_v4/compressor.py Compressor(is_indexer=True): pools keys, scatters full slots"""

    key_of: Callable[[int, int, int], torch.Tensor]

    def __init__(self, layer_idx: int, compress_ratio: int, use_fp4: bool) -> None:
        self.layer_idx = layer_idx
        self.compress_ratio = compress_ratio
        self.use_fp4 = use_fp4

    def __call__(self, hidden_states: torch.Tensor, metadata: Any) -> tuple:
        """Compressor.forward @15f98f48.

        Lengths and table are the metadata's device tensors: whoever changes
        indexer_k_cache_block_offsets in place redirects these writes. A step without a new slot
        gives empty tensors; `compressor_none` gives (None, None), which the indexer still accepts.
        """
        ratio = self.compress_ratio
        if CONFIG.compressor_none and metadata.num_total_compressed_tokens[ratio] == 0:
            return None, None
        cache = metadata.kv_cache_manager.get_indexer_k_cache_buffers(self.layer_idx)
        slots = cache.shape[1]
        new, pages, inside = [], [], []
        past, count = metadata.past_kv_lens_cuda[ratio], metadata.new_comp_kv_lens_cuda[ratio]
        for row, request_id in enumerate(metadata.request_ids):
            start = int(past[row])
            for slot in range(start, start + int(count[row])):
                new.append(self.key_of(self.layer_idx, request_id, slot))
                pages.append(int(metadata.indexer_k_cache_block_offsets[row, slot // slots]))
                inside.append(slot % slots)
        if not new:
            empty = torch.zeros(1, 128, device=cache.device)
            keys, scales = (quantize_fp4 if self.use_fp4 else quantize_fp8)(empty)
            return keys[:0], scales[:0]
        return write_slots(cache, pages, inside, torch.stack(new), self.use_fp4)


class DeepseekV4Indexer(Indexer):
    """indexer.py DeepseekV4Indexer: own compressor, inherits sparse_attn_indexer"""

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
        super().__init__(
            quant_config,
            pos_embd_params,
            mla_params,
            skip_create_weights_in_init,
            sparse_params,
            dtype,
            compress_ratio,
            layer_idx,
            aux_stream,
        )
        self.indexer_k_dtype = sparse_params.indexer_k_dtype
        self.compressor = Compressor(layer_idx, compress_ratio, self.use_fp4)

    def _update_k_cache(self, k_fp8, k_scale, metadata) -> None:
        """DeepseekV4Indexer._update_k_cache: no-op, the compressor has written"""

    def precompute_aux(self, hidden_states, metadata, start_event=None) -> tuple | None:
        """DeepseekV4Indexer.precompute_aux: None without multi-stream mode"""
        return None

    def _run_serial_indexer_prepare(self, qr, hidden_states, metadata, position_ids) -> tuple:
        """DeepseekV4Indexer._run_serial_indexer_prepare"""
        q, weights = self.projection(self, hidden_states, position_ids)[:2]
        q_fp8, q_scale, weights = self._quantize(q, weights)
        k_fp8, k_scale = self.compressor(hidden_states, metadata)
        if k_fp8 is not None and not self.use_fp4:
            self._update_k_cache(k_fp8, k_scale, metadata)
        return q_fp8, q_scale, k_fp8, k_scale, weights

    def forward(self, qr, hidden_states, metadata, position_ids, pre_aux=None) -> torch.Tensor:
        """DeepseekV4Indexer.forward: all -1 rows when nothing was ever compressed this step"""
        assert pre_aux is None
        q_fp8, q_scale, k_fp8, k_scale, weights = self._run_serial_indexer_prepare(
            qr, hidden_states, metadata, position_ids
        )
        if k_fp8 is None:
            return metadata.empty_topk_indices_buffer[: hidden_states.shape[0]]
        return self.sparse_attn_indexer(
            metadata, hidden_states, q_fp8, k_fp8, k_scale, weights, q_scale=q_scale
        )
