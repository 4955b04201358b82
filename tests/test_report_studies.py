# SPDX-License-Identifier: Apache-2.0
"""Studies against the referee and numpy: their figures, and the picture of Figure 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from replay_cli import Capture, Trace, call, make_trace, save
from report_cases import BY_ORACLE, referee, regroup, report, single_rows, write_traces

from spin_trtllm.config import SpinConfig
from spin_trtllm.replay.trace import Trace as TraceReader
from spin_trtllm.report.drafts import DraftedTrace, Drafts
from spin_trtllm.report.studies.masks import draw_masks
from spin_trtllm.report.studies.updates import ACCEPTANCES, DRAFT_TOKENS

STEPS = 40
FIGURES = ("mean_miss", "p99_miss", "p99_miss_layer_mean", "realized_sparsity")


def traces_of(count: int = 2, rows: int = 1) -> list[Trace]:
    """What `write_traces` writes."""
    return [make_trace(steps=STEPS, rows=rows, seed=n, jumps=(STEPS // 2,)) for n in range(count)]


def values(row: dict[str, Any], *names: str) -> list[float]:
    return [row[name]["value"] for name in names]


# ---------------------------------------------------------------- Table 1
def truth_of(scores: np.ndarray, top_k: int) -> set[int]:
    return set(np.lexsort((np.arange(scores.size), -scores))[:top_k].tolist())


def agreement(pairs: list[tuple[np.ndarray, np.ndarray]], top_k: int) -> list[float]:
    """Mean Pearson correlation and top-K recall of (predicted, true) rows."""
    pearson = [np.corrcoef(x, y)[0, 1] for x, y in pairs]
    recall = [len(truth_of(x, top_k) & truth_of(y, top_k)) / top_k for x, y in pairs]
    return [float(np.mean(pearson)), float(np.mean(recall))]


def known_scores(trace: Trace) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """Predicted and true scores of every row that each predictor predicts; one row a step."""
    pairs: dict[str, list] = {"prev_iter": [], "prev_iter_offset1": [], "prev_layer": []}
    scores, positions = trace["scores"][:, :, 0].astype(float), trace["positions"][:, 0]
    for t, position in enumerate(positions):
        visible = int(position) + 1
        pairs["prev_layer"].append((scores[t, 0, :visible], scores[t, 1, :visible]))
        if t == 0 or positions[t - 1] + 1 != position:
            continue
        for layer in (0, 1):
            before = np.nan_to_num(scores[t - 1, layer, :visible])  # the new slot counts as 0
            shifted = np.concatenate([[0.0], before[:-1]])
            pairs["prev_iter"].append((before, scores[t, layer, :visible]))
            pairs["prev_iter_offset1"].append((shifted, scores[t, layer, :visible]))
    return pairs


def spin_predictions(trace: Trace) -> list[tuple[np.ndarray, np.ndarray]]:
    """Predictions of the referee's averages before each warm step."""
    slots = trace["scores"].shape[-1]
    sequence = oracle.OracleSequence(1, 6, trace["layers"], 11, slots, **BY_ORACLE)
    pairs = []
    for t, positions in enumerate(trace["positions"]):
        if t and positions[0] != trace["positions"][t - 1, 0] + 1:
            sequence.reset()
        n = int(positions[0]) + 1
        for layer in (0, 1) if sequence.warm else ():
            v = np.array(sequence.v[layer], dtype=float)[:n]
            d = np.array(sequence.d[layer], dtype=float)[positions[0] - np.arange(n)]
            pairs.append((np.maximum(v, d), trace["scores"][t, layer, 0, :n].astype(float)))
        sequence.step(positions, trace["scores"][t], 0)
    return pairs


def test_table_1_against_numpy_and_the_referee(tmp_path: Path, capsys: Capture) -> None:
    traces = traces_of()
    result = report(capsys, write_traces(tmp_path, STEPS), tmp_path / "out", "--studies", "table1")
    rows = {row["predictor"]: row for row in result["table1"]["rows"]}
    pairs = {name: [] for name in known_scores(traces[0])}
    for trace in traces:
        for name, more in known_scores(trace).items():
            pairs[name].extend(more)
    pairs["spin"] = [pair for trace in traces for pair in spin_predictions(trace)]
    # Of two layers, the first is the only one before the second.
    pairs["prev_layer_best_of_5"] = pairs["prev_layer"]
    for name, of_predictor in pairs.items():
        assert values(rows[name], "pearson", "recall") == pytest.approx(
            agreement(of_predictor, 6), abs=1e-6
        ), name
    assert set(rows) == {"random", *pairs}
    # Random scores know nothing: recall is the share of slots that is drawn, 6 of 60 to 101.
    assert values(rows["random"], "pearson")[0] == pytest.approx(0, abs=0.05)
    assert values(rows["random"], "recall")[0] == pytest.approx(6 / 81, abs=0.03)


def test_claims_of_table_1_compare_rows_that_both_predict(tmp_path: Path, capsys: Capture) -> None:
    traces = traces_of()
    result = report(capsys, write_traces(tmp_path, STEPS), tmp_path / "out", "--studies", "table1")
    claims = {(c["text"], c["metric"]): c for c in result["table1"]["claims"]}
    differences = []
    for trace in traces:
        pairs = known_scores(trace)
        cold = (0, STEPS // 2)
        layer = [pair for t, pair in enumerate(pairs["prev_layer"]) if t not in cold]
        before = pairs["prev_iter"][1::2]  # the second layer only
        differences.append((agreement(before, 6)[1], agreement(layer, 6)[1]))
    expected = np.mean([better - worse for better, worse in differences])
    claim = claims["prev_iter predicts better than prev_layer", "top-K recall, difference"]
    assert claim["difference"] == pytest.approx(expected, abs=1e-9)
    assert claim["for_it"] == sum(better > worse for better, worse in differences)
    assert claim["verdict"] == "undecided"  # 80 steps are too few for an interval


def test_an_ordering_that_is_there_is_found(tmp_path: Path, capsys: Capture) -> None:
    traces = write_traces(tmp_path, steps=140)
    result = report(capsys, traces, tmp_path / "out", "--studies", "table1")
    verdicts = {(c["text"], c["metric"].split(",")[0]): c for c in result["table1"]["claims"]}
    # `make_trace` repeats the same stripe of scores at every step, and another one on each layer.
    for metric in ("Pearson correlation", "top-K recall"):
        claim = verdicts["prev_iter predicts better than prev_layer", metric]
        assert (claim["verdict"], claim["for_it"], claim["traces"]) == ("holds", 2, 2)
        assert 0 < claim["low"] < claim["difference"] < claim["high"]


# ---------------------------------------------------------------- misses
@pytest.mark.parametrize("rows", [1, 3])
def test_quality_against_the_referee_and_replay(tmp_path: Path, capsys: Capture, rows: int) -> None:
    traces = write_traces(tmp_path, STEPS, rows=rows)
    result = report(capsys, traces, tmp_path / "out", "--studies", "tables2-5")["tables2-5"]
    assert len(result["rows"]) == 8
    assert len(result["replays"]) == 8 * len(traces)
    for line in result["replays"]:
        policy, sparsity = line["arm"].split(" at ")
        number = int(line["trace"].split(".")[0])
        changes = {"sparsity": float(sparsity), "exploration_policy": policy}
        expected = oracle.replay(traces_of(rows=rows)[number], **{**BY_ORACLE, **changes})
        found = {name: line[name] for name in FIGURES}
        assert found == pytest.approx({n: expected["metrics"][n] for n in FIGURES}, abs=1e-12)
    options = ("--block-size", "8", "--sparsity", "0.4", "--exploration-policy", "none", "--json")
    code, out, _ = call(capsys, "replay", traces[1], *options)
    assert code == 0
    (line,) = (f for f in result["replays"] if (f["arm"], f["trace"]) == ("none at 0.4", "1.trace"))
    assert {k: line[k] for k in json.loads(out)} == json.loads(out)


def test_table_pools_all_rows_of_all_traces(tmp_path: Path, capsys: Capture) -> None:
    result = report(
        capsys, write_traces(tmp_path, STEPS), tmp_path / "out", "--studies", "tables2-5"
    )["tables2-5"]
    (row,) = (
        r for r in result["rows"] if (r["exploration"], r["target_sparsity"]) == ("random", 0.5)
    )
    misses = []
    for trace in traces_of():
        blocks = oracle.replay(trace, **BY_ORACLE)["blocks"]
        for t, layer in np.ndindex(STEPS, 2):
            if t in (0, STEPS // 2):
                continue
            n = int(trace["positions"][t, 0]) + 1
            truth = truth_of(trace["scores"][t, layer, 0, :n], 6)
            misses.append(np.mean([not blocks[t, layer, i // 8] for i in truth]))
    expected = [np.mean(misses), np.percentile(misses, 99), np.mean(np.array(misses) == 0)]
    found = values(row, "mean_miss", "p99_miss", "complete")
    assert found == pytest.approx(expected, abs=1e-12)
    assert 0 < expected[0] < expected[1]
    by_layer = [referee(trace)["p99_miss_layer_mean"] for trace in traces_of()]
    assert values(row, "p99_miss_layer_mean") == pytest.approx([np.mean(by_layer)], abs=1e-12)


def test_update_policies_against_the_referee(tmp_path: Path, capsys: Capture) -> None:
    paths = write_traces(tmp_path, STEPS, count=1)
    result = report(capsys, paths, tmp_path / "out", "--studies", "figure2")["figure2"]
    for acceptance in (ACCEPTANCES[0], ACCEPTANCES[-1]):
        drafted = DraftedTrace(paths[0], Drafts(DRAFT_TOKENS, acceptance))
        trace = traces_of(1)[0]
        first = drafted.positions_tokens[:, 0].tolist()
        starts = [int(np.flatnonzero(trace["positions"][:, 0] == p)[0]) for p in first]
        grouped = regroup(trace, DRAFT_TOKENS, starts, drafted.accepted.tolist())
        for mask in ("union", "row0"):
            for update in ("prefix", "row0"):
                label = f"acceptance {acceptance:g}: {mask} mask, {update} update at 0.5"
                (line,) = (f for f in result["replays"] if f["arm"] == label)
                expected = referee(grouped, mask_policy=mask, update_policy=update)
                found = {name: line[name] for name in FIGURES}
                assert found == pytest.approx({n: expected[n] for n in FIGURES}, abs=1e-12), label


def test_captured_drafts_are_taken_as_they_are(tmp_path: Path, capsys: Capture) -> None:
    paths = write_traces(tmp_path, STEPS, rows=3)
    result = report(capsys, paths, tmp_path / "out", "--studies", "figure2")["figure2"]
    assert {row["drafts"] for row in result["rows"]} == {"captured"}
    accepted = np.concatenate([trace["accepted"] for trace in traces_of(rows=3)])
    assert result["rows"][0]["acceptance_length"] == pytest.approx(accepted.mean() + 1)
    assert len(result["claims"]) == 2 * 2


def test_reductions_against_the_referee(tmp_path: Path, capsys: Capture) -> None:
    paths = write_traces(tmp_path, STEPS, count=1)
    result = report(capsys, paths, tmp_path / "out", "--studies", "figure3")["figure3"]
    assert len(result["rows"]) == 1 + 6 * 4
    for label, changes in {
        "A0": {"reduction": "A0"},
        "A1-max at 0.5": {},
        "A2-max at 0.5": {"reduction": "A2"},
        "A2-mean at 0.5": {"reduction": "A2", "pooling": "mean"},
    }.items():
        (line,) = (f for f in result["replays"] if f["arm"] == label)
        expected = referee(traces_of(1)[0], **changes)
        assert {n: line[n] for n in FIGURES} == pytest.approx(
            {n: expected[n] for n in FIGURES}, abs=1e-12
        ), label


def test_claims_are_differences_of_the_table(tmp_path: Path, capsys: Capture) -> None:
    studies = ("--studies", "tables2-5,figure2,figure3")
    results = report(capsys, write_traces(tmp_path, STEPS), tmp_path / "out", *studies)

    def table(study: str, *keys: str) -> dict[tuple[Any, ...], dict[str, Any]]:
        return {tuple(row[key] for key in keys): row for row in results[study]["rows"]}

    def difference(study: str, text: str, metric: str) -> float:
        claims = results[study]["claims"]
        (found,) = (
            c
            for c in claims
            if text in c["text"]
            and c["metric"].split(",")[0] == metric
            and "mean over" not in c["metric"]
        )
        return float(found["difference"])

    rows = table("tables2-5", "exploration", "target_sparsity")
    for sparsity in (0.4, 0.5):
        none, explored = rows["none", sparsity], rows["random", sparsity]
        text = f"random exploration recalls at least as much as none, at {sparsity:.0%}"
        for metric, name, sign in (
            ("share of the top-K read", "mean_miss", 1),
            ("rows that miss nothing", "complete", -1),
        ):
            expected = sign * (values(none, name)[0] - values(explored, name)[0])
            assert difference("tables2-5", text, metric) == pytest.approx(expected)
            assert expected != 0
    rows = table("figure3", "variant", "target_sparsity")
    for sparsity in (0.2, 0.3, 0.4, 0.5):
        blocks, slots = (values(rows[v, sparsity], "p99_miss")[0] for v in ("A2-max", "A1-max"))
        found = difference("figure3", f"at {sparsity:.0%} sparsity", "p99 miss")
        assert found == pytest.approx(blocks - slots)
    rows = table("figure2", "drafts", "policies", "target_sparsity")
    for acceptance in ACCEPTANCES:
        tails, lines = {}, {}
        for update in ("row0", "prefix"):
            policies = f"union mask, {update} update"
            points = [rows[f"acceptance {acceptance:g}", policies, s] for s in (0.3, 0.4, 0.5)]
            lines[update] = np.array([values(p, "realized_sparsity", "p99_miss") for p in points]).T
        at = (lines["row0"][0][1] + lines["prefix"][0][1]) / 2
        tails = {update: np.interp(at, *line) for update, line in lines.items()}
        found = difference("figure2", f"(acceptance {acceptance:g}, union mask)", "p99 miss")
        assert found == pytest.approx(tails["row0"] - tails["prefix"], abs=1e-9)


def test_reductions_are_compared_where_they_skip_as_much(tmp_path: Path, capsys: Capture) -> None:
    """Rows that share a mask: at one target A1 and A2 skip unlike shares of the blocks."""
    paths = write_traces(tmp_path, STEPS, rows=3)
    result = report(capsys, paths, tmp_path / "out", "--studies", "figure3")["figure3"]
    lines = {
        variant: np.array(
            [
                values(row, "realized_sparsity", "p99_miss")
                for row in result["rows"]
                if row["variant"] == variant
            ]
        ).T
        for variant in ("A1-max", "A2-max")
    }
    claims = [c for c in result["claims"] if c["metric"].startswith("p99 miss, at a realized")]
    for index in (1, 2):  # targets of 30 and 40 %
        ends = [line[0][index] for line in lines.values()]
        assert ends[0] != ends[1]
        slots, blocks = (np.interp(np.mean(ends), *line) for line in lines.values())
        assert claims[index]["difference"] == pytest.approx(blocks - slots, abs=1e-12)
        assert claims[index]["difference"] != pytest.approx(
            lines["A2-max"][1][index] - lines["A1-max"][1][index], abs=1e-6
        )


def test_no_difference_is_no_verdict(tmp_path: Path, capsys: Capture) -> None:
    # Nothing can be skipped of one block: every policy keeps everything.
    traces = [
        make_trace(steps=150, rows=1, first=10, seed=n, spare_slots=0, ratio=4) for n in (0, 1)
    ]
    paths = [save(tmp_path, trace, f"{n}.trace") for n, trace in enumerate(traces)]
    options = ("--studies", "tables2-5", "--block-size", "128")
    result = report(capsys, paths, tmp_path / "out", *options)["tables2-5"]
    reasons = {claim["reason"] for claim in result["claims"]}
    assert reasons == {"the two do not differ on these traces"}
    assert {claim["verdict"] for claim in result["claims"]} == {"undecided"}


# ---------------------------------------------------------------- Figure 1
def test_masks_against_the_referee(tmp_path: Path) -> None:
    trace = single_rows(steps=30, seed=5)
    path = save(tmp_path, trace)
    masks = draw_masks(TraceReader(path), SpinConfig(block_size=8, target_sparsity=0.5))
    kept = oracle.replay(trace, **BY_ORACLE)["blocks"]
    for index, layer in enumerate(trace["layers"]):
        lines = iter(masks[layer])
        for t in range(30):
            if t in (0, 15):
                continue
            n = int(trace["positions"][t, 0]) + 1
            needed = {i // 8 for i in truth_of(trace["scores"][t, index, 0, :n], 6)}
            marks = {(True, True): "#", (True, False): "-", (False, True): "x"}
            expected = [
                marks.get((bool(kept[t, index, j]), j in needed), ".") if 8 * j < n else " "
                for j in range(kept.shape[-1])
            ]
            assert next(lines) == "".join(expected)
        assert next(lines, None) is None
        assert "x" in "".join(masks[layer])
