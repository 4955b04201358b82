# SPDX-License-Identifier: Apache-2.0
"""The embedded host: off means off, what is skipped is really skipped, what fails runs dense."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
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
    WEIGHTS,
    broken,
    dump_of,
    fail_at,
    feed,
    indexers,
    record,
    run,
    same,
)
from tiny_models import (
    CSA_LAYERS,
    MAX_TOKENS,
    RATIO,
    TOP_K,
    random_ids,
    save_checkpoint,
    tiny_model,
)

from spin_trtllm import SpinConfig, SpinError, SpinState, SpinStep
from spin_trtllm.generate import prefill
from spin_trtllm.hosts.transformers import enable, load_model
from spin_trtllm.hosts.transformers.call import gather_keys, scatter_scores
from spin_trtllm.replay.run import replay
from spin_trtllm.replay.trace import Trace


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model()


# ---------------------------------------------------------------- off means off


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparsity_zero_is_bit_identical(dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    prompt, tokens = random_ids(PROMPT_TOKENS, rows=2), random_ids(50, rows=2, seed=1)
    untouched = run(model, prompt, tokens)
    with enable(model, DENSE, strict=True) as session:
        assert torch.equal(run(model, prompt, tokens), untouched)
    assert session.stats.steps == 100
    assert session.stats.realized_sparsity == 0
    assert session.stats.spin_slots_scored == session.stats.dense_slots_scored > 0


def test_sparsity_zero_is_bit_identical_inside_generate(model: torch.nn.Module) -> None:
    def logits() -> Tensor:
        output = model.generate(
            random_ids(PROMPT_TOKENS),
            max_new_tokens=51,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return torch.stack(output.logits)

    untouched = logits()
    with enable(model, DENSE, strict=True) as session:
        assert torch.equal(logits(), untouched)
    assert session.stats.steps == 50


def test_no_cache_and_prefill_run_dense(model: torch.nn.Module) -> None:
    ids = random_ids(PROMPT_TOKENS)
    with torch.no_grad():
        untouched = model(ids, use_cache=False).logits
        with enable(model, SPARSE, strict=True) as session:
            assert torch.equal(model(ids, use_cache=False).logits, untouched)
            model(ids[:, :1], use_cache=False)
            prefill(model, ids)
    assert session.stats.sparse_steps == 0
    assert session.stats.dense_slots_scored == 0


def snapshot(model: torch.nn.Module) -> dict[str, Any]:
    """All that a hook or patch could leave behind, by module."""
    return {
        name: {
            key: dict(value) if isinstance(value, dict) else value
            for key, value in vars(module).items()
            if key not in ("_parameters", "_buffers")
        }
        for name, module in model.named_modules()
    }


def test_model_is_restored_after_close_and_after_an_exception(model: torch.nn.Module) -> None:
    before, keys = snapshot(model), list(model.state_dict())
    prompt, tokens = random_ids(200), random_ids(5, seed=1)
    untouched = run(model, prompt, tokens)
    session = enable(model, SPARSE)
    assert list(model.state_dict()) == keys
    run(model, prompt, tokens)
    session.close()
    session.close()
    assert snapshot(model) == before
    with contextlib.suppress(KeyError), enable(model, SPARSE):
        run(model, prompt, tokens)
        raise KeyError("mine")
    assert snapshot(model) == before
    assert torch.equal(run(model, prompt, tokens), untouched)


def test_one_session_at_a_time(model: torch.nn.Module) -> None:
    with enable(model, SPARSE):
        for target in (model, model.model):
            with pytest.raises(SpinError, match="one session at a time"):
                enable(target, SPARSE)
    enable(model, SPARSE).close()


# ---------------------------------------------------------------- what is skipped is skipped


def test_only_kept_keys_reach_the_scorer_and_score_as_before(model: torch.nn.Module) -> None:
    """Scores of kept slots agree with dense scoring to 1e-6 of their size; fewer keys go in."""
    seen: list[tuple[int, int, float]] = []

    def compare(layer: int, scorer: Any, cache: Any) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Tensor, ...], scores: Tensor) -> None:
            keys = cache.layers[layer].compressed_kv["indexer"]
            dense = scorer.forward(args[0], keys, args[2])
            kept = scores.isfinite()
            error = ((scores - dense)[kept].abs().max() / dense.abs().max()).item()
            seen.append((args[1].shape[1], keys.shape[1], error))

        return hook

    cache, _ = prefill(model, random_ids(PROMPT_TOKENS))
    with enable(model, SPARSE, strict=True) as session:
        hooks = [
            indexer.scorer.register_forward_hook(compare(layer, indexer.scorer, cache))
            for layer, indexer in indexers(model).items()
        ]
        feed(model, cache, random_ids(12, seed=1))
    for hook in hooks:
        hook.remove()
    assert max(error for _, _, error in seen) <= 1e-6
    cold, warm = seen[: len(CSA_LAYERS)], seen[len(CSA_LAYERS) :]
    assert all(scored == keys for scored, keys, _ in cold)
    assert all(scored < 0.5 * keys for scored, keys, _ in warm)
    assert session.stats.spin_slots_scored == sum(scored for scored, _, _ in seen)
    assert session.stats.dense_slots_scored == sum(keys for _, keys, _ in seen)


def test_rows_that_keep_different_numbers_of_slots() -> None:
    kept = torch.tensor([[True, False, True, True], [False, False, False, True]])
    keys = torch.arange(8.0).view(2, 4, 1)
    slots, narrowed = gather_keys(keys, kept)
    assert slots[0].tolist() == [0, 2, 3]
    assert slots[1, 0] == 3
    scores = scatter_scores(narrowed.transpose(1, 2), slots, kept)
    none = float("-inf")
    assert scores[:, 0].tolist() == [[0, none, 2, 3], [none, none, none, 7]]


@pytest.mark.parametrize("sparsity", [0.3, 0.9])
def test_every_pick_lies_in_a_kept_block(
    model: torch.nn.Module, sparsity: float, tmp_path: Path
) -> None:
    """Also where the kept blocks hold fewer slots than top-k wants."""
    picks: dict[int, list[Tensor]] = {layer: [] for layer in CSA_LAYERS}
    config = SpinConfig(block_size=BLOCK, target_sparsity=sparsity)
    with enable(model, config, capture=True, strict=True) as session:
        hooks = [
            indexer.register_forward_hook(lambda m, a, out, n=n: picks[n].append(out[0, 0].clone()))
            for n, indexer in indexers(model).items()
        ]
        cache, _ = prefill(model, random_ids(PROMPT_TOKENS))
        for values in picks.values():
            values.clear()
        feed(model, cache, random_ids(30, seed=1))
    for hook in hooks:
        hook.remove()
    dump = dump_of(session, tmp_path)
    for index, layer in enumerate(CSA_LAYERS):
        for step, chosen in enumerate(picks[layer]):
            real = chosen[chosen >= 0]
            assert dump["blocks"][step, index][real // BLOCK].all()
            if step:  # the cold step leaves the host's own picks alone
                assert torch.equal(chosen.int(), dump["topk"][step, index, 0])


def test_generate_runs_sparse(model: torch.nn.Module) -> None:
    with enable(model, SPARSE, strict=True) as session:
        output = model.generate(random_ids(PROMPT_TOKENS), max_new_tokens=20, do_sample=False)
    assert output.shape == (1, PROMPT_TOKENS + 20)
    stats = session.stats
    assert (stats.steps, stats.cold_steps, stats.sparse_steps) == (19, 1, 18)
    assert stats.realized_sparsity == pytest.approx(0.55, abs=0.06)
    assert not stats.fallbacks
    assert stats.mean_miss is None


def test_a_prompt_of_one_token_decodes_from_no_slot_at_all(model: torch.nn.Module) -> None:
    prompt, tokens = random_ids(1), random_ids(30, seed=1)
    untouched = run(model, prompt, tokens)
    with enable(model, SPARSE, probe=True, strict=True) as session:
        assert torch.equal(run(model, prompt, tokens)[:, :20], untouched[:, :20])
    assert session.stats.steps == 31
    assert session.stats.cold_steps == 1


# ---------------------------------------------------------------- the serving rule


@pytest.mark.parametrize("part", ["plan", "top_k", "observe"])
def test_an_unexpected_exception_falls_back_to_dense(
    model: torch.nn.Module,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompt, tokens = random_ids(PROMPT_TOKENS, rows=2), random_ids(6, rows=2, seed=1)
    untouched = run(model, prompt, tokens)
    monkeypatch.setattr(SpinStep, part, broken)
    with enable(model, SPARSE) as session, caplog.at_level(logging.WARNING):
        assert torch.equal(run(model, prompt, tokens), untouched)
    failures = session.stats.fallbacks["ZeroDivisionError"]
    assert failures == (2 * 3 if part == "top_k" else 2 * 6)  # top_k: every other step is cold
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is not None
    with pytest.raises(ZeroDivisionError), enable(model, SPARSE, strict=True):
        run(model, prompt, tokens)


def test_spin_comes_back_after_a_fallback(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A failure in the last layer: all layers are cold, and the capture starts over with them."""
    monkeypatch.setattr(SpinStep, "observe", fail_at(505, SpinStep.observe))
    with enable(model, SPARSE, capture=True) as session:
        run(model, random_ids(PROMPT_TOKENS), random_ids(12, seed=1))
    assert session.stats.fallbacks == {"ZeroDivisionError": 1}
    assert session.stats.cold_steps == 2
    session.capture.save_trace(tmp_path / "trace")
    trace = Trace(tmp_path / "trace")
    assert trace.positions_tokens[0, 0] == 506
    replay(trace, SPARSE, dump=tmp_path / "replayed")
    assert same(load_file(tmp_path / "replayed"), dump_of(session, tmp_path))


def test_left_padded_rows_run_dense(model: torch.nn.Module) -> None:
    ids = random_ids(100, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :50] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    untouched = model.generate(ids, **arguments)
    with enable(model, SPARSE, strict=True) as session:
        assert torch.equal(model.generate(ids, **arguments), untouched)
    assert session.stats.fallbacks["padded"] == session.stats.steps == 14


def test_sequences_beyond_the_capacity_run_dense(model: torch.nn.Module) -> None:
    prompt, tokens = random_ids(300), random_ids(6, seed=1)
    untouched = run(model, prompt, tokens)
    with enable(model, SPARSE, max_tokens=200, strict=True) as session:
        assert torch.equal(run(model, prompt, tokens), untouched)
        assert session.state_bytes < 2 * 17 * (2 * 50 + 1) * 4 + 1000
    assert session.stats.fallbacks == {"too_long": 6}


def test_stats_are_plain_values(model: torch.nn.Module) -> None:
    with enable(model, SPARSE, probe=True, strict=True) as session:
        run(model, random_ids(PROMPT_TOKENS), random_ids(10, seed=1))
    values = session.stats.to_dict()
    assert values["steps"] == 10
    assert 0 < values["mean_miss"] <= values["p99_miss"] <= 1
    assert values["probe_seconds"] > 0
    assert session.stats.misses.keys() == set(CSA_LAYERS)
    assert all(len(misses) == 9 for misses in session.stats.misses.values())


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": SpinConfig(top_k=7)}, f"top_k: got 7, allowed: {TOP_K}"),
        ({"config": SpinConfig(reduction="A2")}, "reduction"),
        ({"config": SpinConfig(exploration_policy="age")}, "exploration_policy"),
        ({"max_sequences": 0}, "sequences"),
        ({"max_tokens": 3}, "slots"),
        ({"sequence_ids": [1, 1]}, "each id once"),
        ({"sequence_ids": [-1]}, "sequence_ids: got -1"),
        ({"sequence_ids": ["a"]}, "sequence_ids: got 'a'"),
    ],
)
def test_enable_refuses_and_leaves_no_trace(
    model: torch.nn.Module, options: dict[str, Any], message: str
) -> None:
    before = snapshot(model)
    with pytest.raises(SpinError, match=message):
        enable(model, options.pop("config", SPARSE), **options)
    assert snapshot(model) == before
    enable(model, SPARSE).close()


def test_a_compiled_model_is_refused() -> None:
    """It would go on without the hooks, and nobody would notice."""
    for compiled in (torch.compile(tiny_model(), backend="eager"), tiny_model()):
        if not hasattr(compiled, "_orig_mod"):
            compiled.compile(backend="eager")  # in place
        with pytest.raises(SpinError, match=r"^model: got 'a compiled model'"):
            enable(compiled, SPARSE)


def test_indexers_on_several_devices_are_refused() -> None:
    spread = tiny_model()
    indexers(spread)[CSA_LAYERS[1]].to("meta")
    with pytest.raises(SpinError, match=r"^model: got \['cpu', 'meta'\], allowed: all indexers"):
        enable(spread, SPARSE)


def test_a_model_without_indexer_is_refused() -> None:
    plain = tiny_model(layer_types=["sliding_attention"] * 4)
    for other in (plain, torch.nn.Linear(2, 2)):
        with pytest.raises(SpinError, match="compressed sparse attention"):
            enable(other, SPARSE)


def test_load_model(model: torch.nn.Module, tmp_path: Path) -> None:
    half = tiny_model().to(torch.bfloat16)
    loaded, tokenizer = load_model(save_checkpoint(tmp_path, half), device="cpu")
    assert not loaded.training
    assert loaded.dtype == torch.float32
    assert tokenizer.decode(tokenizer.encode("Hello, you").ids) == "Hello, you"
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, half.state_dict()[name].float())


def _write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "a directory with a config.json"),
        ({"config.json": "{"}, "cannot read"),
        ({"config.json": "[]"}, "a JSON object"),
        ({"config.json": '{"model_type": "llama"}'}, "model_type: got 'llama'"),
        (
            {"config.json": '{"model_type": "deepseek_v4", "layer_types": ["sliding_attention"]}'},
            "at least one compressed_sparse_attention",
        ),
        ({"config.json": '{"model_type": "deepseek_v4"}'}, "a directory with a tokenizer.json"),
        (
            {"config.json": '{"model_type": "deepseek_v4"}', "tokenizer.json": "{}"},
            "cannot read .*tokenizer.json",
        ),
    ],
)
def test_load_model_refuses(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        _write(tmp_path, name, text)
    with pytest.raises(SpinError, match=message):
        load_model(tmp_path)


def test_load_model_refuses_what_is_no_directory_or_has_no_weights(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    with pytest.raises(SpinError, match="a directory"):
        load_model(tmp_path / "missing")
    save_checkpoint(tmp_path, model)
    (tmp_path / WEIGHTS).write_bytes(b"damaged")
    with pytest.raises(SpinError, match="cannot load"):
        load_model(tmp_path)
    weights = model.state_dict()
    del weights["model.norm.weight"]
    save_file({name: weight.clone() for name, weight in weights.items()}, tmp_path / WEIGHTS)
    with pytest.raises(SpinError, match=r"missing tensors: got \['model.norm.weight'\]"):
        load_model(tmp_path)


@pytest.mark.parametrize("version", ["5.11.3", "4.57.1", None])
def test_load_model_needs_a_recent_transformers(
    version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import metadata

    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    save_checkpoint(tmp_path, tiny_model())
    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(SpinError, match=r"transformers: got .*, allowed: >=5\.12"):
        load_model(tmp_path)


def test_sizes_follow_the_model(model: torch.nn.Module) -> None:
    slots = MAX_TOKENS // RATIO
    with enable(model, SPARSE, max_sequences=3) as session:
        assert session.layers == CSA_LAYERS
        assert session.config.top_k == TOP_K
        wanted = SpinState.estimate_bytes(len(CSA_LAYERS), 3, slots, torch.float32)
        assert session.state_bytes == wanted


def test_ids_repeat_from_session_to_session(model: torch.nn.Module, tmp_path: Path) -> None:
    def dumps() -> Sequence[dict[str, Tensor]]:
        session = record(model, random_ids(300, rows=2), random_ids(10, rows=2, seed=1))
        return [dump_of(session, tmp_path, n) for n in (0, 1)]

    assert all(same(a, b) for a, b in zip(dumps(), dumps(), strict=True))
