# SPDX-License-Identifier: Apache-2.0
"""What SPIN leaves to TensorRT-LLM's dense indexer, and why: never guess.

Reasons are short names, fit for a counter's label. Attributes that only some releases have are read
with the value that stands for their absence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spin_trtllm import native

KEY_BYTES = {torch.float8_e4m3fn: native.KEY_BYTES, torch.int8: 68}  # of a slot: fp8, fp4
FP8 = torch.float8_e4m3fn


def rows_of(metadata: Any) -> int:
    """Rows a generation request has this step: drafts + 1; 0 when that is not one number."""
    tokens = metadata.num_tokens - metadata.num_ctx_tokens
    requests = metadata.num_generations
    return 0 if tokens % requests else int(tokens // requests)


def step_obstacle(metadata: Any, *, ratio: int, rows: int, sequences: int) -> str | None:
    """Why no layer of this step can run SPIN, by what the host knows in `prepare`; None if it can.

    Args:
        metadata: `DSAtrtllmAttentionMetadata`, after its own `prepare`.
        ratio: raw tokens a slot; rows, sequences: what the state has room for.
    """
    if metadata.num_generations == 0:
        return "prefill"
    if metadata.num_generations > sequences:
        return "too_many_sequences"
    next_n = rows_of(metadata)
    if next_n == 0 or getattr(metadata, "is_ragged_verify", False):
        return "ragged_drafts"
    if next_n > rows:
        return "too_many_drafts"
    if metadata.skip_indexer_for_gen_reqs:
        return "short_sequences"
    if getattr(metadata, "enable_helix", False):
        return "context_parallel"
    if getattr(metadata, "beam_width", 1) != 1:
        return "beam_search"
    if ratio == 1 and metadata.max_draft_tokens > 0:
        return "draft_layers_with_indexer"  # they would come between the layers of one step
    return None


def layer_obstacle(indexer: Any, metadata: Any, query: Tensor, top_k: int) -> str | None:
    """Why one indexer runs dense although its step could run SPIN; None if it need not.

    Args:
        indexer: `Indexer` or `DeepseekV4Indexer`.
        query: `q_fp8` of `sparse_attn_indexer`.
        top_k: `K` of the state.
    """
    if getattr(metadata, "in_mtp_draft_loop", False):
        return "draft_loop"
    top = getattr(indexer, "top_k", None)
    if not isinstance(top, torch.nn.Module):
        return "no_top_k_module"
    if getattr(indexer, "_enable_heuristic_topk", False) or getattr(top, "needs_gvr_prior", False):
        return "heuristic_top_k"
    if indexer.index_topk != top_k:
        return "top_k"
    if query.dtype not in KEY_BYTES:
        return "query_dtype"
    return None


def cache_obstacle(keys: Tensor, query: Tensor, page_slots: int) -> str | None:
    """Why a layer's key cache is not what was expected.

    Args:
        keys: `get_indexer_k_cache_buffers(layer)`, uint8 `[pages, page_slots, 1, bytes]`.
    """
    expected = (page_slots, 1, KEY_BYTES[query.dtype])
    if keys.dtype != torch.uint8 or keys.dim() != 4 or tuple(keys.shape[1:]) != expected:
        return "key_cache_layout"
    return None


def fused_obstacle(keys: Tensor, query: Tensor, next_n: int, rows: int) -> str | None:
    """Why this package's own scoring kernel cannot take a layer that the host's kernels can."""
    if query.dtype != FP8:
        return "query_dtype"
    if keys.shape[1] not in (32, 64):
        return "page_size"
    if next_n != rows:
        return "fewer_drafts"
    return None if keys.is_contiguous() else "strided_key_cache"
