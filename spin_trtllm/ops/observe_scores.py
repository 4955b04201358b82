# SPDX-License-Identifier: Apache-2.0
"""The averages learn from the scores of the accepted rows (`spin::observe_scores`)."""

from __future__ import annotations

import torch
from torch import Tensor

from spin_trtllm import native, reference
from spin_trtllm.config import UPDATE_POLICIES
from spin_trtllm.errors import refuse
from spin_trtllm.ops.checks import (
    check_blocks,
    check_devices,
    check_geometry,
    check_state,
    check_tensor,
    on_cuda,
    padded_rows,
    row_stride,
)


def observe_scores(
    v: Tensor,
    d: Tensor,
    lanes: Tensor,
    scores: Tensor,
    blocks: Tensor,
    positions_tokens: Tensor,
    accepted: Tensor,
    *,
    ratio: int,
    block_size_slots: int,
    ema_decay: float,
    update_policy: str = "prefix",
) -> None:
    """Update `v` and `d` in place; see `spin_trtllm.reference.observe_scores`.

    On a GPU, averages whose rows are no multiple of 8 apart are copied and copied back; those of
    `GpuState` are not.
    """
    sequences = lanes.shape[0]
    check_state(v, d, lanes)
    check_tensor("positions_tokens", positions_tokens, (torch.int64,), (sequences, "rows"))
    shape = (*positions_tokens.shape, v.shape[-1])
    check_tensor("scores", scores, (torch.float32,), shape)
    check_blocks("blocks", blocks, sequences, v.shape[-1], block_size_slots)
    check_tensor("accepted", accepted, (torch.int64,), (sequences,))
    check_devices({"v": v, "d": d, "lanes": lanes, "scores": scores, "blocks": blocks})
    check_geometry(ratio, block_size_slots)
    if update_policy not in UPDATE_POLICIES:
        refuse("update_policy", update_policy, ", ".join(UPDATE_POLICIES))
    if not 0 <= ema_decay < 1:
        refuse("ema_decay", ema_decay, "a number in [0, 1)")
    arguments = (v, d, lanes, scores, blocks, positions_tokens, accepted)
    _observe(*arguments, ratio, block_size_slots, ema_decay, update_policy)


@torch.library.custom_op("spin::observe_scores", mutates_args=("v", "d"))
def _observe(
    v: Tensor,
    d: Tensor,
    lanes: Tensor,
    scores: Tensor,
    blocks: Tensor,
    positions_tokens: Tensor,
    accepted: Tensor,
    ratio: int,
    block_size_slots: int,
    ema_decay: float,
    update_policy: str,
) -> None:
    run = _launch if on_cuda(v) else reference.observe_scores
    run(
        v,
        d,
        lanes,
        scores,
        blocks,
        positions_tokens,
        accepted,
        ratio=ratio,
        block_size_slots=block_size_slots,
        ema_decay=ema_decay,
        update_policy=update_policy,
    )


@_observe.register_fake
def _(
    v: Tensor,
    d: Tensor,
    lanes: Tensor,
    scores: Tensor,
    blocks: Tensor,
    positions_tokens: Tensor,
    accepted: Tensor,
    ratio: int,
    block_size_slots: int,
    ema_decay: float,
    update_policy: str,
) -> None:
    return None


def _launch(
    v: Tensor,
    d: Tensor,
    lanes: Tensor,
    scores: Tensor,
    blocks: Tensor,
    positions_tokens: Tensor,
    accepted: Tensor,
    *,
    ratio: int,
    block_size_slots: int,
    ema_decay: float,
    update_policy: str,
) -> None:  # pragma: no cover - needs a GPU
    sequences, rows, slots = scores.shape
    flat = padded_rows(scores.reshape(sequences * rows, slots), slots)
    vertical, diagonal = padded_rows(v, slots), padded_rows(d, slots + 1)
    native.call(
        "observe_scores",
        native.stream_of(v),
        v=vertical,
        d=diagonal,
        lanes=lanes.contiguous(),
        positions=positions_tokens.contiguous(),
        accepted=accepted.contiguous(),
        scores=flat,
        compact_of_block=torch.where(blocks, 0, -1).int(),
        slots=slots,
        v_stride=row_stride(vertical),
        d_stride=row_stride(diagonal),
        score_stride=row_stride(flat),
        lanes_total=v.shape[0],
        entries=sequences if rows and slots else 0,
        rows=rows,
        blocks=blocks.shape[1],
        ratio=ratio,
        block_size=block_size_slots,
        state_dtype=native.STATE_DTYPES[v.dtype],
        full_rows=1,
        row0_update=int(update_policy == "row0"),
        decay=ema_decay,
        gain=1.0 - ema_decay,
    )
    if vertical is not v:
        v.copy_(vertical[:, :slots])
    if diagonal is not d:
        d.copy_(diagonal[:, : slots + 1])
