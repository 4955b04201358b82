# SPDX-License-Identifier: Apache-2.0
"""The operations of SPIN on any device: the CUDA library on a GPU, the reference elsewhere.

Names, arguments and results equal `spin_trtllm.reference`. Each is a torch operator `spin::<stem>`
with a fake implementation, so that it survives `torch.compile` and `torch.export`.
"""

from spin_trtllm.ops.observe_scores import observe_scores
from spin_trtllm.ops.predict_blocks import predict_blocks
from spin_trtllm.ops.select_blocks import select_blocks
from spin_trtllm.ops.topk_slots import topk_slots
from spin_trtllm.reference import Selection

__all__ = [
    "Selection",
    "observe_scores",
    "predict_blocks",
    "select_blocks",
    "topk_slots",
]
