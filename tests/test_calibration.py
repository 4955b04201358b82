# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm calibrate`: the best split of a budget, and the file that it ends in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cli import Capture, call, make_trace, refused, save

from spin_trtllm import SpinConfig
from spin_trtllm.calibration.allocate import STEP, Curve, allocate
from spin_trtllm.calibration.curves import mean_miss, skipped_slots
from spin_trtllm.calibration.run import TARGETS, calibrate, plan_calibration, steps_of
from spin_trtllm.replay.run import replay
from spin_trtllm.replay.trace import Trace
from spin_trtllm.report.record import Record

NAN = float("nan")
POINTS = np.array([0.0, 0.25, 0.5, 0.75])
quick = settings(max_examples=60, deadline=None, derandomize=True)


def curve(missed: Any, skipped: Any = POINTS) -> Curve:
    return Curve(POINTS, np.asarray(skipped, float), np.asarray(missed, float))


# ---------------------------------------------------------------- the split
@quick
@given(
    seed=st.integers(0, 2**32 - 1),
    layers=st.integers(2, 3),
    target=st.sampled_from((0.0, 0.1, 0.25, 0.4, 0.6, 0.75)),
    convex=st.booleans(),
)
def test_no_split_misses_less(seed: int, layers: int, target: float, convex: bool) -> None:
    """Every split in the same steps, tried one by one; curves rise, but need not be convex."""
    rng = np.random.default_rng(seed)
    missed = np.cumsum(np.pad(rng.random((layers, 3)), ((0, 0), (1, 0))), 1)
    if convex:
        missed = np.cumsum(missed, 1)
    curves = [curve(of_layer) for of_layer in missed]
    found = allocate(curves, target)
    assert sum(found) <= layers * target + 0.0005 * layers  # they are rounded
    assert sum(found) > layers * target - STEP - 0.0005 * layers

    grid = np.arange(round(0.75 / STEP) + 1) * STEP
    costs = [np.interp(grid, POINTS, of_layer) for of_layer in missed]
    total = int(layers * target / STEP + 1e-6)
    places = np.indices((len(grid),) * (layers - 1)).reshape(layers - 1, -1)
    last = total - places.sum(0)
    possible = (last >= 0) & (last < len(grid))
    sums = costs[-1][last[possible]]
    for of_layer, place in zip(costs[:-1], places, strict=True):
        sums = sums + of_layer[place[possible]]
    reached = sum(np.interp(t, POINTS, of_layer) for t, of_layer in zip(found, missed, strict=True))
    assert reached == pytest.approx(sums.min(), abs=0.0006 * layers * np.diff(missed).max() / 0.25)


def test_splits_by_hand() -> None:
    steep, mild, none = (curve(f * POINTS**2) for f in (3, 1, 0))
    assert allocate([mild, mild], 0.4) == pytest.approx([0.4, 0.4], abs=0.011)
    assert allocate([none, steep], 0.375) == [0.75, 0.0]
    assert allocate([none, none, none], 0.4) == [0.4, 0.4, 0.4]  # equal misses: even
    # Straight lines of slope 1, 3, 5 and of 3, 9, 15 times 1/16: first the mild one up to 0.5.
    assert allocate([mild, steep], 0.25) == pytest.approx([0.375, 0.125], abs=0.13)
    assert allocate([mild, steep], 0.3) == pytest.approx([0.35, 0.25], abs=1e-9)
    # A greedy rise would never pass the hill of the first layer.
    assert allocate([curve([0, 0.5, 0.5, 0.5]), curve([0, 0.3, 0.6, 0.9])], 0.375) == [0.75, 0.0]


def test_a_budget_that_the_top_k_fills_is_given_to_others() -> None:
    """The first layer skips no more than half, whatever its target."""
    full = curve([0, 0.0, 0.0, 0.0], [0, 0.25, 0.5, 0.5])
    easy = curve([0, 0.1, 0.2, 0.3])
    assert allocate([full, easy], 0.5) == [0.5, 0.5]
    assert allocate([full, full], 0.75) == [0.5, 0.5]
    # Together they are to skip 0.5 + 0.75.
    assert allocate([full, easy], 0.75) == [0.5, 0.75]


def record(sparsity: Any, miss: Any) -> Record:
    """A record `[T, L]` of single rows."""
    sparsity, miss = np.asarray(sparsity, float), np.asarray(miss, float)[..., None]
    blank = np.full_like(miss, NAN)
    return Record(np.isfinite(sparsity), sparsity, miss, blank, blank)


def test_figures_by_hand() -> None:
    """Slots weigh in what is skipped, rows in what is missed; cold steps in neither."""
    one = record([[NAN, NAN], [0.5, 0.2], [0.25, 0.0]], [[NAN, NAN], [0.1, 0.3], [0.3, 0.5]])
    two = record([[0.0, 0.6]], [[0.5, 1.0]])
    slots = [np.array([1000.0, 10.0, 20.0]), np.array([70.0])]
    assert skipped_slots([one, two], slots) == pytest.approx([(5 + 5) / 100, (2 + 42) / 100])
    assert mean_miss([one, two]) == pytest.approx([0.3, 0.6])


# ---------------------------------------------------------------- the command
OPTIONS = ("--block-size", "8", "--sparsity", "0.4", "--exploration", "0.1", "--top-k", "6")


def easy_and_hard(folder: Path, number: int, steps: int = 10) -> str:
    """Layer 2 has the same six best slots in one block all the time; layer 6 starts anew each."""
    trace = make_trace(steps=steps, rows=1, first=199, seed=number)
    seen = np.isfinite(trace["scores"])
    rng = np.random.default_rng(number)
    scores = rng.random(trace["scores"].shape).astype(np.float32)
    scores[:, 0] = 0.25
    scores[:, 0, :, 80 + 8 * number : 86 + 8 * number] = 1.0
    trace["scores"] = np.where(seen, scores, np.float32(NAN))
    return save(folder, trace, f"{number}.trace")


def test_the_easy_layer_gets_all_that_it_can_skip(tmp_path: Path, capsys: Capture) -> None:
    traces = [easy_and_hard(tmp_path, n) for n in range(3)]
    output = tmp_path / "layers.yaml"
    code, out, err = call(capsys, "calibrate", *traces, "--output", output, *OPTIONS)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == str(output)
    config = SpinConfig.from_yaml(output)
    assert config.target_sparsity == 0.4
    assert dict(config.layer_sparsity)[2] == pytest.approx(0.8, abs=0.01)
    assert dict(config.layer_sparsity)[6] < 0.01
    assert "held out" in out
    # What the file does is what a replay with it does.
    for trace in traces:
        code, out, _ = call(capsys, "replay", trace, "--spin-config", output, "--json")
        found = json.loads(out)
        assert found["mean_miss"] == 0
        code, out, _ = call(capsys, "replay", trace, *OPTIONS, "--json")
        before = json.loads(out)
        assert before["mean_miss"] > 0.05
        assert found["realized_sparsity"] == pytest.approx(before["realized_sparsity"], abs=0.01)


def test_figures_are_those_of_replay(tmp_path: Path, capsys: Capture) -> None:
    """Mean over the layers before and after, and of each trace with the others' targets."""
    traces = [save(tmp_path, make_trace(rows=2, first=99, seed=n), f"{n}") for n in range(3)]
    config = SpinConfig(block_size=8, target_sparsity=0.45)
    files = plan_calibration(traces, config)
    counted: list[int] = []
    found = calibrate(files, config, on_steps=counted.append)
    assert sum(counted) <= steps_of(files, config) == (len(TARGETS) + 3) * 36

    def mean_of(configs: list[SpinConfig]) -> tuple[float, float]:
        results = [replay(Trace(t), c) for t, c in zip(traces, configs, strict=True)]
        return tuple(
            float(np.mean([r[name] for r in results])) for name in ("mean_miss", "p99_miss")
        )

    assert found.before.mean_miss.mean() == pytest.approx(mean_of([config] * 3)[0])
    assert found.after.mean_miss.mean() == pytest.approx(mean_of([found.config] * 3)[0])
    others = [
        calibrate(plan_calibration([t for t in traces if t != left], config), config).config
        for left in traces
    ]
    assert len({found.config, *others}) > 2
    assert found.held_out is not None
    assert found.held_out.mean_miss.mean() == pytest.approx(mean_of(others)[0])
    assert calibrate(files, config).config == found.config
    single = calibrate(plan_calibration(traces[:1], config), config)
    assert single.held_out is None


def test_a_file_of_earlier_targets_is_no_obstacle(tmp_path: Path, capsys: Capture) -> None:
    trace, output = easy_and_hard(tmp_path, 0), tmp_path / "layers.yaml"
    earlier = tmp_path / "earlier.yaml"
    earlier.write_text("{layer_sparsity: {2: 0.0, 6: 0.7}, seed: 3}")
    options = [*OPTIONS, "--spin-config", earlier]
    code, out, _ = call(capsys, "calibrate", trace, "--output", output, *options)
    assert code == 0
    assert "held out" not in out
    config = SpinConfig.from_yaml(output)
    assert (config.seed, config.top_k) == (3, 6)
    assert dict(config.layer_sparsity)[2] > 0.78


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sparsity", "0"], "target_sparsity: got 0.0, allowed: a number in (0, 0.9]"),
        (["--sparsity", "0.91"], "target_sparsity: got 0.91, allowed: a number in (0, 0.9]"),
        (["--reduction", "A0"], "reduction: got 'A0', allowed: A1, A2"),
        (["--layer-sparsity", "2:0.5"], "--layer-sparsity: got '2:0.5', allowed: none"),
        (["--jobs", "0"], "--jobs: got 0, allowed: an integer in 1 .. 1024"),
        (["--query-share", "0.5"], "query_share: got"),
    ],
    ids=str,
)
def test_refused(options: list[str], message: str, tmp_path: Path, capsys: Capture) -> None:
    trace, output = easy_and_hard(tmp_path, 0), tmp_path / "layers.yaml"
    assert message in refused(capsys, "calibrate", trace, "--output", output, *options)
    assert not output.exists()


def test_traces_that_tell_nothing_are_refused(tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "layers.yaml"
    trace, short = easy_and_hard(tmp_path, 0), easy_and_hard(tmp_path, 1, steps=1)
    line = ["calibrate", "--output", output]
    assert "allowed: traces of two steps or more" in refused(capsys, *line, short)
    assert "allowed: each trace once" in refused(capsys, *line, trace, trace)
    assert "a file that is no input" in refused(capsys, "calibrate", "--output", trace, trace)
    assert not output.exists()
    # Beside two longer ones it does no harm.
    code, _, _ = call(capsys, *line, *OPTIONS, trace, short, easy_and_hard(tmp_path, 2))
    assert code == 0
