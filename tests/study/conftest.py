# SPDX-License-Identifier: Apache-2.0
"""The benchmarks are not installed: makes them importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
