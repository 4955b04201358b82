# SPDX-License-Identifier: Apache-2.0
"""The graph of a node's launches on a GPU: it is used, and what it computes is what they compute.

Whole lives of batches are in test_tensorrt_lives.py, whose nodes are enqueued as graphs, too.
"""

from __future__ import annotations

import threading

import pytest
import torch
from cases import capturing, same_bits
from node_cases import BASE, DEVICE, LANES, MARKS, Cache, current_stream, make_node, make_state
from plugin_host import Binding, Node
from torch import Tensor

pytestmark = MARKS

RATIO, SLOTS, PAGE, ROWS = 4, 4_100, 64, 2
FP8 = torch.float8_e4m3fn


class Pair:
    """The same calls of two nodes with states of their own; the second makes no graphs."""

    def __init__(self, sequences: int = 3, seed: int = 5) -> None:
        self.cache = Cache(seed, SLOTS, PAGE)
        self.nodes = [self.node(), self.node()]
        self.states = [make_state(BASE, SLOTS, ROWS, sequences) for _ in range(2)]
        self.rows: list[list[Tensor]] = [[], []]
        self.sequences, self.step = sequences, 0

    @staticmethod
    def node() -> Node:
        return make_node("SpinIndexer", BASE, RATIO, SLOTS, PAGE)

    def bindings(self) -> list[Binding]:
        """New inputs of a step, elsewhere in memory each time."""
        live = torch.arange(self.sequences, device=DEVICE)
        lanes = torch.where(live < LANES, live, -1)
        position = 4_000 + ROWS * self.step
        positions = torch.arange(position, position + ROWS, device=DEVICE).repeat(len(live), 1)
        inputs = [
            *self.cache.query(self.sequences, ROWS, FP8),
            *(self.cache.words, self.cache.table(self.sequences)),
            *(lanes, positions, live + 70),
        ]
        self.step += 1
        return [
            Binding(node, [*inputs, *state], tell=node is self.nodes[0])
            for node, state in zip(self.nodes, self.states, strict=True)
        ]

    def enqueue(self, stream: int | None = None) -> None:
        """A step of both; outputs are kept for `check`."""
        where = current_stream() if stream is None else stream
        for binding, kept in zip(self.bindings(), self.rows, strict=True):
            kept += [t.clone() for t in binding.enqueue(where)[:2]]

    def check(self) -> None:
        """Every output of every step, and the states."""
        torch.cuda.synchronize()
        assert len(self.rows[0]) == 2 * self.step > 0
        for got, want in zip(*self.rows, strict=True):
            assert torch.equal(got, want)
        assert int((self.rows[0][0] >= 0).sum()) > 0
        for got, want in zip(*self.states, strict=True):
            assert same_bits(got[:LANES], want[:LANES])


def calls_of_cuda(binding: Binding) -> list[str]:
    """Names of the runtime's launching calls in an `enqueue`."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        binding.enqueue(current_stream())
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    return [name for name in names if "Launch" in name]


def test_a_call_is_one_launch_of_the_runtime() -> None:
    graph, alone = Pair().bindings()
    for binding, wanted in ((graph, ["cudaGraphLaunch"]), (alone, ["cudaLaunchKernelExC"] * 4)):
        binding.enqueue(current_stream())
        assert calls_of_cuda(binding) == wanted


def test_many_calls_under_way() -> None:
    """A graph's parameters are renewed while its last launches have not run yet."""
    pair = Pair()
    pair.enqueue()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for _ in range(40):
        pair.enqueue()
    pair.check()


@pytest.mark.parametrize("sequences", [6, 12, 60, 70])  # clusters of 8, 4, 2 and 1 blocks
def test_sizes_of_each_cluster(sequences: int) -> None:
    pair = Pair(sequences)
    for _ in range(4):
        pair.enqueue()
    pair.check()


def test_one_node_of_many_sizes() -> None:
    """Each size is told before its calls, as batches grow and shrink."""
    few = Pair(6)
    pairs = [few, Pair(12), Pair(70)]
    for pair in pairs[1:]:
        pair.nodes = few.nodes
    for _ in range(3):
        for pair in pairs:
            pair.enqueue()
    for pair in pairs:
        pair.check()


def test_shapes_told_and_calls_made_while_another_stream_is_captured() -> None:
    """Neither may end the capture, nor become a part of it."""
    pair, other = Pair(), torch.cuda.Stream()
    counter = torch.zeros(1, device=DEVICE)
    counter += 1
    counter.zero_()
    steps = [pair.bindings() for _ in range(3)]
    with capturing() as graph:
        counter += 1
        for bindings in steps:
            bindings[0].tell()
            for binding in bindings:
                binding.enqueue(other.cuda_stream)
    graph.replay()
    torch.cuda.synchronize()
    assert counter.item() == 1
    for bindings in steps:
        for kept, binding in zip(pair.rows, bindings, strict=True):
            kept += binding.outputs[:2]
    pair.check()


def test_shapes_told_in_one_thread_and_calls_made_in_another() -> None:
    pair = Pair()
    for _ in range(3):
        thread = threading.Thread(target=pair.enqueue)
        thread.start()
        thread.join()
        pair.enqueue()
    pair.check()


def test_a_captured_step_is_replayed_between_calls() -> None:
    """The captured launches hold addresses of their own, which later calls do not renew."""
    pair = Pair()
    pair.enqueue()
    graphs = []
    for binding in pair.bindings():
        with capturing() as graph:
            binding.enqueue(current_stream())
        graphs.append((graph, binding))
    pair.step -= 1
    for _ in range(3):
        for (graph, binding), kept in zip(graphs, pair.rows, strict=True):
            graph.replay()
            kept += [t.clone() for t in binding.outputs[:2]]
        pair.step += 1
        pair.enqueue()
    pair.check()


def test_nodes_come_and_go_with_their_graphs() -> None:
    def used() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    inputs = Pair().bindings()[0].inputs
    for _ in range(8):
        Binding(Pair.node(), inputs).enqueue(current_stream())
    before = used()
    for _ in range(200):
        Binding(Pair.node(), inputs).enqueue(current_stream())
    assert used() - before < 2**25
