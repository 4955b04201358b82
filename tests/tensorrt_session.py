# SPDX-License-Identifier: Apache-2.0
"""Runs an engine of `trtllm-build --tensorrt` in full TensorRT, next to the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import network_reference as nr
import onnx
import torch
from torch import Tensor

from spin_trtllm.config import SpinConfig
from spin_trtllm.hosts.tensorrt import load_plugin
from spin_trtllm.state import SpinState
from spin_trtllm.step import SpinStep

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
}
PROMPT_TOKENS = 4000


class TensorrtSession:
    """One layer's engine with its buffers on a GPU.

    Args:
        trt: the `tensorrt` module.
        folder: what `trtllm-build --tensorrt` wrote.
        layer: decoder-layer index.
    """

    def __init__(self, trt: Any, folder: Path, layer: int) -> None:
        self.trt, self.layer = trt, layer
        self.manifest = json.loads((folder / "manifest.json").read_text())
        files = self.manifest["layers"][str(layer)]
        self.model = onnx.load(folder / files["network"])
        self.config = SpinConfig.from_yaml(folder.parent / "spin.yaml")
        load_plugin(trt, folder / "libspin_trt_plugin.so")
        runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        self.engine = runtime.deserialize_cuda_engine((folder / files["engine"]).read_bytes())
        assert self.engine is not None
        self.context = self.engine.create_execution_context()
        self.stream = torch.cuda.Stream()
        self.state = {
            name: torch.zeros(tensor["shape"], dtype=DTYPES[tensor["dtype"]], device="cuda")
            for name, tensor in self.manifest["state"].items()
        }

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """One step: everything but the state in, everything but the state out; both on the CPU."""
        bound = {name: tensor.cuda() for name, tensor in inputs.items()} | self.state
        for name, tensor in bound.items():
            assert self.context.set_input_shape(name, tuple(tensor.shape)), name
            assert self.context.set_tensor_address(name, tensor.data_ptr())
        outputs = {}
        for name in ("slots", "block_count"):
            shape = tuple(self.context.get_tensor_shape(name))
            outputs[name] = torch.full(shape, -2, dtype=torch.int32, device="cuda")
            assert self.context.set_tensor_address(name, outputs[name].data_ptr())
        for name, tensor in self.state.items():  # in place: one buffer for both
            assert self.context.set_tensor_address(f"{name}_out", tensor.data_ptr())
        torch.cuda.synchronize()
        assert self.context.execute_async_v3(self.stream.cuda_stream)
        self.stream.synchronize()
        return {name: tensor.cpu() for name, tensor in outputs.items()}

    def check_against_the_reference(self, steps: int) -> None:
        """Decode a sequence of random queries over random keys, warm from the second step on.

        Projections are rounded otherwise than on the CPU, so near ties may fall otherwise.
        """
        sizes = self.manifest["sizes"]
        ratio = next(a.i for a in self._fields() if a.name == "ratio")
        state = SpinState([self.layer], sequences=sizes["max_sequences"], slots=sizes["slots"])
        step = SpinStep(self.config, state, ratio=ratio)
        reference = nr.NetworkReference(self.model, step)
        generator = torch.Generator().manual_seed(0)
        widths = {
            v.name: v.type.tensor_type.shape.dim[-1].dim_value for v in self.model.graph.input
        }
        keys = torch.randn(sizes["slots"], 64, generator=generator)
        idle = {name: tensor.cpu() for name, tensor in self.state.items()}
        shared = []
        drift = {name: torch.randn(widths[name], generator=generator) for name in self.inputs}
        for position in range(PROMPT_TOKENS, PROMPT_TOKENS + steps):
            inputs = {
                name: (mean + 0.3 * torch.randn(mean.shape, generator=generator))[None, None]
                for name, mean in drift.items()
            } | {
                "pages": nr.write_pages(keys, sizes["page_slots"]),
                "page_table": nr.page_table(len(keys), sizes["page_slots"]),
                "lanes": torch.tensor([2]),
                "positions": torch.tensor([[position]]),
                "sequence_ids": torch.tensor([77]),
            }
            found = self.run(inputs)
            expected = reference.run(inputs | idle)
            assert torch.equal(found["block_count"], expected["block_count"]), position
            assert (found["slots"].diff() > 0).all()
            both = set(found["slots"].flatten().tolist())
            both &= set(expected["slots"].flatten().tolist())
            shared.append(len(both) / found["slots"].numel())
        assert sum(shared) / steps > 0.95, shared
        assert self.state["v"][2].any()  # learnt, in place
        assert not self.state["v"][[0, 1, 3]].any()

    inputs = ("hidden", "query_latent")

    def _fields(self) -> Any:
        (node,) = (node for node in self.model.graph.node if node.domain == "spin")
        return node.attribute
