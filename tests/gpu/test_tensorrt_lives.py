# SPDX-License-Identifier: Apache-2.0
"""The TensorRT nodes on a GPU through whole lives of a batch, against `SpinStep`.

The reference decides from the scores that the nodes computed, so everything it says is compared bit
for bit: chosen blocks, best slots, averages. The scores are checked on their own, with a tolerance.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import first_difference, same_bits
from node_cases import (
    CASES,
    DEVICE,
    LANES,
    LAYER,
    MARKS,
    STEPS,
    Cache,
    current_stream,
    make_node,
    make_state,
)
from plugin_host import Binding
from serving_batches import Batch
from torch import Tensor

from spin_trtllm import ops
from spin_trtllm.config import SpinConfig
from spin_trtllm.geometry import visible_slots
from spin_trtllm.ops.topk_slots import list_blocks
from spin_trtllm.state import SpinState
from spin_trtllm.step import SpinStep, StepPlan

pytestmark = MARKS

LIVE = 10  # most sequences of a step
# The sums of mean and top4 have no order that both sides keep: bits are compared with GpuStep only.
EXACT = [c for c in CASES if c[1].pooling == "max"]


class Lives:
    """Batches, what the reference makes of them, and lanes that are not the reference's.

    `next` makes a step: `ids`, `plan`, and on the device `lanes`, `numbers` (sequence ids) and
    `positions`; `reset_lanes` were made cold before it.
    """

    def __init__(self, config: SpinConfig, seed: int, rows: int, slots: int, ratio: int) -> None:
        self.slots, self.b = slots, config.block_size
        self.state = SpinState((LAYER,), sequences=LANES, slots=slots, dtype=config.storage_dtype)
        self.step = SpinStep(config, self.state, ratio=ratio)
        self.batch = Batch(seed, rows, slots, ratio)
        self.order = torch.randperm(LANES, generator=torch.Generator().manual_seed(seed)).tolist()

    def next(self) -> None:
        self.reset_lanes: list[int] = []
        self.batch.events(self)
        self.ids, positions = self.batch.step()
        self.plan = self.step.plan((LAYER,), self.ids, positions)
        lanes = [-1 if n == LANES else self.order[n] for n in self.state.lanes(self.ids)]
        self.lanes = torch.tensor(lanes, dtype=torch.int64).to(DEVICE)
        self.numbers = torch.tensor([i or 0 for i in self.ids], dtype=torch.int64).to(DEVICE)
        self.positions = positions.to(DEVICE)

    def release(self, sequence_id: int) -> None:
        """An event of the batch. Nothing to tell the nodes: the lane's next owner is another."""
        self.state.release(sequence_id)

    def reset(self, sequence_id: int) -> None:
        """An event of the batch."""
        if sequence_id in self.state._lane_of:
            self.reset_lanes.append(self.order[self.state._lane_of[sequence_id]])
        self.state.reset(sequence_id)

    @property
    def stepping(self) -> Tensor:
        """Which entries take a step that leaves something behind, bool `[S]`."""
        return (self.lanes >= 0) & (self.positions[:, 0] >= 0)

    @property
    def places(self) -> Tensor:
        """Where the state keeps each entry's scores, int64 `[S]`."""
        own = LANES + torch.arange(len(self.lanes), device=DEVICE)
        return torch.where(self.stepping, self.lanes, own)

    @property
    def accepted(self) -> Tensor:
        """Drafts that the next step will turn out to have taken, int64 `[S]`; -1 for no step."""
        taken = [
            -1 if i is None or int(p[0]) < 0 else self.batch.next[i] - int(p[0]) - 1
            for i, p in zip(self.ids, self.plan.positions_tokens, strict=True)
        ]
        return torch.tensor(taken, dtype=torch.int64)

    def full_scores(self, scores: Tensor) -> Tensor:
        """Compact scores `[S, R, W]` where their slots are, on the CPU; NaN elsewhere."""
        sequences, rows, _ = scores.shape
        full = torch.full((sequences, rows, self.slots), float("nan"))
        for s, blocks in enumerate(self.plan.selection.blocks):
            kept = blocks.nonzero()
            slot = (kept * self.b + torch.arange(self.b)).flatten()
            inside = slot < self.slots
            full[s][:, slot[inside]] = scores[s, :, : len(slot)].cpu()[:, inside]
        return full

    def check_state(self, v: Tensor, d: Tensor) -> None:
        """Averages of the lanes that took this step; the nodes leave others alone until theirs."""
        ours = self.lanes[self.stepping].tolist()
        for lane in ours:
            for name, got in (("v", v), ("d", d)):
                want = getattr(self.state, name)[0, self.order.index(lane)]
                have = got[lane, : len(want)]
                assert same_bits(have, want), f"{name}: {first_difference(have, want)}"


def check_blocks(plan: StepPlan, count: Tensor, compact: Tensor) -> None:
    for s, kept in enumerate(plan.selection.blocks):
        want = torch.where(kept, kept.cumsum(0) - 1, -1).int()
        assert int(count[s]) == int(kept.sum())
        assert torch.equal(compact[s].cpu(), want), f"sequence {s}"


def check_best(got: Tensor, want: Tensor) -> None:
    listed = [[n for n in row if n >= 0] for row in got.cpu().flatten(0, 1).tolist()]
    assert listed == [sorted(n for n in row if n >= 0) for row in want.flatten(0, 1).tolist()]


class Watch:
    """Compares scores of a step with plain arithmetic on the values that the kernel multiplies."""

    def __init__(self, cache: Cache, ratio: int, block_size: int) -> None:
        self.cache, self.ratio, self.block_size = cache, ratio, block_size
        self.looked = 0

    def look(
        self, plan: StepPlan, query: Tensor, weights: Tensor, table: Tensor, z: Tensor
    ) -> None:
        query, weights = query.cpu(), weights.cpu()
        if query.dtype != torch.float8_e4m3fn:
            query, weights = ops.quantize_query(query, weights)
        last = plan.positions_tokens.amax(1)
        want = ops.score_pages(
            query,
            weights,
            self.cache.pages.cpu(),
            table.cpu(),
            visible_slots(last, self.ratio).int(),
            list_blocks(plan.selection.blocks),
            block_size_slots=self.block_size,
        )
        seen = want > -torch.inf
        torch.testing.assert_close(z.cpu()[seen], want[seen], rtol=1e-4, atol=1e-2)
        self.looked += int(seen.sum())


@pytest.mark.parametrize("case", EXACT, ids=[c[0] for c in EXACT])
@pytest.mark.parametrize("aliased", [1, 0])
def test_the_indexer_lives_as_the_reference(case: tuple, aliased: int) -> None:
    _, config, ratio, rows, slots, page, dtype = case
    steps = STEPS if aliased else 20
    lives, cache = Lives(config, aliased, rows, slots, ratio), Cache(1, slots, page)
    node = make_node("SpinIndexer", config, ratio, slots, page, aliased=aliased)
    state, watch = make_state(config, slots, rows, LIVE), Watch(cache, ratio, config.block_size)
    for t in range(steps):
        lives.next()
        state[4][0, lives.reset_lanes] = -1
        query, weights = cache.query(len(lives.ids), rows, dtype)
        table = cache.table(len(lives.ids))
        head = [query, weights, cache.words, table]
        inputs = [*head, lives.lanes, lives.positions, lives.numbers, *state]
        best, count, *state = Binding(node, inputs).enqueue(current_stream())
        z = state[2][lives.places]
        check_blocks(lives.plan, count, state[3][lives.places])
        full = lives.full_scores(z)
        check_best(best, lives.step.top_k(lives.plan, full))
        if t % 20 == 0:
            watch.look(lives.plan, query, weights, table, z)
        # What waits for the next step is not in the averages yet, on either side.
        lives.check_state(*state[:2])
        lives.step.defer(lives.plan, full)
    assert watch.looked > 0


@pytest.mark.parametrize("case", EXACT, ids=[c[0] for c in EXACT])
def test_the_three_nodes_live_as_the_reference(case: tuple) -> None:
    _, config, ratio, rows, slots, page, dtype = case
    if page > config.block_size:
        config = replace(config, block_size=page)
    lives, cache = Lives(config, 7, rows, slots, ratio), Cache(2, slots, page)
    watch = Watch(cache, ratio, config.block_size)
    make = [
        make_node("SpinPredictBlocks", config, ratio, slots, page),
        make_node("SpinSparseIndexer", config, ratio, slots, page),
        make_node("SpinObserve", config, ratio, slots, page),
        make_node("SpinObserve", config, ratio, slots, page, aliased=0),
    ]
    v, d = make_state(config, slots, rows, LIVE)[:2]
    for t in range(STEPS):
        lives.next()
        plan = lives.plan
        warm = plan.warm.to(DEVICE)
        for lane in lives.lanes[~warm & lives.stepping].tolist():
            v[lane], d[lane] = 0, 0
        query, weights = cache.query(len(lives.ids), rows, dtype)
        table = cache.table(len(lives.ids))
        who = [lives.lanes, lives.positions]
        predicted = Binding(make[0], [v, d, *who, lives.numbers, warm, table])
        block_list, count, compact, row_slots, kept, visible, pages = predicted.enqueue(
            current_stream()
        )
        check_blocks(plan, count, compact)
        assert torch.equal(block_list.cpu(), list_blocks(plan.selection.blocks))
        last = plan.positions_tokens.amax(1)
        assert torch.equal(visible.cpu(), visible_slots(last, ratio).int())
        assert torch.equal(kept, row_slots.amax(1))
        check_pages(pages, block_list, visible, table, config.block_size, page)
        chosen = [block_list, count, row_slots, visible]
        scored = Binding(make[1], [query, weights, cache.words, table, *chosen])
        best, z = scored.enqueue(current_stream())
        full = lives.full_scores(z)
        check_best(best, lives.step.top_k(plan, full))
        if t % 20 == 0:
            watch.look(plan, query, weights, table, z)
        observed = [v, d, *who, lives.accepted.to(DEVICE), z, compact]
        if t % 3 == 0:  # the node that leaves its inputs alone
            before = (v.clone(), d.clone())
            fresh = Binding(make[3], observed).enqueue(current_stream())
            assert same_bits(v, before[0])
            assert same_bits(d, before[1])
            v, d = fresh
        else:
            v, d = Binding(make[2], observed).enqueue(current_stream())
        lives.step.observe(plan, full, lives.accepted.clamp(min=0))
        lives.check_state(v, d)
    assert watch.looked > 0


def check_pages(
    pages: Tensor, block_list: Tensor, visible: Tensor, table: Tensor, b: int, page: int
) -> None:
    each = b // page
    for s, listed in enumerate(block_list.cpu().tolist()):
        numbers = [k * each + h for k in listed if k >= 0 for h in range(each)]
        seen = int(visible[s])
        want = [int(table[s, n]) if n * page < seen else 0 for n in numbers]
        assert pages[s, : len(want)].tolist() == want
        assert not pages[s, len(want) :].any()
