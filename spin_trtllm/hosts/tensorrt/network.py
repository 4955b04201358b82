# SPDX-License-Identifier: Apache-2.0
"""Adding SPIN's nodes to a network that is being built, by TensorRT's own interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.hosts.tensorrt.nodes import FieldValue, check_names, node_of, settle_fields
from spin_trtllm.hosts.tensorrt.plugin import Plugin

Array = np.ndarray[Any, Any]

ALIASING = "ALIASED_PLUGIN_IO_10_03"


def add_node(
    network: Any,
    plugin: Plugin,
    name: str,
    inputs: Mapping[str, Any],
    fields: Mapping[str, FieldValue],
    *,
    prefix: str = "",
) -> dict[str, Any]:
    """Add one node.

    Args:
        network: `INetworkDefinition` of the plugin's TensorRT.
        plugin: what `load_plugin` returned.
        name: of the node, such as `SpinIndexer`.
        inputs: `ITensor` of each input by name.
        fields: values of its fields by name, as `node_fields` makes them.
        prefix: put before the names of the layer and of its outputs.

    Returns:
        `ITensor` of each output by name. An output that a state input is aliased to has its name
        and is called `<name>_out` in the network.

    Raises:
        SpinError: names or values that are wrong, or fields that the plugin refuses (it logs why).
    """
    node = node_of(name)
    check_names(node, inputs, fields)
    tensorrt, creator = plugin.tensorrt, plugin.creators[name]
    # a field is a bare pointer: the arrays have to outlive the creator's call
    arrays = {field: _as_array(value) for field, value in settle_fields(node, fields).items()}
    collection = tensorrt.PluginFieldCollection(
        [_field(tensorrt, field, array) for field, array in arrays.items()]
    )
    made = creator.create_plugin(prefix + name, collection, tensorrt.TensorRTPhase.BUILD)
    if made is None:
        refuse(f"{name}: fields", dict(fields), "what the plugin takes; TensorRT's log says why")
    layer = network.add_plugin_v3([inputs[port] for port in node.inputs], [], made)
    if layer is None:
        raise SpinError(f"{name}: TensorRT does not add it; its log says why")
    layer.name = prefix + name
    outputs = {port: layer.get_output(i) for i, port in enumerate(node.outputs)}
    for port, tensor in outputs.items():
        tensor.name = prefix + (f"{port}_out" if port in node.inputs else port)
    return outputs


def allow_aliasing(config: Any, tensorrt: Any) -> None:
    """Set the preview flag without which a node with state in place is not built.

    Args:
        config: `IBuilderConfig`.
        tensorrt: its module.

    Raises:
        SpinError: a TensorRT before 10.3, which has no such flag.
    """
    feature = getattr(tensorrt.PreviewFeature, ALIASING, None)
    if feature is None:
        refuse("aliased", 1, f"0 with TensorRT {tensorrt.__version__}; 1 needs 10.3 or later")
    config.set_preview_feature(feature, True)


def _as_array(value: FieldValue) -> Array:
    return np.array([value], np.float64 if isinstance(value, float) else np.int64)


def _field(tensorrt: Any, name: str, array: Array) -> Any:
    kind = getattr(tensorrt.PluginFieldType, array.dtype.name.upper())
    return tensorrt.PluginField(name, array, kind)
