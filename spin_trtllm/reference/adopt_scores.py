# SPDX-License-Identifier: Apache-2.0
"""What a host's own kernels found on the compacted blocks, in SPIN's terms."""

from __future__ import annotations

import torch
from torch import Tensor


def adopt_scores(
    host_scores: Tensor,
    columns: Tensor | None,
    block_list: Tensor,
    row_slots: Tensor,
    places: Tensor,
    scores: Tensor,
    *,
    block_size_slots: int,
) -> None:
    """Copy scores to where the next step observes them; turn columns into slots of the sequence.

    Args:
        host_scores: fp32 `[S * r, columns]` of the first `r` rows, in compact order.
        columns: int32 `[S * r, K]`, rewritten in place: -1, and every column that names no kept
            block, becomes -1, for what reads them does not check bounds. None: there are none.
        block_list: int32 `[S, B]`, kept blocks ascending, then -1.
        row_slots: int32 `[S, R]`, kept slots that each row sees: only these are copied.
        places: int64 `[S]`, where in `scores` each sequence's belong.
        scores: fp32 `[places, R, stride]`, written.
    """
    sequences, blocks = block_list.shape
    rows = host_scores.shape[0] // max(sequences, 1)
    width = min(host_scores.shape[1], scores.shape[2])
    host = host_scores[:, :width].unflatten(0, (sequences, rows))
    kept = scores[places][:, :rows, :width]
    seen = torch.arange(width, device=scores.device) < row_slots[:, :rows, None]
    scores[:, :rows, :width].index_copy_(0, places, torch.where(seen, host, kept))

    if columns is None:
        return
    wide = columns.view(sequences, -1)
    place = wide // block_size_slots
    inside = (wide >= 0) & (place < blocks)
    block = block_list.gather(1, torch.where(inside, place, 0).long())
    slots = block * block_size_slots + wide % block_size_slots
    wide.copy_(torch.where(inside & (block >= 0), slots, -1))
