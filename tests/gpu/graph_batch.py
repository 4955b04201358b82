# SPDX-License-Identifier: Apache-2.0
"""A serving engine in miniature whose decode steps are replays of captured graphs.

As TensorRT-LLM's runner does it: one graph for each batch size and number of rows, each with
metadata of its own whose buffers alias by name, captured with dummy requests before anything is
served. A decode step is padded with dummies to the next size that was captured; steps that prefill,
or whose rows no graph has, run eagerly on the same state.
"""

from __future__ import annotations

from typing import Any

import torch
from hook_batch import GRAPH_DUMMY, HostBatch, Step
from host_kernels import capture
from torch import Tensor


class StepGraph:
    """A captured forward of all layers, with the fixed tensors that it reads and writes."""

    def __init__(self, batch: GraphBatch, size: int, next_n: int, buffers: dict[Any, Any]) -> None:
        self.batch, self.size, self.next_n = batch, size, next_n
        self.metadata = batch.new_metadata(buffers)
        self.metadata.is_cuda_graph = True
        shape, device = (size * next_n, batch.heads), batch.device
        self.inputs = [
            (
                torch.zeros(*shape, 128, device=device).to(torch.float8_e4m3fn),
                torch.zeros(shape, device=device),
            )
            for _ in batch.layers
        ]
        self.selected = torch.zeros(
            len(batch.layers), shape[0], batch.top_k, dtype=torch.int32, device=device
        )
        self.replay = self.forward
        self.replays = 0

    def forward(self) -> None:
        """What is captured."""
        self.selected.copy_(self.batch.run_eagerly(self.inputs))

    def warm_up(self) -> None:
        """Run once with the dummies that TensorRT-LLM captures with, ids from 0 on, and capture."""
        self.batch.metadata = self.metadata
        self.metadata.prepare(
            list(range(self.size)),
            [self.next_n] * self.size,
            [[] for _ in range(self.size)],
            contexts=[],
            next_n=self.next_n,
        )
        self.forward()
        self.replay = capture(self.forward, self.batch.device.type)

    def run(self, inputs: list[tuple[Tensor, Tensor]]) -> Tensor:
        """A replay on new inputs: int32 `[layers, rows, K]`."""
        for fixed, new in zip(self.inputs, inputs, strict=True):
            for target, source in zip(fixed, new, strict=True):
                target.copy_(source)
        self.replay()
        self.replays += 1
        return self.selected.clone()


class GraphBatch(HostBatch):
    """A `HostBatch` with graphs for `sizes` requests of each number of rows."""

    def __init__(self, seed: int, *, sizes: tuple[int, ...], **options: Any) -> None:
        super().__init__(seed, **options)
        self.eager_metadata, buffers = self.metadata, self.metadata.cuda_graph_buffers
        self.graph: StepGraph | None = None
        rows = range(1, 2 + self.drafts)
        self.graphs = [StepGraph(self, s, n, buffers) for s in sorted(sizes) for n in rows]

    def capture(self) -> None:
        """Capture all graphs, the largest first."""
        for graph in reversed(self.graphs):
            graph.warm_up()

    @property
    def replays(self) -> int:
        """Steps that were replays."""
        return sum(graph.replays for graph in self.graphs)

    def step(self, rows: list[int], *, next_n: int = 1, **options: Any) -> Step:
        """A step, padded to a captured size where there is one."""
        fitting = [g for g in self.graphs if g.size >= len(rows) and g.next_n == next_n]
        self.graph = None if options.get("contexts") or not fitting else fitting[0]
        self.metadata = self.eager_metadata
        if self.graph is not None:
            self.metadata = self.graph.metadata
            rows = rows + [GRAPH_DUMMY] * (self.graph.size - len(rows))
        return super().step(rows, next_n=next_n, **options)

    def run_eagerly(self, inputs: list[tuple[Tensor, Tensor]]) -> Tensor:
        """A forward that is no replay."""
        return super()._run(inputs, 0, 0.0)

    def _run(
        self, inputs: list[tuple[Tensor, Tensor]], context_tokens: int, hidden: float
    ) -> Tensor:
        if self.graph is None:
            return super()._run(inputs, context_tokens, hidden)
        return self.graph.run(inputs)
