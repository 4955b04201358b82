# SPDX-License-Identifier: Apache-2.0
"""Tensors of the TensorRT nodes: types, shapes, formats and aliases, and what is refused."""

from __future__ import annotations

import itertools
import random
from ctypes import c_int32
from dataclasses import replace
from typing import Any

import pytest
import torch
from plugin_cases import AVERAGES, PAGES, QUERIES, Sizes
from plugin_host import (
    BF16,
    BOOL,
    FLOAT,
    HALF,
    INT8,
    INT32,
    INT64,
    NODES,
    TORCH_TYPES,
    Binding,
    Desc,
    Dims,
    Host,
    Node,
    dims,
    find_host,
)

HOST = find_host()
pytestmark = pytest.mark.skipif(HOST is None, reason="the plugin or its host cannot be built here")
STATE = {"SpinIndexer": {2: 7, 3: 8, 4: 9, 5: 10, 6: 11}, "SpinObserve": {0: 0, 1: 1}}
FORMATS = range(13)


def host() -> Host:
    assert HOST is not None
    return HOST


def make(node: str, sizes: Sizes, **changes: Any) -> Node:
    made = host().create(node, **{**sizes.fields(node), **changes})
    assert made is not None, host().log()
    return made.reload()


def shape(d: Desc) -> tuple[int, ...]:
    return tuple(d.dims.d[: d.dims.rank])


def grid() -> list[Sizes]:
    """Sizes drawn from every axis; the first is plain, the second as small as can be."""
    rng = random.Random(0)
    axes = {
        "sequences": (0, 1, 7, 300),
        "rows": range(1, 9),
        "heads": (32, 64),
        "lanes": (1, 9),
        "pages": (0, 5),
        "table_width": (0, 3, 500),
        "slots": (1, 7, 64, 65, 1000, 16_384),
        "block_size": (16, 32, 64, 128),
        "page_slots": (32, 64),
        "top_k": (1, 512, 2048),
        "query": QUERIES,
        "page_type": PAGES,
        "state": AVERAGES,
        "spare_places": (0, 3),
    }
    drawn = [{name: rng.choice(list(values)) for name, values in axes.items()} for _ in range(60)]
    return [Sizes(), *(Sizes(**sizes) for sizes in drawn)]


@pytest.mark.parametrize("node", NODES)
def test_types_and_shapes_of_outputs(node: str) -> None:
    for sizes in grid():
        if node == "SpinPredictBlocks" and sizes.page_slots > sizes.block_size:
            continue
        made = make(node, sizes)
        inputs = list(sizes.inputs(node).values())
        outputs, _ = made.output_descs(inputs)
        assert [(d.type, shape(d)) for d in outputs] == sizes.outputs(node), sizes
        assert made.configure(inputs, outputs) == 0, host().log()
        assert made.shape_change(inputs, outputs) == 0, host().log()
        assert host().log() == ""


def test_what_fields_decide_is_a_constant_of_the_network() -> None:
    made = make("SpinIndexer", Sizes())
    _, constant = made.output_descs(list(Sizes().inputs("SpinIndexer").values()))
    assert constant[0] == [False, False, True]  # top_k
    assert constant[4] == [False, False, False]  # an aliased output is what its input is
    made = make("SpinPredictBlocks", Sizes())
    _, constant = made.output_descs(list(Sizes().inputs("SpinPredictBlocks").values()))
    assert constant[0] == constant[6] == [False, True]


@pytest.mark.parametrize("node", NODES)
def test_state_is_aliased_or_copied_as_asked(node: str) -> None:
    made = make(node, Sizes())
    wanted = [STATE.get(node, {}).get(i, -1) for i in range(len(Sizes().outputs(node)))]
    assert made.aliases() == wanted
    assert made.build_version == (2 if node in STATE else 1)
    if node in STATE:
        copying = make(node, Sizes(), aliased=0)
        assert copying.build_version == 1  # the interface that TensorRT 10.0 knows
        assert set(copying.aliases()) == {-1}


ALLOWED = {
    "query": set(QUERIES),
    "pages": set(PAGES),
    "v": set(AVERAGES),
    "warm": {BOOL},
    **{name: {INT64} for name in ("lanes", "positions", "sequence_ids", "accepted", "books")},
    **{name: {FLOAT} for name in ("weights", "scores")},
}


@pytest.mark.parametrize("node", NODES)
def test_only_linear_and_listed_types_are_supported(node: str) -> None:
    for state in AVERAGES:
        sizes = replace(Sizes(), state=state)
        made = make(node, sizes)
        inputs = sizes.inputs(node)
        outputs, _ = made.output_descs(list(inputs.values()))
        names = [*inputs, *(f"out {i}" for i in range(len(outputs)))]
        descs = [*inputs.values(), *outputs]
        for at, name in enumerate(names):
            allowed = ALLOWED.get(name, {INT32})
            if name == "d" or at >= len(inputs):
                allowed = {descs[at].type}  # follows from the inputs
            for kind, form in itertools.product(range(12), FORMATS):
                changed = [Desc(d.dims, d.type, d.format, 1.0) for d in descs]
                changed[at].type, changed[at].format = kind, form
                got = made.supports(at, changed[: len(inputs)], changed[len(inputs) :])
                assert got == (kind in allowed and form == 0), (name, kind, form)
        assert not made.supports(-1, list(inputs.values()), outputs)
        assert not made.supports(len(descs), list(inputs.values()), outputs)


@pytest.mark.parametrize("node", NODES)
def test_every_wrong_description_is_named(node: str) -> None:
    sizes = Sizes()
    made = make(node, sizes)
    good = sizes.inputs(node)
    outputs, _ = made.output_descs(list(good.values()))
    for name, right in good.items():
        for wrong in wrongs(right):
            changed = {**good, name: wrong}
            for ask in (made.shape_change, made.configure):
                assert ask(list(changed.values()), outputs) != 0, (name, shape(wrong))
                line = host().log()
                assert line.startswith(f"{node}: "), line
                assert line.count("\n") == 1
        wrong = Desc(right.dims, HALF if right.type == INT32 else INT8, 0, 1.0)
        if name != "pages":
            assert made.shape_change(list({**good, name: wrong}.values()), outputs) != 0
            assert host().log().startswith(f"{node}: {name}: got "), name


def wrongs(right: Desc) -> list[Desc]:
    """Descriptions that differ in rank, format, or the sign or size of a dimension."""
    made = [
        Desc(dims(shape(right)[:-1]), right.type, 0, 1.0),
        Desc(dims((*shape(right), 1)), right.type, 0, 1.0),
        Desc(right.dims, right.type, 2, 1.0),
    ]
    for axis in range(right.dims.rank):
        for size in (-1, 2**62):
            changed = list(shape(right))
            changed[axis] = size
            made.append(Desc(dims(changed), right.type, 0, 1.0))
    return made


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [
        ("query", (3, 9, 64, 128), "query: got FP8 [3, 9, 64, 128], allowed: HALF, FP8, BF16 "),
        ("query", (3, 2, 48, 128), "query: got FP8 [3, 2, 48, 128]"),
        ("query", (3, 2, 64, 64), "query: got FP8 [3, 2, 64, 64]"),
        ("weights", (3, 2, 32), "weights: got FLOAT [3, 2, 32]"),
        ("pages", (40, 64 * 132), "pages: got INT32 [40, 8448]"),
        ("v", (5, 996), "v: got FLOAT [5, 996]"),
        ("v", (5, 1004), "v: got FLOAT [5, 1004]"),
        ("d", (5, 1000), "d: got FLOAT [5, 1000]"),
        ("d", (4, 1008), "d: got FLOAT [4, 1008]"),
        ("scores", (8, 2, 1000), "scores: got FLOAT [8, 2, 1000]"),
        ("scores", (9, 2, 1024), "compact_of_block: got INT32 [8, 16]"),
        ("books", (4, 5), "books: got 4 rows, allowed: rows + 3 = 5"),
        ("books", (5, 4), "books: got INT64 [5, 4]"),
    ],
)
def test_the_line_says_what_was_given(name: str, wrong: tuple[int, ...], text: str) -> None:
    node = "SpinIndexer"
    made, inputs = make(node, Sizes()), Sizes().inputs(node)
    outputs, _ = made.output_descs(list(inputs.values()))
    changed = {**inputs, name: Desc(dims(wrong), inputs[name].type, 0, 1.0)}
    assert made.shape_change(list(changed.values()), outputs) != 0
    assert host().log().startswith(f"{node}: {text}")


def test_too_few_places_are_refused() -> None:
    sizes = replace(Sizes(), spare_places=-1)
    made, inputs = make("SpinIndexer", sizes), list(sizes.inputs("SpinIndexer").values())
    outputs, _ = made.output_descs(inputs)
    assert made.shape_change(inputs, outputs) != 0
    wanted = "SpinIndexer: scores: got 7 places, allowed: lanes + sequences = 8 or more\n"
    assert host().log() == wanted


@pytest.mark.parametrize("node", NODES)
def test_wrong_counts_and_output_types_are_refused(node: str) -> None:
    made, inputs = make(node, Sizes()), list(Sizes().inputs(node).values())
    outputs, _ = made.output_descs(inputs)
    with pytest.raises(ValueError, match=f"{node}: tensors: got {len(inputs) - 1} inputs"):
        made.output_descs(inputs[:-1])
    assert made.shape_change(inputs[:-1], outputs) != 0
    assert made.configure(inputs, outputs[:-1]) != 0
    assert made.workspace_bytes(inputs[:-1], outputs) == 0
    outputs[0].type = BF16 if outputs[0].type == INT32 else INT32
    assert made.shape_change(inputs, outputs) != 0


@pytest.mark.parametrize("node", NODES)
def test_null_arrays_and_shape_inputs_are_refused_on_one_line(node: str) -> None:
    made, given = make(node, Sizes()), list(Sizes().inputs(node).values())
    calls, count = host().calls, len(Sizes().outputs(node))
    types = ((c_int32 * len(given))(*(d.type for d in given)), (c_int32 * count)())
    shapes = ((Dims * len(given))(*(d.dims for d in given)), (Dims * count)())
    constant = (c_int32 * (8 * count))()
    for inputs, outputs in ((None, types[1]), (types[0], None)):
        asked = (made.plugin, inputs, len(given), outputs, count)
        assert calls.host_output_types(*asked) != 0
        assert host().log() == f"{node}: tensors: got null, allowed: arrays\n"
    asked = (made.plugin, shapes[0], len(given), shapes[1], constant, count)
    assert calls.host_output_shapes(*asked, 0) == 0
    assert calls.host_output_shapes(*asked, 1) != 0
    assert host().log() == f"{node}: shape inputs: got 1, allowed: 0\n"


def test_pages_are_as_many_as_the_kernels_can_number() -> None:
    made, most = make("SpinIndexer", Sizes()), 2**31 - 1
    for pages, taken in ((most, True), (most + 1, False)):
        inputs = list(replace(Sizes(), pages=pages).inputs("SpinIndexer").values())
        outputs, _ = made.output_descs(inputs)
        assert (made.configure(inputs, outputs) == 0) == taken
    assert host().log().startswith("SpinIndexer: pages: got INT32 [2147483648, 2112], allowed: ")


def tensors(node: str, sizes: Sizes) -> list[torch.Tensor]:
    return [torch.zeros(shape(d), dtype=TORCH_TYPES[d.type]) for d in sizes.inputs(node).values()]


def test_workspace_grows_with_the_call() -> None:
    def needed(**changes: Any) -> int:
        sizes = replace(Sizes(), **changes)
        made, inputs = make("SpinIndexer", sizes), list(sizes.inputs("SpinIndexer").values())
        return made.workspace_bytes(inputs, made.output_descs(inputs)[0])

    heads = 3 * 2 * 64
    rounded = -(-heads * 4 // 256) * 256
    assert needed(query=HALF) - needed() == heads * 128 + rounded
    assert needed(sequences=400) > 40 * needed(sequences=3)
    made, inputs = make("SpinObserve", Sizes()), list(Sizes().inputs("SpinObserve").values())
    assert made.workspace_bytes(inputs, made.output_descs(inputs)[0]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device, and this is host memory")
@pytest.mark.parametrize("node", NODES)
def test_enqueue_without_a_device_returns_an_error(node: str) -> None:
    for aliased in (0, 1) if node in STATE else (None,):
        extra = {} if aliased is None else {"aliased": aliased}
        binding = Binding(make(node, Sizes(), **extra).attach(), tensors(node, Sizes()))
        with pytest.raises(ValueError, match=f"^{node}: [a-z_]+: ") as refused:
            binding.enqueue()
        assert str(refused.value).count("\n") == 1


@pytest.mark.parametrize("node", NODES)
def test_wrong_addresses_are_refused_before_anything_runs(node: str) -> None:
    sizes = Sizes()
    names = list(sizes.inputs(node))
    binding = Binding(make(node, sizes).attach(), tensors(node, sizes))
    plugin, in_descs, out_descs, inputs, outputs, workspace = binding._arguments
    for at, name in enumerate(names):
        for wrong in (None, inputs[at] + 8):
            changed = type(inputs)(*inputs)
            changed[at] = wrong
            arguments = (plugin, in_descs, out_descs, changed, outputs, workspace, None)
            assert host().calls.host_enqueue(*arguments) != 0
            assert host().log().startswith(f"{node}: {name}: got address ")
    if node in ("SpinIndexer", "SpinPredictBlocks"):
        arguments = (plugin, in_descs, out_descs, inputs, outputs, None, None)
        assert host().calls.host_enqueue(*arguments) != 0
        assert host().log().startswith(f"{node}: workspace: got address ")


@pytest.mark.parametrize("node", STATE)
def test_state_apart_from_its_input_is_refused(node: str) -> None:
    inputs = tensors(node, Sizes())
    made = make(node, Sizes()).attach()
    outputs = [torch.zeros(shape, dtype=TORCH_TYPES[kind]) for kind, shape in Sizes().outputs(node)]
    with pytest.raises(ValueError, match=r"v: got an output apart from its input.*ALIASED_PLUGIN"):
        Binding(made, inputs, outputs).enqueue()


@pytest.mark.parametrize("node", NODES)
def test_no_sequences_are_legal(node: str) -> None:
    sizes = replace(Sizes(), sequences=0)
    assert Binding(make(node, sizes).attach(), tensors(node, sizes)).enqueue() is not None
