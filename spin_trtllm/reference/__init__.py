# SPDX-License-Identifier: Apache-2.0
"""The operations of SPIN in plain, vectorised torch: the oracle for the kernels, and the CPU path.

Names and signatures equal `spin_trtllm.ops`, which checks its arguments; these do not. Shapes use
`S` sequences (or sequence-layer pairs), `R` rows a sequence, `N` slots of capacity and
`B = ceil(N / block_size)` blocks of capacity.
"""

from spin_trtllm.reference.adopt_scores import adopt_scores
from spin_trtllm.reference.observe_scores import observe_scores
from spin_trtllm.reference.predict_blocks import predict_blocks
from spin_trtllm.reference.score_slots import score_slots
from spin_trtllm.reference.select_blocks import Selection, select_blocks
from spin_trtllm.reference.topk_slots import topk_slots

__all__ = [
    "Selection",
    "adopt_scores",
    "observe_scores",
    "predict_blocks",
    "score_slots",
    "select_blocks",
    "topk_slots",
]
