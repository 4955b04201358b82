# SPDX-License-Identifier: Apache-2.0
"""What stands for a block before the current query: one pooled key, or two (SPEC 4, step 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from spin_trtllm.geometry import count_blocks

POOLED_KEYS = {"mean": 1, "minmax": 2}  # of one block


def pool_keys(
    keys: Tensor, *, block_size_slots: int, query_pooling: str, known: Tensor | None = None
) -> Tensor:
    """The pooled keys of every whole block.

    They depend on the block's keys alone, so they may be kept with its pages and shared by all
    sequences that share these. A block is pooled once, when it is whole: until then it is the
    newest one, which every row keeps anyway.

    Args:
        keys: `[S, N, D]`, any float dtype, of the slots that the last row sees.
        block_size_slots: slots a block.
        query_pooling: `mean`, or `minmax`.
        known: what an earlier call returned for these sequences, of blocks whose slots have all
            been accepted; only the others are pooled.

    Returns:
        `[S, N // block_size_slots, P, D]` in the dtype of the keys: the mean (`P = 1`), or the
        smallest and then the largest of each component (`P = 2`).
    """
    start = 0 if known is None else known.shape[1]
    whole = keys.shape[1] // block_size_slots
    slots = slice(start * block_size_slots, whole * block_size_slots)
    blocks = keys[:, slots].unflatten(1, (whole - start, block_size_slots))
    if query_pooling == "mean":
        pooled = blocks.float().mean(2, keepdim=True).to(keys.dtype)
    else:
        pooled = torch.stack([blocks.amin(2), blocks.amax(2)], 2)
    return pooled if known is None else torch.cat([known, pooled], 1)


def pooled_keys_read(slots: int, *, block_size_slots: int, query_pooling: str | None) -> int:
    """Pooled keys that one query needs of one sequence in one layer, to rank its blocks.

    Those of all blocks but the oldest and the newest, which are kept unseen. Making them reads
    nothing: the newest block is scored.

    Args:
        slots: visible slots.
        query_pooling: `mean` or `minmax`; None when the current query ranks nothing.
    """
    if query_pooling is None:
        return 0
    return max(count_blocks(slots, block_size_slots) - 2, 0) * POOLED_KEYS[query_pooling]


def key_bytes_read(
    slots: int,
    kept_slots: int,
    *,
    block_size_slots: int,
    key_bytes: int,
    query_pooling: str | None = None,
) -> int:
    """Bytes of keys that one step reads for one sequence in one layer.

    A pooled key costs as much as one of those it stands for.

    Args:
        slots: visible slots; kept_slots: those in kept blocks.
        key_bytes: bytes of one key: 132 for 128 fp8 values and their scale.
        query_pooling: as in `pooled_keys_read`.
    """
    pooled = pooled_keys_read(slots, block_size_slots=block_size_slots, query_pooling=query_pooling)
    return (kept_slots + pooled) * key_bytes
