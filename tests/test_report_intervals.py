# SPDX-License-Identifier: Apache-2.0
"""Intervals against plain resampling, and the verdicts that rest on them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spin_trtllm.report.claims import FAILS, HOLDS, UNDECIDED, judge
from spin_trtllm.report.intervals import (
    RESAMPLES,
    RUN_STEPS,
    Estimate,
    _weights,
    interpolate,
    mean_of,
    p99_layer_mean_of,
    p99_of,
)


def shares(seed: int, steps: int, shift: float = 0.0) -> np.ndarray:
    """Miss rates in 64ths of two layers and three rows; the first step has none."""
    figures = np.random.default_rng(seed).integers(0, 20, (steps, 2, 3)) / 64 + shift
    figures[0] = np.nan
    return figures


@given(
    steps=st.lists(st.integers(0, 200), min_size=1, max_size=4).filter(lambda s: sum(s) > 1),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_estimates_against_numpy(steps: list[int], seed: int) -> None:
    figures = [
        shares(seed + n, count) if count else np.zeros((0, 2, 3)) for n, count in enumerate(steps)
    ]
    pooled = np.concatenate([f[np.isfinite(f)] for f in figures])
    if not pooled.size:
        assert np.isnan(mean_of(figures).value)
        return
    assert mean_of(figures).value == pytest.approx(pooled.mean(), abs=1e-12)
    assert p99_of(figures).value == pytest.approx(np.percentile(pooled, 99), abs=1e-12)
    for of_all, alone in zip(p99_of(figures).by_trace, figures, strict=True):
        there = alone[np.isfinite(alone)]
        if there.size:
            assert of_all == pytest.approx(np.percentile(there, 99), abs=1e-12)
        else:
            assert np.isnan(of_all)


def test_draws_are_of_whole_traces_and_whole_runs() -> None:
    steps = (5 * RUN_STEPS, 3 * RUN_STEPS + 1)
    weights = _weights(steps)
    assert weights.shape == (1 + 2 + RESAMPLES, 5 + 4)
    assert weights[0].tolist() == [1] * 9
    assert weights[1:3].tolist() == [[1] * 5 + [0] * 4, [0] * 5 + [1] * 4]
    first, second = weights[3:, :5].sum(1), weights[3:, 5:].sum(1)
    assert set(zip(first, second, strict=True)) == {(10, 0), (5, 4), (0, 8)}


def test_draws_against_a_plain_loop() -> None:
    figures = [shares(1, 5 * RUN_STEPS), shares(2, 3 * RUN_STEPS + 1)]
    weights = _weights(tuple(map(len, figures)))
    runs = [f[n : n + RUN_STEPS] for f in figures for n in range(0, len(f), RUN_STEPS)]
    means, tails = mean_of(figures).draws, p99_of(figures).draws
    for draw in range(0, RESAMPLES, 100):
        times = weights[3 + draw].astype(int)
        drawn = np.concatenate(
            [run.ravel() for run, n in zip(runs, times, strict=True) for _ in range(n)]
        )
        drawn = drawn[np.isfinite(drawn)]
        assert means[draw] == pytest.approx(drawn.mean(), abs=1e-12)
        assert tails[draw] == pytest.approx(np.percentile(drawn, 99), abs=1e-12)


def test_tails_of_layers_against_a_plain_loop() -> None:
    figures = [shares(1, 5 * RUN_STEPS), shares(2, 3 * RUN_STEPS + 1)]
    figures[0][:, 1] += 0.5
    figures[1][:, 0] = np.nan  # a layer without figures counts for nothing
    weights = _weights(tuple(map(len, figures)))
    estimate = p99_layer_mean_of(figures)
    found = [estimate.value, *estimate.by_trace, *estimate.draws]
    for line in [0, 1, 2, *range(3, 3 + RESAMPLES, 100)]:
        tails, times = [], []
        for figure, of_trace in zip(figures, np.split(weights[line].astype(int), [5]), strict=True):
            starts = range(0, len(figure), RUN_STEPS)
            runs = [figure[n : n + RUN_STEPS] for n in starts]
            drawn = [run for run, n in zip(runs, of_trace, strict=True) for _ in range(n)]
            for layer in (0, 1):
                there = np.concatenate([run[:, layer].ravel() for run in drawn] or [[]])
                there = there[np.isfinite(there)]
                if there.size:
                    tails.append(np.percentile(there, 99))
                    times.append(of_trace.sum() / len(of_trace))
        assert found[line] == pytest.approx(np.average(tails, weights=times), abs=1e-12)


def test_intervals_contain_the_truth_about_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        # Twelve traces with levels of their own, around 0.5.
        levels = 0.5 + 0.1 * generator.standard_normal(12)
        noise = 0.1 * generator.standard_normal((12, 2 * RUN_STEPS, 1, 1))
        low, high = mean_of(list(levels[:, None, None, None] + noise)).interval
        hits += low <= 0.5 <= high
    assert 0.86 <= hits / 200 <= 0.99


def test_short_traces_have_no_interval() -> None:
    enough, short = [shares(1, 8 * RUN_STEPS)], [shares(1, 7 * RUN_STEPS)]
    assert mean_of(enough).interval is not None
    for estimate in (mean_of(short), p99_of(short), p99_layer_mean_of(short)):
        assert np.isfinite(estimate.value)
        assert estimate.interval is None
        assert estimate.to_json() == {"value": estimate.value, "low": None, "high": None}


def test_nothing_has_no_figure() -> None:
    nothing = [np.full((300, 2, 1), np.nan)]
    for estimate in (mean_of(nothing), p99_of(nothing), p99_layer_mean_of(nothing)):
        assert estimate.to_json() == {"value": None, "low": None, "high": None}
        assert judge("claim", "metric", estimate).verdict == UNDECIDED


def test_compared_figures_share_their_draws() -> None:
    low, high = [shares(1, 300)], [shares(1, 300, shift=0.25)]
    for statistic in (mean_of, p99_of, p99_layer_mean_of):
        difference = statistic(high) - statistic(low)
        assert difference.interval == pytest.approx((0.25, 0.25))


def test_interpolation_is_draw_by_draw() -> None:
    def constant(value: float, slope: float = 0.0) -> Estimate:
        return Estimate(value, np.array([value]), value + slope * np.arange(3))

    x = [constant(0.2), constant(0.4, 0.1)]
    y = [constant(1.0), constant(3.0)]
    between = interpolate(x, y, constant(0.3))
    assert between.value == pytest.approx(2.0)
    assert between.by_trace == pytest.approx([2.0])
    assert between.draws == pytest.approx([2.0, 1 + 2 / 3, 1.5])
    beyond = interpolate(x, y, constant(0.45))
    assert np.isnan(beyond.value)
    assert np.isnan(beyond.draws[0])
    assert beyond.interval is None


# ---------------------------------------------------------------- verdicts
def difference(low: float, high: float, by_trace: tuple[float, ...] = (1.0, -1.0, 0.0)) -> Estimate:
    return Estimate((low + high) / 2, np.array(by_trace), np.linspace(low, high, RESAMPLES))


@pytest.mark.parametrize(
    ("low", "high", "or_equal", "verdict"),
    [
        (0.1, 0.3, False, HOLDS),
        (-0.3, -0.1, False, FAILS),
        (-0.1, 0.3, False, UNDECIDED),
        (0.1, 0.3, True, HOLDS),
        (-0.3, -0.1, True, FAILS),
        (-0.1, 0.3, True, UNDECIDED),
        (0.0, 0.0, False, UNDECIDED),
        (0.0, 0.0, True, UNDECIDED),
    ],
)
def test_verdicts(low: float, high: float, or_equal: bool, verdict: str) -> None:
    claim = judge("claim", "metric", difference(low, high), or_equal=or_equal)
    assert claim.verdict == verdict
    assert bool(claim.reason) == (verdict == UNDECIDED)
    assert (claim.for_it, claim.traces) == (2 if or_equal else 1, 3)


def test_rare_draws_that_all_speak_against_a_claim_do_not_make_it_hold() -> None:
    draws = np.zeros(RESAMPLES)
    draws[:10] = -0.5
    estimate = Estimate(0.0, np.array([0.0, 0.0]), draws)
    assert estimate.interval == (0.0, 0.0)
    assert judge("claim", "metric", estimate, or_equal=True).verdict == UNDECIDED


def test_an_interval_that_ends_at_zero() -> None:
    draws = np.zeros(RESAMPLES)
    draws[100:] = 0.5
    estimate = Estimate(0.4, np.array([0.4]), draws)
    assert estimate.interval == (0.0, 0.5)
    assert judge("claim", "metric", estimate, or_equal=True).verdict == HOLDS
    assert judge("claim", "metric", estimate).verdict == UNDECIDED
