# SPDX-License-Identifier: Apache-2.0
"""The sweep beyond the paper: its variants, its counts and its comparison at equal bytes."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.study.beyond import __main__ as command
from benchmarks.study.beyond import capture as capturing
from benchmarks.study.beyond.arms import ARMS, BASELINE, SPARSITIES
from benchmarks.study.beyond.capture import VIEWS, View, capture, to_fp8, trace_path
from benchmarks.study.beyond.compare import everywhere, verdict, write_comparison
from benchmarks.study.beyond.defaults import default_lines, default_of
from benchmarks.study.beyond.findings import BUDGETS, PAPER, find, layer_targets, row_at
from benchmarks.study.beyond.layers import layers_of, traces_of
from benchmarks.study.beyond.measure import Document, Figures, load, measure, save
from benchmarks.study.beyond.rivals import RulePolicy
from benchmarks.study.beyond.table import write_table
from benchmarks.study.beyond.variants import (
    NewestRead,
    Novelty,
    Surprise,
    VerticalOnly,
    to_e4m3,
    to_log8,
)
from benchmarks.study.methods.heavy_hitters import HeavyHitters
from benchmarks.study.methods.index_cache import IndexCache
from benchmarks.study.methods.previous_picks import PreviousPicks
from benchmarks.study.methods.streaming import Streaming
from benchmarks.study.methods.tisa import Tisa
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.reference import Selection
from spin_trtllm.reference.predict_blocks import pool_blocks
from spin_trtllm.replay.policies import Outcome, SpinPolicy, make_policy
from spin_trtllm.replay.run import replay
from spin_trtllm.replay.trace import Trace, write_trace
from spin_trtllm.replay.variants import SpinVariant

STEPS, SLOTS, TOP_K = 24, 320, 32
CONFIG = SpinConfig(block_size=16, target_sparsity=0.5, exploration=0.1)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Two layers of slowly changing scores; in the first, good slots stay good longer."""
    draws = torch.Generator().manual_seed(3)
    moves = torch.tensor([0.1, 0.6]).view(1, 2, 1)
    noise = torch.randn(STEPS, 2, SLOTS, generator=draws)
    scores = [torch.randn(1, 2, SLOTS, generator=draws)]
    for step in range(1, STEPS):
        scores.append((1 - moves) * scores[-1] + moves * noise[step])
    path = tmp_path_factory.mktemp("beyond") / "trace"
    write_trace(
        path,
        torch.cat(scores).unsqueeze(2),
        torch.arange(SLOTS - STEPS, SLOTS).unsqueeze(1),
        torch.zeros(STEPS, dtype=torch.int64),
        ratio=1,
        top_k=TOP_K,
        layers=[1, 3],
        sequence_id=5,
    )
    return Trace(path)


def outcomes(policy, trace):
    return [policy.step(step) for step in trace]


def same(one, other):
    return torch.equal(one.selection.blocks, other.selection.blocks) and torch.equal(
        one.top_k, other.top_k
    )


# ---------------------------------------------------------------- storage
def test_e4m3_by_hand():
    values = torch.tensor([1.0, 1.06, 1.07, -3.3, 1e-4, 1e9, -0.0])
    assert to_e4m3(values).tolist() == [1.0, 1.0, 1.125, -3.25, 0.0, 448.0, -0.0]


def test_log8_by_hand():
    eighth = 2 ** (1 / 8)
    values = torch.tensor([1.0, 1.04, 1.05, -eighth, 2.0**-11, 2.0**-11.1, 1e9, 0.0])
    expected = [1.0, 1.0, eighth, -eighth, 2.0**-11, 0.0, 2.0**4.75, 0.0]
    assert to_log8(values).tolist() == pytest.approx(expected, rel=1e-6)
    assert len(set(to_log8(torch.logspace(-4, 2, 99_999)).tolist())) == 127 + 1


@pytest.mark.parametrize("name", ["fp8 e4m3", "log 8 bit", "vertical, log 8 bit"])
def test_stored_averages_take_few_values(name, trace):
    arm = ARMS[name]
    policy = arm.make(arm.config(0.5), trace)
    outcomes(policy, trace)
    v, d = policy.final_state
    rounding = to_e4m3 if "e4m3" in name else to_log8
    assert torch.equal(rounding(v), v)
    assert v.any()
    assert torch.equal(rounding(d), d) if arm.averages == 2 else d.isneginf().all()


def test_vertical_only_predicts_by_the_vertical_average(trace):
    policy = SpinPolicy(CONFIG, trace, predictions=True, variant=VerticalOnly)
    for step in trace:
        before = policy.final_state[0].clone()
        found = policy.step(step)
        if bool(found.warm.all()):
            visible = found.predicted.shape[-1]
            assert torch.equal(found.predicted[:, 0], before[:, :visible])
    assert pool_blocks(before, 16, "max").any()


# ---------------------------------------------------------------- budgets
def test_layers_have_budgets_of_their_own(trace):
    config = replace(CONFIG, layer_sparsity={1: 0.7, 3: 0.2})
    for step in (SpinVariant, VerticalOnly):
        *_, last = outcomes(SpinPolicy(config, trace, variant=step), trace)
        blocks = -(-SLOTS // 16)
        kept = [blocks - int(s * blocks) for s in (0.7, 0.2)]
        assert last.selection.blocks.sum(-1).tolist() == kept


def test_a_variant_decides_otherwise(trace):
    spin = outcomes(SpinPolicy(CONFIG, trace), trace)
    vertical = outcomes(SpinPolicy(CONFIG, trace, variant=VerticalOnly), trace)
    assert not all(same(*pair) for pair in zip(spin, vertical, strict=True))


def test_novelty_at_rest_is_spin(trace):
    class Rest(Novelty):
        swing = 0.0

        def signal(self, step, outcome):
            return torch.zeros(2)

    spin = outcomes(SpinPolicy(CONFIG, trace), trace)
    rest = outcomes(Rest(CONFIG, trace), trace)
    assert all(same(*pair) for pair in zip(spin, rest, strict=True))


def test_a_signal_above_its_mean_gets_more_budget(trace):
    class Scripted(Novelty):
        signals = iter([[1.0, 1.0], [2.0, 0.0], [0.5, 0.05]] + [[0.0, 0.0]] * STEPS)

        def signal(self, step, outcome):
            return torch.tensor(next(self.signals))

    policy, targets = Scripted(CONFIG, trace), []
    for step in trace:
        targets.append([round(t, 6) for t in policy.targets()])
        policy.step(step)
    # Means before: none, (1, 1), (1.1, 0.9). The first signal is its own mean.
    assert targets[:4] == [[0.5, 0.5], [0.6, 0.6], [0.4, 0.6], [0.6, 0.6]]


def test_signals_by_hand(trace):
    step = next(iter(trace))
    visible = int(step.positions_tokens[0]) + 1
    picks = torch.tensor([[[visible - 1, visible - 64, visible - 65, 3]], [[0, 1, 17, 40]]])
    explored = torch.zeros(2, 20, dtype=torch.bool)
    explored[1, [1, 2]] = True
    selection = Selection(explored, explored.unsqueeze(1), explored)
    outcome = Outcome(torch.ones(2, dtype=torch.bool), selection, picks.int())
    assert NewestRead(CONFIG, trace).signal(step, outcome).tolist() == [0.5, 0.0]
    assert Surprise(CONFIG, trace).signal(step, outcome).tolist() == [0.0, 0.5]


def flat_figures(misses, read=0.5):
    """Figures of four runs of steps with the same misses by layer all the time."""
    miss = np.tile(np.asarray(misses, dtype=float), (128, 1))
    return Figures(miss, miss / 2, np.full_like(miss, read), np.full_like(miss, 0.01))


def test_budgets_go_where_most_is_missed():
    alike = [[flat_figures([s * s, s * s])] for s in SPARSITIES]
    assert layer_targets(alike, [0], 0.4) == pytest.approx([0.4, 0.4], abs=0.011)
    unlike = [[flat_figures([s * s, 3 * s * s])] for s in SPARSITIES]
    easy, hard = layer_targets(unlike, [0], 0.4)
    assert easy + hard == pytest.approx(0.8, abs=1e-6)
    assert (easy, hard) == pytest.approx((0.6, 0.2), abs=0.05)  # where s is 3 times s
    assert layer_targets([[flat_figures([0, s])] for s in SPARSITIES], [0], 0.3)[0] == 0.6


# ---------------------------------------------------------------- counts
@pytest.mark.parametrize("name", [BASELINE, "block 32", "decay 0.9"])
def test_misses_are_those_of_replay(name, trace):
    arm = ARMS[name]
    found = measure(arm.make(arm.config(0.5), trace), trace, Document(trace), arm, 132)
    assert np.nanmean(found.miss) == pytest.approx(
        replay(trace, arm.config(0.5))["mean_miss"], abs=1e-12
    )
    assert np.isnan(found.miss[0]).all()


def test_bytes_and_mass_by_hand(trace):
    arm = ARMS["vertical"]
    document = Document(trace)
    policy = arm.make(arm.config(0.5), trace)
    found = measure(arm.make(arm.config(0.5), trace), trace, document, arm, 68)
    for index, (step, outcome) in enumerate(zip(trace, outcomes(policy, trace), strict=True)):
        if not index:
            continue
        slots = int(step.positions_tokens[0]) + 1
        for layer in (0, 1):
            kept = {i for i in range(slots) if bool(outcome.selection.blocks[layer, i // 16])}
            read = len(kept) * 68 + (slots + len(kept)) * 2
            assert found.read[index, layer] == pytest.approx(read / (slots * 68))
            assert found.written[index, layer] == pytest.approx(len(kept) * 2 / (slots * 68))
            scores = step.scores[layer, 0, :slots].double().numpy()
            truth = np.argsort(-scores, kind="stable")[:TOP_K]
            mass = np.exp(scores[truth])
            lost = np.array([i not in kept for i in truth])
            assert found.missed_mass[index, layer] == pytest.approx(
                mass[lost].sum() / mass.sum(), abs=1e-6
            )


def test_pooled_keys_are_counted(tmp_path, trace):
    """And nothing is stored where the query ranks alone."""
    path = tmp_path / "with-queries"
    scores = torch.stack([step.scores for step in trace])
    whole = torch.tensor([[int(p) + 1] for p in trace.positions_tokens[:, 0]]) // 16
    queries = torch.randn(STEPS, 2, 1, SLOTS // 16, generator=torch.Generator().manual_seed(1))
    seen = torch.arange(SLOTS // 16) < whole.view(STEPS, 1, 1, 1)
    write_trace(
        path,
        scores.masked_fill(scores.isneginf(), float("nan")),
        trace.positions_tokens,
        trace.accepted,
        ratio=1,
        top_k=TOP_K,
        layers=[1, 3],
        sequence_id=5,
        query_scores=queries.masked_fill(~seen, float("nan")),
        query_block_size_slots=16,
    )
    arm, asked = ARMS["query alone"], Trace(path)
    policy = arm.make(arm.config(0.5), asked)
    found = measure(policy, asked, Document(asked), arm, 132)
    slots, blocks = SLOTS, SLOTS // 16
    kept = blocks - blocks // 2
    assert found.read[-1, 0] == pytest.approx((kept * 16 + blocks - 2) / slots)
    assert not found.written[1:].any()


def test_figures_survive_a_file(tmp_path):
    save(tmp_path / "arm.npz", [flat_figures([0.1, 0.2]), flat_figures([0.3, 0.4])])
    found = load(tmp_path / "arm.npz", 2)
    assert found[1].miss[0].tolist() == [0.3, 0.4]
    assert found[0].read[0].tolist() == [0.5, 0.5]


# ---------------------------------------------------------------- rivals
def rival(rule, trace, target=0.5):
    return RulePolicy(rule, replace(CONFIG, target_sparsity=target), trace)


def test_rules_decide_as_the_rivals_of_replay(trace):
    for name, rule in (("streaming", Streaming), ("tisa", Tisa)):
        ours, theirs = rival(rule, trace), make_policy(name, CONFIG, trace)
        for one, other in zip(outcomes(ours, trace)[1:], outcomes(theirs, trace)[1:], strict=True):
            assert one.warm.all()
            if name == "streaming":
                assert same(one, other)
            else:  # whose turn it is differs: the study's moves on in the first step, too
                counts = (found.selection.blocks.sum(-1).tolist() for found in (one, other))
                assert next(counts) == next(counts)


def test_heavy_hitters_keep_the_blocks_of_the_largest_sums(trace):
    policy, sums = rival(HeavyHitters, trace), torch.zeros(2, SLOTS)
    for step in trace:
        slots = int(step.positions_tokens[0]) + 1
        found = policy.step(step)
        blocks = found.selection.blocks[:, : -(-slots // 16)]
        if step.index:
            last = blocks.shape[1] - 1
            pooled = pool_blocks(sums[:, :slots], 16, "max")
            pooled[:, [0, last]] = float("inf")
            for layer in (0, 1):
                best = pooled[layer].topk(int(blocks[layer].sum())).indices
                assert set(best.tolist()) == set(blocks[layer].nonzero()[:, 0].tolist())
        kept = blocks.repeat_interleave(16, 1)[:, :slots]
        # Sums of all slots to choose by, of the kept ones to add to.
        assert policy.state_bytes_read.tolist() == ((slots + kept.sum(1)) * 4).tolist()
        sums[:, :slots] += torch.where(kept, step.scores[:, 0, :slots].clamp(min=0), 0.0)


def test_previous_picks_and_index_cache_on_a_trace(trace):
    picks = rival(lambda _: PreviousPicks(), trace)
    cache = rival(lambda _: IndexCache(2), trace)
    before = None
    for step in trace:
        found, slots = picks.step(step), int(step.positions_tokens[0]) + 1
        if before is not None:
            expected = {0, (slots - 1) // 16, *(before[1] // 16).tolist()}
            assert set(found.selection.blocks[1].nonzero()[:, 0].tolist()) == expected
            assert picks.state_bytes_read.tolist() == [TOP_K * 4] * 2
        before = found.top_k[:, 0]
        cached = cache.step(step)
        dense = step.scores[0, 0].topk(TOP_K).indices
        assert set(cached.top_k[0, 0].tolist()) == set(dense.tolist())
        if step.index:  # the second layer scores nothing and reads what the first one picked
            assert not cached.selection.blocks[1].any()
            assert torch.equal(cached.top_k[1], cached.top_k[0])
            assert cache.state_bytes_read.tolist() == [0, TOP_K * 4]


def test_a_jump_makes_a_rule_cold(trace):
    policy, steps = rival(HeavyHitters, trace), list(trace)
    assert not policy.step(steps[0]).warm.any()
    assert policy.step(steps[1]).warm.all()
    jumped = policy.step(steps[5])
    assert not jumped.warm.any()
    assert int(jumped.selection.blocks[0].sum()) == -(-(SLOTS - STEPS + 6) // 16)


def test_bytes_of_a_rival_are_those_of_its_rule(trace):
    arm, document = ARMS["tisa"], Document(trace)
    found = measure(arm.make(arm.config(0.5), trace), trace, document, arm, 132)
    slots, blocks = SLOTS, SLOTS // 16
    kept = (blocks - blocks // 2) * 16
    assert found.read[-1, 0] == pytest.approx((kept * 132 + (slots - kept) * 2) / (slots * 132))
    assert found.written[-1, 0] == pytest.approx(kept * 2 / (slots * 132))


# ---------------------------------------------------------------- equal bytes
def curves(arms):
    """Figures of arms whose misses rise with their target, each and bytes besides kept keys."""
    return {
        name: [[flat_figures([miss * s] * 2, read=1 - s + extra)] * 4 for s in ARMS[name].targets]
        for name, (miss, extra) in arms.items()
    }


def test_arms_are_compared_at_the_baselines_bytes():
    figures = curves({BASELINE: (1.0, 0.0), "block 8": (0.5, 0.1), "vertical": (1.0, -0.15)})
    found = find(figures, ["recall"] * 2 + ["text"] * 2)
    assert set(found) == {"all", "recall", "text"}
    at_40 = {name: row_at(arm, 0.4) for name, arm in found["all"].items()}
    # It takes a target of 0.5 to read as little, where half as much is missed.
    assert at_40["block 8"]["target_sparsity"]["value"] == pytest.approx(0.5)
    assert at_40["block 8"]["mean_miss"]["value"] == pytest.approx(0.25)
    assert at_40["block 8"]["mean_miss_difference"]["high"] == pytest.approx(0.25 - 0.4)
    assert at_40[BASELINE]["mean_miss_difference"]["value"] == 0
    assert at_40["vertical"]["target_sparsity"]["value"] == pytest.approx(0.25)
    beyond = found["all"]["vertical"]["equal_bytes"][0]  # less than any target that was run
    assert beyond["mean_miss"]["value"] is None
    table = write_table(
        {
            "found": found,
            "documents": 2,
            "context_bytes": 10,
            "key_bytes": 132,
            "environment": {"device": "a machine", "date": "today"},
        }
    )
    assert "| `block 8` | 0.50 | **0.2500** (-0.1500: -0.1500 to -0.1500) |" in table
    assert "| `vertical` | - | - |" in table


def test_arms_are_compared_at_the_papers_misses():
    figures = curves({BASELINE: (0.8, 0.0), PAPER: (1.0, 0.0), "query 0.5, block 8": (0.7, 0.1)})
    found = find(figures, ["text"] * 4)["all"]
    at_40 = {name: arm["equal_misses"][2] for name, arm in found.items()}
    # As much is missed at 0.5 as there at 0.4.
    assert at_40[BASELINE]["target_sparsity"]["value"] == pytest.approx(0.5)
    assert at_40[BASELINE]["read"]["value"] == pytest.approx(0.5)
    assert at_40[BASELINE]["read_difference"]["low"] == pytest.approx(-0.1)
    assert at_40[PAPER]["read_difference"]["value"] == 0
    beyond = found["query 0.5, block 8"]["equal_misses"][
        3
    ]  # 0.5 / 0.7 is more than any target that was run
    assert beyond["target_sparsity"]["value"] is None
    alone = find(curves({BASELINE: (0.8, 0.0)}), ["text"] * 4)
    assert alone["all"][BASELINE]["equal_misses"] == []


def test_what_checkpoints_have_in_common():
    usual = {BASELINE: (0.8, 0.0), PAPER: (1.0, 0.0), "query 0.5": (0.5, 0.0)}
    one, other = (
        find(curves({**usual, "decay 0.9": (miss, 0.0)}), ["text"] * 4)["all"]
        for miss in (2.0, 0.5)
    )
    text = write_comparison({"one": one, "other": other})
    assert "| `query 0.5` | `++++` | `++++` | `++++` | `++++` | less | less |" in text
    assert "| `decay 0.9` | `----` | `++++` | `----` | `++++` |  |  |" in text
    assert "| `block 64` | `----` | `----` | `----` | `----` | more | more |" in text
    assert "| `spin` | 0.50 | 0.500 (-0.100 to -0.100) | 0.50 |" in text
    assert "| `block 64` | 0.40 | 0.600 | 0.40 | 0.600 |" in text
    with pytest.raises(SpinError, match=r"^two: got 'other variants'"):
        write_comparison({"one": one, "two": find(curves(usual), ["text"] * 4)["all"]})


def test_arms_are_compared_with_others_than_the_baseline():
    arms = {BASELINE: (1.0, 0.0), PAPER: (1.0, 0.0)}
    arms |= {"query 0.5": (0.5, 0.0), "query 0.5, union": (0.6, 0.0)}
    found = find(curves(arms), ["text"] * 4)["all"]
    change = row_at(found["query 0.5, union"], 0.4)["mean_miss_difference from query 0.5"]
    assert change["low"] == change["high"] == pytest.approx(0.04)
    text = write_comparison({"one": found, "two": found})
    assert "## Against `query 0.5`" in text
    assert "| `query 0.5, union` | +0.040: +0.040 to +0.040, `----` |" in text
    assert "from query 0.5" not in str(found["query 0.5"])


def test_an_arm_of_one_setting_is_compared_where_the_baseline_reads_as_much():
    figures = curves({BASELINE: (1.0, 0.0), PAPER: (1.0, 0.0)})
    figures["index cache 2"] = [[flat_figures([0.7, 0.7], read=0.55)] * 4]
    figures["previous picks"] = [[flat_figures([0.7, 0.7], read=0.01)] * 4]
    found = find(figures, ["text"] * 4)
    (row,) = found["all"]["index cache 2"]["equal_bytes"]
    assert row["as_baseline_at"] == pytest.approx(0.45)
    assert row["mean_miss_difference"]["value"] == pytest.approx(0.25)
    (beyond,) = found["all"]["previous picks"]["equal_bytes"]
    assert beyond["as_baseline_at"] is None
    assert beyond["mean_miss_difference"]["value"] is None
    facts = {"documents": 4, "context_bytes": 10, "key_bytes": 132}
    table = write_table(
        {"found": found, "environment": {"device": "a machine", "date": "today"}, **facts}
    )
    assert "| `index cache 2` | 0.550 | 0.45 | 0.7000 (+0.2500: +0.2500 to +0.2500) |" in table
    assert "| `previous picks` | 0.010 | - | 0.7000 | " in table
    text = write_comparison({"one": found["all"]})
    assert "| `index cache 2` | 0.550 | 0.700 (+0.250: +0.250 to +0.250) |" in text
    assert "| `previous picks` | 0.010 | 0.700 (-) |" in text


def test_a_default_is_what_misses_least_on_all_checkpoints():
    arms = {BASELINE: (1.0, 0.0), PAPER: (1.2, 0.0), "log 8 bit, block 64": (1.1, 0.0)}
    arms |= {"explore none": (0.9, 0.0), "query alone": (0.1, 0.0), "decay 0.9": (0.1, 0.0)}
    one = find(curves({**arms, "query 0.5": (0.5, 0.0)}), ["text"] * 4)["all"]
    other = find(curves({**arms, "query 0.5": (1.5, 0.0)}), ["text"] * 4)["all"]
    chosen = {"block_slots": 16, "target": 0.4}
    assert default_of({"one": one}, **chosen, kernels=False) == "query 0.5"
    assert default_of({"one": one, "two": other}, **chosen, kernels=False) == "explore none"
    assert default_of({"one": one}, **chosen, kernels=True) == "explore none"
    lines = list(default_lines({"one": one}))
    assert len(lines) == 2 + 2 * 2 * 4
    assert (
        "| 64 | 80 % | no | `log 8 bit, block 64` | 0.80 | 0.880 (-0.080 to -0.080) |"
        in "".join(lines)
    )
    assert "| 64 | 80 % | yes | `block 64` | 0.80 | 0.960 | 0.960 |" in lines
    assert BUDGETS == (0.2, 0.3, 0.4, 0.5, 0.6, 0.8)


def test_no_verdict_without_an_interval_or_on_both_sides_of_zero():
    assert verdict({"low": None, "high": None}) == "."
    assert verdict({"low": -0.1, "high": 0.0}) == "="
    assert [everywhere(signs) for signs in (["++", "++"], ["+.", "++"], ["=="], ["--"])] == [
        "less",
        "",
        "",
        "more",
    ]


def test_layers_of_a_sweep_are_calibrations(trace, tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    for number in (0, 1):
        scores = torch.stack([step.scores for step in trace])
        write_trace(
            folder / f"text-{number}-16-mean.safetensors",
            scores.masked_fill(scores.isneginf(), float("nan")) + number,
            trace.positions_tokens,
            trace.accepted,
            ratio=1,
            top_k=TOP_K,
            layers=[1, 3],
            sequence_id=number,
        )
    found = layers_of(traces_of(tmp_path), 0.3)
    assert sum(found["layers"].values()) / 2 == pytest.approx(0.3, abs=0.02)
    with pytest.raises(SpinError, match=r"a directory of benchmarks\.study\.beyond"):
        traces_of(folder)


# ---------------------------------------------------------------- capture and command
@pytest.fixture
def small(monkeypatch):
    """Two views, and few questions."""
    monkeypatch.setattr(capturing, "VIEWS", VIEWS[:2])
    for tasks in (capturing.TASKS, command.TASKS):
        monkeypatch.setitem(tasks, "recall", 1)
        monkeypatch.setitem(tasks, "text", 8)


def test_views_of_a_document_have_the_same_scores(model, filler, tmp_path, small):
    sizes = {"documents": 2, "context_bytes": 600, "filler": filler}
    paths = list(capture(model, tmp_path, task="text", **sizes))
    assert len(paths) == 2 * 2
    traces = [Trace(trace_path(tmp_path, "text", 1, view)) for view in VIEWS[:2]]
    assert [trace.query_block_size_slots for trace in traces] == [16, 8]
    for one, other in zip(*traces, strict=True):
        assert torch.equal(one.scores, other.scores)
    assert len(traces[0]) == 7
    assert list(capture(model, tmp_path, task="text", **sizes)) == []
    paths[0].unlink()
    assert len(list(capture(model, tmp_path, task="text", **sizes))) == 2


def test_a_view_may_round_pooled_keys(model, filler, tmp_path, monkeypatch):
    rounded = View(16, "mean", fp8=True)
    monkeypatch.setattr(capturing, "VIEWS", (VIEWS[0], rounded))
    monkeypatch.setitem(capturing.TASKS, "text", 8)
    sizes = {"documents": 1, "context_bytes": 600, "filler": filler}
    list(capture(model, tmp_path, task="text", **sizes))
    own, fp8 = (Trace(trace_path(tmp_path, "text", 0, v)) for v in (VIEWS[0], rounded))
    for one, other in zip(own, fp8, strict=True):
        assert torch.equal(one.scores, other.scores)
        seen = one.query_scores.isfinite()
        gap = (one.query_scores - other.query_scores)[seen].abs().max()
        assert 0 < gap < 0.1 * one.query_scores[seen].abs().max()


def test_rounded_keys_are_those_of_the_served_format():
    keys = torch.tensor([[[[448.0, 1.06, -0.3, 1e-4]], [[0.0, 0.0, 0.0, 0.0]]]])
    assert to_fp8(keys).tolist() == [[[[448.0, 1.0, -0.3125, 0.0]], [[0.0] * 4]]]
    assert torch.equal(to_fp8(keys / 2**20), to_fp8(keys) / 2**20)  # each key has its own scale


@pytest.mark.slow
def test_the_command_sweeps_and_resumes(tmp_path, monkeypatch, capsys, small):
    from benchmarks.tiny_model.corpus import save_corpus

    arms = {name: ARMS[name] for name in (BASELINE, "query 0.3, block 8", "budget by layer")}
    monkeypatch.setattr(command, "ARMS", arms)
    save_corpus(tmp_path / "c.zip", b"", b"It was a dark and stormy night. " * 99, {})
    line = ["--output", tmp_path / "out", "--corpus", tmp_path / "c.zip", "--documents", 2]
    monkeypatch.setattr(sys, "argv", ["beyond", *map(str, line), "--context-bytes", "1024"])
    command.main()
    found = json.loads((tmp_path / "out" / "beyond.json").read_text())["found"]
    assert set(found["all"]) == set(arms)
    for arm in found["all"].values():
        rates = [row["mean_miss"]["value"] for row in arm["targets"]]
        assert rates[0] < rates[-1]
    capsys.readouterr()
    monkeypatch.setattr(command, "measure", None)  # nothing is replayed again
    command.main()
    assert "beyond.md" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "beyond.json").read_text())["found"] == found


def test_every_arm_has_a_trace_and_a_configuration():
    assert all(arm.view in VIEWS for arm in ARMS.values())
    assert {arm.config(0.3).target_sparsity for arm in ARMS.values()} == {0.3}
    assert all(arm.against is None or arm.against in ARMS for arm in ARMS.values())
    names = list(ARMS)
    for name, arm in ARMS.items():  # measured before what is calibrated on it
        assert arm.by_layer is None or names.index(arm.by_layer) < names.index(name)
    assert ARMS["fp8 e4m3"].bytes_a_slot == 2
    assert ARMS[BASELINE].bytes_a_slot == 4
