# SPDX-License-Identifier: Apache-2.0
"""The shadow probe counts on a GPU what it counts on a CPU, and waits for nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from spin_trtllm.hosts.trtllm.counters import Counters
from spin_trtllm.hosts.trtllm.probe import Replayed, ShadowProbe, count_missed
from spin_trtllm.layer_view import LayerView

SEQUENCES, ROWS, BLOCKS, BLOCK, TOP_K = 5, 2, 16, 64, 100
SLOTS = BLOCKS * BLOCK - 3


def kept_blocks() -> torch.Tensor:
    """What each sequence kept, bool `[S, B]`: the newest always, and the first sequence all."""
    kept = torch.rand(SEQUENCES, BLOCKS, generator=torch.Generator().manual_seed(1)) < 0.6
    kept[:, -1] = kept[0] = True
    return kept


def view_on(device: str, kept: torch.Tensor) -> LayerView:
    """A view of that; nothing else of it is read."""
    order = kept.logical_not().int().argsort(dim=1, stable=True)
    count = kept.sum(1)
    listed = torch.where(torch.arange(BLOCKS) < count.unsqueeze(1), order, -1).int()
    empty = torch.empty(0, device=device)
    return LayerView(
        block_list=listed.to(device),
        block_count=count.int().to(device),
        row_slots=empty,
        kept_slots=empty,
        visible_slots=torch.full((SEQUENCES,), SLOTS, dtype=torch.int32, device=device),
        pages=None,
        scores=empty,
        places=empty,
    )


def dense_top_k() -> torch.Tensor:
    """Slots of every row, one of them with padding."""
    rng = torch.Generator().manual_seed(2)
    rows = [torch.randperm(SLOTS, generator=rng)[:TOP_K] for _ in range(SEQUENCES * ROWS)]
    truth = torch.stack(rows).int()
    truth[3, 90:] = -1
    return truth


def test_every_row_is_counted_by_its_sequences_blocks() -> None:
    kept, truth = kept_blocks(), dense_top_k()
    found = count_missed(truth, view_on("cpu", kept), BLOCK)
    assert found[:ROWS].tolist() == [[0, 0]] * ROWS
    for row in range(ROWS, SEQUENCES * ROWS):
        slots = [n for n in truth[row].tolist() if n >= 0]
        missed = sum(not kept[row // ROWS, n // BLOCK] for n in slots)
        assert found[row].tolist() == [missed, len(slots)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_counts_the_same_and_the_host_does_not_wait() -> None:
    kept, truth = kept_blocks(), dense_top_k()
    want = count_missed(truth, view_on("cpu", kept), BLOCK).sum(0)
    counters = Counters()
    probe = ShadowProbe(1, 3, counters)
    view, there = view_on("cuda", kept), truth.cuda()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    probe.note(there, view, BLOCK)
    metadata = SimpleNamespace(is_cuda_graph=False)
    probe.next_step(metadata, is_sparse=True)
    assert counters.snapshot().probed_slots == 0  # the device is not there yet
    torch.cuda.synchronize()
    probe.next_step(metadata, is_sparse=True)
    counts = counters.snapshot()
    assert [counts.missed_slots, counts.probed_slots] == want.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_looking_back_at_a_replay_makes_the_host_wait_for_nothing() -> None:
    probe, heads, ids = ShadowProbe(1, 3, Counters()), 32, [70 + n for n in range(SEQUENCES)]
    query = torch.randn(SEQUENCES * ROWS, heads, 128, device="cuda").to(torch.float8_e4m3fn)
    probe.keep_query(1, query, torch.rand(SEQUENCES * ROWS, heads, device="cuda"), 64)
    positions = torch.full((SEQUENCES, ROWS), SLOTS, device="cuda") - ROWS
    positions += torch.arange(ROWS, device="cuda")
    table = torch.arange(SEQUENCES * BLOCKS, dtype=torch.int32, device="cuda")
    metadata = SimpleNamespace(
        num_contexts=0,
        request_ids=ids,
        indexer_k_cache_block_offsets=table.view(SEQUENCES, BLOCKS),
    )
    pages = torch.zeros(SEQUENCES * BLOCKS, BLOCK * 132, dtype=torch.uint8, device="cuda")
    replayed, sizes = Replayed(1, ids), {"top_k": TOP_K, "ratio": 1, "block_size_slots": BLOCK}
    inputs = (replayed, view_on("cuda", kept_blocks()), positions, pages, metadata)
    probe.look_back(*inputs, **sizes)  # the first time may allocate
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        probe.look_back(*inputs, **sizes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(probe._waiting) == 2
