# SPDX-License-Identifier: Apache-2.0
"""The indexer's scores: on plain keys (`score_slots`), and on a paged fp8 cache (`score_pages`)."""

from __future__ import annotations

import torch
from torch import Tensor

from spin_trtllm import native
from spin_trtllm.errors import refuse
from spin_trtllm.geometry import count_blocks
from spin_trtllm.ops.checks import check_devices, check_geometry, check_tensor, on_cuda, row_stride
from spin_trtllm.reference import score_slots

__all__ = ["KEY_DIM", "decode_pages", "score_pages", "score_slots"]

KEY_DIM = native.KEY_DIM
ARITHMETIC = {
    "exact": native.SCORE_EXACT,
    "fast": native.SCORE_FAST,
    "portable": native.SCORE_PORTABLE,
}


def score_pages(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    page_table: Tensor,
    visible_slots: Tensor,
    block_list: Tensor,
    *,
    block_size_slots: int,
    arithmetic: str = "exact",
) -> Tensor:
    """`z = scale * sum_h w[h] * relu(q[h] . k)` of the listed blocks, in compact columns.

    Args:
        query: e4m3 `[S, R, H, 128]`; weights: fp32 `[S, R, H]`, the query's scale included.
        pages: uint8 `[pages, page_slots * 132]`: a page's keys (e4m3), then its fp32 scales.
        page_table: int32 `[S, pages a sequence]`.
        visible_slots: int32 `[S]`, what the last row of each sequence sees.
        block_list: int32 `[S, B]`, blocks ascending, then -1.
        arithmetic: `exact`, `fast` (SM90's fp8 tensor cores) or `portable`; CPUs know one.

    Returns:
        fp32 `[S, R, B * block_size_slots]`: column `c` is slot `block_list[c // b] * b + c % b`;
        `-inf` where there is no visible slot. Every row is scored on what the last one sees.
    """
    check_tensor("query", query, (torch.float8_e4m3fn,), ("sequences", "rows", "heads", KEY_DIM))
    sequences, rows, heads, _ = query.shape
    check_tensor("weights", weights, (torch.float32,), (sequences, rows, heads))
    check_tensor("pages", pages, (torch.uint8,), ("pages", "bytes"))
    check_tensor("page_table", page_table, (torch.int32,), (sequences, "pages"))
    check_tensor("visible_slots", visible_slots, (torch.int32,), (sequences,))
    check_tensor("block_list", block_list, (torch.int32,), (sequences, "blocks"))
    check_devices({"query": query, "weights": weights, "pages": pages, "page_table": page_table})
    check_geometry(1, block_size_slots)
    if pages.shape[1] not in (32 * native.KEY_BYTES, 64 * native.KEY_BYTES):
        refuse("pages", list(pages.shape), "rows of 32 or 64 slots of 132 bytes")
    if arithmetic not in ARITHMETIC:
        refuse("arithmetic", arithmetic, ", ".join(ARITHMETIC))
    tensors = (query, weights, pages, page_table, visible_slots, block_list)
    return _score(*tensors, block_size_slots, arithmetic)


def decode_pages(pages: Tensor) -> Tensor:
    """Keys fp32 `[pages, slots, 128]` of pages uint8 `[pages, slots * 132]`, scales applied."""
    slots = pages.shape[1] // native.KEY_BYTES
    keys, scales = pages.split([slots * KEY_DIM, slots * 4], dim=1)
    decoded = keys.contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (slots, KEY_DIM))
    return decoded * scales.contiguous().view(torch.float32).unsqueeze(-1)


@torch.library.custom_op("spin::score_pages", mutates_args=())
def _score(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    page_table: Tensor,
    visible_slots: Tensor,
    block_list: Tensor,
    block_size_slots: int,
    arithmetic: str,
) -> Tensor:
    run = _launch if on_cuda(query) else _compute
    return run(
        query,
        weights,
        pages,
        page_table,
        visible_slots,
        block_list,
        block_size_slots,
        ARITHMETIC[arithmetic],
    )


@_score.register_fake
def _(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    page_table: Tensor,
    visible_slots: Tensor,
    block_list: Tensor,
    block_size_slots: int,
    arithmetic: str,
) -> Tensor:
    return weights.new_empty(*query.shape[:2], block_list.shape[1] * block_size_slots)


def _compute(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    page_table: Tensor,
    visible_slots: Tensor,
    block_list: Tensor,
    block_size_slots: int,
    arithmetic: int,
) -> Tensor:
    page_slots = pages.shape[1] // native.KEY_BYTES
    within = torch.arange(block_size_slots, device=query.device)
    slots = (block_list.long().unsqueeze(-1) * block_size_slots + within).flatten(1)
    scored = (slots >= 0) & (slots < visible_slots.unsqueeze(1))
    scores = weights.new_full((*query.shape[:2], slots.shape[1]), float("-inf"))
    for s in range(len(query)):
        kept = slots[s, scored[s]]
        page = page_table[s, kept // page_slots].long()
        keys = decode_pages(pages[page])[torch.arange(len(kept)), kept % page_slots]
        dots = torch.einsum("rhd,nd->rhn", query[s].float(), keys).relu_()
        scores[s, :, scored[s]] = torch.einsum("rh,rhn->rn", weights[s], dots)
    return scores


def _launch(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    page_table: Tensor,
    visible_slots: Tensor,
    block_list: Tensor,
    block_size_slots: int,
    arithmetic: int,
) -> Tensor:  # pragma: no cover - needs a GPU
    sequences, rows, heads, _ = query.shape
    page_table, block_list = page_table.contiguous(), block_list.contiguous()
    page_slots = pages.shape[1] // native.KEY_BYTES
    limit = count_blocks(page_table.shape[1] * page_slots, block_size_slots)
    width = max(block_list.shape[1], limit) * block_size_slots
    scores = torch.full((sequences, rows, width), float("-inf"), device=query.device)
    native.call(
        "score_slots",
        native.stream_of(query),
        query=query.contiguous(),
        weights=weights.contiguous(),
        pages=pages.contiguous(),
        page_table=page_table,
        visible_slots=visible_slots.contiguous(),
        block_list=block_list,
        block_count=(block_list >= 0).sum(1).int(),
        scores=scores,
        num_pages=pages.shape[0],
        page_table_stride=row_stride(page_table),
        page_table_width=page_table.shape[1],
        block_list_stride=row_stride(block_list),
        score_stride=width,
        blocks=block_list.shape[1],
        sequences=sequences,
        rows=rows,
        heads=heads,
        page_slots=page_slots,
        block_size=block_size_slots,
        arithmetic=arithmetic,
    )
    return scores[..., : block_list.shape[1] * block_size_slots].contiguous()
