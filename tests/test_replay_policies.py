# SPDX-License-Identifier: Apache-2.0
"""Metrics and policies of `spin-trtllm replay` against numpy and by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import OracleSequence
from replay_cli import (
    DUMPED,
    FIGURES,
    METRICS,
    NEG_INF,
    Capture,
    Dump,
    Trace,
    make_trace,
    refused,
    replay,
    save,
)

from spin_trtllm.config import SpinConfig
from spin_trtllm.replay.policies import POLICIES
from spin_trtllm.replay.variants import SpinVariant
from spin_trtllm.state import SpinState


# ---------------------------------------------------------------- metrics
def truth_of(scores: np.ndarray, top_k: int) -> list[int]:
    """Dense top-K of one row, ties to the lower slot."""
    return np.lexsort((np.arange(scores.size), -scores))[:top_k].tolist()


def rows_of(trace: Trace) -> list[tuple[int, int, int, np.ndarray]]:
    """Step, layer, row and visible scores of every row."""
    steps, layers, rows, _ = trace["scores"].shape
    visible = (trace["positions"] + 1) // trace["ratio"]
    return [
        (t, layer, r, trace["scores"][t, layer, r, : visible[t, r]])
        for t in range(steps)
        for layer in range(layers)
        for r in range(rows)
    ]


def expected_metrics(
    trace: Trace, dump: Dump, cold: set[tuple[int, int]], size: int, *, read: bool = False
) -> dict[str, float]:
    """Section 8 from the dump with numpy: misses by scored blocks, or by the slots read."""
    misses: dict[int, list[float]] = {}
    for t, layer, r, scores in rows_of(trace):
        if (t, layer) in cold:
            continue
        truth = truth_of(scores, trace["top_k"])
        if read:
            kept = set(dump["topk"][t, layer, r].tolist())
            missed = [i for i in truth if i not in kept]
        else:
            missed = [i for i in truth if not dump["blocks"][t, layer, i // size]]
        misses.setdefault(layer, []).append(len(missed) / len(truth))
    last = -(-((trace["positions"][:, -1] + 1) // trace["ratio"]) // size)
    sparsity = [
        1 - dump["blocks"][t, layer].sum() / last[t]
        for t in range(len(last))
        for layer in range(len(trace["layers"]))
        if (t, layer) not in cold
    ]
    together = np.concatenate(list(misses.values()))
    return {
        "mean_miss": together.mean(),
        "p99_miss": np.percentile(together, 99),
        "p99_miss_layer_mean": np.mean([np.percentile(x, 99) for x in misses.values()]),
        "realized_sparsity": np.mean(sparsity),
    }


def test_metrics_against_numpy(tmp_path: Path, capsys: Capture) -> None:
    trace = make_trace(steps=20, first=100, jumps=(6, 13))
    options = ["--block-size", 8, "--sparsity", 0.7]
    metrics, dump = replay(capsys, save(tmp_path, trace), *options)
    cold = {(t, layer) for t in (0, 6, 13) for layer in range(2)}
    expected = expected_metrics(trace, dump, cold, 8)
    assert {name: metrics[name] for name in FIGURES} == pytest.approx(expected, abs=1e-12)
    assert (metrics["cold_steps"], metrics["steps"]) == (3, 20)
    assert 0 < metrics["mean_miss"] < metrics["p99_miss"]
    # 12..17 blocks and 0.7: at most the target, short of it by forced, explored and joined rows
    assert 0.3 < metrics["realized_sparsity"] <= 0.7


def agreement(pairs: list[tuple[np.ndarray, np.ndarray]], top_k: int) -> tuple[float, float]:
    """Mean Pearson correlation and top-K recall of (predicted, true) rows."""
    pearson = [np.corrcoef(x, y)[0, 1] for x, y in pairs]
    recall = [
        len(set(truth_of(x, top_k)) & set(truth_of(y, top_k))) / min(top_k, y.size)
        for x, y in pairs
    ]
    return float(np.nanmean(pearson)), float(np.mean(recall))


def test_predictions_of_spin_against_numpy(tmp_path: Path, capsys: Capture) -> None:
    trace = make_trace(steps=8, first=100)
    path = save(tmp_path, trace)
    options = ["--block-size", 8, "--sparsity", 0.7]
    plain, _ = replay(capsys, path, *options)
    metrics, _ = replay(capsys, path, *options, "--predictions")
    assert list(metrics) == [*METRICS, "pearson", "topk_recall"]
    assert {name: metrics[name] for name in METRICS} == plain
    slots = trace["scores"].shape[-1]
    parameters = {"block_size": 8, "sparsity": 0.7}
    sequence = OracleSequence(1, 6, trace["layers"], 11, slots, **parameters)
    pairs = []
    for t, positions in enumerate(trace["positions"]):
        for layer, r in np.ndindex(2, 3):
            n = int(positions[r]) + 1
            v = np.array(sequence.v[layer], dtype=np.float64)[:n]
            d = np.array(sequence.d[layer], dtype=np.float64)[positions[r] - np.arange(n)]
            if t:
                pairs.append((np.maximum(v, d), trace["scores"][t, layer, r, :n].astype(float)))
        sequence.step(positions, trace["scores"][t], int(trace["accepted"][t]))
    pearson, recall = agreement(pairs, 6)
    assert metrics["pearson"] == pytest.approx(pearson, abs=1e-9)
    assert metrics["topk_recall"] == pytest.approx(recall, abs=1e-12)
    assert 0.1 < metrics["pearson"] < 1
    assert 0 < metrics["topk_recall"] < 1


@pytest.mark.parametrize(
    ("option", "value", "given"),
    [("--reduction", "A2", "reduction A2"), ("--policy", "tisa", "tisa")],
)
def test_predictions_are_refused_where_there_are_none(
    tmp_path: Path, capsys: Capture, option: str, value: str, given: str
) -> None:
    path = save(tmp_path, make_trace())
    line = refused(capsys, "replay", path, "--predictions", option, value)
    assert f"--predictions: got '{given}', allowed: policy spin" in line


# ---------------------------------------------------------------- every policy
def kept_budget(n: int, size: int, top_k: int, rho: float) -> tuple[int, int]:
    """Visible blocks and blocks to keep, by hand (section 4)."""
    blocks = -(-n // size)
    kept = min(blocks, max(-(-top_k // size), blocks - round(rho * 1e6) * blocks // 10**6))
    return blocks, max(kept, min(blocks, 2))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_runs_on_every_kind_of_trace(
    policy: str, tmp_path: Path, capsys: Capture
) -> None:
    for trace in (
        make_trace(first=40, jumps=(3,)),
        make_trace(first=0, ratio=4, rows=1, steps=9),
        make_trace(layers=(9,), rows=1),
    ):
        path = save(tmp_path, trace)
        options = ["--policy", policy, "--block-size", 8, "--sparsity", 0.5]
        metrics, dump = replay(capsys, path, *options)
        again, repeated = replay(capsys, path, *options)
        assert metrics == again
        assert all((dump[name] == repeated[name]).all() for name in DUMPED)
        assert list(metrics)[:6] == METRICS
        assert set(metrics) <= {*METRICS, "pearson", "topk_recall"}
        assert metrics["steps"] == len(trace["positions"])
        for t, layer, r, scores in rows_of(trace):
            slots = dump["topk"][t, layer, r]
            real = slots[slots >= 0]
            assert len(set(real.tolist())) == len(real)
            assert (real < scores.size).all()
            visible = -(-scores.size // 8)
            assert not dump["row_blocks"][t, layer, r, visible:].any()
        if policy != "spin":
            assert not dump["v"].any()
            assert not dump["d"].any()


def test_streaming_keeps_the_sink_and_the_newest(tmp_path: Path, capsys: Capture) -> None:
    trace = make_trace(steps=15, first=50)
    options = ["--policy", "streaming", "--block-size", 8, "--sparsity", 0.6]
    metrics, dump = replay(capsys, save(tmp_path, trace), *options)
    for t, layer, r, scores in rows_of(trace):
        blocks, kept = kept_budget(scores.size, 8, 6, 0.6)
        wanted = {0, *range(blocks - kept + 1, blocks)}
        assert set(dump["row_blocks"][t, layer, r].nonzero()[0].tolist()) == wanted
    assert (dump["blocks"] == dump["row_blocks"].any(2)).all()
    assert not dump["explored"].any()
    assert metrics["cold_steps"] == 0
    expected = expected_metrics(trace, dump, set(), 8)
    assert {name: metrics[name] for name in FIGURES} == pytest.approx(expected, abs=1e-12)


def test_random_is_deterministic_and_depends_on_the_seed(tmp_path: Path, capsys: Capture) -> None:
    trace = make_trace(steps=15, first=150, rows=1, layers=(1, 2))
    path = save(tmp_path, trace)
    options = ["--policy", "random", "--block-size", 8, "--sparsity", 0.8]
    metrics, dump = replay(capsys, path, *options, "--seed", 3)
    again, repeated = replay(capsys, path, *options, "--seed", 3)
    _, other = replay(capsys, path, *options, "--seed", 4)
    assert metrics == again
    assert (dump["blocks"] == repeated["blocks"]).all()
    assert (dump["blocks"] != other["blocks"]).any()
    assert (dump["blocks"][:, 0] != dump["blocks"][:, 1]).any()  # anew for every layer
    assert len({b.tobytes() for b in dump["blocks"][:, 0]}) > 10  # and position
    for t, layer, r, scores in rows_of(trace):
        blocks, kept = kept_budget(scores.size, 8, 6, 0.8)
        chosen = dump["row_blocks"][t, layer, r]
        assert chosen.sum() == kept
        assert chosen[0]
        assert chosen[blocks - 1]
    assert abs(metrics["pearson"]) < 0.1
    assert metrics["cold_steps"] == 0


def kept_by(predicted: np.ndarray, size: int, top_k: int, rho: float) -> set[int]:
    """Blocks that A1 keeps without exploration for predicted scores of the visible slots."""
    blocks, kept = kept_budget(predicted.size, size, top_k, rho)
    score = [predicted[j * size : (j + 1) * size].max() for j in range(blocks)]
    inner = sorted(range(1, blocks - 1), key=lambda j: (-score[j], j))
    return {0, blocks - 1, *inner[: kept - min(blocks, 2)]}


@pytest.mark.parametrize(("policy", "shift"), [("prev_iter", 0), ("prev_iter_offset1", 1)])
def test_previous_iteration_by_hand(
    policy: str, shift: int, tmp_path: Path, capsys: Capture
) -> None:
    trace = make_trace(steps=15, first=100, jumps=(6,))
    options = ["--policy", policy, "--block-size", 8, "--sparsity", 0.6]
    options += ["--exploration-policy", "none"]
    metrics, dump = replay(capsys, save(tmp_path, trace), *options)
    pairs = []
    for t, layer, r, scores in rows_of(trace):
        n = scores.size
        found = set(dump["row_blocks"][t, layer, r].nonzero()[0].tolist())
        if t in (0, 6):
            assert found == set(range(-(-n // 8)))
            continue
        before = trace["scores"][t - 1, layer, trace["accepted"][t - 1]]
        predicted = np.nan_to_num(np.concatenate([np.zeros(shift, np.float32), before]))[:n]
        assert found == kept_by(predicted, 8, 6, 0.6)
        pairs.append((predicted.astype(float), scores.astype(float)))
    pearson, recall = agreement(pairs, 6)
    assert metrics["pearson"] == pytest.approx(pearson, abs=1e-9)
    assert metrics["topk_recall"] == pytest.approx(recall, abs=1e-12)
    assert metrics["cold_steps"] == 2
    cold = {(t, layer) for t in (0, 6) for layer in range(2)}
    expected = expected_metrics(trace, dump, cold, 8)
    assert {name: metrics[name] for name in FIGURES} == pytest.approx(expected, abs=1e-12)


def test_previous_layer_by_hand(tmp_path: Path, capsys: Capture) -> None:
    trace = make_trace(steps=6, first=100, layers=(0, 1, 5))
    options = ["--policy", "prev_layer", "--block-size", 8, "--sparsity", 0.6]
    options += ["--exploration-policy", "none"]
    metrics, dump = replay(capsys, save(tmp_path, trace), *options)
    for t, layer, r, scores in rows_of(trace):
        found = set(dump["row_blocks"][t, layer, r].nonzero()[0].tolist())
        if layer == 0:
            assert found == set(range(-(-scores.size // 8)))
        else:
            before = trace["scores"][t, layer - 1, r, : scores.size]
            assert found == kept_by(before, 8, 6, 0.6)
    assert metrics["cold_steps"] == 0
    expected = expected_metrics(trace, dump, {(t, 0) for t in range(6)}, 8)
    assert {name: metrics[name] for name in FIGURES} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_the_best_of_five_layers_correlates_best(
    seed: int, tmp_path: Path, capsys: Capture
) -> None:
    trace = make_trace(steps=5, first=60, layers=tuple(range(8)), seed=seed)
    # Every layer resembles an earlier one, not always the last.
    source = np.random.default_rng(seed).integers(0, 8, 8)
    trace["scores"] = trace["scores"] + trace["scores"][:, source % (np.arange(8) + 1)]
    path = save(tmp_path, trace)
    last, _ = replay(capsys, path, "--policy", "prev_layer", "--block-size", 8)
    best, _ = replay(capsys, path, "--policy", "prev_layer_best_of_5", "--block-size", 8)
    assert best["pearson"] > last["pearson"]
    expected = []
    for t, layer, r, scores in rows_of(trace):
        if layer:
            earlier = trace["scores"][t, max(0, layer - 5) : layer, r, : scores.size]
            expected.append(max(np.corrcoef(e, scores)[0, 1] for e in earlier.astype(float)))
    assert best["pearson"] == pytest.approx(np.mean(expected), abs=1e-9)


def test_tisa_refreshes_in_turn_and_reads_cached_scores(tmp_path: Path, capsys: Capture) -> None:
    trace = make_trace(steps=14, layers=(3, 5), rows=1, first=327, ratio=4)
    size, inner = 8, 9
    assert set(((trace["positions"] + 1) // 4 + 7).ravel() // 8) == {inner + 2}
    options = ["--policy", "tisa", "--block-size", size, "--sparsity", 0.5]
    metrics, dump = replay(capsys, save(tmp_path, trace), *options)
    assert metrics["cold_steps"] == 1
    assert dump["blocks"][0, :, : inner + 2].all()
    ranked = 6 - 2  # eleven blocks, five dropped, sink and newest forced
    assert (dump["blocks"][1:].sum(-1) == 6).all()
    assert dump["blocks"][:, :, [0, inner + 1]].all()
    window = math.ceil(inner / ranked)
    for t in range(1, 14 - window + 1):
        refreshed = dump["blocks"][t : t + window].any(0)
        assert refreshed[:, : inner + 2].all()
    cache = np.full((2, trace["scores"].shape[-1]), NEG_INF)
    for t, layer, _, scores in rows_of(trace):
        for i in range(scores.size):
            if dump["blocks"][t, layer, i // size]:
                cache[layer, i] = scores[i]
        wanted = truth_of(cache[layer, : scores.size], 6)
        assert dump["topk"][t, layer, 0].tolist() == wanted
    cold = {(0, 0), (0, 1)}
    expected = expected_metrics(trace, dump, cold, size, read=True)
    assert {name: metrics[name] for name in FIGURES} == pytest.approx(expected, abs=1e-12)
    assert metrics["mean_miss"] > 0


def test_tisa_caches_the_last_accepted_row(tmp_path: Path, capsys: Capture) -> None:
    trace = make_trace(steps=14, first=90)
    options = ["--policy", "tisa", "--block-size", 8, "--sparsity", 0.5]
    _, dump = replay(capsys, save(tmp_path, trace), *options)
    cache = np.full((2, trace["scores"].shape[-1]), NEG_INF)
    scores = np.nan_to_num(trace["scores"], nan=NEG_INF)
    for t, layer in np.ndindex(14, 2):
        fresh = np.repeat(dump["blocks"][t, layer], 8)[: cache.shape[1]]
        for r, position in enumerate(trace["positions"][t]):
            mixed = np.where(fresh, scores[t, layer, r], cache[layer])[: position + 1]
            assert dump["topk"][t, layer, r].tolist() == truth_of(mixed, 6)
        cache[layer] = np.where(fresh, scores[t, layer, trace["accepted"][t]], cache[layer])


def test_tisa_starts_over_after_a_jump(tmp_path: Path, capsys: Capture) -> None:
    trace = make_trace(steps=9, first=90, jumps=(5,))
    options = ["--policy", "tisa", "--block-size", 8, "--sparsity", 0.6]
    metrics, dump = replay(capsys, save(tmp_path, trace), *options)
    assert metrics["cold_steps"] == 2
    for t in range(9):
        full = -(-(trace["positions"][t, -1] + 1) // 8)
        assert (dump["blocks"][t].sum(-1) == full).all() == (t in (0, 5))


@pytest.mark.parametrize(("sparsity", "every"), [(0.5, 2), (0.7, 3), (0.0, 1), (0.9, 10)])
def test_index_cache_scores_every_nth_layer(
    sparsity: float, every: int, tmp_path: Path, capsys: Capture
) -> None:
    trace = make_trace(steps=5, layers=(0, 2, 4, 6, 8, 10), first=70)
    options = ["--policy", "index_cache", "--block-size", 8, "--sparsity", sparsity]
    metrics, dump = replay(capsys, save(tmp_path, trace), *options)
    for t, layer, r, scores in rows_of(trace):
        scoring = layer % every == 0
        assert dump["row_blocks"][t, layer, r].sum() == (-(-scores.size // 8) if scoring else 0)
        source = trace["scores"][t, layer - layer % every, r, : scores.size]
        assert dump["topk"][t, layer, r].tolist() == truth_of(source, 6)
    scored = math.ceil(6 / every)
    assert metrics["realized_sparsity"] == pytest.approx(1 - scored / 6)
    expected = expected_metrics(trace, dump, set(), 8, read=True)
    assert {name: metrics[name] for name in FIGURES} == pytest.approx(expected, abs=1e-12)
    assert (metrics["mean_miss"] == 0) == (every == 1)


# ---------------------------------------------------------------- ages
def test_ages_do_not_survive_a_reset() -> None:
    """The sequence jumps back into a step of many rows, of which the mask covers only the first."""
    config = SpinConfig(
        block_size=8,
        target_sparsity=0.5,
        exploration=1.0,
        exploration_policy="age",
        mask_policy="row0",
        top_k=8,
    )
    used, fresh = (
        SpinVariant(config, SpinState((3,), sequences=1, slots=400), ratio=1) for _ in range(2)
    )

    def run(variant: SpinVariant, position: int, rows: int) -> list[list[bool]]:
        plan = variant.plan([3], [11], torch.arange(position, position + rows).unsqueeze(0))
        scores = torch.arange(400.0).sin().expand(1, rows, 400)
        variant.observe(plan, scores, torch.tensor([rows - 1]))
        return [plan.selection.blocks[0].tolist(), plan.selection.explored_blocks[0].tolist()]

    for t in range(25):
        run(used, 100 + t, 1)
    decided = [[run(v, 40 + 60 * t, 60) for t in range(5)] for v in (used, fresh)]
    assert decided[0] == decided[1]
    assert any(any(explored) for _, explored in decided[1])
