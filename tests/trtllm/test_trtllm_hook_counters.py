# SPDX-License-Identifier: Apache-2.0
"""What the hooks count, and the memory they own."""

from __future__ import annotations

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


def test_memory_is_given_back_with_the_manager() -> None:
    counters = hook(SMALL)
    batch = HostBatch(1)
    batch.step([batch.join(50)])
    assert counters.snapshot().state_bytes > 0
    batch.manager = batch.metadata.kv_cache_manager = SimpleNamespace()  # type: ignore[assignment]
    assert counters.snapshot().state_bytes == 0
