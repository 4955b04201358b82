# SPDX-License-Identifier: Apache-2.0
"""How much GPU memory SPIN's averages take next to the key cache they save reading."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spin_trtllm.build.checkpoint import IndexerGeometry
from spin_trtllm.build.target import indexer_key_bytes
from spin_trtllm.errors import refuse
from spin_trtllm.state import SpinState


@dataclass(frozen=True)
class StateMemory:
    """Bytes of the averages V and D and their bookkeeping, in every indexer layer of one rank.

    Attributes:
        per_sequence_bytes: one sequence of the longest length.
        total_bytes: all sequences, and the scratch lane of padding rows.
        share_of_indexer_cache: `per_sequence_bytes` over the indexer keys of that sequence.
    """

    per_sequence_bytes: int
    total_bytes: int
    share_of_indexer_cache: float


def state_memory(
    geometry: IndexerGeometry,
    *,
    max_batch_size: int,
    max_seq_len: int,
    state_dtype: torch.dtype,
    key_dtype: str,
) -> StateMemory:
    """Size the state of a deployment.

    Args:
        max_batch_size: sequences that decode at once.
        max_seq_len: longest sequence, in tokens.
        state_dtype: storage of the averages.
        key_dtype: storage of the indexer's keys, `fp8` or `fp4`.

    Raises:
        SpinError: a sequence too short to fill one slot.
    """
    slots = max_seq_len // geometry.ratio
    if slots < 1:
        refuse("max_seq_len", max_seq_len, f"at least {geometry.ratio}, the tokens of one slot")
    layers = len(geometry.layers)
    # A state for no sequence is its scratch lane alone, which is as large as any other lane.
    lane_bytes = SpinState.estimate_bytes(layers, 0, slots, state_dtype)
    key_bytes = layers * slots * indexer_key_bytes(geometry.index_head_dim, key_dtype)
    return StateMemory(
        per_sequence_bytes=lane_bytes,
        total_bytes=SpinState.estimate_bytes(layers, max_batch_size, slots, state_dtype),
        share_of_indexer_cache=round(lane_bytes / key_bytes, 4),
    )


def human_bytes(size_bytes: int) -> str:
    """`1.4 GiB` and the like."""
    amount, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
