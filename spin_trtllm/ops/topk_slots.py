# SPDX-License-Identifier: Apache-2.0
"""The best scored slots of each row (`spin::topk_slots`)."""

from __future__ import annotations

import torch
from torch import Tensor

from spin_trtllm import native, reference
from spin_trtllm.errors import refuse
from spin_trtllm.geometry import visible_slots
from spin_trtllm.ops.checks import (
    check_blocks,
    check_devices,
    check_geometry,
    check_tensor,
    on_cuda,
    padded_rows,
    row_stride,
)


def topk_slots(
    scores: Tensor,
    blocks: Tensor,
    positions_tokens: Tensor,
    *,
    top_k: int,
    ratio: int,
    block_size_slots: int,
) -> Tensor:
    """The best slots int32 `[S, R, K]`, -1 pads; see `spin_trtllm.reference.topk_slots`.

    The order within a row differs by device: best first on a CPU, ascending slots on a GPU. The
    set is the same everywhere.
    """
    check_tensor("scores", scores, (torch.float32,), ("sequences", "rows", "slots"))
    sequences, rows, slots = scores.shape
    check_blocks("blocks", blocks, sequences, slots, block_size_slots)
    check_tensor("positions_tokens", positions_tokens, (torch.int64,), (sequences, rows))
    check_devices({"scores": scores, "blocks": blocks, "positions_tokens": positions_tokens})
    check_geometry(ratio, block_size_slots)
    if not 1 <= top_k <= native.MAX_TOP_K:
        refuse("top_k", top_k, f"an integer in 1 .. {native.MAX_TOP_K}")
    return _topk(scores, blocks, positions_tokens, top_k, ratio, block_size_slots)


@torch.library.custom_op("spin::topk_slots", mutates_args=())
def _topk(
    scores: Tensor,
    blocks: Tensor,
    positions_tokens: Tensor,
    top_k: int,
    ratio: int,
    block_size_slots: int,
) -> Tensor:
    run = _launch if on_cuda(scores) else reference.topk_slots
    return run(
        scores,
        blocks,
        positions_tokens,
        top_k=top_k,
        ratio=ratio,
        block_size_slots=block_size_slots,
    )


@_topk.register_fake
def _(
    scores: Tensor,
    blocks: Tensor,
    positions_tokens: Tensor,
    top_k: int,
    ratio: int,
    block_size_slots: int,
) -> Tensor:
    return scores.new_empty(*scores.shape[:2], top_k, dtype=torch.int32)


def list_blocks(blocks: Tensor) -> Tensor:
    """Kept block ids ascending, then -1: int32 `[S, B]` from a mask bool `[S, B]`."""
    sequences, width = blocks.shape
    index = torch.arange(width, device=blocks.device, dtype=torch.int32).expand(sequences, -1)
    place = torch.where(blocks, blocks.cumsum(1) - 1, width)
    full = index.new_full((sequences, width + 1), -1)
    return full.scatter_(1, place, torch.where(blocks, index, -1))[:, :width].contiguous()


def count_scored(
    blocks: Tensor, positions_tokens: Tensor, slots: int, ratio: int, block_size: int
) -> Tensor:
    """Slots of the mask that each row sees: int32 `[S, R]`."""
    visible = visible_slots(positions_tokens, ratio).clamp(0, slots).unsqueeze(-1)
    first = torch.arange(blocks.shape[1], device=blocks.device) * block_size
    inside = (visible - first).clamp(0, block_size)
    return (inside * blocks.unsqueeze(1)).sum(-1).int()


def _launch(
    scores: Tensor,
    blocks: Tensor,
    positions_tokens: Tensor,
    *,
    top_k: int,
    ratio: int,
    block_size_slots: int,
) -> Tensor:  # pragma: no cover - needs a GPU
    sequences, rows, slots = scores.shape
    best = torch.full((sequences, rows, top_k), -1, dtype=torch.int32, device=scores.device)
    width = blocks.shape[1]
    flat = padded_rows(scores.reshape(sequences * rows, slots), slots)
    native.call(
        "topk_slots",
        native.stream_of(scores),
        scores=flat,
        block_list=list_blocks(blocks),
        row_slots=count_scored(blocks, positions_tokens, slots, ratio, block_size_slots),
        slots_out=best,
        score_stride=row_stride(flat),
        entries=sequences if rows and slots else 0,
        rows=rows,
        blocks=width,
        block_size=block_size_slots,
        top_k=top_k,
        full_rows=1,
    )
    return best
