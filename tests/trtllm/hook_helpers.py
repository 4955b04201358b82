# SPDX-License-Identifier: Apache-2.0
"""Hooking the stand-in, and what tests of the hooks ask of a batch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import hook_standin
import numpy as np
from hook_batch import HostBatch, Step
from hook_witness import Witness, engine_behind

from spin_trtllm.config import SpinConfig
from spin_trtllm.hosts.trtllm import indexer as hooks
from spin_trtllm.hosts.trtllm.backend import DecodeEngine
from spin_trtllm.hosts.trtllm.counters import Counters

SMALL = {"block_size": 8, "target_sparsity": 0.6, "exploration": 0.2, "seed": 5}


def hook(config: dict[str, Any], backend: str = "host", **options: Any) -> Counters:
    """Hook the stand-in; options are those of `patch`."""
    counters = Counters()
    spin = SpinConfig.from_dict(config)
    hooks.patch(hook_standin.module(), spin, backend, counters, **options)
    return counters


def module_with(indexer: type | None, top_k: Any = hook_standin.TopK) -> ModuleType:
    """A module as another version of the host might define it."""
    changed = ModuleType("changed.dsa.indexer")
    for name, value in (("Indexer", indexer), ("TopK", top_k)):
        if value is not None:
            setattr(changed, name, value)
    return changed


def engine_of(batch: HostBatch) -> DecodeEngine:
    """The engine behind a batch."""
    return engine_behind(hook_standin.Indexer, batch.metadata)


def witness_of(batch: HostBatch, config: dict[str, Any]) -> Witness:
    """A witness of a batch that has not stepped yet."""
    capacity = batch.manager.max_batch_size
    return Witness(batch.layers, batch.ratio, batch.top_k, batch.slots, capacity, config)


def ready(**options: Any) -> HostBatch:
    """A batch that has taken a step."""
    batch = HostBatch(0, **options)
    batch.step([batch.join(50)])
    return batch


def kept(batch: HostBatch, row: int = 0) -> float:
    """Share of a row's blocks that the last step kept in the first layer."""
    view = engine_of(batch).step.layer(0)
    return int(view.block_count[row]) / -(-int(view.visible_slots[row]) // 8)


def missed_by_hand(
    batch: HostBatch, step: Step, layer: int, block: int
) -> list[list[tuple[int, int]]]:
    """Of each request, for each row: slots of the dense top-k that were missed, and all of them.

    Nothing for a request that skipped no block.
    """
    view, found = engine_of(batch).step.layer(layer, len(step.rows)), []
    for s, start in enumerate(step.starts):
        kept = {j for j in view.block_list[s].tolist() if j >= 0}
        rows = []
        if len(kept) < -(-int(view.visible_slots[s]) // block):
            for row in range(step.next_n):
                scores = step.scores[layer, s, row, : (start + row + 1) // batch.ratio]
                best = np.lexsort((np.arange(len(scores)), -scores))[: batch.top_k]
                rows.append((sum(int(i) // block not in kept for i in best), len(best)))
        found.append(rows)
    return found
