# SPDX-License-Identifier: Apache-2.0
"""Writing an ONNX graph node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spin_trtllm.hosts.tensorrt.onnx_nodes import DOMAIN, DOMAIN_VERSION, import_onnx

OPSET = 19  # the first with fp8; TensorRT 10.3 reads up to 20
IR_VERSION = 9

Shape = Sequence[int | str]


class Graph:
    """Collects an ONNX graph: tensors are known by name, and a node is named after its output.

    Args:
        dtype: what it computes in.
        storage: what large weights are kept in; `dtype`, or e4m3.

    Raises:
        SpinError: no `onnx`.
    """

    def __init__(self, dtype: torch.dtype, storage: torch.dtype) -> None:
        self._onnx = import_onnx()
        self.dtype = dtype
        self.nodes: list[Any] = []
        self._storage = storage
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._constants: dict[str, Any] = {}

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs so far, in order."""
        return [tensor.name for tensor in self._inputs]

    def input(self, name: str, dtype: torch.dtype, shape: Shape) -> None:
        """Add an input; a named dimension may vary."""
        self._inputs.append(self._tensor(name, dtype, shape))

    def output(self, name: str, dtype: torch.dtype, shape: Shape) -> None:
        """Let a tensor be an output."""
        self._outputs.append(self._tensor(name, dtype, shape))

    def node(self, operation: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Add a node of one output, and return its name."""
        made = self._onnx.helper.make_node(operation, inputs, [output], output, **attributes)
        self.nodes.append(made)
        return output

    def cast(self, tensor: str, dtype: torch.dtype, output: str | None = None) -> str:
        """A tensor in another dtype; unless named, after both."""
        output = output or f"{tensor}_as_{str(dtype).removeprefix('torch.')}"
        return self.node("Cast", [tensor], output, to=self._type(dtype))

    def reshape(self, tensor: str, shape: Sequence[int], output: str) -> str:
        """A tensor in another shape; 0 keeps a dimension."""
        return self.node("Reshape", [tensor, self.integers(shape)], output)

    def split(self, tensor: str, parts: Sequence[int], outputs: Sequence[str]) -> None:
        """Cut the last axis into parts of these sizes."""
        inputs = [tensor, self.integers(parts)]
        made = self._onnx.helper.make_node("Split", inputs, outputs, f"{tensor}_split", axis=-1)
        self.nodes.append(made)

    def integers(self, values: Sequence[int]) -> str:
        """A constant int64 vector."""
        name = "integers_" + "_".join(str(value).replace("-", "minus") for value in values)
        return self.constant(name, torch.tensor(values), torch.int64)

    def constant(self, name: str, value: Tensor, dtype: torch.dtype | None = None) -> str:
        """A constant in a dtype; None: the one that the network computes in."""
        stored = value.to(dtype or self.dtype).contiguous()
        tensor = self._onnx.TensorProto(
            name=name, data_type=self._type(stored.dtype), dims=stored.shape
        )
        tensor.raw_data = stored.reshape(-1).view(torch.uint8).numpy().tobytes()
        self._constants[name] = tensor
        return name

    def weight(self, name: str, value: Tensor) -> str:
        """A matrix `[in, out]` in the precision's storage, widened again where that is fp8."""
        if self._storage.itemsize > 1:
            return self.constant(name, value)
        scale = value.abs().amax(0).clamp(min=1e-12) / torch.finfo(self._storage).max
        scale = scale.to(self.dtype)
        stored = self.constant(f"{name}_e4m3", value / scale.float(), self._storage)
        inputs = [stored, self.constant(f"{name}_scale", scale)]
        return self.node("DequantizeLinear", inputs, name, axis=1)

    def model(self, name: str) -> Any:
        """The graph as a `ModelProto`."""
        helper = self._onnx.helper
        graph = helper.make_graph(
            self.nodes, name, self._inputs, self._outputs, list(self._constants.values())
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="spin-trtllm"
        )

    def _tensor(self, name: str, dtype: torch.dtype, shape: Shape) -> Any:
        return self._onnx.helper.make_tensor_value_info(name, self._type(dtype), list(shape))

    def _type(self, dtype: torch.dtype) -> int:
        types: Mapping[torch.dtype, str] = {
            torch.float32: "FLOAT",
            torch.float16: "FLOAT16",
            torch.bfloat16: "BFLOAT16",
            torch.float8_e4m3fn: "FLOAT8E4M3FN",
            torch.int32: "INT32",
            torch.int64: "INT64",
        }
        return int(self._onnx.TensorProto.DataType.Value(types[dtype]))
