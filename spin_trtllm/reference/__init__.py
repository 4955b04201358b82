# SPDX-License-Identifier: Apache-2.0
"""The operations of SPIN in plain, vectorised torch: the oracle for the kernels, and the CPU path.

Names and signatures equal `spin_trtllm.ops`, which checks its arguments; these do not. What ranks
by the current query (`pool_keys`, `score_blocks`, `query_*`) has no kernel yet. Shapes use
`S` sequences (or sequence-layer pairs), `R` rows a sequence, `N` slots of capacity and
`B = ceil(N / block_size)` blocks of capacity.
"""

from spin_trtllm.reference.adopt_scores import adopt_scores
from spin_trtllm.reference.observe_scores import observe_scores
from spin_trtllm.reference.pool_keys import pool_keys
from spin_trtllm.reference.predict_blocks import predict_blocks
from spin_trtllm.reference.quantize_query import quantize_query
from spin_trtllm.reference.score_blocks import score_blocks
from spin_trtllm.reference.score_slots import score_slots
from spin_trtllm.reference.select_blocks import Selection, select_blocks
from spin_trtllm.reference.topk_slots import topk_slots

__all__ = [
    "Selection",
    "adopt_scores",
    "observe_scores",
    "pool_keys",
    "predict_blocks",
    "quantize_query",
    "score_blocks",
    "score_slots",
    "select_blocks",
    "topk_slots",
]
