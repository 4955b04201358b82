# SPDX-License-Identifier: Apache-2.0
"""Known failures of other engines: captured graphs, padded batches and empty work.

Each test names the public issue of the failure that it keeps out, and covers the whole class. Some
failures exist only where memory and launches do, and are left to the tests that need a GPU:

- NVIDIA/TensorRT-LLM #16290, #14297: addresses that go stale between capture and replay.
- sgl-project/sglang #22851, FlashInfer #3133, #5058: a path chosen on the host at capture.
- vllm-project/vllm #55270, FlashInfer #4365: a schedule built for one launch, used in another.
- 1CatAI/1Cat-vLLM #250: the byte layout of a page of keys and scales.
- NVIDIA/TensorRT-LLM #16219, #16223: the block stride of a cache manager swapped later.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from oracle import priority
from sequence_model import (
    NEVER_SEEN,
    indices,
    new_step,
    run,
    tensors_of,
)

from spin_trtllm import reference as ops
from spin_trtllm.reference.select_blocks import explore_priorities

# ---------------------------------------------------------------- padding and empty work


def test_warm_up_rows_belong_to_nobody() -> None:
    """vllm-project/vllm #55637, #55636: a padded row id lies outside the block table."""
    step = new_step(sequences=2)
    plan = run(step, [7, 8, None], [20, 20, -1], torch.ones(3, 1, 64), rows=[1, 1, 0])
    assert plan.lanes.tolist() == [0, 1, step.state.scratch]
    assert plan.drafts.tolist() == [0, 0, -1]
    assert [len(indices(blocks)) for blocks in plan.selection.blocks] == [3, 3, 0]
    assert (step.top_k(plan, torch.ones(3, 1, 64))[2] == -1).all()
    for name, tensor in tensors_of(step.state).items():
        assert (tensor[:, step.state.scratch] == NEVER_SEEN[name]).all(), name


@pytest.mark.parametrize("batch", [32, 33, 64])
def test_lengths_that_give_no_slot(batch: int) -> None:
    """deepseek-ai/DeepGEMM #353, vllm-project/vllm #51970, #51972: every length is zero."""
    step = new_step(sequences=batch, ratio=4)
    lengths = [s % 4 for s in range(batch)]  # raw tokens; 0 is a dummy, and 4 would give a slot
    ids = [s if length else None for s, length in enumerate(lengths)]
    rows = [int(length > 0) for length in lengths]
    scores = torch.full((batch, 1, 64), float("inf"))
    for turn in range(2):  # cold, then warm unless there is no room for another token
        starts = [min(length + turn, 3) - 1 for length in lengths]
        plan = run(step, ids, starts, scores, rows=rows)
        assert plan.warm.tolist() == [turn == 1 and length in (1, 2) for length in lengths]
        assert not plan.selection.blocks.any()
        assert not plan.selection.explored_blocks.any()
        assert (step.top_k(plan, scores) == -1).all()
    assert not step.state.v.any()
    assert not step.state.d.any()


def test_no_rows_through_every_operation() -> None:
    """sgl-project/sglang #38952, #39899, #39760: idle ranks crash on zero tokens."""
    none, v, d = torch.zeros(0, dtype=torch.int64), torch.ones(3, 20), torch.ones(3, 21)
    positions, blocks = torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.bool)
    sizes = {"ratio": 4, "block_size_slots": 8}
    block_scores = ops.predict_blocks(v, d, none, positions, **sizes)
    assert block_scores.shape == (0, 2, 3)
    budget = {"top_k": 8, "sparsity_ppm": 500_000, "exploration_ppm": 50_000, "seed": 0}
    selection = ops.select_blocks(
        block_scores, positions, none.bool(), none, none, **sizes, **budget
    )
    assert selection.blocks.shape == selection.explored_blocks.shape == (0, 3)
    assert selection.row_blocks.shape == (0, 2, 3)
    query, keys, weights = torch.zeros(0, 2, 4, 16), torch.zeros(0, 20, 16), torch.zeros(0, 2, 4)
    scores = ops.score_slots(query, keys, weights, blocks, positions, **sizes)
    assert scores.shape == (0, 2, 20)
    assert ops.topk_slots(scores, blocks, positions, top_k=8, **sizes).shape == (0, 2, 8)
    no_slots = torch.zeros(3, 2, 0), torch.zeros(3, 0, dtype=torch.bool)
    best = ops.topk_slots(*no_slots, torch.zeros(3, 2, dtype=torch.int64), top_k=8, **sizes)
    assert best.tolist() == [[[-1] * 8] * 2] * 3
    ops.observe_scores(v, d, none, scores, blocks, positions, none, **sizes, ema_decay=0.5)
    assert torch.equal(v, torch.ones(3, 20))
    assert torch.equal(d, torch.ones(3, 21))


def test_a_step_of_nobody() -> None:
    """sgl-project/sglang #38952, #39899, #39760: idle ranks crash on zero tokens."""
    step = new_step(layers=(3, 5))
    plan = step.plan((3, 5), [], torch.zeros(0, 2, dtype=torch.int64))
    scores = torch.zeros(0, 2, 64)
    assert plan.selection.blocks.shape == (0, 8)
    assert step.top_k(plan, scores).shape == (0, 2, 8)
    step.observe(plan, scores, torch.zeros(0, dtype=torch.int64))
    for name, tensor in tensors_of(step.state).items():
        assert (tensor == NEVER_SEEN[name]).all(), name


def test_padding_beside_one_sequence_changes_nothing() -> None:
    """sgl-project/sglang #38952, #39899, #39760: one real row and three of padding."""
    padded, alone = new_step(layers=(3, 5)), new_step(layers=(3, 5))
    for turn in range(4):
        own = (torch.arange(2 * 64) * 7 % (5 + turn)).float().view(2, 1, 64)
        scores = torch.full((2, 4, 1, 64), float("nan"))
        scores[:, 2] = own
        batch, starts, rows = [None, None, 7, None], [-1, -1, 40 + turn, -1], [0, 0, 1, 0]
        plan = run(padded, batch, starts, scores.flatten(0, 1), rows=rows)
        expected = run(alone, [7], [40 + turn], own)
        blocks = plan.selection.blocks.view(2, 4, -1)
        assert torch.equal(blocks[:, 2], expected.selection.blocks)
        assert not blocks[:, [0, 1, 3]].any()
    for name, tensor in tensors_of(padded.state).items():
        assert torch.equal(tensor, tensors_of(alone.state)[name]), name


# ---------------------------------------------------------------- exploration

BLOCKS, EXPLORED = 40, 3
TURNS = range(320_000, 320_400)  # as many steps, at all of which 320 slots are visible


def explored_sets(
    positions: range, *, sequence_id: int = 7, layer: int = 3, seed: int = 11
) -> list[set[int]]:
    """Blocks explored at each position, out of 40: 0 and 39 are forced, 1 .. 8 ranked.

    rho = 0.675 keeps 13 of them: 2 forced, 8 ranked, and gamma = 0.2 explores ceil(2.6) = 3.
    """
    count = len(positions)
    block_scores = torch.zeros(count, 1, BLOCKS)
    block_scores[..., 1:9] = 1.0
    selection = ops.select_blocks(
        block_scores,
        torch.tensor(positions).unsqueeze(-1),
        torch.ones(count, dtype=torch.bool),
        torch.full((count,), sequence_id),
        torch.full((count,), layer),
        ratio=1000,
        block_size_slots=8,
        top_k=8,
        sparsity_ppm=675_000,
        exploration_ppm=200_000,
        seed=seed,
    )
    return [indices(blocks) for blocks in selection.explored_blocks]


def test_exploration_draws_anew_at_every_step() -> None:
    """NVIDIA/Megatron-LM #5697, FlashInfer #2132: every replay draws the same random numbers."""
    sets = explored_sets(TURNS)
    assert all(len(explored) == EXPLORED for explored in sets)
    repeats = sum(a == b for a, b in pairwise(sets))
    assert repeats < 5  # C(30, 3) = 4,060 sets: a tenth of a repeat is expected
    # 30 blocks are neither forced nor ranked. Each is due 40 times, with deviation 6.
    times = [sum(block in explored for explored in sets) for block in range(BLOCKS)]
    assert times[:9] == [0] * 9
    assert times[39] == 0
    assert all(15 < count < 65 for count in times[9:39]), times


def test_exploration_is_the_documented_function() -> None:
    """NVIDIA/Megatron-LM #5697, FlashInfer #2132: the same step gives the same draw anywhere."""
    for identity in ({}, {"sequence_id": 8}, {"layer": 4}, {"seed": 12}, {"seed": 2**64 - 1}):
        full = {"sequence_id": 7, "layer": 3, "seed": 11} | identity
        for position, explored in zip(TURNS[:20], explored_sets(TURNS[:20], **full), strict=True):
            key = (full["seed"], full["sequence_id"], full["layer"], position)
            due = sorted(range(9, 39), key=lambda j, key=key: (priority(*key, j), j))
            assert explored == set(due[:EXPLORED])


def test_exploration_does_not_depend_on_the_rest_of_the_batch() -> None:
    """NVIDIA/Megatron-LM #5697: the draw of a row follows its place in the batch."""

    def step_with(ids: list[int | None]) -> dict[int | None, list[set[int]]]:
        step = new_step(slots=128, layers=(3, 5), exploration_policy="random", exploration=1.0)
        drawn: dict[int | None, list[set[int]]] = {i: [] for i in ids}
        for turn in range(12):
            starts = [-1 if i is None else 90 + i + turn for i in ids]
            rows = [int(i is not None) for i in ids]
            plan = run(step, ids, starts, torch.zeros(2 * len(ids), 1, 128), rows=rows)
            for e, i in enumerate([*ids, *ids]):
                drawn[i].append(indices(plan.selection.explored_blocks[e]))
        return drawn

    alone = step_with([7])
    crowded = step_with([9, None, 12, 7])
    assert crowded[7] == alone[7]
    assert crowded[9] != alone[7]
    assert len({frozenset(explored) for explored in alone[7][2:]}) > 4


def test_another_process_draws_the_same() -> None:
    """NVIDIA/Megatron-LM #5697, FlashInfer #2132: a private generator differs by process."""
    code = (
        "import torch; from spin_trtllm.reference.select_blocks import explore_priorities as f;"
        "print(f(torch.tensor([7]), torch.tensor([3]), torch.tensor([50]), 8, seed=11).tolist())"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "5"}
    other = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    place = [torch.tensor([number]) for number in (7, 3, 50)]
    here = explore_priorities(*place, 8, seed=11)
    expected = [[priority(11, 7, 3, 50, j) for j in range(8)]]
    assert here.tolist() == expected
    assert other.stdout.strip() == str(expected)
