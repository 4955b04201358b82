# SPDX-License-Identifier: Apache-2.0
"""A node's launches as one CUDA graph: the same ones, renewed at each call, whatever fails."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from plugin_cases import Sizes
from plugin_host import HALF, NODES, TORCH_TYPES, Binding, Node
from plugin_recorder import SIZES, Recorder, open_recorder

CALLS = (
    *("cudaGetDevice", "cudaGraphCreate", "cudaGraphAddKernelNode"),
    *("cudaGraphKernelNodeSetAttribute", "cudaGraphInstantiate", "cudaStreamCreateWithFlags"),
    *("cudaGraphUpload", "cudaGraphExecKernelNodeSetParams", "cudaGraphLaunch"),
    "cudaStreamIsCapturing",
)


class Launch(NamedTuple):
    """A kernel that would have run."""

    stem: str
    params: bytes
    cluster: int
    in_graph: bool


class Context:
    """A node of an execution context, and what its calls launch."""

    def __init__(self, recorder: Recorder, node: str, **fields: Any) -> None:
        self.host, self.library = recorder
        self.name = node
        known = self.host.field_names(node)
        given = {**SIZES.fields(node), **fields}
        made = self.host.create(node, **{n: v for n, v in given.items() if n in known})
        assert made is not None, self.host.log()
        self.node: Node = made.reload().attach()

    def bind(self, sizes: Sizes = SIZES) -> Binding:
        """New tensors, whose shapes the node is told."""
        descs = sizes.inputs(self.name).values()
        shapes = [tuple(d.dims.d[: d.dims.rank]) for d in descs]
        types = [TORCH_TYPES[d.type] for d in descs]
        tensors = [torch.zeros(s, dtype=t) for s, t in zip(shapes, types, strict=True)]
        return Binding(self.node, tensors)

    def launches(self, binding: Binding, stream: int = 0) -> list[Launch]:
        """What runs in a call."""
        self.library.recorder_clear()
        binding.enqueue(stream)
        return [self._launch(i) for i in range(self.library.recorder_count())]

    def alone(self, binding: Binding) -> list[Launch]:
        """What a call launches without a graph."""
        self.library.recorder_fail(b"cudaStreamIsCapturing")
        launches = self.launches(binding)
        self.library.recorder_fail(b"")
        assert not any(launch.in_graph for launch in launches)
        return launches

    def _launch(self, i: int) -> Launch:
        stem, params = self.library.recorder_stem(i).decode(), self.library.recorder_params(i)
        length = self.library.recorder_bytes(i)
        in_graph = bool(self.library.recorder_in_graph(i))
        copy = ctypes.string_at(params, length)
        return Launch(stem, copy, self.library.recorder_cluster(i), in_graph)


def in_graph(launches: list[Launch]) -> list[Launch]:
    return [launch._replace(in_graph=True) for launch in launches]


@pytest.fixture(scope="module")
def opened() -> Recorder:
    return open_recorder()


@pytest.fixture
def recorder(opened: Recorder) -> Iterator[Recorder]:
    """Left without streams, graphs or an error."""
    gc.collect()
    library = opened[1]
    assert library.recorder_alive() == 0
    yield opened
    library.recorder_fail(b"")
    library.recorder_refuse(b"")
    gc.collect()
    assert library.recorder_alive() == 0
    assert library.recorder_take_error() == 0


@pytest.mark.parametrize("node", NODES)
def test_a_call_is_one_graph_of_the_same_launches(recorder: Recorder, node: str) -> None:
    context = Context(recorder, node)
    binding = context.bind()
    alone = context.alone(binding)
    assert len(alone) == {"SpinIndexer": 4, "SpinObserve": 1}.get(node, 2)
    for _ in range(2):
        assert context.launches(binding) == in_graph(alone)


@pytest.mark.parametrize("node", NODES)
def test_a_graph_has_the_addresses_of_its_call(recorder: Recorder, node: str) -> None:
    context = Context(recorder, node)
    first, second = context.bind(), context.bind()
    wanted = [in_graph(context.alone(binding)) for binding in (first, second)]
    assert wanted[0] != wanted[1]
    for n in (1, 0, 0, 1):
        assert context.launches((first, second)[n]) == wanted[n]


def test_a_copying_node_copies_first(recorder: Recorder) -> None:
    context = Context(recorder, "SpinIndexer", aliased=0)
    binding = context.bind()
    assert all(launch.in_graph for launch in context.launches(binding))


@pytest.mark.parametrize("pooling", [0, 2])
def test_a_wide_query_and_other_poolings(recorder: Recorder, pooling: int) -> None:
    context = Context(recorder, "SpinIndexer", pooling=pooling)
    binding = context.bind(replace(SIZES, query=HALF))
    alone = context.alone(binding)
    assert len(alone) == (5 if pooling == 0 else 6)
    assert context.launches(binding) == in_graph(alone)


def test_other_clusters_are_other_graphs_made_once(recorder: Recorder) -> None:
    context, library = Context(recorder, "SpinIndexer"), recorder[1]
    few, some, many, most = (replace(SIZES, sequences=s, lanes=s) for s in (6, 12, 66, 70))
    bindings = [context.bind(sizes) for sizes in (few, some, many, most)]
    made = library.recorder_alive()
    for binding, cluster in zip(bindings * 2, (8, 4, 2, 1) * 2, strict=True):
        binding.tell()
        launches = context.launches(binding)
        assert [launch.cluster for launch in launches] == [1, 1, 1, cluster]
        assert launches == in_graph(context.alone(binding))
    assert library.recorder_alive() == made == 8  # four graphs, and what runs of each


def test_sizes_that_the_node_was_not_told_of(recorder: Recorder) -> None:
    """Right in any case, and no longer one graph until the node is told sizes again."""
    context = Context(recorder, "SpinIndexer")
    many, few = context.bind(replace(SIZES, sequences=70, lanes=70)), context.bind()
    wanted = context.alone(many)
    assert context.launches(many) == wanted
    assert context.launches(few) == context.alone(few)
    few.tell()
    assert context.launches(few) == in_graph(context.alone(few))


def test_other_sizes_with_the_same_clusters_use_the_same_graph(recorder: Recorder) -> None:
    context = Context(recorder, "SpinIndexer")
    bindings = [context.bind(replace(SIZES, sequences=s)) for s in (1, 2, 5)]
    for binding in bindings:
        assert context.launches(binding) == in_graph(context.alone(binding))
    assert recorder[1].recorder_alive() == 2


def test_a_captured_stream_gets_the_launches_themselves(recorder: Recorder) -> None:
    context, library = Context(recorder, "SpinIndexer"), recorder[1]
    binding, stream = context.bind(), 64
    library.recorder_capture(stream)
    assert context.launches(binding, stream) == []
    assert library.recorder_end_capture(stream) == 4
    assert all(launch.in_graph for launch in context.launches(binding, stream))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("when", ["before the shapes", "before the call"])
def test_whatever_fails_the_launches_are_made(recorder: Recorder, call: str, when: str) -> None:
    context, library = Context(recorder, "SpinIndexer"), recorder[1]
    reference = context.bind()
    alone = context.alone(reference)
    del context
    gc.collect()
    context = Context(recorder, "SpinIndexer")
    if when == "before the shapes":
        library.recorder_fail(call.encode())
    binding = Binding(context.node, reference.inputs, reference.outputs)
    binding.workspace = reference.workspace
    binding._arguments = (context.node.plugin, *reference._arguments[1:])
    library.recorder_fail(call.encode())
    for _ in range(2):
        launches = context.launches(binding)
        assert [launch._replace(in_graph=False) for launch in launches] == alone
    library.recorder_fail(b"")
    assert library.recorder_take_error() == 0
    binding.tell()
    assert context.launches(binding) == in_graph(alone)


@pytest.mark.parametrize("stem", ["advance", "topk_slots"])
def test_what_a_stem_refuses_is_said_once(recorder: Recorder, stem: str) -> None:
    context, library = Context(recorder, "SpinIndexer"), recorder[1]
    binding = context.bind()
    library.recorder_refuse(stem.encode())
    line = f"^SpinIndexer: {stem}: {stem}: allowed: nothing\n$"
    with pytest.raises(ValueError, match=line):
        binding.tell()
    with pytest.raises(ValueError, match=line):
        binding.enqueue()
    library.recorder_refuse(b"")
    binding.tell()
    library.recorder_refuse(stem.encode())
    with pytest.raises(ValueError, match=line):
        context.launches(binding)
    assert library.recorder_count() == 0  # not even the launches before it


def test_each_context_has_graphs_of_its_own(recorder: Recorder) -> None:
    context, library = Context(recorder, "SpinIndexer"), recorder[1]
    binding = context.bind()
    node = context.node.attach()
    other = Binding(node, [t.clone() for t in binding.inputs])
    assert library.recorder_alive() == 4
    wanted = in_graph(context.alone(binding)), in_graph(context.alone(other))
    for _ in range(2):
        assert (context.launches(binding), context.launches(other)) == wanted
    del node, other
    gc.collect()
    assert library.recorder_alive() == 2


def test_no_sequences_are_no_graph(recorder: Recorder) -> None:
    context = Context(recorder, "SpinIndexer")
    binding = context.bind(replace(SIZES, sequences=0))
    assert context.launches(binding) == []
    assert recorder[1].recorder_alive() == 0
