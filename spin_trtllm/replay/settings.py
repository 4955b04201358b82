# SPDX-License-Identifier: Apache-2.0
"""The preset of a trace's model: a capture, a replay and a deployment start from the same one."""

from __future__ import annotations

_PRESETS = {  # by tokens a slot, and slots that the attention reads
    (4, 64): "tiny-deepseek-v4",
    (4, 512): "deepseek-v4-flash",
    (4, 1024): "deepseek-v4-pro",
    (1, 2048): "deepseek-v3.2",
}


def preset_of(ratio: int, top_k: int) -> str | None:
    """Name of the preset for models with this ratio and top-k; None where there is none."""
    return _PRESETS.get((ratio, top_k))
