# SPDX-License-Identifier: Apache-2.0
"""Where SPIN is worth its own work."""

from __future__ import annotations

# Slots of all sequences together from which on SPIN is taken to gain, by what scores kept blocks.
# Measured for the fused kernels, which lose 1 % at worst (README, Numbers); a guess for the host's.
MIN_WORK_SLOTS = {"fused": 0, "host": 2**18}


def pays(backend: str, sequences: int, slots: int, rows: int) -> bool:
    """Whether a step is large enough for SPIN to make it faster.

    A captured graph does for ever what was decided when it was captured, on dummy sequences of one
    token. So the answer depends on sizes that a graph cannot change, never on a current length.

    Args:
        backend: what scores the kept blocks, `host` or `fused`.
        sequences: of the step; slots: most that one can have.
        rows: of each sequence, drafts + 1; they share the keys that are read.
    """
    return sequences * slots >= MIN_WORK_SLOTS[backend]
