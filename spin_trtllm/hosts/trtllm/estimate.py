# SPDX-License-Identifier: Apache-2.0
"""What a step will do, from the host's lengths alone: figures for the counters, not for decisions.

A captured graph runs without Python, and the host may not wait for the device. So the counters take
the budget of SPEC 4 for the lengths that the host knows, which may be late by the drafts accepted
in the step before; what the union of draft rows keeps beyond one row's budget is left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spin_trtllm.geometry import PPM, count_blocks
from spin_trtllm.hosts.trtllm.backend import DecodeEngine
from spin_trtllm.hosts.trtllm.eligibility import rows_of


def step_figures(metadata: Any, engine: DecodeEngine) -> dict[str, int]:
    """Arguments of `Counters.step` for a step that runs SPIN.

    `kv_cache_params.num_cached_tokens_per_seq` holds the raw tokens before this step, in batch
    order; padding rows count for nothing.
    """
    first, next_n = metadata.num_contexts, rows_of(metadata)
    cached = metadata.kv_cache_params.num_cached_tokens_per_seq[first : metadata.num_seqs]
    real, sparse = engine.lanes.is_real, engine.lanes.is_known
    visible = (np.array(cached, dtype=np.int64)[sparse] + next_n) // engine.shape.ratio
    size = engine.config.block_size
    blocks = (visible + (size - 1)) // size
    kept = blocks - blocks * engine.config.sparsity_ppm // PPM
    kept = np.minimum(np.maximum(kept, count_blocks(engine.shape.top_k, size)), blocks)
    rows, all_rows = int(np.count_nonzero(sparse)), int(np.count_nonzero(real))
    return {
        "sparse_rows": rows * next_n,
        "cold_rows": (all_rows - rows) * next_n,
        "kept_slots": int(np.minimum(kept * size, visible).sum()) * next_n,
        "visible_slots": int(visible.sum()) * next_n,
    }
