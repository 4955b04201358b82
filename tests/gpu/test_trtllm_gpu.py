# SPDX-License-Identifier: Apache-2.0
"""The hooked indexer of TensorRT-LLM with a host's real kernels, replayed from CUDA graphs.

The stand-in runs upstream's decode flow on a GPU: DeepGEMM scores, FlashInfer or torch selects (see
`host_kernels`). Keys, scales, queries and weights are small dyadic numbers, so the scores of
whichever kernel are exact and known beforehand: the witness, a literal SPIN on the CPU, gets the
very bits that the host's kernel produces. Every test also runs on a CPU, without graphs and with
the reference's kernels, so that only what is the device's own stays untested there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hook_standin
import pytest
import torch
from graph_batch import GraphBatch
from hook_batch import HostBatch, Step
from hook_helpers import missed_by_hand
from hook_witness import Witness, engine_behind
from host_kernels import OwnKernels, best_kernels
from torch.profiler import ProfilerActivity, profile

from spin_trtllm.config import SpinConfig
from spin_trtllm.hosts.trtllm import indexer as hooks
from spin_trtllm.hosts.trtllm.backend import DecodeEngine
from spin_trtllm.hosts.trtllm.counters import Counters

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)
on_every_device = pytest.mark.parametrize("device", ["cpu", CUDA])

CONFIG = {
    "block_size": 64,
    "target_sparsity": 0.6,
    "exploration": 0.2,
    "state_dtype": "bf16",
    "seed": 5,
}
SIZES = (1, 2, 4)
# tokens_per_block 256: pages of 64 slots, which DeepGEMM wants on Hopper.
SHAPE: dict[str, Any] = {
    "tokens_per_block": 256,
    "max_seq_len": 4096,
    "max_batch_size": 4,
    "top_k": 64,
    "heads": 32,
    "scaled": True,
}
CASES = [
    ("host", 0),
    ("host", 1),
    ("host", 3),  # tables of their own for draft rows
    ("fused", 0),
    ("fused", 1),
]
LAYERED = {"layer_sparsity": {2: 0.8, 4: 0.0}}


@pytest.fixture(autouse=True)
def _unhooked() -> Iterator[None]:
    yield
    hooks.unpatch()


def hook(backend: str, probe_every: int = 0, **changes: Any) -> Counters:
    """Hook the stand-in."""
    counters = Counters()
    config = SpinConfig.from_dict(CONFIG | changes)
    hooks.patch(hook_standin.module(), config, backend, counters, probe_every=probe_every)
    return counters


def batch_on(
    device: str, seed: int, *, sizes: tuple[int, ...] = SIZES, drafts: int = 0, **options: Any
) -> GraphBatch:
    """A batch whose graphs are captured: to be called once the hooks are where they shall be."""
    kernels = options.pop("kernels", None) or best_kernels(device, is_lower_first=True)
    batch = GraphBatch(
        seed, sizes=sizes, drafts=drafts, device=device, kernels=kernels, **SHAPE, **options
    )
    for metadata in (batch.eager_metadata, *(graph.metadata for graph in batch.graphs)):
        metadata.use_expanded_buffers_for_mtp = drafts > 1
    batch.capture()
    return batch


def engine_of(batch: HostBatch) -> DecodeEngine:
    """The engine behind a batch."""
    return engine_behind(hook_standin.Indexer, batch.metadata)


def witness_of(batch: HostBatch, backend: str, **changes: Any) -> Witness:
    """A witness of a batch that has not stepped yet; `fused` selects where no draft is missing."""
    assert isinstance(batch.kernels, OwnKernels)
    return Witness(
        batch.layers,
        batch.ratio,
        batch.top_k,
        batch.slots,
        batch.manager.max_batch_size,
        CONFIG | changes,
        lower_first=batch.kernels.is_lower_first or (backend == "fused" and not batch.drafts),
    )


@on_every_device
@pytest.mark.parametrize(
    ("backend", "drafts", "changes"),
    [*((*case, {}) for case in CASES), ("host", 1, LAYERED), ("fused", 0, LAYERED)],
)
def test_replays_equal_one_literal_sequence_a_request(
    backend: str, drafts: int, changes: dict[str, Any], device: str
) -> None:
    counters = hook(backend, **changes)
    batch = batch_on(device, drafts, drafts=drafts)
    witness = witness_of(batch, backend, **changes)
    for _ in range(30):
        step = batch.random_step()
        assert engine_of(batch).fused == (backend == "fused")
        witness.check(step, engine_of(batch))
    assert witness.sparse_entries > 20
    assert 12 < batch.replays < 30  # eager steps, which prefill, come between
    assert counters.snapshot().dense_rows.keys() <= {"warm_up"}


@on_every_device
def test_a_lane_that_another_takes_over_between_replays_is_cold(device: str) -> None:
    hook("host")
    batch = batch_on(device, 1, sizes=(1,))
    witness = witness_of(batch, "host")
    tokens = 4000
    for _ in range(3):
        number = batch.join(tokens)
        for t in range(4):
            witness.check(batch.step([number]), engine_of(batch))
            view = engine_of(batch).step.layer(0, 1)
            blocks = -(-int(view.visible_slots[0]) // 64)
            assert (int(view.block_count[0]) == blocks) == (t == 0)
        tokens = batch.requests[number].tokens  # the next one goes on where this one stopped
        batch.finish(number)
    assert batch.replays == 12


@on_every_device
@pytest.mark.parametrize("drafts", [0, 1])
def test_without_sparsity_replays_are_those_of_the_dense_host(drafts: int, device: str) -> None:
    kernels = best_kernels(device)
    kernels.top_k = OwnKernels().top_k  # type: ignore[method-assign]  # the same set each time
    dense = batch_on(device, 7, drafts=drafts, kernels=kernels)
    want = [dense.random_step().selected for _ in range(12)]
    hook("host", target_sparsity=0.0)
    sparse = batch_on(device, 7, drafts=drafts, kernels=kernels)
    for selected in want:
        assert torch.equal(sparse.random_step().selected, selected)
    assert sparse.replays == dense.replays > 5
    assert engine_of(sparse).obstacle is None


@on_every_device
@pytest.mark.parametrize("backend", ["host", "fused"])
def test_two_ranks_agree_bit_for_bit_one_replaying_one_not(backend: str, device: str) -> None:
    hook(backend)
    replaying = batch_on(device, 13, drafts=1)
    eager = batch_on(device, 13, drafts=1)
    for graph in eager.graphs:
        graph.replay = graph.forward
    for _ in range(20):
        first, second = replaying.random_step(), eager.random_step()
        one, two = engine_of(replaying), engine_of(eager)
        for index in range(len(replaying.layers)):
            a, b = (e.step.layer(index, len(first.rows)) for e in (one, two))
            assert torch.equal(a.block_list, b.block_list)
        assert torch.equal(first.selected.sort(-1).values, second.selected.sort(-1).values)
        assert one.lanes.lane_of == two.lanes.lane_of
        for number in one.lanes.lane_of.keys() & set(first.rows):
            held, other = (e.step.state._read(e.lanes.lane_of[number]) for e in (one, two))
            assert held.keys() == other.keys()
            assert all(torch.equal(held[name], other[name]) for name in held)


@on_every_device
@pytest.mark.parametrize("backend", ["host", "fused"])
def test_replayed_steps_are_probed_as_a_literal_count_finds(backend: str, device: str) -> None:
    counters = hook(backend, probe_every=1)
    batch = batch_on(device, 3, drafts=1)
    found: list[tuple[int, int]] = []
    before: tuple[Step, list[list[tuple[int, int]]]] | None = None
    graphs = 0
    for _ in range(24):
        step = batch.random_step()
        if before is not None:  # whoever goes on is looked up now
            pairs = zip(before[0].rows, before[1], strict=True)
            found += [row for i, rows in pairs if i in step.rows for row in rows]
            graphs += 1
        probe = engine_of(batch).probe
        assert probe is not None
        layer = (probe._seen - 1) % len(batch.layers)
        missed = missed_by_hand(batch, step, layer, 64)
        before = (step, missed) if batch.metadata.is_cuda_graph else None
        if before is None:
            found += [row for rows in missed for row in rows]
    assert graphs > 8
    for _ in range(3):  # what was found is read when the device has it
        batch.step([batch.join(50)])
        if device == "cuda":
            torch.cuda.synchronize()
    counts = counters.snapshot()
    assert counts.missed_slots == sum(m for m, _ in found)
    assert counts.probed_slots == sum(n for _, n in found) > 1000


def launched(device: str, run: Callable[[], object]) -> list[str]:
    """Names of the kernels that run, on a CPU of torch's operators; in order."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    run()
    with profile(activities=[activity]) as seen:
        run()
        if device == "cuda":
            torch.cuda.synchronize()
    kind = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    events = sorted(seen.events(), key=lambda e: e.time_range.start)
    return [e.name for e in events if e.device_type == kind and not e.name.startswith("cuda")]


@on_every_device
def test_hooks_that_are_not_there_launch_nothing(device: str) -> None:
    def step_of_a_new_batch() -> Callable[[], object]:
        batch = batch_on(device, 3, sizes=())
        number = batch.join(3000)
        return lambda: batch.step([number])

    never = launched(device, step_of_a_new_batch())
    hook("host")
    hooked = launched(device, step_of_a_new_batch())
    hooks.unpatch()
    assert launched(device, step_of_a_new_batch()) == never
    hook("host", top_k=16)  # a model that selects 64: refused
    assert launched(device, step_of_a_new_batch()) == never
    assert len(hooked) > len(never) > 10
