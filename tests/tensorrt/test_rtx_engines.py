# SPDX-License-Identifier: Apache-2.0
"""Serialized engines with the plugin, built without a GPU: dtypes, dynamic shapes, aliasing.

TensorRT-RTX is an oracle here, of what TensorRT's parser and builder make of the plugin; its own
documentation does not support plugins, and these engines are never run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto as T
from tensorrt_wheels import ROOT, RTX, VERSIONS, need_plugin, run_probe, wheel_environment

from spin_trtllm.config import SpinConfig
from spin_trtllm.hosts.tensorrt import NODES, make_onnx_node, node_fields
from spin_trtllm.hosts.tensorrt.onnx_nodes import DOMAIN, DOMAIN_VERSION

CONFIG = SpinConfig(top_k=512, block_size=64, ema_decay=0.7, seed=2**63 + 5)
SLOTS, BLOCKS, WIDTH, TOP_K, ROWS = 4096, 64, 4096, 512, 2
MOST = {"S": 8, "R": 8, "H": 64, "P": 64, "pages": 512, "M": 8, "places": 16, "books": 11}

# ports of all nodes: element type and shape
PORTS: dict[str, tuple[int, list[Any]]] = {
    "query": (T.FLOAT16, ["S", ROWS, 64, 128]),
    "weights": (T.FLOAT, ["S", ROWS, 64]),
    "pages": (T.INT32, ["pages", 64 * 33]),
    "page_table": (T.INT32, ["S", "P"]),
    "lanes": (T.INT64, ["S"]),
    "positions": (T.INT64, ["S", ROWS]),
    "sequence_ids": (T.INT64, ["S"]),
    "v": (T.FLOAT, [8, SLOTS]),
    "d": (T.FLOAT, [8, SLOTS + 8]),
    "scores": (T.FLOAT, ["S", ROWS, WIDTH]),
    "compact_of_block": (T.INT32, ["S", BLOCKS]),
    "books": (T.INT64, [ROWS + 3, 8]),
    "warm": (T.BOOL, ["S"]),
    "accepted": (T.INT64, ["S"]),
    "block_list": (T.INT32, ["S", BLOCKS]),
    "block_count": (T.INT32, ["S"]),
    "row_slots": (T.INT32, ["S", ROWS]),
    "kept_slots": (T.INT32, ["S"]),
    "visible_slots": (T.INT32, ["S"]),
    "compact_pages": (T.INT32, ["S", WIDTH // 64]),
    "slots": (T.INT32, ["S", ROWS, TOP_K]),
}
PLACES = {
    "scores": (T.FLOAT, [16, ROWS, WIDTH]),
    "compact_of_block": (T.INT32, [16, BLOCKS]),
}
TENSORRT_TYPES = {T.FLOAT: "FLOAT", T.BFLOAT16: "BF16", T.INT32: "INT32", T.INT64: "INT64"}


def ports_of(node: str) -> dict[str, tuple[int, list[Any]]]:
    return PORTS | (PLACES if node == "SpinIndexer" else {})


def write_model(
    path: Path,
    node: str,
    ports: dict[str, tuple[int, list[Any]]],
    fields: dict[str, Any],
    quantized: tuple[str, ...] = (),
) -> None:
    """A network of one node; `quantized` inputs come out of a conversion to fp8."""
    made, outputs = make_onnx_node(
        node, {p: f"{p}_fp8" if p in quantized else p for p in NODES[node].inputs}, fields
    )
    helper = onnx.helper
    nodes, constants = [], []
    for port in quantized:
        constants += [
            helper.make_tensor(f"{port}_scale", ports[port][0], [], [1.0]),
            helper.make_tensor(f"{port}_zero", T.FLOAT8E4M3FN, [], [0.0]),
        ]
        inputs = [port, f"{port}_scale", f"{port}_zero"]
        nodes.append(helper.make_node("QuantizeLinear", inputs, [f"{port}_fp8"]))

    def info(name: str, port: str) -> Any:
        return helper.make_tensor_value_info(name, *ports[port])

    graph = helper.make_graph(
        [*nodes, made],
        "network",
        [info(port, port) for port in NODES[node].inputs],
        [info(name, port) for port, name in outputs.items()],
        constants,
    )
    opsets = [helper.make_opsetid("", 19), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)


def variant(
    title: str,
    node: str = "SpinIndexer",
    *,
    fields: dict[str, Any] | None = None,
    types: dict[str, int] | None = None,
    shapes: dict[str, list[Any]] | None = None,
    quantized: tuple[str, ...] = (),
    aliasing: bool = True,
    why: str = "",
) -> dict[str, Any]:
    """One engine to try: what differs from the usual, and why it is refused, if it is."""
    return {
        "title": title,
        "node": node,
        "fields": fields or {},
        "types": types or {},
        "shapes": shapes or {},
        "quantized": quantized,
        "aliasing": aliasing,
        "why": why,
    }


DYNAMIC = {
    "query": ["S", "R", 64, 128],
    "weights": ["S", "R", 64],
    "positions": ["S", "R"],
    "v": ["M", SLOTS],
    "d": ["M", SLOTS + 8],
    "scores": ["places", "R", WIDTH],
    "compact_of_block": ["places", BLOCKS],
    "books": ["books", "M"],
    "slots": ["S", "R", TOP_K],
}
BF16_STATE = {"v": T.BFLOAT16, "d": T.BFLOAT16}
BYTES = {"pages": ["pages", 64 * 132]}
GOOD = [
    *(variant(node, node) for node in NODES),
    variant("bf16 query", types={"query": T.BFLOAT16}),
    variant("fp8 query", quantized=("query",)),
    variant("fp8 query of the scorer", "SpinSparseIndexer", quantized=("query",)),
    variant("bf16 state", types=BF16_STATE),
    variant("bf16 state, predicted", "SpinPredictBlocks", types=BF16_STATE),
    variant("bf16 state, observed", "SpinObserve", types=BF16_STATE),
    variant("int8 pages", types={"pages": T.INT8}, shapes=BYTES),
    variant("fp8 pages", types={"pages": T.FLOAT8E4M3FN}, shapes=BYTES),
    variant("copying", fields={"aliased": 0}, aliasing=False),
    variant("copying observer", "SpinObserve", fields={"aliased": 0}, aliasing=False),
    variant("all dynamic", shapes=DYNAMIC),
    variant("32 heads", shapes={"query": ["S", ROWS, 32, 128], "weights": ["S", ROWS, 32]}),
    variant("fast", fields={"exact": 0}),
    variant("pages of 32", fields={"page_slots": 32}, shapes={"pages": ["pages", 32 * 33]}),
]
BAD = [
    variant("no flag", aliasing=False, why="ALIASED_PLUGIN_IO_10_03"),
    variant("no flag, observer", "SpinObserve", aliasing=False, why="ALIASED_PLUGIN_IO_10_03"),
    # not the plugin's doing: TensorRT has no plugin inputs of this type
    variant("uint8 pages", types={"pages": T.UINT8}, shapes=BYTES, why="UInt8 datatype formats"),
    variant("half weights", types={"weights": T.FLOAT16}, why="supported formats"),
    variant("fp32 query", types={"query": T.FLOAT}, why="supported formats"),
    variant("mixed state", types={"v": T.BFLOAT16}, why="supported formats"),
    variant("narrow pages", shapes={"pages": ["pages", 64 * 32]}, why="pages: got INT32"),
    variant("odd heads", shapes={"query": ["S", ROWS, 48, 128]}, why="query: got HALF"),
    variant("short state", shapes={"v": [8, SLOTS - 8]}, why="v: got FLOAT [8, 4088]"),
    variant("wrong rank", shapes={"positions": ["S"]}, why="shape computation"),
    variant("field out of range", fields={"sparsity_ppm": 10**6}, why="sparsity_ppm: got 1000000"),
]


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    plugin = need_plugin()
    scratch = tmp_path_factory.mktemp("rtx")
    cases = []
    for number, case in enumerate(GOOD + BAD):
        node = case["node"]
        fields = node_fields(node, CONFIG, ratio=4, slots=SLOTS, layer=2) | case["fields"]
        path = scratch / f"{number}.onnx"
        write_model(path, node, ports_for(case), fields, case["quantized"])
        cases.append(
            {n: case[n] for n in ("title", "node", "aliasing")} | {"path": str(path), "most": MOST}
        )
    return run_probe("rtx_probe.py", RTX, scratch, {"plugin": str(plugin), "cases": cases})


def ports_for(case: dict[str, Any]) -> dict[str, tuple[int, list[Any]]]:
    return {
        port: (case["types"].get(port, kind), case["shapes"].get(port, shape))
        for port, (kind, shape) in ports_of(case["node"]).items()
    }


def test_the_version_is_the_pinned_one(answer: Any) -> None:
    assert answer["version"] == VERSIONS[RTX]


@pytest.mark.parametrize("case", GOOD, ids=[case["title"] for case in GOOD])
def test_it_builds(answer: Any, case: dict[str, Any]) -> None:
    result = answer["cases"][case["title"]]
    assert result["built"], result["errors"]
    assert result["errors"] == []
    assert result["layers"].count("PLUGIN_V3") == 1
    assert result["holds_plugin"]
    node, ports = NODES[case["node"]], ports_for(case)
    for port in node.outputs:
        kind, shape = result["outputs"][f"{port}_out" if port in node.state else port]
        assert kind == TENSORRT_TYPES[ports[port][0]], port
        assert shape == [size if isinstance(size, int) else -1 for size in ports[port][1]], port


@pytest.mark.parametrize("case", BAD, ids=[case["title"] for case in BAD])
def test_it_is_refused_with_a_reason(answer: Any, case: dict[str, Any]) -> None:
    result = answer["cases"][case["title"]]
    assert not result["built"]
    assert case["why"] in " ".join(result["errors"] + result.get("why", []))


REFUSALS = """
import json, sys
from pathlib import Path
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.tensorrt.builder import EngineJob, build_engines
plugin, *cases = json.load(sys.stdin)
for network, ranges in cases:
    job = EngineJob(network, str(Path(network).with_suffix(".engine")))
    try:
        build_engines([job], builder="tensorrt_rtx", plugin=plugin, ranges=ranges, target_sm=120)
    except SpinError as error:
        print(json.dumps(str(error)))
"""


def test_the_reason_for_a_refused_network_is_one_line(tmp_path: Path) -> None:
    """The plugin's own, which TensorRT does not pass on; several lines; a range that is missing."""
    titled = {case["title"]: case for case in BAD}
    bad, rank = titled["field out of range"], titled["wrong rank"]
    ranges = {name: (1, 2, most) for name, most in MOST.items()}
    fewer = {name: range_ for name, range_ in ranges.items() if name != "pages"}
    asked: list[Any] = [str(need_plugin())]
    for name, case, given in (("bad", bad, ranges), ("rank", rank, ranges), ("x", GOOD[0], fewer)):
        path = tmp_path / f"{name}.onnx"
        fields = node_fields(case["node"], CONFIG, ratio=4, slots=SLOTS, layer=2) | case["fields"]
        write_model(path, case["node"], ports_for(case), fields)
        asked.append([str(path), given])
    done = subprocess.run(
        [sys.executable, "-c", REFUSALS],
        input=json.dumps(asked),
        text=True,
        capture_output=True,
        cwd=ROOT,
        env=wheel_environment(RTX, tmp_path),
    )
    assert done.returncode == 0, done.stderr
    plugins, several, missing = map(json.loads, done.stdout.splitlines())
    assert plugins.startswith("bad.onnx: TensorRT does not read it: ")
    assert plugins.endswith(": SpinIndexer: sparsity_ppm: got 1000000, allowed: 0 .. 999999")
    assert several.startswith("rank.onnx: TensorRT does not read it: Invalid Node - SpinIndexer ")
    assert "\n" not in plugins + several
    allowed = "'pages' among them, a dimension of pages"
    assert missing == f"ranges: got {sorted(fewer)}, allowed: {allowed}"
    assert not list(tmp_path.glob("*.engine"))
