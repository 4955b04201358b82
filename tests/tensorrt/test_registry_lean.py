# SPDX-License-Identifier: Apache-2.0
"""The plugin in real TensorRT registries, 10.x and 11.x, on a machine without a GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorrt_wheels import (
    LEAN_10,
    LEAN_11,
    ROOT,
    RTX,
    VERSIONS,
    need_plugin,
    run_probe,
    wheel_environment,
)

from spin_trtllm.config import SpinConfig
from spin_trtllm.hosts.tensorrt import NODES, node_fields

CONFIG = SpinConfig(top_k=512, seed=2**64 - 1, ema_decay=0.7)
GOOD = {name: node_fields(name, CONFIG, ratio=4, slots=4096, layer=2) for name in NODES}


def typed(fields: dict[str, Any]) -> list[tuple[str, str, Any]]:
    return [(n, "float64" if isinstance(v, float) else "int64", v) for n, v in fields.items()]


def case(title: str, node: str, fields: list[tuple[str, str, Any]]) -> dict[str, Any]:
    return {"title": title, "node": node, "fields": fields}


def changed(node: str, **changes: Any) -> list[tuple[str, str, Any]]:
    return typed({k: v for k, v in (GOOD[node] | changes).items() if v is not None})


REFUSED = [
    case("unknown", "SpinIndexer", changed("SpinIndexer", top_n=3)),
    case("missing", "SpinIndexer", changed("SpinIndexer", ratio=None)),
    case("range", "SpinIndexer", changed("SpinIndexer", sparsity_ppm=1_000_000)),
    case("choice", "SpinObserve", changed("SpinObserve", block_size=48)),
    case("fraction", "SpinObserve", changed("SpinObserve", ema_decay=1.0)),
    case("type", "SpinSparseIndexer", [("top_k", "float64", 512.0), ("slots", "int64", 4096)]),
]
TAKEN = [
    *(case(name, name, typed(fields)) for name, fields in GOOD.items()),
    case("copying", "SpinIndexer", changed("SpinIndexer", aliased=0)),
    case("narrow", "SpinObserve", [(n, "int32", v) for n, _, v in changed("SpinObserve")[:3]]),
]


@pytest.fixture(scope="module", params=[LEAN_10, LEAN_11, RTX])
def answer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    plugin = need_plugin()
    scratch = tmp_path_factory.mktemp("registry")
    (scratch / "text.so").write_text("no library")
    kernels = plugin.with_name("libspin.so")
    wrong = [str(scratch / "text.so"), str(scratch / "absent.so")]
    if kernels.exists():
        wrong.append(str(shutil.copy(kernels, scratch / "kernels.so")))
    asked = {"plugin": str(plugin), "wrong": wrong, "creations": REFUSED + TAKEN, "added": GOOD}
    return run_probe("registry_probe.py", request.param, scratch, asked) | {
        "wheels": request.param,
        "plugin": plugin,
    }


def test_it_loads_once(answer: Any) -> None:
    assert answer["version"] == VERSIONS[answer["wheels"]]
    assert Path(answer["path"]) == answer["plugin"].resolve()
    assert answer["again"] is None  # found in the registry, whatever path is given
    assert answer["new_creators"] == len(NODES)


def test_creators_have_the_fields_that_are_written_down(answer: Any) -> None:
    assert answer["fields"] == {name: list(node.fields) for name, node in NODES.items()}


@pytest.mark.parametrize("title", [case["title"] for case in TAKEN])
def test_creators_make_their_nodes(answer: Any, title: str) -> None:
    node = next(case["node"] for case in TAKEN if case["title"] == title)
    aliased = node in ("SpinIndexer", "SpinObserve") and title != "copying"
    expected = [node, "spin", "1", len(NODES[node].outputs), 2 if aliased else 1]
    assert answer["made"][title] == [expected, expected]


@pytest.mark.parametrize("title", [case["title"] for case in REFUSED])
def test_creators_refuse_bad_fields(answer: Any, title: str) -> None:
    assert answer["made"][title] == [None, None]


@pytest.mark.parametrize("name", NODES)
def test_nodes_are_added_with_inputs_in_order_and_named_outputs(answer: Any, name: str) -> None:
    layer, kind, inputs, outputs = answer["added"][name]
    node = NODES[name]
    assert (layer, kind) == (f"layer_2.{name}", name)
    assert inputs == [port.upper() for port in node.inputs]
    assert list(outputs) == list(node.outputs)
    for port, called in outputs.items():
        assert called == f"layer_2.{port}" + ("_out" if port in node.state else "")


def test_what_is_no_plugin_is_one_line(answer: Any) -> None:
    refusals = {Path(path).name: line for path, line in answer["refusals"].items()}
    assert "absent.so; build it with `make plugin`" in refusals["absent.so"]
    for name in refusals.keys() - {"absent.so"}:
        assert "not a loadable TensorRT plugin" in refusals[name]


SAYING = """
import json, sys
from spin_trtllm.hosts.tensorrt import import_flavour, load_plugin
tensorrt = import_flavour()
class Log(tensorrt.ILogger):
    lines = []
    def log(self, severity, message):
        self.lines.append(message)
runtime = tensorrt.Runtime(Log())
creator = load_plugin(tensorrt, sys.argv[1]).creators["SpinObserve"]
nothing = tensorrt.PluginFieldCollection([])
made = creator.create_plugin("probe", nothing, tensorrt.TensorRTPhase.RUNTIME)
print(json.dumps([made is None, [line for line in Log.lines if line.startswith("Spin")]]))
"""


@pytest.mark.parametrize("wheels", [LEAN_10, LEAN_11, RTX])
def test_without_a_logger_for_plugins_messages_go_to_standard_error(
    wheels: str, tmp_path: Path
) -> None:
    """None of these hands plugins the logger that its own runtime has."""
    done = subprocess.run(
        [sys.executable, "-c", SAYING, str(need_plugin())],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=wheel_environment(wheels, tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, []]
    assert "SpinObserve: ratio: got nothing, allowed: 1 .. 1048576\n" in done.stderr
