# SPDX-License-Identifier: Apache-2.0
"""Registers CPU versions of the torch.ops.trtllm.* operators that the indexer calls.

Upstream they are C++ (cpp/tensorrt_llm/thop) or CuTe DSL; names, argument names and order come
from the call sites in dsa/indexer.py @0b228a79 and modules/top_k.py @099929cb. Registered once
per process: operator names are global.
"""

import sys

import torch


def _top(scores: torch.Tensor, end: int, out: torch.Tensor, top_k: int) -> None:
    """Best `top_k` of the first `end` columns, padded with -1, in no useful order.

    Ties go to the lower column (upstream does not say); NaN ranks lowest.
    """
    out.fill_(-1)
    if end <= 0:
        return
    if end <= top_k:
        picked = torch.arange(end, device=scores.device)
    else:
        row = torch.nan_to_num(scores[:end], nan=float("-inf"), posinf=float("inf"))
        picked = torch.sort(row, descending=True, stable=True).indices[:top_k].flip(0)
    out[: picked.numel()] = picked.to(torch.int32)


def visible(length: int, next_n: int, j: int, ratio: int) -> int:
    """Columns that row j of next_n may see: C++ division truncates, so clamp first."""
    return max(0, length - next_n + j + 1) // max(1, ratio)


def indexer_topk_decode(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    indices: torch.Tensor,
    next_n: int,
    index_topk: int = 2048,
    pre_idx: torch.Tensor | None = None,
    heuristic_scratch: torch.Tensor | None = None,
    compress_ratio: int = 1,
    radix_aux_indices: torch.Tensor | None = None,
    radix_aux_logits: torch.Tensor | None = None,
) -> None:
    """trtllm::indexer_topk_decode: `seq_lens` are raw tokens, the kernel divides"""
    rows = logits.shape[0]
    assert seq_lens.shape[0] * next_n == rows, "one length per request"
    assert indices.dtype == torch.int32
    assert tuple(indices.shape) == (rows, index_topk)
    _config().record("topk_decode", rows=rows, next_n=next_n, ratio=compress_ratio)
    for row in range(rows):
        end = visible(int(seq_lens[row // next_n]), next_n, row % next_n, compress_ratio)
        _top(logits[row], min(end, logits.shape[1]), indices[row], index_topk)


def cute_dsl_indexer_topk_decode(
    logits: torch.Tensor, seq_lens: torch.Tensor, indices: torch.Tensor, top_k: int, next_n: int
) -> None:
    """trtllm::cute_dsl_indexer_topk_decode: lengths are score columns"""
    _config().record("cute_topk_decode", rows=logits.shape[0], next_n=next_n)
    for row in range(logits.shape[0]):
        end = visible(int(seq_lens[row // next_n]), next_n, row % next_n, 1)
        _top(logits[row], end, indices[row], top_k)


def indexer_topk_prefill(
    logits: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    indices: torch.Tensor,
    index_topk: int = 2048,
) -> None:
    """trtllm::indexer_topk_prefill: indices relative to the row's start"""
    for row in range(logits.shape[0]):
        first, last = int(row_starts[row]), int(row_ends[row])
        _top(logits[row, first:last], last - first, indices[row], index_topk)


def indexer_k_cache_scatter_op(
    k_fp8: torch.Tensor,
    k_scale: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping_fp8: torch.Tensor,
    slot_mapping_scale: torch.Tensor,
    num_tokens: int,
) -> None:
    """trtllm::indexer_k_cache_scatter_op: flat byte offsets into the cache view"""
    flat = k_cache.view(-1)
    data = k_fp8.contiguous().view(torch.uint8).view(num_tokens, -1)
    scale = k_scale.contiguous().view(torch.uint8).view(num_tokens, -1)
    for values, mapping in ((data, slot_mapping_fp8), (scale, slot_mapping_scale)):
        lanes = torch.arange(values.shape[1], device=flat.device)
        flat[(mapping[:num_tokens, None] + lanes).reshape(-1)] = values.reshape(-1)


def indexer_k_cache_gather_op(
    k_cache: torch.Tensor,
    slot_mapping_fp8: torch.Tensor,
    slot_mapping_scale: torch.Tensor,
    k_token_start: int,
    num_k_tokens: int,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """trtllm::indexer_k_cache_gather_op: keys and scales of one prefill chunk"""
    flat = k_cache.view(-1)
    rows = slice(k_token_start, k_token_start + num_k_tokens)
    lanes = torch.arange(head_dim, device=flat.device)
    data = flat[slot_mapping_fp8[rows, None] + lanes].view(torch.float8_e4m3fn)
    scale = flat[slot_mapping_scale[rows, None] + lanes[:4]].view(torch.float32)
    return data, scale


def cute_dsl_fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor,
    max_context_len: int,
) -> torch.Tensor:
    """trtllm::cute_dsl_fp8_paged_mqa_logits: 1-D lengths, (B, 1) schedule, row stride 256"""
    gemm = sys.modules["tensorrt_llm.deep_gemm"]
    assert context_lens.dim() == 1
    gemm._check_schedule(schedule_meta, q.shape[0])
    _config().record("cute_paged_logits", batch=q.shape[0], next_n=q.shape[1])
    stride = -(-max_context_len // 256) * 256
    return gemm._paged_logits(
        q.float(), kv_cache, weights, context_lens, block_table, max_context_len, False, stride
    )


def cute_dsl_fp4_paged_mqa_logits(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor,
    max_context_len: int,
) -> torch.Tensor:
    """trtllm::cute_dsl_fp4_paged_mqa_logits: uint8 codes and int32 scales apart"""
    gemm = sys.modules["tensorrt_llm.deep_gemm"]
    assert q.dtype == torch.uint8
    assert context_lens.dim() == 1
    gemm._check_schedule(schedule_meta, q.shape[0])
    _config().record("cute_paged_logits", batch=q.shape[0], next_n=q.shape[1])
    query = gemm.unpack_fp4(q, q_scale.contiguous().view(torch.uint8).view(*q.shape[:3], 4))
    stride = -(-max_context_len // 256) * 256
    return gemm._paged_logits(
        query, kv_cache, weights, context_lens, block_table, max_context_len, True, stride
    )


def _config():
    return sys.modules["tensorrt_llm._double"].CONFIG


_LIBRARY = None
_MUTATED = {
    indexer_topk_decode: ["indices"],
    cute_dsl_indexer_topk_decode: ["indices"],
    indexer_topk_prefill: ["indices"],
    indexer_k_cache_scatter_op: ["k_cache"],
    indexer_k_cache_gather_op: [],
    cute_dsl_fp8_paged_mqa_logits: [],
    cute_dsl_fp4_paged_mqa_logits: [],
}


def register() -> None:
    """Defines every operator under torch.ops.trtllm, once."""
    global _LIBRARY
    if hasattr(torch.ops.trtllm, "indexer_topk_decode"):
        return
    _LIBRARY = torch.library.Library("trtllm", "FRAGMENT")
    for function, mutated in _MUTATED.items():
        schema = torch.library.infer_schema(function, mutates_args=mutated)
        _LIBRARY.define(function.__name__ + schema)
        _LIBRARY.impl(function.__name__, function, "CompositeExplicitAutograd")
