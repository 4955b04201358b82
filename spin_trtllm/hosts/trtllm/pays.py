# SPDX-License-Identifier: Apache-2.0
"""Where SPIN is worth its own work, by measurement."""

from __future__ import annotations

# Where a captured step with the host's scoring kernels was at least level with the dense one on an
# H200 (benchmarks/results/h200-trtllm-step.json): launches bind what is smaller, and a dense top-k
# over one long row takes so long that even a single sequence gains. The fused kernels were level
# or ahead in every cell.
MIN_WORK_SLOTS = {"fused": 0, "host": 2**19}  # of all sequences together
LONG_SLOTS = 2**17  # of one sequence


def pays(backend: str, sequences: int, slots: int, rows: int) -> bool:
    """Whether a step is large enough for SPIN to make it faster.

    A captured graph does for ever what was decided when it was captured, on dummy sequences of one
    token. So the answer depends on sizes that a graph cannot change, never on a current length.

    Args:
        backend: what scores the kept blocks, `host` or `fused`.
        sequences: of the step; slots: most that one can have.
        rows: of each sequence, drafts + 1; they share the keys that are read.
    """
    return slots >= LONG_SLOTS or sequences * slots >= MIN_WORK_SLOTS[backend]
