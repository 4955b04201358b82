# SPDX-License-Identifier: Apache-2.0
"""The shadow probe measures what a literal count finds, and changes nothing."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hook_batch import GRAPH_DUMMY, HostBatch, Step
from hook_helpers import SMALL, engine_of, hook

from spin_trtllm.hosts.trtllm import indexer as hooks
from spin_trtllm.hosts.trtllm import probe as probes

LARGE = SMALL | {"block_size": 32}
PAGES = {"tokens_per_block": 128, "max_seq_len": 2048, "max_batch_size": 3}


def count_by_hand(batch: HostBatch, step: Step, layer: int, block: int) -> list[tuple[int, int]]:
    """Missed and all slots of the dense top-k, of each row whose request skipped a block."""
    view, found = engine_of(batch).step.layer(layer), []
    for s, start in enumerate(step.starts):
        kept = {j for j in view.block_list[s].tolist() if j >= 0}
        if len(kept) == -(-int(view.visible_slots[s]) // block):
            continue
        for row in range(step.next_n):
            scores = step.scores[layer, s, row, : (start + row + 1) // batch.ratio]
            best = np.lexsort((np.arange(len(scores)), -scores))[: batch.top_k]
            found.append((sum(int(i) // block not in kept for i in best), len(best)))
    return found


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
            found += count_by_hand(batch, step, (t // 3) % 2, config["block_size"])
    batch.step([GRAPH_DUMMY])  # what was found is read in the next step
    counts = counters.snapshot()
    assert counts.probed_slots == sum(n for _, n in found) > 100
    assert counts.missed_slots == sum(m for m, _ in found) > 0
    assert sum(counts.miss_rows) == len(found)
    assert counts.miss_rows[0] == sum(m == 0 for m, _ in found)


def test_steps_that_a_graph_replays_are_not_probed() -> None:
    batch = HostBatch(2)
    counters = hook(SMALL, probe_every=1)
    number = batch.join(600)
    batch.step([number])
    batch.metadata.is_cuda_graph = True
    for _ in range(3):
        batch.step([number])
    assert counters.snapshot().probed_slots == 0
    batch.metadata.is_cuda_graph = False
    for _ in range(3):
        batch.step([number])
    assert counters.snapshot().probed_slots == 2 * batch.top_k


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
