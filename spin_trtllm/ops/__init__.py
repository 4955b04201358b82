# SPDX-License-Identifier: Apache-2.0
"""The operations of SPIN on any device: the CUDA library on a GPU, the reference elsewhere.

Names, arguments and results equal `spin_trtllm.reference`; `score_pages` scores a paged fp8 cache.
Each is a torch operator `spin::<stem>` with a fake implementation, so that it survives
`torch.compile` and `torch.export`. `score_slots`, on plain keys, is the reference everywhere.
"""

from spin_trtllm.ops.observe_scores import observe_scores
from spin_trtllm.ops.predict_blocks import predict_blocks
from spin_trtllm.ops.quantize_query import quantize_query
from spin_trtllm.ops.score_slots import score_pages, score_slots
from spin_trtllm.ops.select_blocks import select_blocks
from spin_trtllm.ops.topk_slots import topk_slots
from spin_trtllm.reference import Selection

__all__ = [
    "Selection",
    "observe_scores",
    "predict_blocks",
    "quantize_query",
    "score_pages",
    "score_slots",
    "select_blocks",
    "topk_slots",
]
