# SPDX-License-Identifier: Apache-2.0
"""Traces of a hooked host with real kernels: its dense scores, and replays that do what it did.

Scores are exact whichever kernel makes them (see `test_trtllm_gpu`), so dense scores and those that
SPIN used are the same bits, and a replay on the CPU must keep the very blocks that the device kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hook_standin
import pytest
import torch
from graph_batch import GraphBatch
from hook_record import Record
from hook_witness import engine_behind
from host_kernels import best_kernels

from spin_trtllm.config import SpinConfig
from spin_trtllm.hosts.trtllm import indexer as hooks
from spin_trtllm.hosts.trtllm.backend import DecodeEngine
from spin_trtllm.hosts.trtllm.capture_settings import CaptureSettings
from spin_trtllm.hosts.trtllm.counters import Counters

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)
on_every_device = pytest.mark.parametrize("device", ["cpu", CUDA])

CONFIG = {"block_size": 64, "target_sparsity": 0.6, "exploration": 0.2, "seed": 5}
# tokens_per_block 256: pages of 64 slots, which DeepGEMM wants on Hopper.
SHAPE: dict[str, Any] = {
    "tokens_per_block": 256,
    "max_seq_len": 2048,
    "max_batch_size": 3,
    "top_k": 64,
    "heads": 32,
    "scaled": True,
}


@pytest.fixture(autouse=True)
def _unhooked() -> Iterator[None]:
    yield
    hooks.unpatch()


def hook(backend: str, folder: Path, **limits: Any) -> Counters:
    """Hook the stand-in, with a capture."""
    counters, config = Counters(), SpinConfig.from_dict(CONFIG)
    capture = CaptureSettings(folder, **limits)
    hooks.patch(hook_standin.module(), config, backend, counters, capture=capture)
    return counters


def batch_on(device: str, *, sizes: tuple[int, ...] = (), drafts: int = 0) -> GraphBatch:
    """A batch without graphs, or whose graphs are still to be captured."""
    kernels = best_kernels(device, is_lower_first=True)
    batch = GraphBatch(7, sizes=sizes, drafts=drafts, device=device, kernels=kernels, **SHAPE)
    for metadata in (batch.eager_metadata, *(graph.metadata for graph in batch.graphs)):
        metadata.use_expanded_buffers_for_mtp = drafts > 1
    return batch


def engine_of(batch: GraphBatch) -> DecodeEngine:
    """The engine behind a batch."""
    return engine_behind(hook_standin.Indexer, batch.metadata)


@on_every_device
@pytest.mark.parametrize(
    ("backend", "drafts"), [("host", 0), ("host", 1), ("host", 3), ("fused", 0), ("fused", 1)]
)
def test_traces_replay_to_what_the_device_did(
    backend: str, drafts: int, device: str, tmp_path: Path
) -> None:
    counters = hook(backend, tmp_path, sequences=3, steps=5)
    batch, record = batch_on(device, drafts=drafts), Record(CONFIG)
    rows = [batch.join(1500), batch.join(1023)]
    for t in range(7):
        if t == 1:
            rows.insert(1, batch.join(1700))
        contexts = [batch.join(20)] if t == 3 else []
        accepted = {number: (number + t) % (drafts + 1) for number in rows}
        step = batch.step(rows, next_n=drafts + 1, contexts=contexts, accepted=accepted)
        record.add(step, engine_of(batch))
        rows.reverse()
    traces = [record.check(path) for path in tmp_path.iterdir()]
    assert [len(trace) for trace in traces] == [5] * 3
    assert counters.snapshot().capture_steps == {"written": 15}


@on_every_device
def test_graphs_are_captured_and_replayed_as_ever_and_nothing_is_written(
    device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counters = hook("host", tmp_path)
    batch = batch_on(device, sizes=(1, 2))
    batch.capture()
    rows = [batch.join(1500), batch.join(1023)]
    for _ in range(4):
        batch.step(rows)
    batch.step(rows, contexts=[batch.join(20)])  # an eager one
    assert batch.replays == 4
    engine = engine_of(batch)
    assert engine.capture is not None
    assert int(engine.step.layer(0, 2).block_count[0]) < 6  # SPIN itself goes on
    assert list(tmp_path.iterdir()) == []
    assert counters.snapshot().capture_steps == {"cuda_graph": 7}  # two of them when captured
    (line,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert "cuda_graph_config: null" in line


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_replays_of_steps_that_look_eager_are_missed_and_harm_nothing(tmp_path: Path) -> None:
    """As piecewise graphs do: the metadata is no graph's, and Python runs no layer."""
    counters = hook("host", tmp_path)
    batch = batch_on("cuda", sizes=(1,))
    for graph in batch.graphs:
        graph.metadata.is_cuda_graph = False
    batch.capture()
    number = batch.join(1500)
    for _ in range(4):
        batch.step([number])
    torch.cuda.synchronize()
    assert list(tmp_path.iterdir()) == []
    assert counters.snapshot().capture_steps == {"unfinished_step": 1}
