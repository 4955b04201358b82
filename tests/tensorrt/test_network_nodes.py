# SPDX-License-Identifier: Apache-2.0
"""Nodes in networks and ONNX, and finding TensorRT: names, fields, one line for what is wrong."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from checkpoints import TINY

from spin_trtllm.build.checkpoint import IndexerGeometry, read_checkpoint
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.tensorrt import (
    FLAVOURS,
    NODES,
    IndexerSizes,
    IndexerWeights,
    Plugin,
    Rope,
    add_node,
    allow_aliasing,
    import_flavour,
    indexer_network,
    installed_flavours,
    load_plugin,
    make_onnx_node,
    node_fields,
    plugin_path,
    read_indexer_weights,
)
from spin_trtllm.hosts.tensorrt.builder import EngineJob, build_engines
from spin_trtllm.hosts.tensorrt.rope import indexer_rope

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
        (CONFIG, {"page_slots": 16}, "page_slots: got 16, allowed: 32, 64"),
        (CONFIG, {"page_slots": 64.0}, "page_slots: got 64.0, allowed: 32, 64"),
        (CONFIG, {"page_slots": [64]}, "page_slots: got [64], allowed: 32, 64"),
        (CONFIG, {"ratio": 0}, "ratio: got 0, allowed: an integer in 1 .. 1048576"),
        (CONFIG, {"ratio": 2**20 + 1}, "ratio: got 1048577"),
        (CONFIG, {"ratio": 4.0}, "ratio: got 4.0"),
        (CONFIG, {"layer": -1}, "layer: got -1, allowed: an integer in 0 .. 1023"),
        (CONFIG, {"layer": 1024}, "layer: got 1024"),
        (CONFIG, {"layer": None}, "layer: got None"),
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


# -- the indexer network --------------------------------------------------------------------------


SMALL = IndexerSizes(2, 1, 128)


def network(
    geometry: IndexerGeometry,
    config: SpinConfig = CONFIG,
    *,
    weights: IndexerWeights | None = None,
    sizes: IndexerSizes = SMALL,
    **options: Any,
) -> Any:
    heads, head_dim = geometry.index_heads, geometry.index_head_dim
    weights = weights or IndexerWeights(3, torch.zeros(heads, head_dim, 8), torch.zeros(heads, 8))
    return indexer_network(weights, Rope(torch.ones(8)), geometry, config, sizes, **options)


@pytest.mark.parametrize(
    ("geometry", "options", "line"),
    [
        ((65, 128, 64), {}, "index_n_heads: got 65, allowed: at most 64"),
        ((64, 129, 64), {}, "index_head_dim: got 129, allowed: 16 .. 128"),
        ((64, 8, 64), {}, "index_head_dim: got 8, allowed: 16 .. 128"),
        ((64, 96, 64), {}, "index_head_dim: got 96, allowed: a power of two"),
        ((64, 128, 32), {}, "config.top_k: got 64, allowed: 32, the model's index_topk"),
        ((64, 128, 64), {"precision": "int4"}, "precision: got 'int4', allowed: fp32, fp16,"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    geometry: tuple[int, int, int], options: dict[str, Any], line: str
) -> None:
    with pytest.raises(SpinError) as error:
        network(IndexerGeometry((3,), 4, *geometry), **options)
    assert str(error.value).startswith(line)


def test_ninety_six_dimensions_do_without_rotation() -> None:
    onnx.checker.check_model(network(IndexerGeometry((3,), 4, 64, 96, 64), rotate=False))


@pytest.mark.parametrize(
    ("name", "value", "precision", "line"),
    [
        ("query", math.nan, "bf16", "query projection of layer 3: got nan, allowed: finite"),
        ("heads", math.nan, "fp8", "head weights of layer 3: got nan, allowed: finite numbers"),
        ("query", -math.inf, "fp32", "query projection of layer 3: got inf"),
        ("query", 70000.0, "fp16", "query projection of layer 3: got 70000.0, allowed: finite num"),
        ("heads", -70000.0, "fp16", "head weights of layer 3: got 70000.0"),
        ("query", 3.4e38, "bf16", "query projection of layer 3: got 3.3999"),
        ("query", 3.4e38, "fp8", "query projection of layer 3: got 3.3999"),
    ],
)
def test_weights_that_a_precision_cannot_hold_are_refused(
    name: str, value: float, precision: str, line: str
) -> None:
    weights = IndexerWeights(3, torch.zeros(64, 128, 8), torch.zeros(64, 8))
    getattr(weights, name)[..., 1, 3] = value
    with pytest.raises(SpinError) as error:
        network(IndexerGeometry((3,), 4, 64, 128, 64), weights=weights, precision=precision)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize(
    ("query", "heads", "line"),
    [
        ((32, 128, 8), (64, 8), "query projection of layer 3: got [32, 128, 8], allowed: [64, 1"),
        ((64, 128, 0), (64, 8), "query projection of layer 3: got [64, 128, 0]"),
        ((64, 128), (64, 8), "query projection of layer 3: got [64, 128]"),
        ((64, 128, 8), (63, 8), "head weights of layer 3: got [63, 8], allowed: [64, hidden]"),
        ((64, 128, 8), (64, 0), "head weights of layer 3: got [64, 0]"),
    ],
)
def test_weights_of_another_shape_are_refused(
    query: tuple[int, ...], heads: tuple[int, ...], line: str
) -> None:
    weights = IndexerWeights(3, torch.zeros(query), torch.zeros(heads))
    with pytest.raises(SpinError) as error:
        network(IndexerGeometry((3,), 4, 64, 128, 64), weights=weights)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((4096, 8, 262_144), "elements of scores: got 17179869184, allowed: at most 2147483647"),
        ((4096, 1, 262_144), "elements of scores: got 2147483648"),
        ((65536, 8, 64), "elements of query: got 4294967296"),
    ],
)
def test_tensors_that_tensorrt_cannot_have_are_refused(sizes: tuple[int, ...], line: str) -> None:
    with pytest.raises(SpinError) as error:
        network(IndexerGeometry((3,), 4, 64, 128, 64), sizes=IndexerSizes(*sizes))
    assert str(error.value).startswith(line)


def test_the_largest_tensors_are_made() -> None:
    onnx.checker.check_model(
        network(IndexerGeometry((3,), 4, 64, 128, 64), sizes=IndexerSizes(4095, 1, 262_144))
    )


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((0, 1, 64), "max_sequences: got 0"),
        ((1, 9, 64), "rows: got 9, allowed: an integer in 1 .. 8"),
        ((1, 1, 96), "slots: got 96, allowed: a multiple of 64"),
        ((1, 1, 32), "slots: got 32"),
        ((1, 1, 64, 128), "page_slots: got 128, allowed: 32, 64"),
    ],
)
def test_wrong_sizes_are_refused(sizes: tuple[int, ...], line: str) -> None:
    with pytest.raises(SpinError) as error:
        IndexerSizes(*sizes)
    assert str(error.value).startswith(line)


def test_a_layer_without_an_indexer_is_refused() -> None:
    with pytest.raises(SpinError, match="layer: got 2, allowed: 1, 3, 4, 6"):
        read_indexer_weights(read_checkpoint(TINY), 2)


def test_a_layer_type_may_have_no_rope_fields() -> None:
    assert indexer_rope({}).dim == 64


# -- finding TensorRT and the plugin --------------------------------------------------------------


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a module of this text on the path; no other TensorRT is there."""
    monkeypatch.syspath_prepend(tmp_path)
    find = importlib.util.find_spec

    def find_ours(name: str) -> Any:
        return find(name) if (tmp_path / f"{name}.py").exists() else None

    monkeypatch.setattr(importlib.util, "find_spec", find_ours)

    def add(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, name, raising=False)

    yield add
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_the_best_flavour_is_taken(install: Any) -> None:
    install("tensorrt_lean", "__version__ = '10.9'")
    assert [flavour.name for flavour in installed_flavours()] == ["tensorrt_lean"]
    assert import_flavour().__name__ == "tensorrt_lean"
    with pytest.raises(SpinError, match="none of tensorrt, tensorrt_rtx is installed"):
        import_flavour(builds=True)
    install("tensorrt_bindings", "__version__ = '10.9'")
    assert import_flavour().__name__ == "tensorrt_bindings"
    assert import_flavour("tensorrt_lean").__name__ == "tensorrt_lean"


def test_a_flavour_that_is_none_or_broken_is_one_line(install: Any) -> None:
    with pytest.raises(SpinError, match="tensorrt: got 'cuda', allowed: tensorrt, tensorrt_rtx,"):
        import_flavour("cuda")
    install("tensorrt", "raise OSError('libnvinfer.so.10: cannot open shared object file')")
    with pytest.raises(SpinError, match=r"tensorrt: cannot import tensorrt: libnvinfer\.so\.10"):
        import_flavour()


class Registry:
    """A plugin registry that takes these creators from any library."""

    def __init__(self, names: tuple[str, ...], handle: object) -> None:
        self.all_creators: list[Any] = [
            SimpleNamespace(name="SpinIndexer", plugin_namespace="", plugin_version="1")
        ]
        self._names, self._handle = names, handle

    def load_library(self, path: str) -> object:
        self.all_creators += [
            SimpleNamespace(name=name, plugin_namespace="spin", plugin_version="1")
            for name in self._names
        ]
        return self._handle


def module_with(names: tuple[str, ...], handle: object) -> Any:
    registry = Registry(names, handle)
    return SimpleNamespace(__version__="10.9", get_plugin_registry=lambda: registry)


@pytest.fixture
def library() -> Path:
    path = plugin_path()
    if path is None:
        pytest.skip("libspin_trt_plugin.so is not built: make plugin")
    return path


def test_a_library_that_tensorrt_does_not_take_is_noticed(library: Path) -> None:
    with pytest.raises(SpinError, match=r"TensorRT 10\.9 does not take it; it needs 10\.3"):
        load_plugin(module_with((), None), library)
    with pytest.raises(SpinError, match="no creator for SpinObserve, SpinPredictBlocks; rebuild"):
        load_plugin(module_with(("SpinIndexer", "SpinSparseIndexer"), 1), library)
    loaded = load_plugin(module_with(tuple(NODES), 1), library)
    assert (loaded.path, set(loaded.creators)) == (library.resolve(), set(NODES))


def test_the_plugin_is_looked_for_where_the_kernels_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPIN_TRT_PLUGIN", raising=False)
    monkeypatch.setenv("SPIN_LIBRARY", str(tmp_path / "libspin.so"))
    assert plugin_path() is None
    with pytest.raises(SpinError, match=r"libspin_trt_plugin\.so: not found in .*make plugin"):
        load_plugin(module_with((), None))
    (tmp_path / "libspin_trt_plugin.so").touch()
    assert plugin_path() == tmp_path / "libspin_trt_plugin.so"
    monkeypatch.setenv("SPIN_TRT_PLUGIN", str(tmp_path / "other.so"))
    assert plugin_path() is None


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


def test_an_old_tensorrt_has_no_aliases() -> None:
    old: Any = SimpleNamespace(__version__="10.2.0", PreviewFeature=SimpleNamespace())
    with pytest.raises(SpinError, match=r"aliased: got 1, allowed: 0 with TensorRT 10\.2\.0"):
        allow_aliasing(None, old)


def test_without_the_builder_the_process_says_so(tmp_path: Path) -> None:
    there = {flavour.name for flavour in installed_flavours()}
    absent = next((f.name for f in FLAVOURS if f.builds and f.name not in there), None)
    if absent is None:
        pytest.skip("every builder is installed")
    job = EngineJob(str(tmp_path / "a.onnx"), str(tmp_path / "a.engine"))
    with pytest.raises(SpinError, match=f"tensorrt: none of {absent} is installed"):
        build_engines([job], builder=absent, plugin="none.so", ranges={})
    assert list(tmp_path.iterdir()) == []
