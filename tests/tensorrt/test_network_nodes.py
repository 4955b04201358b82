# SPDX-License-Identifier: Apache-2.0
"""Nodes in networks and ONNX: names, fields, one line for what is wrong."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.tensorrt import (
    NODES,
    Plugin,
    add_node,
    make_onnx_node,
    node_fields,
)

CONFIG = SpinConfig(top_k=64, block_size=16)
SIZES = {"ratio": 4, "slots": 2048, "layer": 3}


def fields_of(name: str, config: SpinConfig = CONFIG, **more: Any) -> dict[str, Any]:
    return node_fields(name, config, **SIZES | more)


def inputs_of(name: str) -> dict[str, str]:
    return {port: port for port in NODES[name].inputs}


# -- fields ---------------------------------------------------------------------------------------


def test_fields_are_the_configurations() -> None:
    config = SpinConfig(
        top_k=512,
        target_sparsity=0.3,
        exploration=0.02,
        ema_decay=0.75,
        pooling="mean",
        mask_policy="row0",
        update_policy="row0",
        seed=2**64 - 1,
    )
    assert node_fields(
        "SpinIndexer", config, ratio=4, slots=4096, layer=7, page_slots=32, exact=False
    ) == {
        "ratio": 4,
        "slots": 4096,
        "top_k": 512,
        "layer": 7,
        "block_size": 64,
        "page_slots": 32,
        "sparsity_ppm": 300_000,
        "exploration_ppm": 20_000,
        "seed": -1,
        "pooling": 2,
        "row0_mask": 1,
        "ema_decay": 0.75,
        "row0_update": 1,
        "exact": 0,
        "aliased": 1,
    }
    without = replace(config, exploration_policy="none")
    assert fields_of("SpinIndexer", without)["exploration_ppm"] == 0
    assert list(fields_of("SpinObserve", aliased=False)) == list(NODES["SpinObserve"].fields)


@pytest.mark.parametrize(
    ("config", "more", "line"),
    [
        (replace(CONFIG, top_k=None), {}, "config.top_k: got None"),
        (replace(CONFIG, top_k=2049), {}, "config.top_k: got 2049, allowed: an integer in 1 .."),
        (replace(CONFIG, block_size=8), {}, "block_size: got 8, allowed: 16, 32, 64, 128"),
        (replace(CONFIG, reduction="A2"), {}, "reduction: got 'A2', allowed: A1"),
        (replace(CONFIG, exploration_policy="age"), {}, "exploration_policy: got 'age'"),
        (replace(CONFIG, query_share=0.5), {}, "query_share: got 0.5, allowed: 0"),
        (replace(CONFIG, state_dtype="log8"), {}, "state_dtype: got 'log8', allowed: fp32, bf16"),
        (CONFIG, {"page_slots": 16}, "page_slots: got 16, allowed: 32, 64"),
        (CONFIG, {"page_slots": 64.0}, "page_slots: got 64.0, allowed: 32, 64"),
        (CONFIG, {"page_slots": [64]}, "page_slots: got [64], allowed: 32, 64"),
        (CONFIG, {"ratio": 0}, "ratio: got 0, allowed: an integer in 1 .. 1048576"),
        (CONFIG, {"ratio": 2**20 + 1}, "ratio: got 1048577"),
        (CONFIG, {"ratio": 4.0}, "ratio: got 4.0"),
        (CONFIG, {"layer": -1}, "layer: got -1, allowed: an integer in 0 .. 1023"),
        (CONFIG, {"layer": 1024}, "layer: got 1024"),
        (CONFIG, {"layer": None}, "layer: got None"),
        (CONFIG, {"exact": "no"}, "exact: got 'no', allowed: True, False"),
        (CONFIG, {"exact": None}, "exact: got None, allowed: True, False"),
        (CONFIG, {"aliased": 2}, "aliased: got 2, allowed: True, False"),
        (CONFIG, {"slots": 2048.0}, "slots: got 2048.0"),
        (CONFIG, {"slots": "2048"}, "slots: got '2048'"),
        (
            CONFIG,
            {"slots": 16 * 16384 + 1},
            "slots: got 262145, allowed: an integer in 1 .. 262144",
        ),
    ],
)
def test_a_configuration_that_cannot_run_is_refused(
    config: SpinConfig, more: dict[str, Any], line: str
) -> None:
    with pytest.raises(SpinError) as error:
        fields_of("SpinIndexer", config, **more)
    assert str(error.value).startswith(line)


def test_pages_larger_than_blocks_are_refused_where_pages_are_listed() -> None:
    with pytest.raises(SpinError, match="page_slots: got 64, allowed: at most block_size = 32"):
        fields_of("SpinPredictBlocks", replace(CONFIG, block_size=32))
    with pytest.raises(SpinError, match="page_slots: got 32, allowed: at most block_size = 16"):
        fields_of("SpinPredictBlocks", CONFIG, page_slots=32)
    assert fields_of("SpinIndexer", replace(CONFIG, block_size=32))["page_slots"] == 64


def test_an_unknown_node_is_refused() -> None:
    with pytest.raises(SpinError, match="node: got 'SpinAll', allowed: SpinIndexer, SpinPredict"):
        fields_of("SpinAll")


def recording_plugin(given: list[Any]) -> Plugin:
    """A plugin whose creators put down the fields they are given, and refuse them."""
    tensorrt: Any = SimpleNamespace(
        PluginField=lambda *a: a,
        PluginFieldCollection=given.extend,
        PluginFieldType=SimpleNamespace(INT64=0, FLOAT64=1),
        TensorRTPhase=SimpleNamespace(BUILD=0),
    )
    creator = SimpleNamespace(create_plugin=lambda *a: None)
    return Plugin(None, tensorrt, dict.fromkeys(NODES, creator))


# -- ONNX -----------------------------------------------------------------------------------------


def attributes(node: Any) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def test_an_onnx_node_names_its_plugin() -> None:
    inputs = {port: f"my_{port}" for port in reversed(NODES["SpinObserve"].inputs)}
    fields = fields_of("SpinObserve")
    node, outputs = make_onnx_node("SpinObserve", inputs, fields, prefix="layer_3/")
    assert (node.op_type, node.domain, node.name) == ("SpinObserve", "spin", "layer_3/SpinObserve")
    assert list(node.input) == [f"my_{port}" for port in NODES["SpinObserve"].inputs]
    assert outputs == {"v": "layer_3/v_out", "d": "layer_3/d_out"}
    assert list(node.output) == list(outputs.values())
    found = attributes(node)
    assert (found.pop("plugin_namespace"), found.pop("plugin_version")) == (b"spin", b"1")
    assert found == fields | {"ema_decay": b"0.5"}


@pytest.mark.parametrize(
    ("seed", "written"),
    [(2**31 - 1, 2**31 - 1), (2**31, b"2147483648"), (2**64 - 2**31 - 1, b"-2147483649")],
)
def test_what_the_parser_would_cut_is_text(seed: int, written: Any) -> None:
    """TensorRT's parser keeps 32 bits of an integer attribute."""
    fields = fields_of("SpinIndexer", replace(CONFIG, seed=seed, ema_decay=0.1))
    node, _ = make_onnx_node("SpinIndexer", inputs_of("SpinIndexer"), fields)
    found = attributes(node)
    assert (found["seed"], found["ema_decay"]) == (written, b"0.1")


@pytest.mark.parametrize(
    ("inputs", "fields", "line"),
    [
        ({"v": None}, {}, "SpinObserve: inputs: got "),
        ({"w": "w"}, {}, "SpinObserve: input: got 'w', allowed: v, d, lanes,"),
        ({}, {"top_k": 3}, "SpinObserve: field: got 'top_k', allowed: ratio, slots,"),
        ({}, {"ratio": None}, "SpinObserve: fields: got "),
    ],
)
def test_wrong_names_are_refused(inputs: dict[str, Any], fields: dict[str, Any], line: str) -> None:
    def changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        return {n: v for n, v in (values | changes).items() if v is not None}

    ports = changed(inputs_of("SpinObserve"), inputs)
    values = changed(fields_of("SpinObserve"), fields)
    for add in (make_onnx_node, lambda *a: add_node(None, SimpleNamespace(), *a)):
        with pytest.raises(SpinError) as error:
            add("SpinObserve", ports, values)
        assert str(error.value).startswith(line)


BOTH: Any = (make_onnx_node, lambda *a: add_node(None, recording_plugin([]), *a))


@pytest.mark.parametrize("add", BOTH)
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"ratio": [4]}, "SpinObserve: ratio: got [4], allowed: an integer of 64 bits"),
        ({"ratio": "4"}, "SpinObserve: ratio: got '4', allowed: an integer of 64 bits"),
        ({"ratio": 4.0}, "SpinObserve: ratio: got 4.0, allowed: an integer of 64 bits"),
        ({"ratio": 2**64}, "SpinObserve: ratio: got 18446744073709551616"),
        ({"ratio": -(2**63) - 1}, "SpinObserve: ratio: got -9223372036854775809"),
        ({"ema_decay": "0.5"}, "SpinObserve: ema_decay: got '0.5', allowed: a number in [0, 1)"),
        ({"ema_decay": None}, "SpinObserve: ema_decay: got None"),
        ({"ema_decay": math.nan}, "SpinObserve: ema_decay: got nan"),
        ({"ema_decay": 10**400}, "SpinObserve: ema_decay: got 1000000"),
    ],
)
def test_wrong_values_are_refused(add: Any, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(SpinError) as error:
        add("SpinObserve", inputs_of("SpinObserve"), fields_of("SpinObserve") | changes)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize("tensor", [None, "", 3, ["v"]])
def test_an_onnx_input_is_a_name(tensor: Any) -> None:
    with pytest.raises(SpinError, match=r"SpinObserve: v: got .*, allowed: the name of a tensor"):
        make_onnx_node(
            "SpinObserve", inputs_of("SpinObserve") | {"v": tensor}, fields_of("SpinObserve")
        )


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63)])
def test_both_ways_take_the_same_64_bits(seed: int) -> None:
    fields = fields_of("SpinIndexer") | {"seed": seed, "exact": True, "ema_decay": 0}
    node, _ = make_onnx_node("SpinIndexer", inputs_of("SpinIndexer"), fields)
    given: list[Any] = []
    with pytest.raises(SpinError, match="what the plugin takes"):
        add_node(None, recording_plugin(given), "SpinIndexer", inputs_of("SpinIndexer"), fields)
    added = {name: array[0] for name, array, _ in given}
    written = attributes(node)
    bits = seed % 2**64
    assert int(added["seed"]) % 2**64 == int(written["seed"]) % 2**64 == bits
    assert added["exact"] == written["exact"] == 1
    assert (added["ema_decay"], added["ema_decay"].dtype, written["ema_decay"]) == (
        0,
        float,
        b"0.0",
    )


def test_numpys_numbers_are_numbers() -> None:
    fields = fields_of("SpinObserve") | {"ratio": np.int64(4), "ema_decay": np.float32(0.5)}
    node, _ = make_onnx_node("SpinObserve", inputs_of("SpinObserve"), fields)
    assert (attributes(node)["ratio"], attributes(node)["ema_decay"]) == (4, b"0.5")


def test_onnx_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(SpinError, match=r"onnx: cannot import it.*pip install onnx"):
        make_onnx_node("SpinObserve", inputs_of("SpinObserve"), fields_of("SpinObserve"))


def test_a_node_that_tensorrt_refuses_is_one_line() -> None:
    def plugin_of(made: object) -> Plugin:
        tensorrt: Any = SimpleNamespace(
            PluginField=lambda *a: a,
            PluginFieldCollection=list,
            PluginFieldType=SimpleNamespace(INT64=0, FLOAT64=1),
            TensorRTPhase=SimpleNamespace(BUILD=0),
        )
        creator = SimpleNamespace(create_plugin=lambda *a: made)
        return Plugin(None, tensorrt, {"SpinObserve": creator})

    given = ("SpinObserve", inputs_of("SpinObserve"), fields_of("SpinObserve"))
    network = SimpleNamespace(add_plugin_v3=lambda *a: None)
    with pytest.raises(SpinError, match=r"SpinObserve: fields: got .* what the plugin takes"):
        add_node(network, plugin_of(None), *given)
    with pytest.raises(SpinError, match="SpinObserve: TensorRT does not add it"):
        add_node(network, plugin_of(object()), *given)
