# SPDX-License-Identifier: Apache-2.0
"""Mirrors the paged-logits entry points of tensorrt_llm/deep_gemm (used by dsa/indexer.py
@0b228a79). Arithmetic: score = sum_h weight_h * relu(q_h . k) * key_scale, fp32.

The schedule walk follows the public DeepGEMM kernels as remembered, not as re-read: it is
enough to notice a schedule of another batch or another next_n.
"""

from __future__ import annotations

import torch
from tensorrt_llm._double import CONFIG

SPLIT_BLOCKS = 4  # schedule unit: 4 blocks of 64 columns
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
POISON = torch.tensor([float("nan"), float("inf"), 3.0e38, -float("inf"), 1.0e30])


def get_num_sms() -> int:
    """deep_gemm.get_num_sms"""
    return CONFIG.num_sms


def poisoned(rows: int, columns: int, row_stride: int | None = None) -> torch.Tensor:
    """An "uninitialised" logits arena: whatever reads past a row's length meets nonsense."""
    stride = row_stride or columns
    pattern = POISON[torch.arange(rows * stride) % POISON.numel()]
    return pattern.view(rows, stride)[:, :columns].to(CONFIG.device)


def _atoms(next_n: int) -> int:
    """Schedule rows per request: the 2-D lengths tensor tells the builder next_n."""
    return 1 if next_n == 1 else (next_n + 1) // 2


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int
) -> torch.Tensor:
    """deep_gemm.get_paged_mqa_logits_metadata: int32 [num_sms + 1, 2] of (row, split) starts"""
    assert context_lens.dim() == 2, "context_lens must be 2-D"
    assert context_lens.dtype == torch.int32
    CONFIG.record("schedule", batch=context_lens.shape[0], next_n=context_lens.shape[1])
    lens = context_lens[:, -1].repeat_interleave(_atoms(context_lens.shape[1])).tolist()
    splits = [-(-max(0, n) // (block_kv * SPLIT_BLOCKS)) for n in lens]
    starts = [(row, s) for row, count in enumerate(splits) for s in range(count)]
    rows = []
    share, extra = divmod(len(starts), num_sms)
    for sm in range(num_sms + 1):
        first = sm * share + min(sm, extra)
        rows.append(starts[first] if first < len(starts) else (len(lens), 0))
    return torch.tensor(rows, dtype=torch.int32, device=context_lens.device)


def _check_schedule(schedule: torch.Tensor, rows: int) -> None:
    assert schedule.dtype == torch.int32
    assert tuple(schedule.shape) == (CONFIG.num_sms + 1, 2)
    assert schedule[-1].tolist() == [rows, 0], (
        f"schedule was built for {int(schedule[-1, 0])} rows, the launch has {rows}"
    )


def split_page(page_bytes: torch.Tensor, slots: int, data_bytes: int) -> tuple:
    """Planar page: every slot's data first, then every slot's 4-byte scale."""
    flat = page_bytes.reshape(page_bytes.shape[0], -1)
    data = flat[:, : slots * data_bytes].reshape(-1, slots, data_bytes)
    scales = flat[:, slots * data_bytes :].reshape(-1, slots, 4)
    return data, scales


def decode_keys(pages: torch.Tensor, fp4: bool) -> torch.Tensor:
    """uint8 [pages, slots, 1, bytes] -> fp32 keys [pages, slots, 128], scale applied"""
    slots, per_slot = pages.shape[1], pages.shape[3]
    data, scales = split_page(pages, slots, per_slot - 4)
    if not fp4:
        values = data.contiguous().view(torch.float8_e4m3fn).float()
        return values * scales.contiguous().view(torch.float32)
    return unpack_fp4(data, scales)


def unpack_fp4(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Two E2M1 codes a byte, low nibble first; one UE8M0 exponent per 32 values."""
    data = data.contiguous().view(torch.uint8).long()
    codes = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)
    values = E2M1.to(data.device)[codes & 7] * (1 - 2 * (codes >> 3)).float()
    exponents = scales.contiguous().view(torch.uint8).float() - 127.0
    return values * torch.exp2(exponents).repeat_interleave(32, dim=-1)


def _paged_logits(
    q: torch.Tensor,  # fp32 [B, next_n, H, 128]
    kv: torch.Tensor,
    weights: torch.Tensor,
    lens: torch.Tensor,  # int32 [B] or [B, next_n]
    block_table: torch.Tensor,
    max_len: int,
    fp4: bool,
    row_stride: int | None = None,
) -> torch.Tensor:
    batch, next_n, heads, _ = q.shape
    slots = kv.shape[1]
    assert kv.dtype == torch.uint8
    assert kv.dim() == 4
    assert kv.shape[2] == 1
    assert block_table.dtype == torch.int32
    assert block_table.shape[0] == batch
    assert weights.dtype == torch.float32
    assert tuple(weights.shape) == (batch * next_n, heads)
    out = poisoned(batch * next_n, max_len, row_stride)
    for b in range(batch):
        length = int(lens[b, 0] if lens.dim() == 2 else lens[b])
        if lens.dim() == 2:
            assert (lens[b] == length).all(), "all columns of a request hold one length"
        if length <= 0:
            continue
        assert length <= max_len, f"length {length} above the logits width {max_len}"
        pages = -(-length // slots)
        assert pages <= block_table.shape[1], "length needs more pages than the table has"
        ids = block_table[b, :pages].long()
        assert int(ids.min()) >= 0, "negative page id"
        assert int(ids.max()) < kv.shape[0], "page id outside the pool"
        keys = decode_keys(kv[ids], fp4).reshape(-1, 128)[:length]
        scores = torch.einsum("nhd,kd->nhk", q[b], keys).relu()
        mixed = torch.einsum("nhk,nh->nk", scores, weights[b * next_n : (b + 1) * next_n])
        out[b * next_n : (b + 1) * next_n, :length] = mixed
    return out


def fp8_paged_mqa_logits(
    q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len
) -> torch.Tensor:
    """deep_gemm.fp8_paged_mqa_logits: fp32 [B * next_n, max_context_len], exact row width"""
    assert q.dtype == torch.float8_e4m3fn
    assert context_lens.dtype == torch.int32
    batch, next_n = q.shape[:2]
    if CONFIG.body == "split":
        assert tuple(context_lens.shape) == (batch, next_n), "2-D context_lens expected"
        assert context_lens.is_contiguous()
        _check_schedule(schedule_meta, batch * _atoms(next_n))
    CONFIG.record("paged_logits", batch=batch, next_n=next_n, max_len=max_context_len)
    return _paged_logits(
        q.float(), kv_cache, weights, context_lens, block_table, max_context_len, False
    )


def fp8_fp4_paged_mqa_logits(
    q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len
) -> torch.Tensor:
    """deep_gemm.fp8_fp4_paged_mqa_logits: q is (packed int8, packed int32 scales [B, n, H])"""
    codes, scales = q
    batch, next_n, heads, _ = codes.shape
    assert tuple(scales.shape) == (batch, next_n, heads)
    assert scales.dtype == torch.int32
    _check_schedule(schedule_meta, batch * _atoms(next_n))
    query = unpack_fp4(codes, scales.contiguous().view(torch.uint8).view(batch, next_n, heads, 4))
    CONFIG.record("paged_logits", batch=batch, next_n=next_n, max_len=max_context_len)
    return _paged_logits(query, kv_cache, weights, context_lens, block_table, max_context_len, True)


def _ragged_logits(query, keys, weights, starts, ends, clean_logits) -> torch.Tensor:
    scores = torch.einsum("thd,kd->thk", query, keys).relu()
    mixed = torch.einsum("thk,th->tk", scores, weights)
    columns = torch.arange(keys.shape[0], device=keys.device)
    inside = (columns >= starts[:, None]) & (columns < ends[:, None])
    fill = torch.full_like(mixed, float("-inf")) if clean_logits else poisoned(*mixed.shape)
    return torch.where(inside, mixed, fill)


def fp8_mqa_logits(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits=True) -> torch.Tensor:
    """deep_gemm.fp8_mqa_logits: prefill, one gathered key list, row window [ks, ke)"""
    keys = kv[0].float() * kv[1].reshape(-1, 1)
    return _ragged_logits(q.float(), keys, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits)


def fp8_fp4_mqa_logits(
    q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits=True
) -> torch.Tensor:
    """deep_gemm.fp8_fp4_mqa_logits: prefill with packed keys"""
    codes, scales = q
    query = unpack_fp4(codes, scales.contiguous().view(torch.uint8).view(*scales.shape, 4))
    keys = unpack_fp4(kv[0], kv[1].contiguous().view(torch.uint8).view(-1, 4))
    return _ragged_logits(query, keys, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits)
