# SPDX-License-Identifier: Apache-2.0
"""The TensorRT nodes on a GPU, their host played by the test, against `SpinStep` and `GpuStep`.

Nodes are created, serialised, re-created for the run time and attached, as an engine does it. The
reference decides from the scores that the nodes computed, so everything it says is compared bit for
bit: chosen blocks, best slots, averages. The scores are checked on their own, with a tolerance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import capturing, first_difference, same_bits
from plugin_host import Binding, Node, find_host
from serving_batches import Batch
from torch import Tensor

from spin_trtllm import native, ops
from spin_trtllm.config import SpinConfig
from spin_trtllm.geometry import count_blocks, visible_slots
from spin_trtllm.gpu_state import GpuState
from spin_trtllm.gpu_step import GpuStep
from spin_trtllm.ops.topk_slots import list_blocks
from spin_trtllm.state import SpinState
from spin_trtllm.step import SpinStep, StepPlan

HOST = find_host() if torch.cuda.is_available() else None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(HOST is None, reason="the plugin or its host has not been built"),
]

DEVICE = "cuda"
LAYER, LANES, LIVE, HEADS = 5, 5, 10, 32
STEPS = 200
BASE = SpinConfig(top_k=8, block_size=16, state_dtype="bf16", seed=3)
CASES = [
    ("plain", BASE, 4, 1, 700, 64, torch.float8_e4m3fn),
    ("drafts", replace(BASE, seed=2**64 - 1), 4, 4, 700, 32, torch.float16),
    ("fp32", replace(BASE, state_dtype="fp32", ema_decay=0.7), 1, 8, 300, 64, torch.bfloat16),
    ("tiles", replace(BASE, block_size=64, top_k=100), 1, 3, 4100, 64, torch.float8_e4m3fn),
    ("row0", replace(BASE, mask_policy="row0", update_policy="row0"), 4, 3, 500, 32, torch.float16),
    ("dense", replace(BASE, target_sparsity=0.0), 4, 2, 500, 64, torch.bfloat16),
    ("sparse", replace(BASE, target_sparsity=0.9, exploration=0.3), 1, 2, 2000, 64, torch.float16),
    ("mean", replace(BASE, pooling="mean", block_size=128), 2, 2, 1500, 64, torch.float8_e4m3fn),
    ("top4", replace(BASE, pooling="top4", block_size=32), 2, 1, 900, 32, torch.bfloat16),
]
IDS = [c[0] for c in CASES]
# The sums of mean and top4 have no order that both sides keep: bits are compared with GpuStep only.
EXACT = [c for c in CASES if c[1].pooling == "max"]


def make_node(
    name: str, config: SpinConfig, ratio: int, slots: int, page: int, **more: Any
) -> Node:
    """A node as an engine has it, after a trip through its file."""
    assert HOST is not None
    given = {
        "ratio": ratio,
        "slots": slots,
        "layer": LAYER,
        "top_k": config.top_k,
        "block_size": config.block_size,
        "page_slots": page,
        "sparsity_ppm": config.sparsity_ppm,
        "exploration_ppm": config.exploration_ppm,
        "seed": str(config.seed),
        "pooling": native.POOLINGS[config.pooling],
        "row0_mask": int(config.mask_policy == "row0"),
        "ema_decay": config.ema_decay,
        "row0_update": int(config.update_policy == "row0"),
    }
    known = HOST.field_names(name)
    made = HOST.create(name, **{n: v for n, v in given.items() if n in known}, **more)
    assert made is not None, HOST.log()
    return made.reload().attach()


def current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


class Cache:
    """Keys in pages, a table for each sequence of a step, and queries."""

    def __init__(self, seed: int, slots: int, page: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.width = count_blocks(slots, page) + 1
        count = self.width + 20
        keys = torch.randn(count, page * native.KEY_DIM, generator=self.generator)
        scales = torch.rand(count, page, generator=self.generator) + 0.5
        parts = [keys.to(torch.float8_e4m3fn).view(torch.uint8), scales.view(torch.uint8)]
        self.pages = torch.cat(parts, 1).to(DEVICE)
        self.words = self.pages.view(torch.int32)  # as TensorRT takes them

    def table(self, sequences: int) -> Tensor:
        table = torch.zeros(sequences, self.width, dtype=torch.int32)
        for row in table:
            row[:] = torch.randperm(len(self.pages), generator=self.generator)[: self.width]
        return table.to(DEVICE)

    def query(self, sequences: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        query = torch.randn(sequences, rows, HEADS, native.KEY_DIM, generator=self.generator)
        weights = torch.randn(sequences, rows, HEADS, generator=self.generator)
        return query.to(dtype).to(DEVICE), weights.to(DEVICE)


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


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


def padded(size: int) -> int:
    return (size + 7) // 8 * 8


def make_state(config: SpinConfig, slots: int, rows: int, sequences: int) -> list[Tensor]:
    """State inputs of SpinIndexer: zeros, and where nothing may be read, what must not be used."""
    blocks = count_blocks(slots, config.block_size)
    places = LANES + sequences
    return [
        zeros(LANES, padded(slots), dtype=config.storage_dtype),
        zeros(LANES, padded(slots + 1) + 8, dtype=config.storage_dtype),
        torch.full((places, rows, blocks * config.block_size), float("nan"), device=DEVICE),
        zeros(places, blocks, dtype=torch.int32),
        zeros(rows + 3, LANES, dtype=torch.int64),
    ]


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


class Fixed:
    """Inputs of a step at fixed addresses, and a walk of positions through them."""

    def __init__(self, config: SpinConfig, rows: int, slots: int, ratio: int, page: int) -> None:
        self.rows, self.ratio, self.slots = rows, ratio, slots
        self.cache = Cache(3, slots, page)
        self.query, self.weights = self.cache.query(LANES, rows, torch.float8_e4m3fn)
        self.table = self.cache.table(LANES)
        self.lanes = torch.arange(LANES, device=DEVICE)
        self.numbers = self.lanes + 100
        self.positions = torch.full((LANES, rows), -1, device=DEVICE)
        self.generator = torch.Generator().manual_seed(4)
        self.first = torch.randint(0, 40, (LANES,), generator=self.generator)

    def draw(self, options: int) -> int:
        return int(torch.randint(0, options, (1,), generator=self.generator))

    def move(self, t: int) -> None:
        """The next step: other places in the batch, drafts taken or not, jumps, pauses."""
        rows, limit = self.rows, (self.slots + 1) * self.ratio - 1 - 2 * self.rows
        order = torch.randperm(LANES, generator=self.generator)
        if t % 50 == 49:
            self.first[self.draw(LANES)] = self.draw(limit)  # a jump
        counts = torch.tensor([1 + self.draw(rows) for _ in range(LANES)])
        if t % 7 == 6:
            counts[self.draw(LANES)] = 0  # takes no step
        row = torch.arange(rows)
        steps = torch.where(row < counts.unsqueeze(1), self.first.unsqueeze(1) + row, -1)
        taken = torch.tensor([self.draw(int(c)) + 1 if c else 0 for c in counts])
        self.first = torch.where(self.first + taken > limit, limit // 2, self.first + taken)
        self.lanes.copy_(order)
        self.numbers.copy_(order + 100)
        self.positions.copy_(steps[order])
        query, weights = self.cache.query(LANES, rows, self.query.dtype)
        self.query.copy_(query)
        self.weights.copy_(weights)

    def inputs(self) -> list[Tensor]:
        head = [self.query, self.weights, self.cache.words, self.table]
        return [*head, self.lanes, self.positions, self.numbers]


def captured(*bindings: Binding) -> torch.cuda.CUDAGraph:
    with capturing() as graph:
        for binding in bindings:
            binding.enqueue(current_stream())
    return graph


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("as_graph", [False, True])
def test_the_indexer_equals_gpu_step(case: tuple, as_graph: bool) -> None:
    """The same kernels through torch; a graph is captured before the first real step."""
    _, config, ratio, rows, slots, page, _ = case
    fixed = Fixed(config, rows, slots, ratio, page)
    node = make_node("SpinIndexer", config, ratio, slots, page)
    binding = Binding(node, [*fixed.inputs(), *make_state(config, slots, rows, LANES)])
    best, count, v, d, _, _, books = binding.outputs
    gpu_state = GpuState((LAYER,), sequences=LANES, slots=slots, dtype=config.storage_dtype)
    step = GpuStep(config, gpu_state, ratio=ratio, sequences=LANES, rows=rows)
    binding.enqueue(current_stream())  # only padding: nothing is remembered
    graph = captured(binding) if as_graph else None
    warm = 0
    for t in range(STEPS):
        fixed.move(t)
        if graph is None:
            binding.enqueue(current_stream())
        else:
            graph.replay()
        step.begin(fixed.lanes, fixed.numbers, fixed.positions, tenants=fixed.numbers)
        step.score(0, fixed.query, fixed.weights, fixed.cache.pages, fixed.table)
        assert torch.equal(best, step.top_k(0)), first_difference(best, step.top_k(0))
        assert torch.equal(count, step.layer(0).block_count)
        assert same_bits(v[:, :slots], gpu_state.v[0, :LANES])
        assert same_bits(d[:, : slots + 1], gpu_state.d[0, :LANES])
        assert torch.equal(books[1], gpu_state.next_tokens[0, :LANES])
        warm += int(step.warm[:LANES].sum())
    assert warm > STEPS * LANES // 2


def test_the_three_nodes_in_a_graph_equal_direct_calls() -> None:
    _, config, ratio, rows, slots, page, _ = CASES[3]
    fixed, found = Fixed(config, rows, slots, ratio, page), []
    warm, accepted = zeros(LANES, dtype=torch.bool), zeros(LANES, dtype=torch.int64)

    def build() -> list[Binding]:
        v, d = make_state(config, slots, rows, LANES)[:2]
        who = [fixed.lanes, fixed.positions, fixed.numbers]
        names = ("SpinPredictBlocks", "SpinSparseIndexer", "SpinObserve")
        nodes = [make_node(name, config, ratio, slots, page) for name in names]
        predict = Binding(nodes[0], [v, d, *who, warm, fixed.table])
        lists, count, compact, row_slots, _, visible, _ = predict.outputs
        chosen = [lists, count, row_slots, visible]
        score = Binding(nodes[1], [*fixed.inputs()[:4], *chosen])
        state = [v, d, *who[:2], accepted, score.outputs[1], compact]
        return [predict, score, Binding(nodes[2], state)]

    direct, replayed = build(), build()
    for binding in direct:
        binding.enqueue(current_stream())  # loads the kernels; only padding, so nothing is learned
    graph = captured(*replayed)
    for t in range(STEPS):
        fixed.move(t)
        warm.copy_(torch.rand(LANES, generator=fixed.generator) < 0.9)
        accepted.fill_(fixed.draw(rows + 1) - 1)
        for binding in direct:
            binding.enqueue(current_stream())
        graph.replay()
        for a, b in zip(direct[:2], replayed[:2], strict=True):
            assert torch.equal(a.outputs[0], b.outputs[0])
        for name, a, b in zip("vd", direct[2].outputs, replayed[2].outputs, strict=True):
            assert same_bits(a, b), f"step {t} {name}: {first_difference(a, b)}"
        found.append(direct[1].outputs[0].clone())
    assert not torch.equal(found[0], found[-1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_wide_query_is_quantised_on_the_way(dtype: torch.dtype) -> None:
    _, config, ratio, rows, slots, page, _ = CASES[1]
    fixed = Fixed(config, rows, slots, ratio, page)
    query, weights = fixed.cache.query(LANES, rows, dtype)
    quantised, scaled = ops.quantize_query(query, weights)
    found = []
    for given in ((query, weights), (quantised, scaled)):
        node = make_node("SpinIndexer", config, ratio, slots, page)
        fixed.positions.copy_(torch.arange(rows).expand(LANES, -1) + 1500)
        inputs = [*given, *fixed.inputs()[2:], *make_state(config, slots, rows, LANES)]
        found.append(Binding(node, inputs).enqueue(current_stream())[0])
    assert torch.equal(*found)
    assert bool((found[0] >= 0).all())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_pages_are_bytes_whatever_their_type(dtype: torch.dtype) -> None:
    _, config, ratio, rows, slots, page, _ = CASES[0]
    fixed = Fixed(config, rows, slots, ratio, page)
    fixed.move(0)
    found = []
    for pages in (fixed.cache.words, fixed.cache.pages.view(dtype)):
        head, tail = fixed.inputs()[:2], fixed.inputs()[3:]
        node = make_node("SpinIndexer", config, ratio, slots, page)
        inputs = [*head, pages, *tail, *make_state(config, slots, rows, LANES)]
        found.append(Binding(node, inputs).enqueue(current_stream())[0])
    assert torch.equal(*found)
