# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm replay` and `trace-info` as a user meets them: options, policies, files, errors."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strategies
from oracle import OracleSequence
from oracle import replay as oracle_replay
from safetensors.numpy import load_file
from test_trace import MALFORMED, STREAMED

import spin_trtllm
from spin_trtllm.cli import main
from spin_trtllm.replay.policies import POLICIES

ROOT = Path(spin_trtllm.__file__).parents[1]
METRICS = [
    "mean_miss",
    "p99_miss",
    "p99_miss_layer_mean",
    "realized_sparsity",
    "cold_steps",
    "steps",
]
FIGURES = ("mean_miss", "p99_miss", "p99_miss_layer_mean", "realized_sparsity")
DUMPED = ("blocks", "row_blocks", "explored", "topk", "v", "d")
# The command's defaults, by the oracle's names.
DEFAULTS = {"block_size": 64, "sparsity": 0.4, "ema_decay": 0.5, "exploration": 0.05}
NEG_INF = -math.inf

Trace = dict[str, Any]
Dump = dict[str, np.ndarray]
Capture = pytest.CaptureFixture[str]


def make_trace(
    steps: int = 12,
    layers: tuple[int, ...] = (2, 6),
    rows: int = 3,
    first: int = 60,
    ratio: int = 1,
    top_k: int = 6,
    seed: int = 0,
    jumps: tuple[int, ...] = (),
    spare_slots: int = 2,
) -> Trace:
    """Random scores with some persistence and ties; `jumps` are steps that start 2 tokens late."""
    rng = np.random.default_rng(seed)
    accepted = rng.integers(0, rows, steps)
    starts, position = [], first
    for t in range(steps):
        position += 2 * (t in jumps)
        starts.append(position)
        position += int(accepted[t]) + 1
    positions = np.array(starts, dtype=np.int64).reshape(-1, 1) + np.arange(rows)
    slots = (max(starts, default=first) + rows) // ratio + spare_slots
    stripe = rng.standard_normal((len(layers), 1, slots))
    scores = stripe + rng.standard_normal((steps, len(layers), rows, slots))
    scores = np.where(scores < -1.5, 0.0, scores).astype(np.float32)
    seen = np.arange(slots) < ((positions + 1) // ratio)[:, None, :, None]
    return {
        "scores": np.where(seen, scores, np.float32(np.nan)),
        "positions": positions,
        "accepted": accepted.astype(np.int64),
        "ratio": ratio,
        "top_k": top_k,
        "layers": list(layers),
        "sequence_id": 11,
    }


def save(folder: Path, trace: Trace, name: str = "t.trace", source: str | None = None) -> str:
    path = folder / name
    strategies.write_trace(path, trace, source)
    return str(path)


def call(capsys: Capture, *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `spin-trtllm ARGUMENTS`, in this process."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


def replay(capsys: Capture, trace: str, *options: Any) -> tuple[dict[str, Any], Dump]:
    """Metrics and dump of a replay that must succeed."""
    dump = Path(trace).with_suffix(".dump")
    arguments = ["replay", trace, "--json", "--dump", dump, *map(str, options)]
    code, out, err = call(capsys, *arguments)
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    return json.loads(out), load_file(dump)


def refused(capsys: Capture, *arguments: str | Path) -> str:
    """The one line on stderr of a call that must fail with exit code 2."""
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert "Traceback" not in err
    return err


def check(found: tuple[dict[str, Any], Dump], expected: dict[str, Any]) -> None:
    metrics, dump = found
    assert list(metrics) == METRICS
    for name in DUMPED:
        assert dump[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(dump[name], expected[name], err_msg=name)
    for name in FIGURES:
        assert metrics[name] == pytest.approx(expected["metrics"][name], abs=1e-12)
    assert metrics["steps"] == expected["metrics"]["steps"]
    assert metrics["cold_steps"] == expected["metrics"]["cold_steps"]


# ---------------------------------------------------------------- output
def test_json_and_dump_have_the_specified_shape(tmp_path: Path, capsys: Capture) -> None:
    trace = make_trace(steps=4, rows=2, first=100, top_k=9)
    metrics, dump = replay(capsys, save(tmp_path, trace), "--block-size", 16)
    slots = trace["scores"].shape[-1]
    blocks = -(-slots // 16)
    assert list(metrics) == METRICS
    assert {name: (x.dtype.name, x.shape) for name, x in dump.items()} == {
        "blocks": ("bool", (4, 2, blocks)),
        "row_blocks": ("bool", (4, 2, 2, blocks)),
        "explored": ("bool", (4, 2, blocks)),
        "topk": ("int32", (4, 2, 2, 9)),
        "v": ("float32", (2, slots)),
        "d": ("float32", (2, slots + 1)),
    }
    assert (metrics["steps"], metrics["cold_steps"]) == (4, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.dump", "t.trace"]


def test_without_dump_nothing_is_written(tmp_path: Path, capsys: Capture) -> None:
    code, out, err = call(capsys, "replay", save(tmp_path, make_trace()), "--json")
    assert (code, err) == (0, "")
    assert list(json.loads(out)) == METRICS
    assert [p.name for p in tmp_path.iterdir()] == ["t.trace"]


def test_the_table_shows_the_same_figures(tmp_path: Path, capsys: Capture) -> None:
    path = save(tmp_path, make_trace())
    options = ("--block-size", 8, "--predictions")
    metrics, _ = replay(capsys, path, *options)
    code, out, err = call(capsys, "replay", path, *map(str, options))
    assert (code, err) == (0, "")
    assert "spin on t.trace" in out
    for label, key in [
        ("mean miss", "mean_miss"),
        ("p99 miss", "p99_miss"),
        ("p99 miss, mean over layers", "p99_miss_layer_mean"),
        ("realized sparsity", "realized_sparsity"),
        ("cold steps", "cold_steps"),
        ("steps", "steps"),
        ("Pearson, predicted and true scores", "pearson"),
        ("top-K recall of the prediction", "topk_recall"),
    ]:
        line = next(x for x in out.splitlines() if x.strip("│ ").startswith(label + " "))
        assert float(line.strip("│ ").split()[-1]) == pytest.approx(metrics[key], rel=1e-5)


def test_a_dump_replaces_an_older_file(tmp_path: Path, capsys: Capture) -> None:
    path = save(tmp_path, make_trace())
    (tmp_path / "t.dump").write_text("old")
    _, dump = replay(capsys, path)
    assert set(dump) == set(DUMPED)


# ---------------------------------------------------------------- every option
OPTIONS: list[tuple[list[str], dict[str, Any]]] = [
    (["--sparsity", "0.8"], {"sparsity": 0.8}),
    (["--sparsity", "0"], {"sparsity": 0.0}),
    (["--block-size", "16"], {"block_size": 16}),
    (["--ema-decay", "0.9"], {"ema_decay": 0.9}),
    (["--exploration", "0.5"], {"exploration": 0.5}),
    (["--exploration", "0"], {"exploration": 0.0}),
    (["--reduction", "A0"], {"reduction": "A0"}),
    (["--reduction", "A2"], {"reduction": "A2"}),
    (["--exploration-policy", "none"], {"exploration_policy": "none"}),
    (["--mask-policy", "row0"], {"mask_policy": "row0"}),
    (["--update-policy", "row0"], {"update_policy": "row0"}),
    (["--top-k", "3"], {"top_k": 3}),
    (["--top-k", "500"], {"top_k": 500}),
    (["--seed", "18446744073709551615"], {"seed": 2**64 - 1}),
    (["--state-dtype", "bf16"], {"state_dtype": "bf16"}),
]


@pytest.mark.parametrize(("options", "change"), OPTIONS, ids=lambda x: " ".join(map(str, x)))
def test_every_option_is_honoured(
    options: list[str], change: dict[str, Any], tmp_path: Path, capsys: Capture
) -> None:
    trace = make_trace(first=90, jumps=(7,))
    path = save(tmp_path, trace)
    base = ["--block-size", 8, "--sparsity", 0.6]
    changed = {**DEFAULTS, "block_size": 8, "sparsity": 0.6, **change}
    wanted = oracle_replay({**trace, "top_k": changed.pop("top_k", trace["top_k"])}, **changed)
    found = replay(capsys, path, *base, *options)
    check(found, wanted)
    _, plain = replay(capsys, path, *base)
    assert any(
        plain[name].shape != found[1][name].shape or (plain[name] != found[1][name]).any()
        for name in DUMPED
    )  # the option makes a difference on this trace


@pytest.mark.parametrize("pooling", ["top4", "mean"])
def test_pooling(pooling: str, tmp_path: Path, capsys: Capture) -> None:
    """Scores are small integers and alpha is 0.5, so that every sum is exact in any order."""
    trace = make_trace(first=90)
    trace["scores"] = np.round(trace["scores"] * 3)
    path = save(tmp_path, trace)
    changed = {**DEFAULTS, "block_size": 8, "sparsity": 0.7}
    found = replay(capsys, path, "--block-size", 8, "--sparsity", 0.7, "--pooling", pooling)
    check(found, oracle_replay(trace, pooling=pooling, **changed))
    _, plain = replay(capsys, path, "--block-size", 8, "--sparsity", 0.7)
    assert (plain["blocks"] != found[1]["blocks"]).any()


def test_defaults(tmp_path: Path, capsys: Capture) -> None:
    trace = make_trace(steps=5, first=700, rows=2, top_k=70)
    check(replay(capsys, save(tmp_path, trace)), oracle_replay(trace, **DEFAULTS))


def test_options_override_the_configuration_file(tmp_path: Path, capsys: Capture) -> None:
    trace = make_trace(first=90)
    path = save(tmp_path, trace)
    file = tmp_path / "spin.yaml"
    file.write_text("spin: {block_size: 16, target_sparsity: 0.7, seed: 4, update_policy: row0}\n")
    found = replay(capsys, path, "--spin-config", file, "--block-size", 8, "--seed", 9)
    wanted = oracle_replay(
        trace, block_size=8, sparsity=0.7, seed=9, update_policy="row0", exploration=0.05
    )
    check(found, wanted)


def rotation_trace() -> Trace:
    """Eighty slots, ten blocks and query slot 80 all along (ratio 16), all scores zero."""
    trace = make_trace(steps=9, layers=(3,), rows=1, first=1281, ratio=16)
    assert set((trace["positions"] // 16).ravel()) == {80}
    assert set(((trace["positions"] + 1) // 16).ravel()) == {80}
    trace["scores"] = np.where(np.isnan(trace["scores"]), trace["scores"], np.float32(0))
    return trace


def explored_lists(dump: Dump) -> list[list[int]]:
    return [row[0].nonzero()[0].tolist() for row in dump["explored"]]


@pytest.mark.parametrize("policy", ["age", "staleness"])
def test_oldest_blocks_are_explored_first(policy: str, tmp_path: Path, capsys: Capture) -> None:
    """Budget 4 of 10, all but sink and newest explored: pairs in turn, ties to the lower block."""
    options = ["--block-size", 8, "--sparsity", 0.6, "--exploration", 1]
    _, dump = replay(
        capsys, save(tmp_path, rotation_trace()), *options, "--exploration-policy", policy
    )
    assert explored_lists(dump) == [
        [],
        [1, 2],
        [3, 4],
        [5, 6],
        [7, 8],
        [1, 2],
        [3, 4],
        [5, 6],
        [7, 8],
    ]
    for t in range(1, 9):
        assert dump["blocks"][t, 0].sum() == 4
        assert dump["blocks"][t, 0, [0, 9]].all()


def test_staleness_weighs_score_against_age(tmp_path: Path, capsys: Capture) -> None:
    trace = rotation_trace()
    trace["scores"][..., 40:48] += 8  # block 5
    path = save(tmp_path, trace)
    options = ["--block-size", 8, "--sparsity", 0.7, "--exploration", 1]  # one explored
    for weight, expected in [
        (0, [[], *[[5]] * 8]),  # score alone
        # Block 5's S is 4 after the cold step and all ages are equal; from then on a step of age
        # outweighs it, ties to the lower block.
        (100, [[], [5], [1], [2], [3], [4], [6], [7], [8]]),
    ]:
        file = tmp_path / "spin.yaml"
        file.write_text(f"exploration_policy: staleness\nstaleness_weight: {weight}\n")
        _, dump = replay(capsys, path, *options, "--spin-config", file)
        assert explored_lists(dump) == expected


# ---------------------------------------------------------------- special traces
def test_no_steps(tmp_path: Path, capsys: Capture) -> None:
    trace = make_trace(steps=0)
    path = save(tmp_path, trace)
    for policy in POLICIES:
        metrics, dump = replay(capsys, path, "--policy", policy)
        assert metrics == {**dict.fromkeys(FIGURES), "cold_steps": 0, "steps": 0}
        assert dump["blocks"].shape == (0, 2, 2)
        assert dump["row_blocks"].shape == (0, 2, 3, 2)
        assert dump["topk"].shape == (0, 2, 3, 6)
        assert not dump["v"].any()
    code, out, _ = call(capsys, "replay", path)
    assert code == 0
    assert out.count("not measured") == 4
    code, out, _ = call(capsys, "trace-info", path, "--json")
    assert code == 0
    assert json.loads(out)["first_position_tokens"] is None


def test_one_step_is_cold_and_measures_nothing(tmp_path: Path, capsys: Capture) -> None:
    trace = make_trace(steps=1, spare_slots=0)
    metrics, dump = replay(capsys, save(tmp_path, trace), "--block-size", 8)
    assert metrics == {**dict.fromkeys(FIGURES), "cold_steps": 1, "steps": 1}
    assert dump["blocks"].all()


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_minus_infinity(share: float, tmp_path: Path, capsys: Capture) -> None:
    trace = make_trace(first=90)
    rng = np.random.default_rng(5)
    hide = (rng.random(trace["scores"].shape) < share) & ~np.isnan(trace["scores"])
    trace["scores"] = np.where(hide, np.float32(-np.inf), trace["scores"])
    found = replay(capsys, save(tmp_path, trace), "--block-size", 8, "--sparsity", 0.6)
    check(found, oracle_replay(trace, **{**DEFAULTS, "block_size": 8, "sparsity": 0.6}))
    assert np.isfinite(found[1]["v"]).all()
    assert (share == 1) == (not found[1]["v"].any())


def test_half_precision_scores(tmp_path: Path, capsys: Capture) -> None:
    trace = make_trace(first=90)
    half = {**trace, "scores": trace["scores"].astype(np.float16)}
    wide = {**trace, "scores": half["scores"].astype(np.float32)}
    found = replay(capsys, save(tmp_path, half), "--block-size", 8)
    check(found, oracle_replay(wide, **{**DEFAULTS, "block_size": 8}))


def test_sparsity_0_misses_nothing(tmp_path: Path, capsys: Capture) -> None:
    metrics, dump = replay(capsys, save(tmp_path, make_trace()), "--sparsity", 0, "--block-size", 8)
    assert metrics["mean_miss"] == metrics["p99_miss"] == metrics["realized_sparsity"] == 0
    last = make_trace()["positions"][:, -1] + 1  # visible slots
    for t, n in enumerate(last):
        assert (dump["blocks"][t].sum(-1) == -(-n // 8)).all()


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


def test_block_averages_predict_no_slots(tmp_path: Path, capsys: Capture) -> None:
    path = save(tmp_path, make_trace())
    metrics, _ = replay(capsys, path, "--block-size", 8, "--reduction", "A2", "--predictions")
    assert list(metrics) == METRICS


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


# ---------------------------------------------------------------- trace-info
def test_trace_info(tmp_path: Path, capsys: Capture) -> None:
    trace = make_trace(steps=6, rows=2, layers=(4, 8), first=30, jumps=(2, 5))
    path = save(tmp_path, trace, source="by hand")
    code, out, err = call(capsys, "trace-info", path, "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    seen = trace["scores"][~np.isnan(trace["scores"])]
    assert json.loads(out) == {
        "format": "spin-trace/1",
        "steps": 6,
        "layers": [4, 8],
        "rows": 2,
        "slots": trace["scores"].shape[-1],
        "ratio": 1,
        "top_k": 6,
        "sequence_id": 11,
        "source": "by hand",
        "first_position_tokens": 30,
        "last_position_tokens": int(trace["positions"][-1, -1]),
        "resets": 2,
        "accepted_drafts": int(trace["accepted"].sum()),
        "lowest_score": float(seen.min()),
        "highest_score": float(seen.max()),
        "zero_scores": int((seen == 0).sum()),
        "file_bytes": Path(path).stat().st_size,
    }
    assert (seen == 0).any()
    code, text, err = call(capsys, "trace-info", path)
    assert (code, err) == (0, "")
    for words in ("t.trace", "spin-trace/1", "[4, 8]", "by hand", "first position tokens", "30"):
        assert words in text


# ---------------------------------------------------------------- errors
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_traces(name: str, tmp_path: Path, capsys: Capture) -> None:
    spoil, words = MALFORMED[name]
    path = tmp_path / "bad.trace"
    spoil(path)
    before = sorted(p.name for p in tmp_path.iterdir())
    commands = [["replay", path, "--json", "--dump", tmp_path / "out"], ["trace-info", path]]
    if name in STREAMED:  # a policy that reads the scores in another way
        commands.append(["replay", path, "--policy", "tisa", "--dump", tmp_path / "out"])
    for command in commands:
        message = refused(capsys, *command)
        for word in ["bad.trace", *words]:
            assert word in message
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "best"], ["policy: got 'best'", ", ".join(POLICIES)]),
        (["--policy", ""], ["policy: got ''"]),
        (["--block-size", "63"], ["block_size: got 63, allowed: 8, 16, 32, 64, 128"]),
        (["--block-size", "many"], ["--block-size", "many"]),
        (["--sparsity", "nan"], ["target_sparsity: got nan, allowed: a number in [0, 1)"]),
        (["--sparsity", "1"], ["target_sparsity: got 1.0"]),
        (["--sparsity", "-0.1"], ["target_sparsity: got -0.1"]),
        (["--sparsity", "40%"], ["--sparsity", "40%"]),
        (["--ema-decay", "1"], ["ema_decay: got 1.0"]),
        (["--exploration", "inf"], ["exploration: got inf"]),
        (["--pooling", "median"], ["pooling: got 'median', allowed: max, top4, mean"]),
        (["--reduction", "A3"], ["reduction: got 'A3', allowed: A0, A1, A2"]),
        (["--exploration-policy", "new"], ["exploration_policy: got 'new'"]),
        (["--mask-policy", "all"], ["mask_policy: got 'all', allowed: union, row0"]),
        (["--update-policy", "all"], ["update_policy: got 'all', allowed: prefix, row0"]),
        (["--top-k", "0"], ["top_k: got 0, allowed: an integer in 1 .. "]),
        (["--top-k", "-3"], ["top_k: got -3"]),
        (["--top-k", "1.5"], ["--top-k", "1.5"]),
        (["--seed", "-1"], ["seed: got -1, allowed: an integer in 0 .. "]),
        (["--seed", str(2**64)], ["seed: got 18446744073709551616"]),
        (["--state-dtype", "fp16"], ["state_dtype: got 'fp16', allowed: fp32, bf16"]),
        (["--spin-config", "absent.yaml"], ["spin_config: cannot read 'absent.yaml'"]),
        (["--speed", "9"], ["--speed"]),
        (["second"], ["second"]),
        (["--sparsity"], ["--sparsity"]),
    ],
)
def test_bad_options(
    options: list[str],
    words: list[str],
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path, make_trace())
    message = refused(capsys, "replay", "t.trace", "--dump", "out", "--json", *options)
    for word in words:
        assert word in message
    assert [p.name for p in tmp_path.iterdir()] == ["t.trace"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("seed: [\n", ["is not valid YAML"]),
        ("blocksize: 8\n", ["field: got 'blocksize'", "block_size"]),
        ("- 1\n", ["a YAML mapping"]),
        ('pooling: "a\\nb"\n', ["pooling: got 'a\\nb'"]),
    ],
)
def test_bad_configuration_files(
    content: str, words: list[str], tmp_path: Path, capsys: Capture
) -> None:
    path = save(tmp_path, make_trace())
    file = tmp_path / "spin.yaml"
    file.write_text(content)
    message = refused(capsys, "replay", path, "--spin-config", file)
    for word in words:
        assert word in message


def test_dumps_that_cannot_be_written(tmp_path: Path, capsys: Capture) -> None:
    path = save(tmp_path, make_trace())
    for dump, reason in [
        (tmp_path, "is a directory"),
        (tmp_path / "no" / "out", "No such file or directory"),
        (Path(path) / "out", "Not a directory"),
    ]:
        assert reason in (message := refused(capsys, "replay", path, "--dump", dump))
        assert message.startswith("error: dump: ")
    assert [p.name for p in tmp_path.iterdir()] == ["t.trace"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["replay"], ["TRACE"]),
        (["trace-info"], ["TRACE"]),
        (["trace-info", "a", "b"], ["b"]),
        (["rewind"], ["rewind"]),
        (["--loud"], ["--loud"]),
    ],
)
def test_bad_commands(arguments: list[str], words: list[str], capsys: Capture) -> None:
    message = refused(capsys, *arguments)
    for word in words:
        assert word in message


def test_help_and_version(capsys: Capture) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    for name in ("doctor", "generate", "replay", "trace", "trace-info"):
        assert f"  {name} " in out
    code, out, _ = call(capsys, "replay", "-h")
    assert code == 0
    for word in ["--sparsity", "--dump", "--json", "--policy", *POLICIES]:
        assert word in out
    assert call(capsys) == (0, call(capsys, "--help")[1], "")
    assert call(capsys, "--version")[1] == f"spin-trtllm, version {spin_trtllm.__version__}\n"


def test_an_interrupt_exits_with_130(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    path = save(tmp_path, make_trace())
    monkeypatch.setattr("spin_trtllm.replay.policies.SpinPolicy.step", interrupt)
    code, out, err = call(capsys, "replay", path, "--json", "--dump", tmp_path / "out")
    assert (code, out) == (130, "")
    assert "Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["t.trace"]


# ---------------------------------------------------------------- as a process of its own
def process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spin_trtllm.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def test_a_process_replays(tmp_path: Path) -> None:
    trace = make_trace(first=90)
    path = save(tmp_path, trace)
    done = process("replay", path, "--json", "--block-size", "8", "--dump", tmp_path / "t.dump")
    assert (done.returncode, done.stderr) == (0, "")
    wanted = oracle_replay(trace, **{**DEFAULTS, "block_size": 8})
    check((json.loads(done.stdout), load_file(tmp_path / "t.dump")), wanted)


def test_a_process_refuses_a_bad_trace(tmp_path: Path) -> None:
    spoil, _ = MALFORMED["NaN last"]
    spoil(tmp_path / "bad.trace")
    done = process("replay", tmp_path / "bad.trace", "--json", "--dump", tmp_path / "out")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "NaN at step 4, layer 6, row 1, slot 36" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["bad.trace"]


def test_a_process_refuses_a_truncated_trace(tmp_path: Path) -> None:
    spoil, _ = MALFORMED["truncated to -41"]
    spoil(tmp_path / "bad.trace")
    done = process("trace-info", tmp_path / "bad.trace")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "not a whole safetensors file" in done.stderr


def test_a_reader_that_leaves_sees_no_traceback(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "spin_trtllm.cli", "replay", save(tmp_path, make_trace())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert child.stdout is not None
    child.stdout.close()  # as in `spin-trtllm replay TRACE | true`
    assert child.stderr is not None
    assert child.stderr.read() == b""
    assert child.wait() == 1
    child.stderr.close()


# ---------------------------------------------------------------- memory
def write_large(path: Path, steps: int, layers: int, slots: int) -> None:
    """A trace of zeros with one step of random scores repeated, written step by step."""
    shapes = {
        "scores": ("F32", [steps, layers, 1, slots], 4),
        "positions": ("I64", [steps, 1], 8),
        "accepted": ("I64", [steps], 8),
    }
    entries: dict[str, Any] = {
        "__metadata__": {
            "format": "spin-trace/1",
            "ratio": "4",
            "top_k": "512",
            "layers": ",".join(map(str, range(layers))),
            "sequence_id": "1",
        }
    }
    end = 0
    for name, (dtype, shape, width) in shapes.items():
        start, end = end, end + width * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    scores = np.random.default_rng(1).standard_normal((layers, slots), dtype=np.float32)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(steps):
            file.write(scores.tobytes())
        first = 4 * slots - 1 - steps
        file.write(np.arange(first, first + steps, dtype=np.int64).tobytes())
        file.write(np.zeros(steps, dtype=np.int64).tobytes())


def peak_bytes(trace: Path) -> int:
    """Most resident memory of a process that replays a trace."""
    child = subprocess.Popen(
        [sys.executable, "-m", "spin_trtllm.cli", "replay", str(trace), "--json"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert child.stdout is not None
    steps = json.loads(child.stdout.read())["steps"]
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = status
    child.stdout.close()
    assert status == 0
    assert steps > 0
    return usage.ru_maxrss * 1024


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kB on Linux only")
def test_a_large_trace_is_streamed(tmp_path: Path) -> None:
    """100 times the steps, 200 MB more file: hardly more memory."""
    write_large(tmp_path / "small", 2, 8, 32_768)
    write_large(tmp_path / "large", 200, 8, 32_768)
    assert (tmp_path / "large").stat().st_size > 200_000_000
    small, large = peak_bytes(tmp_path / "small"), peak_bytes(tmp_path / "large")
    assert large - small < 50_000_000
    assert large < 450_000_000
