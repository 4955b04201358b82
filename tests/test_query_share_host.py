# SPDX-License-Identifier: Apache-2.0
"""The embedded host with a share for the current query: what it computes, keeps and records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers")

from host_sessions import (
    BLOCK,
    DENSE,
    PROMPT_TOKENS,
    SPARSE,
    dump_of,
    feed,
    indexers,
    record,
    run,
    same,
)
from tiny_models import CSA_LAYERS, RATIO, random_ids, tiny_model

from spin_trtllm import SpinError, SpinStep
from spin_trtllm.generate import forward, prefill
from spin_trtllm.hosts.transformers import enable
from spin_trtllm.reference.pool_keys import key_bytes_read
from spin_trtllm.replay.run import replay
from spin_trtllm.replay.trace import Trace

SHARED = replace(SPARSE, query_share=0.5)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model()


@pytest.mark.parametrize(("share", "merge"), [(1.0, "split"), (0.5, "union"), (0.5, "max")])
def test_nothing_skipped_is_the_untouched_model(
    model: torch.nn.Module, share: float, merge: str
) -> None:
    prompt, tokens = random_ids(PROMPT_TOKENS), random_ids(6, seed=1)
    untouched = run(model, prompt, tokens)
    with enable(model, replace(DENSE, query_share=share, query_merge=merge), strict=True):
        assert torch.equal(run(model, prompt, tokens), untouched)


@pytest.mark.parametrize("pooling", ["mean", "minmax"])
def test_the_host_counts_pooled_keys_as_key_bytes_read_does(
    model: torch.nn.Module, pooling: str
) -> None:
    """Through steps whose newest block is partial, and one whose newest block is whole."""
    config = replace(SHARED, query_pooling=pooling)
    with enable(model, config, strict=True) as session:
        run(model, random_ids(PROMPT_TOKENS), random_ids(40, seed=1))
    slots = [(PROMPT_TOKENS + step) // RATIO for step in range(1, 41)]
    assert any(n % BLOCK == 0 for n in slots)
    expected = sum(
        key_bytes_read(n, 0, block_size_slots=BLOCK, key_bytes=1, query_pooling=pooling)
        for n in slots
    )
    assert session.stats.pooled_keys_read == expected * len(CSA_LAYERS)


@pytest.mark.parametrize(
    ("pooling", "merge"),
    [("mean", "split"), ("mean", "union"), ("mean", "max"), ("minmax", "split")],
)
def test_replay_repeats_the_host_bit_for_bit(
    model: torch.nn.Module, pooling: str, merge: str, tmp_path: Path
) -> None:
    config = replace(SHARED, query_pooling=pooling, query_merge=merge, seed=5)
    with enable(model, config, capture=True, strict=True, sequence_ids=[77]) as session:
        cache, _ = prefill(model, random_ids(PROMPT_TOKENS))
        feed(model, cache, random_ids(25, seed=1))
        forward(model, random_ids(70, seed=2), cache)  # a new turn, two blocks long
        feed(model, cache, random_ids(12, seed=3))
    assert session.capture is not None
    session.capture.save_trace(tmp_path / "trace", 77)
    trace = Trace(tmp_path / "trace")
    assert (trace.query_block_size_slots, trace.query_pooling) == (BLOCK, pooling)
    metrics = replay(trace, config, dump=tmp_path / "replayed")
    assert same(load_file(tmp_path / "replayed"), dump_of(session, tmp_path, 77))
    for name, value in metrics.items():
        assert getattr(session.stats, name) == pytest.approx(value, abs=1e-12), name
    assert session.stats.mean_miss is not None
    assert session.stats.mean_miss > 0
    without = replay(trace, replace(config, query_share=0.0), dump=tmp_path / "without")
    assert without["steps"] == metrics["steps"]
    assert not same(load_file(tmp_path / "without"), load_file(tmp_path / "replayed"), "blocks")


def test_the_query_is_scored_as_the_host_scores(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Means of all keys there are, whatever happened to the cache, through the host's own scorer.

    Two sequences: a second turn, then beams that change places.
    """
    found: list[Tensor] = []
    wanted: list[Tensor] = []
    plan = SpinStep.plan

    def spy(step: SpinStep, layers: Any, ids: Any, positions: Any, scores: Tensor) -> Any:
        found.append(scores)
        return plan(step, layers, ids, positions, scores)

    def expect(scorer: Any, args: tuple[Tensor, ...]) -> None:
        query, keys, hidden = args
        if query.shape[1] == 1:
            whole = keys.shape[1] // BLOCK
            means = [keys[:, j * BLOCK : (j + 1) * BLOCK].mean(1) for j in range(whole)]
            wanted.append(scorer.forward(query, torch.stack(means, 1), hidden).clone())

    hooks = [x.scorer.register_forward_pre_hook(expect) for x in indexers(model).values()]
    monkeypatch.setattr(SpinStep, "plan", spy)
    with enable(model, SHARED, strict=True) as session:
        cache, _ = prefill(model, random_ids(PROMPT_TOKENS, rows=2))
        feed(model, cache, random_ids(10, rows=2, seed=1))
        forward(model, random_ids(70, rows=2, seed=2), cache)
        feed(model, cache, random_ids(10, rows=2, seed=3))
        cache.reorder_cache(torch.tensor([1, 0]))
        feed(model, cache, random_ids(10, rows=2, seed=4))
    for hook in hooks:
        hook.remove()
    assert len(found) == len(wanted) == 30 * len(CSA_LAYERS)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert session.stats.cold_steps == 6


def test_a_step_that_fails_is_dense_and_the_next_one_pools_anew(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, tokens = random_ids(PROMPT_TOKENS), random_ids(8, seed=1)
    with enable(model, SHARED) as session:
        cache, _ = prefill(model, prompt)
        feed(model, cache, tokens[:, :3])
        rows = session._decoder.book.rows(cache, 1)
        rows.pooled_keys[CSA_LAYERS[0]] = rows.pooled_keys[CSA_LAYERS[0]][:, :, :, :-1]
        feed(model, cache, tokens[:, 3:])
    assert session.stats.fallbacks == {"RuntimeError": 1}
    assert session.stats.cold_steps == 2
    assert session.stats.sparse_steps == 2 + 3


# ---------------------------------------------------------------- the scores in a trace
def spoil(trace: Path, tensors: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Write a trace again with some tensors and metadata replaced; None drops one."""
    from safetensors import safe_open

    with safe_open(trace, "pt") as file:
        merged = {**file.metadata(), **metadata}
    content = {**load_file(trace), **tensors}
    save_file(
        {name: tensor for name, tensor in content.items() if tensor is not None},
        trace,
        {name: text for name, text in merged.items() if text is not None},
    )


@pytest.mark.parametrize(
    ("change", "metadata", "words"),
    [
        (lambda q: q.double(), {}, ["query_scores dtype", "F64", "allowed: F32"]),
        (lambda q: q.half(), {}, ["query_scores dtype", "F16", "allowed: F32"]),
        (lambda q: q[:, :, 0], {}, ["query_scores shape", "4 dimensions"]),
        (lambda q: q[..., 1:], {}, ["query_scores shape", "allowed: [8, 2, 1, 16]"]),
        (lambda q: q[1:], {}, ["query_scores shape", "allowed: [8, 2, 1, 16]"]),
        (lambda q: q, {"query_block_size": None}, ["metadata query_block_size: got None"]),
        (lambda q: q, {"query_block_size": "64"}, ["query_scores shape", "[8, 2, 1, 2]"]),
        (lambda q: q, {"query_block_size": "0"}, ["query_block_size: got '0'", "8 .. 128"]),
        (lambda q: q, {"query_pooling": "top4"}, ["query_pooling: got 'top4'", "mean, minmax"]),
        (
            lambda q: q.index_fill(3, torch.tensor([7]), float("nan")),
            {},
            ["query_scores: got 'NaN at step 0, layer 1, row 0, block 7'"],
        ),
    ],
)
def test_a_spoiled_trace_is_refused(
    model: torch.nn.Module, change: Any, metadata: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    session = record(model, random_ids(PROMPT_TOKENS), random_ids(8, seed=1), config=SHARED)
    assert session.capture is not None
    path = tmp_path / "trace"
    session.capture.save_trace(path)
    queries = load_file(path)["query_scores"]
    spoil(path, {"query_scores": change(queries).contiguous()}, metadata)
    with pytest.raises(SpinError) as caught:
        list(Trace(path))
    for word in words:
        assert word in str(caught.value)


def test_what_is_no_whole_block_may_be_anything(model: torch.nn.Module, tmp_path: Path) -> None:
    """The newest block is no whole one; NaN there, or a number, is the same trace."""
    session = record(model, random_ids(PROMPT_TOKENS), random_ids(8, seed=1), config=SHARED)
    assert session.capture is not None
    path = tmp_path / "trace"
    session.capture.save_trace(path)
    queries = load_file(path)["query_scores"]
    assert queries.shape == (8, len(CSA_LAYERS), 1, 16)
    assert queries[..., 15].isnan().all()
    assert not queries[..., :15].isnan().any()
    before = replay(Trace(path), SHARED)
    spoil(path, {"query_scores": queries.nan_to_num(9e9)}, {})
    assert replay(Trace(path), SHARED) == before
