# SPDX-License-Identifier: Apache-2.0
"""The embedded host: what was captured replays, and whose averages are whose."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("transformers")

from host_sessions import (
    BLOCK,
    DENSE,
    PROMPT_TOKENS,
    SPARSE,
    dump_of,
    fail_at,
    feed,
    indexers,
    record,
    run,
    same,
)
from tiny_models import CSA_LAYERS, RATIO, random_ids, tiny_model
from transformers import DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HCACache

from spin_trtllm import SpinConfig, SpinError, SpinState, SpinStep
from spin_trtllm.generate import forward, prefill
from spin_trtllm.hosts.transformers import enable, sequences
from spin_trtllm.replay.run import replay
from spin_trtllm.replay.trace import Trace

whole_cache = pytest.mark.skipif(
    "reset" not in vars(DeepseekV4HCACache),
    reason="this transformers resets and reorders only a part of the cache",
)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model()


# ---------------------------------------------------------------- capture and replay


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "log8"])
def test_replay_of_a_capture_repeats_the_host_bit_for_bit(
    model: torch.nn.Module, state_dtype: str, tmp_path: Path
) -> None:
    config = SpinConfig(block_size=BLOCK, target_sparsity=0.6, seed=5, state_dtype=state_dtype)
    with enable(model, config, capture=True, strict=True, sequence_ids=[77]) as session:
        cache, _ = prefill(model, random_ids(PROMPT_TOKENS))
        feed(model, cache, random_ids(30, seed=1))
        forward(model, random_ids(9, seed=2), cache)  # a new turn: a gap in the positions
        feed(model, cache, random_ids(12, seed=3))
    assert session.capture is not None
    session.capture.save_trace(tmp_path / "trace", 77, source="a test")
    trace = Trace(tmp_path / "trace")
    metrics = replay(trace, config, dump=tmp_path / "replayed")
    assert same(load_file(tmp_path / "replayed"), dump_of(session, tmp_path, 77))
    assert (trace.source, trace.sequence_id, trace.layers) == ("a test", 77, CSA_LAYERS)
    for name, value in metrics.items():
        assert getattr(session.stats, name) == pytest.approx(value, abs=1e-12), name
    assert session.stats.cold_steps == 2
    assert session.stats.mean_miss > 0


def test_capture_decides_as_spin_step_does(model: torch.nn.Module, tmp_path: Path) -> None:
    session = record(model, random_ids(PROMPT_TOKENS), random_ids(20, seed=1))
    dump = dump_of(session, tmp_path)
    session.capture.save_trace(tmp_path / "trace")
    trace = Trace(tmp_path / "trace")
    state = SpinState(CSA_LAYERS, sequences=1, slots=trace.slots)
    step = SpinStep(session.config, state, ratio=RATIO)
    for t, recorded in enumerate(trace):
        for index, layer in enumerate(CSA_LAYERS):
            plan = step.plan([layer], [0], recorded.positions_tokens.unsqueeze(0))
            scores = recorded.scores[index].unsqueeze(0)
            assert torch.equal(plan.selection.blocks[0], dump["blocks"][t, index])
            assert torch.equal(step.top_k(plan, scores)[0], dump["topk"][t, index])
            step.observe(plan, scores, torch.zeros(1, dtype=torch.int64))
    assert torch.equal(state.v[:, 0], dump["v"])
    assert torch.equal(state.d[:, 0], dump["d"])


def test_capture_starts_over_where_positions_do_not_show_a_reset(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    with enable(model, SPARSE, capture=True, strict=True) as session:
        cache, _ = prefill(model, random_ids(PROMPT_TOKENS))
        feed(model, cache, random_ids(5, seed=1))
        session.reset()
        feed(model, cache, random_ids(4, seed=2))
    session.capture.save_trace(tmp_path / "trace")
    trace = Trace(tmp_path / "trace")
    assert trace.positions_tokens[:, 0].tolist() == list(range(505, 509))
    replay(trace, SPARSE, dump=tmp_path / "replayed")
    assert same(load_file(tmp_path / "replayed"), dump_of(session, tmp_path))


def test_capture_drops_a_sequence_whose_layers_disagree(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strict, a step failed halfway and the caller went on: one layer is cold, the other warm."""
    with enable(model, SPARSE, capture=True, strict=True) as session:
        cache, _ = prefill(model, random_ids(PROMPT_TOKENS))
        feed(model, cache, random_ids(3, seed=1))
        monkeypatch.setattr(SpinStep, "observe", fail_at(503, SpinStep.observe))
        with pytest.raises(ZeroDivisionError):
            feed(model, cache, random_ids(1, seed=2))
        assert session.capture.sequence_ids == [0]
        feed(model, cache, random_ids(2, seed=3))
        assert session.capture.sequence_ids == []


def test_nan_scores_are_never_selected_observed_or_written(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    def poison(module: Any, args: Any, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[..., 3] = float("nan")
        return scores

    hook = indexers(model)[1].scorer.register_forward_hook(poison)
    session = record(model, random_ids(PROMPT_TOKENS), random_ids(10, seed=1))
    hook.remove()
    dump = dump_of(session, tmp_path)
    assert dump["v"].isfinite().all()
    assert dump["d"].isfinite().all()
    session.capture.save_trace(tmp_path / "trace")
    replay(Trace(tmp_path / "trace"), SPARSE, dump=tmp_path / "replayed")
    assert same(load_file(tmp_path / "replayed"), dump)


def test_saving_what_was_not_recorded_is_refused(model: torch.nn.Module, tmp_path: Path) -> None:
    session = record(model, random_ids(50), random_ids(2, seed=1))
    for save in (session.capture.save_trace, session.capture.save_dump):
        with pytest.raises(SpinError, match="sequence: got 9"):
            save(tmp_path / "file", 9)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- whose averages are whose


def test_a_batch_decides_as_its_sequences_do_alone(model: torch.nn.Module, tmp_path: Path) -> None:
    prompt, tokens = random_ids(PROMPT_TOKENS, rows=3), random_ids(25, rows=3, seed=1)
    batch = record(model, prompt, tokens)
    for row in range(3):
        alone = record(model, prompt[[row]], tokens[[row]], sequence_ids=[row])
        together = dump_of(batch, tmp_path, row)
        assert same(dump_of(alone, tmp_path, row), together, "blocks", "explored")
        torch.testing.assert_close(dump_of(alone, tmp_path, row)["v"], together["v"])


def test_two_interleaved_caches_do_not_mix(model: torch.nn.Module, tmp_path: Path) -> None:
    prompts = [random_ids(300), random_ids(411, seed=5)]
    tokens = [random_ids(15, seed=6), random_ids(15, seed=7)]
    with enable(model, SPARSE, capture=True, strict=True) as session:
        caches = [prefill(model, prompt)[0] for prompt in prompts]
        for t in range(15):
            for cache, fed in zip(caches, tokens, strict=True):
                feed(model, cache, fed[:, t : t + 1])
        assert [session.sequence_ids(cache) for cache in caches] == [(0,), (1,)]
    for n in range(2):
        alone = record(model, prompts[n], tokens[n], sequence_ids=[n])
        assert same(dump_of(alone, tmp_path, n), dump_of(session, tmp_path, n))


def test_a_dropped_cache_frees_its_lane(model: torch.nn.Module) -> None:
    with enable(model, SPARSE, max_sequences=1, strict=True) as session:
        for n in range(3):
            cache, _ = prefill(model, random_ids(200, seed=n))
            feed(model, cache, random_ids(3, seed=n))
            assert session.live_sequences == [n]
            del cache
            gc.collect()
            assert session.live_sequences == []
    assert session.stats.cold_steps == 3
    assert not session.stats.fallbacks


def test_sequences_without_a_lane_run_dense_and_are_counted(model: torch.nn.Module) -> None:
    prompt, tokens = random_ids(PROMPT_TOKENS, rows=3), random_ids(6, rows=3, seed=1)
    untouched = run(model, prompt, tokens)
    with enable(model, SPARSE, max_sequences=2, strict=True, capture=True) as session:
        logits = run(model, prompt, tokens)
    assert session.stats.fallbacks == {"no_free_lane": 6}
    assert session.stats.cold_steps == 2  # the two that have a lane; the third is no cold step
    torch.testing.assert_close(logits[2], untouched[2], atol=1e-5, rtol=0)
    assert not torch.allclose(logits[1], untouched[1], atol=1e-3, rtol=0)
    assert session.capture.sequence_ids == [0, 1]


def test_prefill_in_the_middle_makes_cold(model: torch.nn.Module) -> None:
    with enable(model, SPARSE, strict=True) as session:
        cache, _ = prefill(model, random_ids(300))
        feed(model, cache, random_ids(4, seed=1))
        assert session.stats.cold_steps == 1
        forward(model, random_ids(2, seed=2), cache)
        feed(model, cache, random_ids(4, seed=3))
        assert session.stats.cold_steps == 2
        session.reset()
        feed(model, cache, random_ids(2, seed=4))
        assert session.stats.cold_steps == 3


@whole_cache
def test_a_cache_that_is_filled_again_is_cold(model: torch.nn.Module) -> None:
    with enable(model, SPARSE, strict=True) as session:
        cache = DynamicCache(config=model.config)
        for turn in (1, 2):
            cache.reset()
            forward(model, random_ids(300), cache)
            feed(model, cache, random_ids(3, seed=1))
            assert session.stats.cold_steps == turn
        assert session.live_sequences == [0]


def test_moved_beams_are_cold_and_the_others_stay_warm(model: torch.nn.Module) -> None:
    prompt, tokens = random_ids(300), random_ids(4, rows=3, seed=1)
    with enable(model, SPARSE, strict=True) as session:
        cache, _ = prefill(model, prompt.expand(3, -1))
        feed(model, cache, tokens)
        cache.reorder_cache(torch.tensor([0, 1, 2]))
        feed(model, cache, tokens)
        assert session.stats.cold_steps == 3
        cache.reorder_cache(torch.tensor([0, 0, 2]))
        feed(model, cache, tokens)
        assert session.stats.cold_steps == 4
        assert session.sequence_ids(cache) == (0, 1, 2)


@whole_cache
def test_beams_that_differ_only_long_ago_are_noticed_when_they_move(model: torch.nn.Module) -> None:
    """Beyond the first layers' sliding windows: their newest keys there are the same."""
    recent = random_ids(200).expand(3, -1)
    tokens = random_ids(4, seed=1).expand(3, -1)
    with enable(model, SPARSE, strict=True) as session:
        cache, _ = prefill(model, torch.cat([random_ids(100, rows=3, seed=2), recent], 1))
        feed(model, cache, tokens)
        cache.reorder_cache(torch.tensor([0, 1, 2]))  # a copy, the rows where they were
        feed(model, cache, tokens)
        assert session.stats.cold_steps == 3
        cache.reorder_cache(torch.tensor([1, 0, 2]))
        feed(model, cache, tokens)
        assert session.stats.cold_steps == 5


def test_steps_compare_only_what_was_replaced(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    equal = sequences._equal_rows
    monkeypatch.setattr(sequences, "_equal_rows", lambda *pair: compared.append(1) or equal(*pair))
    with enable(model, SPARSE, strict=True) as session:
        cache, _ = prefill(model, random_ids(300))
        feed(model, cache, random_ids(9, seed=1))
        assert not compared
        cache.layers[CSA_LAYERS[-1]].compressed_kv["indexer"] = torch.zeros(1, 77, 16)
        feed(model, cache, random_ids(1, seed=1))
    assert len(compared) == 1
    assert session.stats.cold_steps == 2


def test_beam_search_runs(model: torch.nn.Module) -> None:
    beams = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False}
    prompt = random_ids(100)
    untouched = model.generate(prompt, **beams)
    with enable(model, DENSE, strict=True) as session:
        assert torch.equal(model.generate(prompt, **beams), untouched)
    assert session.stats.steps == 3 * 11


@whole_cache
def test_another_number_of_rows_is_another_batch(model: torch.nn.Module) -> None:
    with enable(model, SPARSE, strict=True) as session:
        cache, _ = prefill(model, random_ids(300, rows=2))
        feed(model, cache, random_ids(3, rows=2, seed=1))
        cache.reorder_cache(torch.tensor([1]))
        feed(model, cache, random_ids(3, seed=1))
        assert session.sequence_ids(cache) == (2,)
        assert session.live_sequences == [2]
    assert session.stats.cold_steps == 3


def test_names_are_given_to_the_next_new_cache(model: torch.nn.Module) -> None:
    with enable(model, SPARSE, strict=True, sequence_ids=[1, 2**64 - 1]) as session:
        first, _ = prefill(model, random_ids(20, rows=2))
        second, _ = prefill(model, random_ids(20, rows=2))
        assert session.sequence_ids(first) == (1, 2**64 - 1)
        assert session.sequence_ids(second) == (0, 2)  # counting skips ids in use
        session.name_sequences([1])
        with pytest.raises(SpinError, match="in use"):
            prefill(model, random_ids(20))
        session.name_sequences([8, 9])
        with pytest.raises(SpinError, match="1 ids, one a row"):
            prefill(model, random_ids(20))
        del first
        gc.collect()
        session.name_sequences([1])
        third, _ = prefill(model, random_ids(20))
        assert session.sequence_ids(third) == (1,)
        assert session.sequence_ids(DynamicCache(config=model.config)) == ()
