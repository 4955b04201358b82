# SPDX-License-Identifier: Apache-2.0
"""The benchmarks are not installed: makes them importable. Without transformers, no tests here."""

import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

if find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from miniature import corpus, small_model, stage  # noqa: F401 (fixtures)
