# SPDX-License-Identifier: Apache-2.0
"""Makes the helpers of this folder importable by name; no test leaves a class hooked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spin_trtllm.hosts.trtllm import indexer

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(autouse=True)
def _unhooked() -> Iterator[None]:
    yield
    indexer.unpatch()
