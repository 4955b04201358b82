# SPDX-License-Identifier: Apache-2.0
"""Block scores from the averages alone (`spin::predict_blocks`)."""

from __future__ import annotations

import torch
from torch import Tensor

from spin_trtllm import native, reference
from spin_trtllm.config import POOLINGS
from spin_trtllm.errors import refuse
from spin_trtllm.geometry import count_blocks
from spin_trtllm.ops.checks import (
    check_devices,
    check_geometry,
    check_state,
    check_tensor,
    on_cuda,
    row_stride,
)


def predict_blocks(
    v: Tensor,
    d: Tensor,
    lanes: Tensor,
    positions_tokens: Tensor,
    *,
    ratio: int,
    block_size_slots: int,
    pooling: str = "max",
) -> Tensor:
    """Block scores fp32 `[S, R, B]`; see `spin_trtllm.reference.predict_blocks`."""
    check_state(v, d, lanes)
    check_tensor("positions_tokens", positions_tokens, (torch.int64,), (lanes.shape[0], "rows"))
    check_devices({"v": v, "d": d, "lanes": lanes, "positions_tokens": positions_tokens})
    check_geometry(ratio, block_size_slots)
    if pooling not in POOLINGS:
        refuse("pooling", pooling, ", ".join(POOLINGS))
    return _predict(v, d, lanes, positions_tokens, ratio, block_size_slots, pooling)


@torch.library.custom_op("spin::predict_blocks", mutates_args=())
def _predict(
    v: Tensor,
    d: Tensor,
    lanes: Tensor,
    positions_tokens: Tensor,
    ratio: int,
    block_size_slots: int,
    pooling: str,
) -> Tensor:
    if on_cuda(v):  # pragma: no cover - needs a GPU
        return _launch(v, d, lanes, positions_tokens, ratio, block_size_slots, pooling)
    return reference.predict_blocks(
        v,
        d,
        lanes,
        positions_tokens,
        ratio=ratio,
        block_size_slots=block_size_slots,
        pooling=pooling,
    )


@_predict.register_fake
def _(
    v: Tensor,
    d: Tensor,
    lanes: Tensor,
    positions_tokens: Tensor,
    ratio: int,
    block_size_slots: int,
    pooling: str,
) -> Tensor:
    blocks = count_blocks(v.shape[-1], block_size_slots)
    return v.new_empty(*positions_tokens.shape, blocks, dtype=torch.float32)


def _launch(
    v: Tensor,
    d: Tensor,
    lanes: Tensor,
    positions_tokens: Tensor,
    ratio: int,
    block_size_slots: int,
    pooling: str,
) -> Tensor:  # pragma: no cover - needs a GPU
    sequences, rows = positions_tokens.shape
    blocks = count_blocks(v.shape[-1], block_size_slots)
    scores = torch.empty(sequences, rows, blocks, device=v.device)
    native.call(
        "predict_blocks",
        native.stream_of(v),
        v=v if v.stride(-1) == 1 else v.contiguous(),
        d=d if d.stride(-1) == 1 else d.contiguous(),
        lanes=lanes.contiguous(),
        positions=positions_tokens.contiguous(),
        block_scores=scores,
        slots=v.shape[-1],
        v_stride=row_stride(v),
        d_stride=row_stride(d),
        lane_stride=v.shape[0],
        entries=sequences if rows and blocks else 0,
        sequences=max(sequences, 1),
        rows=rows,
        blocks=blocks,
        ratio=ratio,
        block_size=block_size_slots,
        state_dtype=native.STATE_DTYPES[v.dtype],
        pooling=native.POOLINGS[pooling],
    )
    return scores
