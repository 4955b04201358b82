# SPDX-License-Identifier: Apache-2.0
"""Loads the plugin into the TensorRT of this process and tells what it finds, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.tensorrt import NODES, add_node, import_flavour, load_plugin

TENSORRT = import_flavour()


def main() -> None:
    request = json.load(sys.stdin)
    tensorrt = TENSORRT
    registry = tensorrt.get_plugin_registry()
    before = len(registry.all_creators)
    refusals = {path: refusal(tensorrt, path) for path in request["wrong"]}
    plugin = load_plugin(tensorrt, request["plugin"])
    answer = {
        "module": tensorrt.__name__,
        "version": tensorrt.__version__,
        "path": str(plugin.path),
        "again": load_plugin(tensorrt, "/no/such.so").path,
        "refusals": refusals,
        "new_creators": len(registry.all_creators) - before,
        "fields": {n: [f.name for f in c.field_names] for n, c in plugin.creators.items()},
        "made": {
            case["title"]: [create(plugin, case, phase) for phase in ("BUILD", "RUNTIME")]
            for case in request["creations"]
        },
        "added": {name: add(plugin, name, fields) for name, fields in request["added"].items()},
    }
    Path(sys.argv[1]).write_text(json.dumps(answer))


def refusal(tensorrt: Any, path: str) -> str | None:
    try:
        load_plugin(tensorrt, path)
    except SpinError as error:
        return str(error)
    return None


def create(plugin: Any, case: dict[str, Any], phase: str) -> list[Any] | None:
    """Name, namespace, version, outputs and capabilities of what a creator makes of fields."""
    tensorrt = plugin.tensorrt
    arrays = {name: np.array([value], kind) for name, kind, value in case["fields"]}
    fields = [
        tensorrt.PluginField(name, arrays[name], getattr(tensorrt.PluginFieldType, kind.upper()))
        for name, kind, _ in case["fields"]
    ]
    made = plugin.creators[case["node"]].create_plugin(
        "probe", tensorrt.PluginFieldCollection(fields), getattr(tensorrt.TensorRTPhase, phase)
    )
    if made is None:
        return None
    kinds = tensorrt.PluginCapabilityType
    core = made.get_capability_interface(kinds.CORE)
    build = made.get_capability_interface(kinds.BUILD)
    runtime = made.get_capability_interface(kinds.RUNTIME)
    assert runtime is not None
    identity = [core.plugin_name, core.plugin_namespace, core.plugin_version]
    assert case["node"] in NODES
    return [*identity, build.num_outputs, build.interface_info.major]


class Network:
    """Stands for an `INetworkDefinition`, which needs a builder."""

    def add_plugin_v3(self, inputs: list[str], shape_inputs: list[str], plugin: Any) -> Any:
        assert shape_inputs == []
        core = plugin.get_capability_interface(TENSORRT.PluginCapabilityType.CORE)
        build = plugin.get_capability_interface(TENSORRT.PluginCapabilityType.BUILD)
        self.inputs, self.kind = inputs, core.plugin_name
        outputs = [SimpleNamespace(name="") for _ in range(build.num_outputs)]
        self.layer = SimpleNamespace(name="", get_output=outputs.__getitem__)
        return self.layer


def add(plugin: Any, name: str, fields: dict[str, Any]) -> Any:
    """What `add_node` adds, or why it does not."""
    network = Network()
    inputs = {port: port.upper() for port in reversed(NODES[name].inputs)}
    try:
        outputs = add_node(network, plugin, name, inputs, fields, prefix="layer_2.")
    except SpinError as error:
        return str(error)
    names = {port: tensor.name for port, tensor in outputs.items()}
    return [network.layer.name, network.kind, network.inputs, names]


if __name__ == "__main__":
    main()
