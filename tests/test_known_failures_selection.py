# SPDX-License-Identifier: Apache-2.0
"""Known failures of other engines: ties, and ranks that select different keys.

Each test names the public issue of the failure that it keeps out, and covers the whole class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from sequence_model import indices, new_step, positions_of, run
from torch import Tensor

from spin_trtllm import reference as ops
from spin_trtllm.step import SpinStep

# ---------------------------------------------------------------- ties


@pytest.mark.parametrize("negative_zeros", [False, True])
@pytest.mark.parametrize("slots", [100, 4097])
def test_a_plateau_of_zeros_goes_to_the_lowest_slots(slots: int, negative_zeros: bool) -> None:
    """sgl-project/sglang #31115: scores of exactly 0.0 are won by arrival order."""
    scores = torch.zeros(1, 1, slots)
    if negative_zeros:  # the same score
        scores[..., ::3] = -0.0
    tenth = torch.arange(5, slots, 10)
    scores[..., tenth] = 1.0 + tenth % 2  # 1.0 on even slots, 2.0 on odd ones
    top_k = len(tenth) + 30  # reaches into the plateau
    blocks = torch.ones(1, (slots + 7) // 8, dtype=torch.bool)
    positions = torch.tensor([[slots - 1]])
    high = [*(s for s in tenth.tolist() if s % 2), *(s for s in tenth.tolist() if s % 2 == 0)]
    expected = high + [s for s in range(slots) if s % 10 != 5][:30]
    for _ in range(50):
        best = ops.topk_slots(scores, blocks, positions, top_k=top_k, ratio=1, block_size_slots=8)
        assert best[0, 0].tolist() == expected


@pytest.mark.parametrize("level", [0.0, float("-inf")])
@pytest.mark.parametrize("top_k", [20, 30])
def test_equal_scores_outside_the_kept_blocks_take_no_place(top_k: int, level: float) -> None:
    """sgl-project/sglang #31115: the plateau has holes where nothing was scored."""
    blocks = torch.tensor([[True, False, True, False, True]])
    best = ops.topk_slots(
        torch.full((1, 1, 40), level),
        blocks,
        torch.tensor([[38]]),
        top_k=top_k,
        ratio=1,
        block_size_slots=8,
    )
    scored = [*range(8), *range(16, 24), *range(32, 39)]
    assert best[0, 0].tolist() == (scored + [-1] * 7)[:top_k]


def test_slots_with_equal_scores_come_in_slot_order() -> None:
    """sgl-project/sglang #31115: the order of the list, where no tie decides what is in it."""
    scores = torch.tensor([3.0, 1.0, 2.0, 3.0, 2.0, 1.0, 3.0, 0.0]).view(1, 1, 8)
    scores = torch.cat([scores, torch.full((1, 1, 56), -1.0)], dim=-1)
    blocks = torch.ones(1, 8, dtype=torch.bool)
    best = ops.topk_slots(
        scores, blocks, torch.tensor([[63]]), top_k=7, ratio=1, block_size_slots=8
    )
    assert best[0, 0].tolist() == [0, 3, 6, 2, 4, 1, 5]


@pytest.mark.parametrize("blocks", [8, 64])
def test_blocks_never_observed_rank_by_their_place(blocks: int) -> None:
    """sgl-project/sglang #31115: all blocks that were never seen have the same score."""
    step = new_step(slots=8 * blocks)
    zeros = torch.zeros(1, 1, 8 * blocks)
    run(step, [7], [8 * blocks - 2], zeros)
    kept = blocks - blocks // 2  # two of them forced
    for _ in range(50):
        plan = step.plan((3,), [7], positions_of([8 * blocks - 1], [1]))
        assert indices(plan.selection.blocks[0]) == {*range(kept - 1), blocks - 1}


def test_equal_priorities_explore_the_lower_block() -> None:
    """sgl-project/sglang #31115: the same rule where priorities are not scores."""
    selection = ops.select_blocks(
        torch.zeros(1, 1, 64),
        torch.tensor([[511]]),
        torch.tensor([True]),
        torch.tensor([7]),
        torch.tensor([3]),
        ratio=1,
        block_size_slots=8,
        top_k=8,
        sparsity_ppm=500_000,
        exploration_ppm=500_000,  # of 32 kept blocks
        seed=0,
        priorities=torch.full((1, 1, 64), 5),
    )
    # 2 forced and 14 ranked, which are 0 .. 14 and 63; then 16 explored
    assert indices(selection.explored_blocks[0]) == set(range(15, 31))


# ---------------------------------------------------------------- ranks

LAYERS, IDS = (2, 5, 9), (7, 2**64 - 5, 9, 31)
SLOTS = 128


def tied_scores(sequence: int, turn: int) -> Tensor:
    """Scores `[layers, 2 rows, slots]` of one sequence: few distinct values, most of them zero."""
    generator = torch.Generator().manual_seed(1000 * turn + sequence)
    scores = torch.randint(-8, 9, (len(LAYERS), 2, SLOTS), generator=generator) / 4
    return torch.where(torch.rand(scores.shape, generator=generator) < 0.6, 0.0, scores)


def accept(sequence: int, turn: int) -> int:
    """Drafts accepted, 0 or 1."""
    return (turn * 7 + sequence * 3) % 5 % 2


class Rank:
    """One of several workers that see the same scores, each with its own order of work."""

    def __init__(
        self,
        joining: Sequence[int],
        layer_order: Sequence[tuple[int, ...]],
        *,
        strided: bool = False,
        deferring: bool = False,
    ) -> None:
        self.joining, self.layer_order = joining, layer_order
        self.strided, self.deferring = strided, deferring
        self.step: SpinStep = new_step(
            layers=LAYERS, slots=SLOTS, exploration_policy="random", exploration=0.2, seed=3
        )
        self.step.state.lanes([IDS[s] for s in joining])

    def decode(self, turn: int, starts: Sequence[int]) -> dict[tuple[int, int, str], Tensor]:
        """One step of all sequences in all layers: kept blocks and top-k by sequence and layer."""
        shift = turn % len(self.joining)
        order = [*self.joining[shift:], *self.joining[:shift]]  # another one at every step
        scores = {s: tied_scores(s, turn) for s in order}
        decided = {}
        for layers in self.layer_order:
            places = positions_of([starts[s] for s in order], [2] * len(order))
            plan = self.step.plan(layers, [IDS[s] for s in order], places)
            z = torch.stack([scores[s][LAYERS.index(n)] for n in layers for s in order])
            if self.strided:
                z = z.transpose(0, 2).contiguous().transpose(0, 2)
            if self.deferring:
                self.step.defer(plan, z)
            else:
                accepted = [accept(s, turn) for s in order] * len(layers)
                self.step.observe(plan, z, torch.tensor(accepted))
            entries = [(s, n) for n in layers for s in order]
            best = self.step.top_k(plan, z)
            for (s, n), blocks, slots in zip(entries, plan.selection.blocks, best, strict=True):
                decided[s, n, "blocks"], decided[s, n, "top-k"] = blocks, slots
        return decided

    def states(self) -> dict[tuple[int, str], Tensor]:
        """Every tensor of every sequence."""
        exports = {s: self.step.state.export(IDS[s]) or {} for s in self.joining}
        return {(s, name): t for s, export in exports.items() for name, t in export.items()}


def same_bits(a: dict[Any, Tensor], b: dict[Any, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_ranks_stay_bit_identical() -> None:
    """sgl-project/sglang #24654, ROCm/aiter #4415, vllm-ascend #15053: ranks drift apart.

    500 steps: layers called in another order, one plan or one a layer, the batch permuted, scores
    laid out differently, acceptance known at once or with the next step.
    """
    single = [(9,), (2,), (5,)]
    first = Rank([0, 1, 2, 3], [LAYERS])
    others = [
        Rank([3, 1, 0, 2], single, strided=True),
        Rank([2, 3, 1, 0], [(5, 9, 2)], deferring=True),
    ]
    starts, kept_blocks, entries = [60, 64, 71, 80], 0, 0
    for turn in range(500):
        decided = first.decode(turn, starts)
        kept_blocks += sum(int(t.sum()) for key, t in decided.items() if key[2] == "blocks")
        entries += len(decided) // 2
        for rank in others:
            assert same_bits(decided, rank.decode(turn, starts)), turn
        assert same_bits(first.states(), others[0].states()), turn
        starts = [start + accept(s, turn) + 1 for s, start in enumerate(starts)]
        starts = [start if start < SLOTS - 1 else 60 + s for s, start in enumerate(starts)]
    assert kept_blocks < 8 * entries  # of up to 16 blocks: ranks could have differed
    # What is deferred is learned with the next plan, so the last rank needs one more.
    for rank in (first, others[1]):
        for layers in rank.layer_order:
            places = positions_of([starts[s] for s in rank.joining], [1] * 4)
            rank.step.plan(layers, [IDS[s] for s in rank.joining], places)
    assert bool(first.step.state.v.any())
    assert same_bits(first.states(), others[1].states())
