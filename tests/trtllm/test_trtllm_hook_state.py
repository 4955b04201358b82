# SPDX-License-Identifier: Apache-2.0
"""Whose state is it: lanes through joins, ends, waits, other pages and other rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hook_standin
import pytest
from hook_batch import GRAPH_DUMMY, HostBatch
from hook_helpers import SMALL, engine_of, hook, kept, witness_of
from hook_witness import Witness


def checked(batch: HostBatch) -> tuple[Any, Witness]:
    """A function that runs steps under the witness, and the witness."""
    witness = witness_of(batch, SMALL)

    def step(rows: list[int], **options: Any) -> Any:
        done = batch.step(rows, **options)
        witness.check(done, engine_of(batch))
        return done

    return step, witness


def test_a_recycled_lane_is_cold() -> None:
    batch = HostBatch(1, max_batch_size=1)
    hook(SMALL)
    step, _ = checked(batch)
    first = batch.join(600)
    for _ in range(4):
        step([first])
    assert kept(batch) < 0.6
    batch.finish(first)
    second = batch.join(604)  # goes on exactly where the other stopped
    step([second])
    assert kept(batch) == 1
    assert engine_of(batch).lanes.lane_of == {second: 0}


def test_a_sequence_whose_prefill_was_elsewhere_or_cached_starts_cold() -> None:
    batch = HostBatch(1)
    hook(SMALL)
    step, _ = checked(batch)
    old, new = batch.join(500), batch.join(550)
    step([old])
    step([old])
    step([old, new])
    assert kept(batch, 0) < 0.6
    assert kept(batch, 1) == 1


def test_a_request_that_prefills_again_is_cold_even_if_it_seems_to_go_on() -> None:
    batch = HostBatch(1)
    hook(SMALL)
    step, _ = checked(batch)
    number = batch.join(500)
    for _ in range(3):
        step([number])
    batch.requests[number].tokens -= 2
    step([GRAPH_DUMMY], contexts=[number])  # recomputes its last tokens
    step([number])
    assert kept(batch) == 1


@pytest.mark.parametrize("stages", [1, 2])
def test_a_sequence_that_sat_out_is_cold_unless_micro_batches_take_turns(stages: int) -> None:
    """Suspended and resumed on other pages; or of the other micro-batch of a pipeline."""
    batch = HostBatch(1)
    batch.manager.mapping = SimpleNamespace(pp_size=stages)
    hook(SMALL)
    step, _ = checked(batch)
    waits, goes = batch.join(500), batch.join(550)
    for _ in range(3):
        step([waits, goes])
    step([goes])
    batch.move(waits)
    step([goes, waits])
    assert kept(batch, 0) < 0.6
    assert kept(batch, 1) == 1 if stages == 1 else kept(batch, 1) < 0.6


def test_full_micro_batches_that_take_turns_stay_warm() -> None:
    """Each of the stages' micro-batches is as large as a batch may be."""
    batch = HostBatch(1, drafts=1, max_batch_size=2)
    batch.manager.mapping = SimpleNamespace(pp_size=2)
    hook(SMALL)
    witness = Witness(batch.layers, batch.ratio, batch.top_k, batch.slots, 4, SMALL)
    turns = [[batch.join(500), batch.join(550)], [batch.join(520), batch.join(590)]]
    for t in range(8):
        witness.check(batch.step(turns[t % 2], next_n=2), engine_of(batch))
        assert [kept(batch, row) == 1 for row in (0, 1)] == [t < 2] * 2, t


@pytest.mark.parametrize("how", ["step", "layer"])
def test_tokens_of_a_dense_step_are_not_taken_for_drafts(how: str) -> None:
    """Rejected drafts, a dense step, rejected drafts: the position alone looks like acceptance."""
    batch = HostBatch(1, drafts=1)
    hook(SMALL)
    step, _ = checked(batch)
    number = batch.join(500)
    for _ in range(3):
        step([number], next_n=2, accepted={number: 0})
    assert kept(batch) < 0.6
    if how == "step":
        batch.metadata.skip_indexer_for_gen_reqs = True
    else:
        batch.metadata.in_mtp_draft_loop = True
    batch.step([number], next_n=2, accepted={number: 0})
    batch.metadata.skip_indexer_for_gen_reqs = batch.metadata.in_mtp_draft_loop = False
    batch.step([number], next_n=2, accepted={number: 0})
    assert kept(batch) == 1


def test_a_step_with_prefills_keeps_the_decoding_rows_warm() -> None:
    batch = HostBatch(1)
    hook(SMALL)
    step, _ = checked(batch)
    number = batch.join(500)
    step([number])
    step([number])
    step([number], contexts=[batch.join(20)])
    assert kept(batch) < 0.6


def test_metadata_objects_of_one_manager_share_lanes() -> None:
    batch = HostBatch(1)
    hook(SMALL)
    step, _ = checked(batch)
    number = batch.join(500)
    other = hook_standin.Metadata(
        batch.manager, ratio=4, top_k=8, drafts=0, buffers=batch.metadata.cuda_graph_buffers
    )
    for _ in range(3):
        step([number])
        batch.metadata, other = other, batch.metadata
    step([number])
    assert kept(batch) < 0.6


def test_ids_beyond_63_bits_are_sequences_like_any() -> None:
    batch = HostBatch(1)
    hook(SMALL)
    step, _ = checked(batch)
    number = batch.join(500, 2**63 + 5)
    for _ in range(3):
        step([number])
    assert kept(batch) < 0.6


def test_a_graph_captured_dense_keeps_what_waits_from_being_taken_for_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be replayed for steps that could run SPIN, and then nothing of SPIN runs in them."""
    batch = HostBatch(1, drafts=1)
    hook(SMALL)
    number = batch.join(500)
    batch.step([number], next_n=2)
    step = engine_of(batch).step
    dropped: list[int | None] = []
    monkeypatch.setattr(step, "disown", lambda index=None: dropped.append(index))
    batch.metadata.skip_indexer_for_gen_reqs = True
    batch.step([number], next_n=2)
    assert dropped == []
    batch.metadata.is_cuda_graph = True
    batch.step([number], next_n=2)
    assert dropped == [None]


def test_graphs_are_counted_by_what_they_were_captured_with() -> None:
    batch = HostBatch(2)
    counters = hook(SMALL)
    rows = [batch.join(600)]
    dense, sparse = batch.metadata, batch.new_metadata({})
    dense.is_cuda_graph = sparse.is_cuda_graph = True
    dense.in_mtp_draft_loop = True
    batch.step(rows)
    batch.metadata = sparse
    for _ in range(3):
        batch.step(rows)
    before = counters.snapshot()
    request = batch.requests[rows[0]]
    for _ in range(3):  # replays: no Python runs but `prepare`
        batch._grow(request, request.tokens, request.tokens + 1)
        dense.prepare(rows, [request.tokens + 1], [request.pages], contexts=[], next_n=1)
        request.tokens += 1
    after = counters.snapshot()
    assert after.dense_rows["draft_loop"] - before.dense_rows.get("draft_loop", 0) == 3
    assert after.sparse_rows == before.sparse_rows
