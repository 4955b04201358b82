# SPDX-License-Identifier: Apache-2.0
"""The benchmarks are not installed: makes them importable. And a miniature model and study."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS / "tiny_model")]

FILLER = b"The quick brown fox jumps over the lazy dog. " * 30

NEED_TRANSFORMERS = (
    "about",
    "answers",
    "beyond",
    "methods",
    "replay",
    "run",
    "speculation",
    "trained_methods",
)
if find_spec("transformers") is None:
    collect_ignore = [f"test_{name}.py" for name in NEED_TRANSFORMERS]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Random weights, two layers with an indexer: top-16 of blocks of 16, 16 heads of 16."""
    from miniature import small_configuration

    from benchmarks.tiny_model.model import CSA, HCA, SLIDING, new_model

    made = new_model(small_configuration(layer_types=[SLIDING, CSA, HCA, CSA]), 0).eval()
    folder = tmp_path_factory.mktemp("miniature")
    targets = {"0": {"1": 0.0, "3": 0.0}, "0.5": {"1": 0.75, "3": 0.25}}
    (folder / "layer_sparsity.json").write_text(json.dumps(targets), encoding="utf-8")
    made.name_or_path = str(folder)
    return made


@pytest.fixture(scope="session")
def filler():
    return FILLER
