# SPDX-License-Identifier: Apache-2.0
"""How much GPU memory SPIN takes next to the key cache it saves reading."""

from __future__ import annotations

from dataclasses import dataclass

from spin_trtllm.build.checkpoint import IndexerGeometry
from spin_trtllm.build.target import PAGE_SLOTS, indexer_key_bytes
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import refuse
from spin_trtllm.geometry import count_blocks
from spin_trtllm.gpu_state import GpuState
from spin_trtllm.gpu_step import GpuStep


@dataclass(frozen=True)
class SpinMemory:
    """Bytes that SPIN allocates in one rank, which has all indexer layers.

    Attributes:
        total_bytes: everything, for steps without drafts: averages and buffers.
        state_bytes: the averages V and D and their bookkeeping, of all sequences and of the scratch
            lane of padding rows.
        buffer_bytes: what lies between steps, most of it scores that wait for observation.
        draft_bytes: what each draft token of a step adds.
        per_sequence_bytes: averages of one sequence of the longest length.
        share_of_indexer_cache: `per_sequence_bytes` over the indexer keys of that sequence.
    """

    total_bytes: int
    state_bytes: int
    buffer_bytes: int
    draft_bytes: int
    per_sequence_bytes: int
    share_of_indexer_cache: float


def spin_memory(
    geometry: IndexerGeometry,
    config: SpinConfig,
    *,
    max_batch_size: int,
    max_seq_len: int,
    key_dtype: str,
) -> SpinMemory:
    """Size SPIN for a deployment, by the very classes that will allocate it.

    Args:
        config: `top_k` must be settled.
        max_batch_size: sequences that decode at once.
        max_seq_len: longest sequence, in tokens; its last page counts whole.
        key_dtype: storage of the indexer's keys, `fp8` or `fp4`.

    Raises:
        SpinError: a sequence too short to fill one slot.
    """
    if max_seq_len < geometry.ratio:
        refuse("max_seq_len", max_seq_len, f"at least {geometry.ratio}, the tokens of one slot")
    layers = len(geometry.layers)
    slots = count_blocks(max_seq_len, PAGE_SLOTS * geometry.ratio) * PAGE_SLOTS

    def state_of(sequences: int) -> int:
        dtype = config.storage_dtype
        state = GpuState(
            range(layers), sequences=sequences, slots=slots, dtype=dtype, device="meta"
        )
        return state.state_bytes

    def total_of(rows: int) -> int:
        return GpuStep.estimate_bytes(
            config,
            layers,
            ratio=geometry.ratio,
            sequences=max_batch_size,
            slots=slots,
            rows=rows,
            # Blocks smaller than a page have no table of pages; TensorRT-LLM's hooks refuse them.
            page_slots=PAGE_SLOTS if config.block_size >= PAGE_SLOTS else None,
        )

    state, total = state_of(max_batch_size), total_of(1)
    per_sequence = state_of(2) - state_of(1)
    key_bytes = layers * slots * indexer_key_bytes(geometry.index_head_dim, key_dtype)
    return SpinMemory(
        total_bytes=total,
        state_bytes=state,
        buffer_bytes=total - state,
        draft_bytes=total_of(2) - total,
        per_sequence_bytes=per_sequence,
        share_of_indexer_cache=round(per_sequence / key_bytes, 4),
    )


def human_bytes(size_bytes: int) -> str:
    """`1.4 GiB` and the like."""
    amount, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
