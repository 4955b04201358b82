# SPDX-License-Identifier: Apache-2.0
"""Makes the doubles of TensorRT-LLM importable by name."""

from __future__ import annotations

import sys
from pathlib import Path

DOUBLES = str(Path(__file__).resolve().parents[1] / "trtllm")
if DOUBLES not in sys.path:
    sys.path.insert(0, DOUBLES)
