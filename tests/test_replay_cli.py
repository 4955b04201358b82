# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm replay` and `trace-info` as a user meets them: output, options, special traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import replay as oracle_replay
from replay_cli import (
    DEFAULTS,
    DUMPED,
    FIGURES,
    METRICS,
    Capture,
    Dump,
    Trace,
    call,
    check,
    make_trace,
    replay,
    save,
)

from spin_trtllm.replay.policies import POLICIES


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
    (["--state-dtype", "log8"], {"state_dtype": "log8"}),
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


@pytest.mark.parametrize("policy", POLICIES)
def test_no_slots(policy: str, tmp_path: Path, capsys: Capture) -> None:
    """Three tokens at ratio 4: the first slot is yet to come, and so is the first block."""
    trace = make_trace(steps=2, rows=1, first=0, ratio=4, spare_slots=0)
    assert trace["scores"].shape == (2, 2, 1, 0)
    metrics, dump = replay(capsys, save(tmp_path, trace), "--policy", policy)
    assert metrics["steps"] == 2
    assert {name: x.shape for name, x in dump.items()} == {
        "blocks": (2, 2, 0),
        "row_blocks": (2, 2, 1, 0),
        "explored": (2, 2, 0),
        "topk": (2, 2, 1, 6),
        "v": (2, 0),
        "d": (2, 1),
    }
    assert (dump["topk"] == -1).all()


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
        "model": "",
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


def test_names_and_sources_are_shown_as_they_are(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Square brackets are markup to the library that draws the tables."""
    monkeypatch.chdir(tmp_path)
    Path("[").mkdir()
    # A closing tag without its opening one.
    path = save(Path(), make_trace(), "[/b].trace", source="[red]by[/blue] hand")
    code, out, err = call(capsys, "trace-info", path)
    assert (code, err) == (0, "")
    assert out.startswith("[/b].trace ")
    assert "[red]by[/blue] hand" in out
    Path(path).rename("[red]b.trace")
    code, out, err = call(capsys, "replay", "[red]b.trace")
    assert (code, err) == (0, "")
    assert out.startswith("spin on [red]b.trace ")
