# SPDX-License-Identifier: Apache-2.0
"""The shadow probe measures what a literal count finds, and changes nothing."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from hook_batch import GRAPH_DUMMY, HostBatch, Step
from hook_helpers import SMALL, engine_of, hook, missed_by_hand

from spin_trtllm.hosts.trtllm import indexer as hooks
from spin_trtllm.hosts.trtllm import probe as probes

LARGE = SMALL | {"block_size": 32}
PAGES = {"tokens_per_block": 128, "max_seq_len": 2048, "max_batch_size": 3}


@pytest.mark.parametrize(
    ("config", "options", "backend"),
    [
        (SMALL, {}, "host"),
        (SMALL, {"drafts": 2}, "host"),
        (SMALL, {"drafts": 1, "phases": True}, "host"),
        (LARGE, {**PAGES, "drafts": 1}, "fused"),
    ],
)
def test_the_miss_rate_is_that_of_a_literal_count(
    config: dict[str, Any], options: dict[str, Any], backend: str
) -> None:
    plain, batch = HostBatch(2, **options), HostBatch(2, **options)
    hook(config, backend)
    want = [plain.random_step() for _ in range(40)]
    assert engine_of(plain).probe is None
    hooks.unpatch()
    counters, found = hook(config, backend, probe_every=3), []
    for t, expected in enumerate(want):
        step = batch.random_step()
        assert step.selected.equal(expected.selected)  # a probe changes nothing
        if t % 3 == 2:
            missed = missed_by_hand(batch, step, (t // 3) % 2, config["block_size"])
            found += [row for rows in missed for row in rows]
    batch.step([GRAPH_DUMMY])  # what was found is read in the next step
    counts = counters.snapshot()
    assert counts.probed_slots == sum(n for _, n in found) > 100
    assert counts.missed_slots == sum(m for m, _ in found) > 0
    assert sum(counts.miss_rows) == len(found)
    assert counts.miss_rows[0] == sum(m == 0 for m, _ in found)


@pytest.mark.parametrize(("drafts", "backend"), [(0, "host"), (1, "host"), (1, "fused")])
def test_steps_of_a_graph_are_probed_when_they_are_over(drafts: int, backend: str) -> None:
    """By whoever goes on: in the next step they sit in other rows, and some are gone."""
    options = {**PAGES, "drafts": drafts}
    plain, batch = HostBatch(2, **options), HostBatch(2, **options)
    hook(LARGE, backend)
    want = [plain.random_step() for _ in range(40)]
    hooks.unpatch()
    counters, found = hook(LARGE, backend, probe_every=3), []
    batch.metadata.is_cuda_graph = True
    due: list[tuple[Step, list[list[tuple[int, int]]]]] = []
    for t, expected in enumerate(want):
        step = batch.random_step()
        assert step.selected.equal(expected.selected)
        for before, missed in due:
            pairs = zip(before.rows, missed, strict=True)
            found += [row for i, rows in pairs if i in step.rows for row in rows]
        due = []
        if t % 3 == 2:
            due = [(step, missed_by_hand(batch, step, (t // 3) % 2, LARGE["block_size"]))]
    batch.step([GRAPH_DUMMY])  # what was found is read in the next step
    counts = counters.snapshot()
    assert counts.probed_slots == sum(n for _, n in found) > 100
    assert counts.missed_slots == sum(m for m, _ in found) > 0
    assert sum(counts.miss_rows) == len(found)


def test_a_long_batch_is_probed_in_parts() -> None:
    parts = [probes._some_of(range(20), {i: 19 - i for i in range(20)}, n) for n in range(5)]
    assert all(len(part) == probes.PROBED_SEQUENCES for part in parts)
    assert {then for part in parts for then, _ in part} == set(range(20))
    assert all(now == 19 - then for part in parts for then, now in part)
    assert probes._some_of([1, 2], {}, 3) == []


def test_a_probe_that_fails_is_off_and_spin_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, batch = HostBatch(2), HostBatch(2)
    numbers = [plain.join(600), batch.join(600)][:1]
    counters = hook(SMALL, probe_every=2)
    want = [plain.step(numbers).selected for _ in range(6)]

    def fail(*_: Any) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(probes, "count_missed", fail)
    caplog.set_level(logging.WARNING)
    assert all(batch.step(numbers).selected.equal(x) for x in want)
    assert [r.message for r in caplog.records] == ["SPIN's probe is off: RuntimeError: unforeseen"]
    assert engine_of(batch).probe is None
    assert counters.snapshot().dense_rows == {}


def test_a_probe_that_fails_leaves_graphs_what_they_write_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = HostBatch(2, **PAGES)
    hook(LARGE, probe_every=1)
    batch.metadata.is_cuda_graph = True
    number = batch.join(1500)
    batch.step([number])
    probe = engine_of(batch).probe
    assert probe is not None
    buffer = weakref.ref(probe._query)
    del probe
    monkeypatch.setattr(probes, "score_pages", None)
    batch.step([number])
    gc.collect()
    assert engine_of(batch).probe is None
    assert buffer() is not None


def test_a_request_that_prefills_is_not_looked_back_at() -> None:
    """Its pages are others by then, or hold something else."""
    batch = HostBatch(2, **PAGES)
    counters = hook(LARGE, probe_every=1)
    batch.metadata.is_cuda_graph = True
    again, other = batch.join(1500), batch.join(1200)
    for _ in range(3):
        batch.step([again])
    before = counters.snapshot().probed_slots
    batch.step([other], contexts=[again])
    assert counters.snapshot().probed_slots == before > 0


def test_slots_that_no_sequence_has_count_as_missed() -> None:
    batch = HostBatch(2, **PAGES)
    hook(LARGE)
    number = batch.join(2040)
    for _ in range(2):
        batch.step([number])
    view = engine_of(batch).step.layer(0)
    assert int(view.block_list.max()) == view.block_list.shape[1] - 1
    kept = int(view.block_list[0, 0]) * 32
    truth = torch.tensor([[kept, 10**6, -1]], dtype=torch.int32)
    assert probes.count_missed(truth, view, 32).tolist() == [[1, 2]]
