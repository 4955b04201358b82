# SPDX-License-Identifier: Apache-2.0
"""Inputs for the kernel tests: scores that select badly, and batches that hosts really form."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from spin_trtllm.layer_view import LayerView

FAMILIES = (
    "gaussian",
    "relu",
    "equal",
    "zero",
    "negative",
    "integer",
    "infinite",
    "nan",
    "denormal",
    "huge",
    "signed_zero",
    "clustered",
)


def scores_of(family: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Scores fp32 of one family on the CPU."""
    gaussian = torch.randn(shape, generator=generator)
    uniform = torch.rand(shape, generator=generator)
    if family == "relu":  # about 90% exact zeros, K inside the plateau
        return torch.where(uniform < 0.9, 0.0, gaussian.abs())
    if family == "equal":
        return torch.full(shape, 0.75)
    if family == "zero":
        return torch.zeros(shape)
    if family == "negative":
        return -gaussian.abs() - 0.125
    if family == "integer":
        return gaussian.round()
    if family == "infinite":
        signed = torch.where(gaussian > 0, float("inf"), float("-inf"))
        return torch.where(uniform < 0.3, signed, gaussian)
    if family == "nan":
        return torch.where(uniform < 0.6, float("nan"), gaussian)
    if family == "denormal":
        bits = torch.randint(1, 64, shape, generator=generator, dtype=torch.int32)
        return torch.where(uniform < 0.5, bits.view(torch.float32), -bits.view(torch.float32))
    if family == "huge":
        return gaussian * 1e37
    if family == "signed_zero":
        return torch.where(uniform < 0.5, -0.0, 0.0)
    if family == "clustered":  # the best lie together, where a sparse sample may not look
        index = torch.arange(shape[-1])
        return gaussian + 8.0 * ((index % 5000) < 40)
    return gaussian


def random_positions(
    sequences: int, rows: int, slots: int, ratio: int, generator: torch.Generator
) -> Tensor:
    """Positions int64 `[S, R]`: drafts of random length, some sequences only padding."""
    limit = (slots + 1) * ratio - 1  # first position past the capacity
    positions = torch.full((sequences, rows), -1, dtype=torch.int64)
    for s in range(sequences):
        kind = int(torch.randint(0, 6, (1,), generator=generator))
        if kind == 0:
            continue
        count = 1 + int(torch.randint(0, rows, (1,), generator=generator))
        count = min(count, limit)
        last = limit - count
        near = kind == 1  # just full
        first = last if near else int(torch.randint(0, last + 1, (1,), generator=generator))
        positions[s, :count] = first + torch.arange(count)
    return positions


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.uint8}[a.element_size()]
    return a.shape == b.shape and torch.equal(
        a.contiguous().cpu().view(kind), b.contiguous().cpu().view(kind)
    )


def first_difference(a: Tensor, b: Tensor) -> str:
    """Where two tensors differ first, for a failing assertion."""
    a, b = a.cpu(), b.cpu()
    if a.shape != b.shape:
        return f"shapes {list(a.shape)} and {list(b.shape)}"
    wrong = ((a != b) & ~((a != a) & (b != b))).nonzero()
    if not len(wrong):
        return "equal but for the sign of zero"
    at = tuple(wrong[0].tolist())
    return f"{len(wrong)} differ, first at {at}: {a[at].item()} and {b[at].item()}"


def compact_scores(full: Tensor, block_list: Tensor, block_size: int, out: Tensor) -> None:
    """Write scores `[S, R, N]` where a scorer would: only kept blocks, other columns untouched."""
    slots = full.shape[-1]
    column = torch.arange(out.shape[-1], device=full.device)
    block = block_list.long().gather(
        1, (column // block_size).clamp(max=block_list.shape[1] - 1).expand(len(full), -1)
    )
    slot = block * block_size + column % block_size
    inside = (block >= 0) & (slot < slots)
    index = slot.clamp(0, slots - 1).unsqueeze(1).expand(-1, full.shape[1], -1)
    out.copy_(torch.where(inside.unsqueeze(1), full.gather(2, index), out))


def put_scores(view: LayerView, scores: Tensor, block_size: int, poison: float) -> None:
    """Score a layer: kept blocks from `scores` `[S, R, N]`, everything else poisoned."""
    compact = torch.full_like(view.get_scores(), poison)
    compact_scores(scores, view.block_list, block_size, compact)
    view.put_scores(compact)


@contextmanager
def capturing() -> Iterator[torch.cuda.CUDAGraph]:
    """What the block launches becomes the graph. A dead graph that Python's collector destroyed
    meanwhile would spoil the capture, and torch's memory with it.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            yield graph
    finally:
        gc.enable()
