# SPDX-License-Identifier: Apache-2.0
"""A miniature of the tiny model, its stages and its corpus: both stages train in seconds."""

import numpy as np
import pytest

from benchmarks.tiny_model.corpus import Corpus
from benchmarks.tiny_model.model import CSA, HCA, SLIDING, configuration, new_model
from benchmarks.tiny_model.stages import Phase, Stage


def small_configuration(**overrides):
    """16 index heads all the same: with few of them, scores are often exactly zero, hence tied."""
    fields = {
        "hidden_size": 32,
        "layer_types": [SLIDING, CSA, HCA],
        "num_attention_heads": 2,
        "head_dim": 16,
        "q_lora_rank": 16,
        "o_lora_rank": 8,
        "sliding_window": 32,
        "compress_rates": {CSA: 4, HCA: 32},
        "index_head_dim": 16,
        "index_topk": 16,
        "moe_intermediate_size": 16,
    }
    return configuration(**(fields | overrides))


def small_stage(number=1, steps=8, scale=1, **phase_fields):
    """All three kinds of phase; only the sparse one has more slots than top-k."""
    fields = {"recall_share": 0.5} | phase_fields
    return Stage(
        number=number,
        phases=(
            Phase(steps // 2, 1.0, length=256 * scale, **fields),
            Phase(steps // 4, 1.0, length=256 * scale, teach_indexer=True, **fields),
            Phase(steps // 4, 2.0, length=512 * scale, teach_indexer=True, sparse=True, **fields),
        ),
        learning_rate=1e-2,
        indexer_learning_rate=1e-2,
        step_bytes=1_024 * scale,
    )


@pytest.fixture
def small_model():
    """Makes models: the same seed, the same weights."""

    def make(seed=0, **overrides):
        return new_model(small_configuration(**overrides), seed)

    return make


@pytest.fixture(scope="session")
def corpus():
    """Training text without any byte of the held-out text: digits there, letters here."""
    draws = np.random.default_rng(0)
    words = [bytes(draws.integers(ord("a"), ord("z") + 1, size=3).tolist()) for _ in range(8)]
    train = b" ".join(words[i] for i in draws.integers(0, len(words), size=3_000))
    return Corpus(
        np.frombuffer(train, np.uint8), draws.integers(128, 256, size=4_096).astype(np.uint8)
    )


@pytest.fixture
def stage():
    """Makes stages of 8 steps or more."""
    return small_stage
