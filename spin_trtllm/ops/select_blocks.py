# SPDX-License-Identifier: Apache-2.0
"""Which blocks a step keeps (`spin::select_blocks`)."""

from __future__ import annotations

import torch
from torch import Tensor

from spin_trtllm import native, reference
from spin_trtllm.config import MASK_POLICIES
from spin_trtllm.errors import refuse
from spin_trtllm.geometry import PPM
from spin_trtllm.ops.checks import check_devices, check_geometry, check_tensor, on_cuda
from spin_trtllm.reference import Selection


def select_blocks(
    block_scores: Tensor,
    positions_tokens: Tensor,
    warm: Tensor,
    sequence_ids: Tensor,
    layers: Tensor,
    *,
    ratio: int,
    block_size_slots: int,
    top_k: int,
    sparsity_ppm: int | Tensor,
    exploration_ppm: int,
    seed: int,
    mask_policy: str = "union",
) -> Selection:
    """The kept blocks; see `spin_trtllm.reference.select_blocks`.

    Targets in a tensor, int32 or int64 `[S]`, count as the nearest of 0 .. 999999.
    """
    check_tensor("block_scores", block_scores, (torch.float32,), ("sequences", "rows", "blocks"))
    sequences, rows, _ = block_scores.shape
    check_tensor("positions_tokens", positions_tokens, (torch.int64,), (sequences, rows))
    check_tensor("warm", warm, (torch.bool,), (sequences,))
    check_tensor("sequence_ids", sequence_ids, (torch.int64,), (sequences,))
    check_tensor("layers", layers, (torch.int64,), (sequences,))
    check_devices({"block_scores": block_scores, "positions_tokens": positions_tokens})
    check_devices({"warm": warm, "sequence_ids": sequence_ids, "layers": layers})
    check_geometry(ratio, block_size_slots)
    if top_k < 1:
        refuse("top_k", top_k, "an integer >= 1")
    layer_sparsity_ppm = None
    if isinstance(sparsity_ppm, Tensor):
        check_tensor("sparsity_ppm", sparsity_ppm, (torch.int32, torch.int64), (sequences,))
        check_devices({"block_scores": block_scores, "sparsity_ppm": sparsity_ppm})
        layer_sparsity_ppm, sparsity_ppm = sparsity_ppm.clamp(0, PPM - 1).int(), 0
    if not 0 <= sparsity_ppm < PPM:
        refuse("sparsity_ppm", sparsity_ppm, f"an integer in 0 .. {PPM - 1}")
    if not 0 <= exploration_ppm <= PPM:
        refuse("exploration_ppm", exploration_ppm, f"an integer in 0 .. {PPM}")
    if mask_policy not in MASK_POLICIES:
        refuse("mask_policy", mask_policy, ", ".join(MASK_POLICIES))
    masks = _select(
        block_scores,
        positions_tokens,
        warm,
        sequence_ids,
        layers,
        ratio,
        block_size_slots,
        top_k,
        sparsity_ppm,
        layer_sparsity_ppm,
        exploration_ppm,
        str(seed),  # 64 unsigned bits do not fit an operator's integers
        mask_policy,
    )
    return Selection(*masks)


@torch.library.custom_op("spin::select_blocks", mutates_args=())
def _select(
    block_scores: Tensor,
    positions_tokens: Tensor,
    warm: Tensor,
    sequence_ids: Tensor,
    layers: Tensor,
    ratio: int,
    block_size_slots: int,
    top_k: int,
    sparsity_ppm: int,
    layer_sparsity_ppm: Tensor | None,
    exploration_ppm: int,
    seed: str,
    mask_policy: str,
) -> tuple[Tensor, Tensor, Tensor]:
    run = _launch if on_cuda(block_scores) else reference.select_blocks
    chosen = run(
        block_scores,
        positions_tokens,
        warm,
        sequence_ids,
        layers,
        ratio=ratio,
        block_size_slots=block_size_slots,
        top_k=top_k,
        sparsity_ppm=sparsity_ppm if layer_sparsity_ppm is None else layer_sparsity_ppm,
        exploration_ppm=exploration_ppm,
        seed=int(seed),
        mask_policy=mask_policy,
    )
    masks = (chosen.blocks, chosen.row_blocks, chosen.explored_blocks)
    return masks[0].clone(), masks[1].clone(), masks[2].clone()  # operators must not alias


@_select.register_fake
def _(
    block_scores: Tensor,
    positions_tokens: Tensor,
    warm: Tensor,
    sequence_ids: Tensor,
    layers: Tensor,
    ratio: int,
    block_size_slots: int,
    top_k: int,
    sparsity_ppm: int,
    layer_sparsity_ppm: Tensor | None,
    exploration_ppm: int,
    seed: str,
    mask_policy: str,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = block_scores.new_empty(block_scores.shape, dtype=torch.bool)
    return torch.empty_like(rows[:, 0]), rows, torch.empty_like(rows[:, 0])


def _launch(
    block_scores: Tensor,
    positions_tokens: Tensor,
    warm: Tensor,
    sequence_ids: Tensor,
    layers: Tensor,
    *,
    ratio: int,
    block_size_slots: int,
    top_k: int,
    sparsity_ppm: int | Tensor,
    exploration_ppm: int,
    seed: int,
    mask_policy: str,
) -> Selection:  # pragma: no cover - needs a GPU
    sequences, rows, blocks = block_scores.shape
    device = block_scores.device
    mask = torch.zeros(sequences, blocks, dtype=torch.bool, device=device)
    row_masks = torch.zeros(sequences, rows, blocks, dtype=torch.bool, device=device)
    explored = torch.zeros_like(mask)
    numbers = torch.empty(sequences * (2 * blocks + 2 + rows), dtype=torch.int32, device=device)
    lists, maps, count, kept, row_slots = numbers.split(
        [sequences * blocks, sequences * blocks, sequences, sequences, sequences * rows]
    )
    targets: dict[str, int | Tensor] = {"sparsity_ppm": sparsity_ppm}
    if isinstance(sparsity_ppm, Tensor):
        targets = {"layer_sparsity_ppm": sparsity_ppm.contiguous()}
    native.call(
        "select_blocks",
        native.stream_of(block_scores),
        block_scores=block_scores.contiguous(),
        positions=positions_tokens.contiguous(),
        warm=warm.contiguous(),
        sequence_ids=sequence_ids.contiguous(),
        layers=layers.contiguous(),
        block_list=lists,
        compact_of_block=maps,
        block_count=count,
        kept_slots=kept,
        row_slots=row_slots,
        block_mask=mask,
        row_masks=row_masks,
        explored_mask=explored,
        seed=seed,
        entries=sequences if rows and blocks else 0,
        sequences=max(sequences, 1),
        layer_entries=1,
        rows=rows,
        blocks=blocks,
        ratio=ratio,
        block_size=block_size_slots,
        top_k=top_k,
        **targets,
        exploration_ppm=exploration_ppm,
        row0_mask=int(mask_policy == "row0"),
    )
    return Selection(mask, row_masks, explored)
