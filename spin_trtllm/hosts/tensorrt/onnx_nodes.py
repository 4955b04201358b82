# SPDX-License-Identifier: Apache-2.0
"""SPIN's nodes in an ONNX graph: custom nodes whose attributes are the plugin's fields."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.hosts.tensorrt.nodes import (
    NAMESPACE,
    VERSION,
    FieldValue,
    check_names,
    node_of,
    settle_fields,
)

DOMAIN = NAMESPACE
DOMAIN_VERSION = 1

_INT32_END = 2**31


def import_onnx() -> ModuleType:
    """The `onnx` package.

    Raises:
        SpinError: it is not installed.
    """
    try:
        import onnx
        import onnx.helper
        import onnx.numpy_helper
    except ImportError as error:
        raise SpinError(f"onnx: cannot import it ({error}): pip install onnx") from error
    return onnx


def make_onnx_node(
    name: str,
    inputs: Mapping[str, str],
    fields: Mapping[str, FieldValue],
    *,
    prefix: str = "",
) -> tuple[Any, dict[str, str]]:
    """One node for an ONNX graph, which TensorRT's parser turns into a plugin layer.

    The graph's model has to import the opset `DOMAIN`, `DOMAIN_VERSION`.

    Args:
        name: of the node, such as `SpinIndexer`.
        inputs: tensor name of each input by name.
        fields: values of its fields by name, as `node_fields` makes them.
        prefix: put before the names of the node and of its outputs.

    Returns:
        A `NodeProto`, and the tensor name of each output; an output that a state input is aliased
        to is called `<name>_out`.

    Raises:
        SpinError: names or values that are wrong, or no `onnx`.
    """
    node = node_of(name)
    check_names(node, inputs, fields)
    for port, tensor in inputs.items():
        if not isinstance(tensor, str) or not tensor:
            refuse(f"{name}: {port}", tensor, "the name of a tensor")
    outputs = {
        port: prefix + (f"{port}_out" if port in node.inputs else port) for port in node.outputs
    }
    made = import_onnx().helper.make_node(
        name,
        [inputs[port] for port in node.inputs],
        list(outputs.values()),
        name=prefix + name,
        domain=DOMAIN,
        plugin_namespace=NAMESPACE,
        plugin_version=VERSION,
        **{field: _attribute(value) for field, value in settle_fields(node, fields).items()},
    )
    return made, outputs


def _attribute(value: FieldValue) -> FieldValue | str:
    """As text where TensorRT's parser would cut it: it keeps 32 bits of integers and floats."""
    if isinstance(value, float):
        return repr(value)
    return value if -_INT32_END <= value < _INT32_END else str(value)
