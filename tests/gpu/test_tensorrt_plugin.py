# SPDX-License-Identifier: Apache-2.0
"""The TensorRT nodes on a GPU against direct calls of the same kernels, and in CUDA graphs.

Whole lives of a batch are in `test_tensorrt_lives.py`.
"""

from __future__ import annotations

import pytest
import torch
from cases import capturing, first_difference, same_bits
from node_cases import (
    CASES,
    DEVICE,
    IDS,
    LANES,
    LAYER,
    MARKS,
    STEPS,
    Cache,
    current_stream,
    make_node,
    make_state,
    zeros,
)
from plugin_host import Binding
from torch import Tensor

from spin_trtllm import ops
from spin_trtllm.config import SpinConfig
from spin_trtllm.gpu_state import GpuState
from spin_trtllm.gpu_step import GpuStep

pytestmark = MARKS


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
