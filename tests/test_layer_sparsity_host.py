# SPDX-License-Identifier: Apache-2.0
"""The embedded host with a target for each layer: what it keeps, counts and records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers")

from host_sessions import BLOCK, DENSE, PROMPT_TOKENS, SPARSE, dump_of, feed, run, same
from tiny_models import CSA_LAYERS, RATIO, random_ids, tiny_model

from spin_trtllm import SpinError
from spin_trtllm.generate import forward, prefill
from spin_trtllm.hosts.transformers import enable
from spin_trtllm.replay.run import replay
from spin_trtllm.replay.trace import Trace

FIRST, *OTHERS = CSA_LAYERS
LAYERED = replace(SPARSE, layer_sparsity={FIRST: 0.2})


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model()


def test_a_layer_that_skips_nothing_is_the_untouched_model(model: torch.nn.Module) -> None:
    prompt, tokens = random_ids(PROMPT_TOKENS), random_ids(6, seed=1)
    untouched = run(model, prompt, tokens)
    nothing = replace(SPARSE, layer_sparsity=dict.fromkeys(CSA_LAYERS, 0.0))
    with enable(model, nothing, strict=True) as session:
        assert torch.equal(run(model, prompt, tokens), untouched)
    assert session.stats.realized_sparsity == 0
    with enable(model, replace(DENSE, layer_sparsity={FIRST: 0.9}), strict=True) as session:
        assert not torch.equal(run(model, prompt, tokens), untouched)
    assert session.stats.realized_sparsity > 0


def test_every_layer_keeps_its_own_budget(model: torch.nn.Module, tmp_path: Path) -> None:
    steps = 12
    with enable(model, LAYERED, capture=True, strict=True) as session:
        run(model, random_ids(PROMPT_TOKENS), random_ids(steps, seed=1))
    kept = dump_of(session, tmp_path)["blocks"].sum(-1)[1:]
    shares = []
    for t in range(1, steps):
        blocks = -(-((PROMPT_TOKENS + t + 1) // RATIO) // BLOCK)
        wanted = [blocks - int(rho * blocks) for rho in (0.2, *[0.6] * len(OTHERS))]
        assert kept[t - 1].tolist() == wanted
        shares += [1 - m / blocks for m in wanted]
    assert session.stats.realized_sparsity == pytest.approx(sum(shares) / len(shares))


def test_replay_repeats_the_host_bit_for_bit(model: torch.nn.Module, tmp_path: Path) -> None:
    options = {"capture": True, "strict": True, "sequence_ids": [77], "probe": True}
    with enable(model, LAYERED, **options) as session:
        cache, _ = prefill(model, random_ids(PROMPT_TOKENS))
        feed(model, cache, random_ids(25, seed=1))
        forward(model, random_ids(70, seed=2), cache)  # a new turn
        feed(model, cache, random_ids(12, seed=3))
    assert session.capture is not None
    session.capture.save_trace(tmp_path / "trace", 77)
    metrics = replay(Trace(tmp_path / "trace"), LAYERED, dump=tmp_path / "replayed")
    assert same(load_file(tmp_path / "replayed"), dump_of(session, tmp_path, 77))
    for name, value in metrics.items():
        assert getattr(session.stats, name) == pytest.approx(value, abs=1e-12), name
    replay(Trace(tmp_path / "trace"), SPARSE, dump=tmp_path / "alike")
    assert not same(load_file(tmp_path / "alike"), load_file(tmp_path / "replayed"), "blocks")


def test_layers_of_another_model_are_refused(model: torch.nn.Module) -> None:
    with pytest.raises(SpinError, match=r"^layer_sparsity: layer: got 99, allowed: indexer layers"):
        enable(model, replace(SPARSE, layer_sparsity={99: 0.5}))
