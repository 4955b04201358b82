# SPDX-License-Identifier: Apache-2.0
"""What the hooks count, and the memory they own."""

from __future__ import annotations

import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
from hook_batch import GRAPH_DUMMY, HostBatch
from hook_helpers import SMALL, engine_of, hook


def test_counters_tell_sparse_from_cold_rows_and_the_share_of_slots() -> None:
    batch = HostBatch(1)
    counters = hook(SMALL)
    number = batch.join(600)
    for _ in range(3):
        batch.step([number, GRAPH_DUMMY])
    counts = counters.snapshot()
    assert (counts.steps, counts.sparse_rows, counts.cold_rows) == (3, 2, 1)
    view = engine_of(batch).step.layer(0)
    assert counts.kept_slots % int(view.kept_slots[0]) <= 8
    assert counts.realized_sparsity == pytest.approx(0.6, abs=0.05)
    assert counts.state_bytes == sum(engine_of(batch).bytes)


def test_warm_up_rows_are_counted_as_such() -> None:
    """And so would be real ones, in a release that starts their ids lower."""
    batch = HostBatch(1, drafts=1)
    counters = hook(SMALL)
    number = batch.join(600)
    batch.step([2, number, 0, 4], next_n=2)
    batch.step([2, number, 0, 4], next_n=2)
    batch.step([number], next_n=2)
    counts = counters.snapshot()
    assert counts.dense_rows == {"warm_up": 8}
    assert (counts.cold_rows, counts.sparse_rows) == (2, 4)


def test_a_profiling_prefill_takes_the_memory_that_decoding_will(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """TensorRT-LLM sizes its pool by a prefill with a manager that it then throws away."""
    caplog.set_level(logging.INFO, "spin_trtllm")
    counters = hook(SMALL)
    profiling, serving = HostBatch(1), HostBatch(1)
    number = profiling.join(50)
    table = profiling.requests[number].pages
    profiling.metadata.prepare([number], [50], [table], contexts=[3], next_n=1)
    taken = counters.snapshot().state_bytes
    engine = weakref.ref(engine_of(profiling))
    assert taken == sum(engine().bytes) > 0
    del profiling
    gc.collect()
    assert engine() is None
    assert counters.snapshot().state_bytes == 0
    serving.step([serving.join(50)])
    assert counters.snapshot().state_bytes == taken
    lines = [r.message for r in caplog.records]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert lines[0].startswith("SPIN: 2 layers, 5 sequences of 160 slots: ")


def test_memory_is_given_back_with_the_manager() -> None:
    counters = hook(SMALL)
    batch = HostBatch(1)
    batch.step([batch.join(50)])
    assert counters.snapshot().state_bytes > 0
    batch.manager = batch.metadata.kv_cache_manager = SimpleNamespace()  # type: ignore[assignment]
    assert counters.snapshot().state_bytes == 0
