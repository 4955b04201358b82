# SPDX-License-Identifier: Apache-2.0
"""Checks of the oracle against values worked out by hand, and of the trace strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from oracle import (
    OracleSequence,
    best_slots,
    budget,
    mix,
    percentile99,
    pool_values,
    priority,
    query_slot,
    replay,
    round_bf16,
    visible_slots,
)
from safetensors import safe_open
from strategies import (
    SCORE_FAMILIES,
    Params,
    Trace,
    cases,
    family_scores,
    traces,
    write_trace,
)

F32 = np.float32
NAN = float("nan")
INF = float("inf")


def sequence(n_slots: int, top_k: int = 8, ratio: int = 1, **params: Any) -> OracleSequence:
    params = {"block_size": 8, "exploration_policy": "none", **params}
    return OracleSequence(ratio, top_k, [3], 7, n_slots, **params)


def one_layer(rows: list[list[float]], n_slots: int) -> np.ndarray:
    """[1, rows, n_slots] scores, NaN after what each row lists."""
    scores = np.full((1, len(rows), n_slots), np.nan, dtype=np.float32)
    for row, values in enumerate(rows):
        scores[0, row, : len(values)] = values
    return scores


# ---------------------------------------------------------------- units, budgets, priorities
def test_visibility() -> None:
    assert [visible_slots(p, 4) for p in range(10)] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert [query_slot(p, 4) for p in range(10)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert [visible_slots(p, 1) for p in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_offsets_stay_inside_the_diagonal(ratio: int) -> None:
    for position in range(50):
        n, q = visible_slots(position, ratio), query_slot(position, ratio)
        assert n == 0 or q - (n - 1) >= 0
        assert q <= n


@pytest.mark.parametrize(
    ("n_blocks", "top_k", "block_size", "rho_ppm", "gamma_ppm", "explore", "expected"),
    [
        # ceil(512/64) = 8 > 5 - 2, capped at B; e = min(ceil(0.25), 5 - 2)
        (5, 512, 64, 400_000, 50_000, True, (5, {0, 4}, 1)),
        # 5 - floor(2.0) = 3
        (5, 64, 64, 400_000, 50_000, True, (3, {0, 4}, 1)),
        (5, 64, 64, 400_000, 50_000, False, (3, {0, 4}, 0)),
        # 5 - floor(2.5) = 3: the kept part rounds up
        (5, 64, 64, 500_000, 0, True, (3, {0, 4}, 0)),
        # ceil(65/64) = 2, 10 - floor(9.9) = 1
        (10, 65, 64, 990_000, 50_000, True, (2, {0, 9}, 0)),
        # m = 1 < |F| becomes 2, nothing left to explore
        (10, 64, 64, 990_000, 1_000_000, True, (2, {0, 9}, 0)),
        # m = 50, e = ceil(2.5) = 3
        (100, 64, 64, 500_000, 50_000, True, (50, {0, 99}, 3)),
        # m = 40, e = 2 exactly
        (100, 64, 64, 600_000, 50_000, True, (40, {0, 99}, 2)),
        # exploration takes all but the forced blocks
        (10, 8, 8, 500_000, 1_000_000, True, (5, {0, 9}, 3)),
        (1, 8, 8, 990_000, 1_000_000, True, (1, {0}, 0)),
        (2, 8, 8, 990_000, 1_000_000, True, (2, {0, 1}, 0)),
        (7, 8, 8, 0, 0, True, (7, {0, 6}, 0)),
    ],
)
def test_budget(
    n_blocks: int,
    top_k: int,
    block_size: int,
    rho_ppm: int,
    gamma_ppm: int,
    explore: bool,
    expected: tuple[int, set[int], int],
) -> None:
    assert budget(n_blocks, top_k, block_size, rho_ppm, gamma_ppm, explore) == expected


def test_mix_is_splitmix64() -> None:
    golden = 0x9E3779B97F4A7C15
    assert mix(0) == 0xE220A8397B1DCDAF  # the first three outputs of splitmix64 from state 0
    assert mix(golden) == 0x6E789E6AA1B965F4
    assert mix(2 * golden % 2**64) == 0x06C45D188009454F


def test_priority_composition() -> None:
    # With M = mix(0): seed 0 gives M, sequence id M cancels it, so the inner value is M again;
    # layer << 40 and p0 cancel that to 0, so the key is M; block M cancels it: mix(0) >> 32.
    m = mix(0)
    assert priority(0, m, 0, m, m) == 0xE220A839
    assert priority(0, m, 5, m ^ (5 << 40), m) == 0xE220A839
    assert priority(2**64, m, 0, m, m) == 0xE220A839  # 64-bit wrap-around
    assert priority(0, m, 0, m, m ^ 0x9E3779B97F4A7C15) == 0x6E789E6A


# ---------------------------------------------------------------- arithmetic
def test_round_bf16() -> None:
    def rounded(x: float) -> float:
        return float(round_bf16(F32(x)))

    ulp = 2.0**-7  # of bf16 at 1.0
    assert rounded(1.0) == 1.0
    assert rounded(1 + ulp / 2) == 1.0  # tie, down to even
    assert rounded(1 + 3 * ulp / 2) == 1 + 2 * ulp  # tie, up to even
    assert rounded(1 + ulp / 2 + 2.0**-23) == 1 + ulp
    assert rounded(1 + 3 * ulp / 2 - 2.0**-23) == 1 + ulp
    assert rounded(-(1 + ulp / 2)) == -1.0
    assert rounded(-(1 + 3 * ulp / 2)) == -(1 + 2 * ulp)
    assert rounded(2.0 - 2.0**-23) == 2.0  # carries into the exponent
    assert np.signbit(round_bf16(F32(-0.0)))
    assert rounded(2.0**-149) == 0.0  # the smallest fp32 denormal
    assert rounded(2.0**-133) == 2.0**-133  # the smallest bf16 denormal


def test_round_bf16_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(0).integers(0, 2**32, 4000, dtype=np.uint64).astype(np.uint32)
    bits[::4] = (bits[::4] & 0xFFFF0000) | 0x8000  # ties
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    got = np.array([round_bf16(x) for x in values], dtype=np.float32)
    assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_pooling() -> None:
    values = [F32(x) for x in (1.0, -3.0, 8.0, 2.0, 5.0)]
    assert pool_values(values, "max") == 8.0
    assert pool_values(values, "top4") == 4.0  # (8 + 5 + 2 + 1) / 4
    assert pool_values(values, "mean") == F32(F32(13.0) / F32(5.0))
    assert pool_values(values[:2], "top4") == -1.0
    assert values[0] == 1.0
    assert values[1] == -3.0


def test_best_slots_order() -> None:
    score = {0: -INF, 1: NAN, 2: -0.0, 3: 0.0, 4: INF, 5: -1.0, 6: 0.0}
    assert best_slots(list(range(7)), score, 9) == [4, 2, 3, 6, 5, 0, 1]
    assert best_slots([3, 5, 6], score, 2) == [3, 6]


# ---------------------------------------------------------------- state
def test_ema_three_steps() -> None:
    # ratio 1, alpha 0.5, one row per step at p = 0, 1, 2, so q = p and N = p + 1.
    # p=0, z=[1]:       V0 = 0.5                     D0 = 0.5
    # p=1, z=[2,4]:     V0 = 0.25 + 1 = 1.25         D1 = 0 + 1 = 1
    #                   V1 = 0 + 2 = 2               D0 = 0.25 + 2 = 2.25
    # p=2, z=[8,-2,6]:  V0 = 0.625 + 4 = 4.625       D2 = 0 + 4 = 4
    #                   V1 = 1 - 1 = 0               D1 = 0.5 - 1 = -0.5
    #                   V2 = 0 + 3 = 3               D0 = 1.125 + 3 = 4.125
    seq = sequence(3)
    (first,) = seq.step([0], one_layer([[1.0]], 3), 0)
    (second,) = seq.step([1], one_layer([[2.0, 4.0]], 3), 0)
    assert (first.warm, second.warm) == (False, True)
    assert seq.v[0] == [1.25, 2.0, 0.0]
    assert seq.d[0] == [2.25, 1.0, 0.0, 0.0]
    (third,) = seq.step([2], one_layer([[8.0, -2.0, 6.0]], 3), 0)
    assert third.topk == [[0, 2, 1, -1, -1, -1, -1, -1]]
    assert seq.v[0] == [4.625, 0.0, 3.0]
    assert seq.d[0] == [4.125, -0.5, 4.0, 0.0]
    seq.reset()
    assert not seq.warm
    assert seq.v[0] == [0.0] * 3
    assert seq.d[0] == [0.0] * 4


def test_ema_rounds_products_and_sum_apart() -> None:
    # a = fp32(0.9) and c = fp32(1.0 - 0.9), the difference taken in double; three fp32 roundings.
    seq = sequence(1, ratio=4, ema_decay=0.9)
    for position, z in ((3, 0.3), (4, 0.7)):
        seq.step([position], one_layer([[z]], 1), 0)
    a, c = F32(0.9), F32(1.0 - 0.9)
    assert c != F32(1.0) - a
    once = F32(c * F32(0.3))
    assert seq.v[0][0] == F32(F32(a * once) + F32(c * F32(0.7)))
    # p=3: q=0, offset 0; p=4: q=1, offset 1
    assert seq.d[0] == [once, F32(c * F32(0.7))]


@pytest.mark.parametrize(
    ("update_policy", "accepted", "v", "d"),
    [
        # rows at p = 1, 2, 3 with z = [4,4], [8,8,8], [16,16,16,16]; alpha 0.5
        ("prefix", 0, [2, 2, 0, 0], [2, 2, 0, 0, 0]),
        # + row 1 (q = 2): V = 1+4, 1+4, 4;  D2 = 4, D1 = 1+4, D0 = 1+4
        ("prefix", 1, [5, 5, 4, 0], [5, 5, 4, 0, 0]),
        # + row 2 (q = 3): V = 2.5+8, 2.5+8, 2+8, 8;  D3 = 8, D2 = 2+8, D1, D0 = 2.5+8
        ("prefix", 2, [10.5, 10.5, 10, 8], [10.5, 10.5, 10, 8, 0]),
        ("row0", 0, [2, 2, 0, 0], [2, 2, 0, 0, 0]),
        ("row0", 2, [2, 2, 0, 0], [2, 2, 0, 0, 0]),
    ],
)
def test_update_policy_and_rejected_rows(
    update_policy: str, accepted: int, v: list[float], d: list[float]
) -> None:
    seq = sequence(4, update_policy=update_policy)
    seq.step([1, 2, 3], one_layer([[4.0] * 2, [8.0] * 3, [16.0] * 4], 4), accepted)
    assert seq.v[0] == v
    assert seq.d[0] == d
    assert seq.warm


def test_non_finite_scores_are_not_observed() -> None:
    seq = sequence(6, top_k=6)
    (record,) = seq.step([5], one_layer([[NAN, -INF, 2.0, INF, -4.0, -INF]], 6), 0)
    assert record.topk == [[3, 2, 4, 0, 1, 5]]
    assert seq.v[0] == [0, 0, 1, 0, -2, 0]
    assert seq.d[0] == [0, -2, 0, 1, 0, 0, 0]  # offsets 5 - i


def test_bf16_state_rounds_after_each_row() -> None:
    # alpha 0: the state is the rounded score of the last accepted row.
    seq = sequence(2, ema_decay=0.0, state_dtype="bf16")
    seq.step([0], one_layer([[1 + 2.0**-8]], 2), 0)
    assert seq.v[0][0] == 1.0
    # alpha 0.5, two rows on slot 0: 2 + 2^-6 -> V = 1 + 2^-7, exact;
    # then 0.5 + 2^-8 + 0.5 = 1 + 2^-8, a tie -> 1.0.
    seq = sequence(2, state_dtype="bf16")
    seq.step([0, 1], one_layer([[2 + 2.0**-6], [1.0, 0.0]], 2), 1)
    assert seq.v[0] == [1.0, 0.0]
    # row 0: 2 + 2^-7 -> 1 + 2^-8, a tie -> 1.0; row 1: 0.5 + 0.5 (1 + 2^-7) = 1 + 2^-8 -> 1.0.
    # Without the rounding after row 0: 1 + 2^-8 + 2^-9, above the tie -> 1 + 2^-7.
    seq = sequence(2, state_dtype="bf16")
    seq.step([0, 1], one_layer([[2 + 2.0**-7], [1 + 2.0**-7, 0.0]], 2), 1)
    assert seq.v[0][0] == 1.0


def test_rows_without_slots() -> None:
    seq = sequence(1, ratio=4, top_k=2)
    (record,) = seq.step([1, 2, 3], one_layer([[], [], [5.0]], 1), 1)
    assert record.row_blocks == [set(), set(), {0}]
    assert record.blocks == {0}
    assert record.topk == [[-1, -1], [-1, -1], [0, -1]]
    assert seq.v[0] == [0.0]
    assert seq.warm


# ---------------------------------------------------------------- selection
def warm_forty(n_slots: int = 48, **params: Any) -> OracleSequence:
    """Five blocks of 8 seen from p = 39, all zero but slot 17 (block 2).

    V[17] = 2 and D[39 - 17 = 22] = 2, so from p = 40 the predicted slots are 17 and 18: block 2.
    """
    seq = sequence(n_slots, sparsity=0.4, **params)
    z = [0.0] * 40
    z[17] = 4.0
    (record,) = seq.step([39], one_layer([z], n_slots), 0)
    assert record.blocks == set(range(5))
    assert not record.warm
    assert record.explored == set()
    assert record.topk == [[17, 0, 1, 2, 3, 4, 5, 6]]
    return seq


def test_ranked_selection() -> None:
    # p = 40: N = 41, B = 6, m = 6 - floor(2.4) = 4, F = {0, 5}; ranked: 2, then the tie goes to 1.
    (record,) = warm_forty().step([40], one_layer([[0.0] * 41], 48), 0)
    assert record.row_blocks == [{0, 1, 2, 5}]
    assert record.explored == set()
    # An unselected slot is neither scored nor observed.
    seq = warm_forty()
    (record,) = seq.step([40], one_layer([[0.0] * 24 + [9.0] * 8 + [0.0] * 9], 48), 0)
    assert record.topk == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert seq.v[0][24:32] == [0.0] * 8
    assert seq.v[0][17] == 1.0


def test_explored_blocks() -> None:
    # gamma 0.05: e = ceil(0.2) = 1, ranked = {2}; the explored block is one of 1, 3, 4.
    seq = warm_forty(exploration_policy="random", exploration=0.05, seed=11)
    (record,) = seq.step([40], one_layer([[0.0] * 41], 48), 0)
    expected = min((1, 3, 4), key=lambda j: (priority(11, 7, 3, 40, j), j))
    assert record.explored == {expected}
    assert record.blocks == {0, 2, 5, expected}
    # gamma 1: e = 4 - 2, nothing is ranked.
    seq = warm_forty(exploration_policy="random", exploration=1.0, seed=11)
    (record,) = seq.step([40], one_layer([[0.0] * 41], 48), 0)
    order = sorted((1, 2, 3, 4), key=lambda j: (priority(11, 7, 3, 40, j), j))
    assert record.explored == set(order[:2])
    assert record.blocks == {0, 5, *order[:2]}
    # Every row of a step uses the p0 of row 0.
    seq = warm_forty(n_slots=64, exploration_policy="random", exploration=1.0, seed=11)
    (record,) = seq.step([40, 41], one_layer([[0.0] * 41, [0.0] * 42], 64), 0)
    assert record.row_blocks[0] == record.row_blocks[1] == {0, 5, *order[:2]}


def test_mask_policies() -> None:
    # Rows p = 47 (N = 48, B = 6) and p = 48 (N = 49, B = 7): m = 4 and 7 - floor(2.8) = 5.
    # V[17] = 2; D[22] = 2 points at slots 25 and 26: block 3 in both rows.
    # Row 0: {0, 5} + {2, 3}. Row 1: {0, 6} + {2, 3} + tie 1.
    z = one_layer([[0.0] * 48, [0.0] * 49], 56)
    for mask_policy, expected in (("union", {0, 1, 2, 3, 5, 6}), ("row0", {0, 2, 3, 5, 6})):
        (record,) = warm_forty(n_slots=56, mask_policy=mask_policy).step([47, 48], z, 0)
        assert record.row_blocks == [{0, 2, 3, 5}, {0, 1, 2, 3, 6}]
        assert record.blocks == expected


def test_a0_keeps_the_blocks_of_the_predicted_top_k() -> None:
    # From p = 40 zhat is 2 on slots 17 and 18, else 0: K = 3 takes 17, 18 and slot 0.
    seq = warm_forty(reduction="A0", exploration_policy="random", exploration=1.0)
    seq.top_k = 3
    (record,) = seq.step([40], one_layer([[0.0] * 41], 48), 0)
    assert record.blocks == {0, 2, 5}
    assert record.explored == set()


def test_a2_keeps_block_level_state() -> None:
    # b = 8, p = 19: q = 19, N = 20, B = 3, q // b = 2. Pools (max): block 0 -> 6, block 1 has no
    # finite score and is not observed, block 2 -> -2. V = [3, 0, -1]; D[2] = 3, D[0] = -1.
    seq = sequence(24, reduction="A2")
    z = [1.0, 6.0] + [0.0] * 6 + [-INF] * 8 + [-2.0, -4.0, -8.0, -INF]
    seq.step([19], one_layer([z], 24), 0)
    assert seq.v[0][:4] == [3.0, 0.0, -1.0, 0.0]
    assert seq.d[0][:4] == [-1.0, 0.0, 3.0, 0.0]
    # p = 32: q // b = 4, B = 5, m = 5 - 2 = 3, F = {0, 4}, one ranked. max(V[j], D[4 - j]) is
    # max(0, 0) for j = 1, max(-1, 3) for j = 2, max(0, 0) for j = 3.
    seq = sequence(40, reduction="A2", sparsity=0.4)
    seq.step([19], one_layer([z], 40), 0)
    (record,) = seq.step([32], one_layer([[0.0] * 33], 40), 0)
    assert record.blocks == {0, 2, 4}
    # That step halved D[2] to 1.5, on block 2 again from p = 39; V[1] = 8 outweighs it.
    seq.v[0][1] = F32(8.0)
    (record,) = seq.step([39], one_layer([[0.0] * 40], 40), 0)
    assert record.blocks == {0, 1, 4}


# ---------------------------------------------------------------- replay
def test_percentile99() -> None:
    assert percentile99([]) is None
    assert percentile99([0.25]) == 0.25
    # rank 0.99 * 2 = 1.98 in [0, 0.5, 1]
    assert percentile99([1.0, 0.0, 0.5]) == pytest.approx(0.99)


def test_replay_metrics_and_resets() -> None:
    # Steps p = 39 (cold), 40 (warm), 45 (a gap: cold). At p = 40 U = {0, 1, 2, 5} (see above);
    # the true top 8 are 6 slots of block 2 and 2 of block 3: miss 2/8, sparsity 1 - 4/6.
    n_slots = 46
    scores = np.full((3, 1, 1, n_slots), np.nan, dtype=np.float32)
    for t, position in enumerate((39, 40, 45)):
        scores[t, 0, 0, : position + 1] = 0.0
    scores[0, 0, 0, 17] = 4.0
    scores[1, 0, 0, 16:22] = 5.0
    scores[1, 0, 0, 30:32] = 6.0
    trace = {
        "scores": scores,
        "positions": np.array([[39], [40], [45]], dtype=np.int64),
        "accepted": np.zeros(3, dtype=np.int64),
        "ratio": 1,
        "top_k": 8,
        "layers": [3],
        "sequence_id": 7,
    }
    result = replay(trace, block_size=8, sparsity=0.4, exploration_policy="none")
    metrics = result["metrics"]
    assert metrics["mean_miss"] == metrics["p99_miss"] == metrics["p99_miss_layer_mean"] == 0.25
    assert metrics["realized_sparsity"] == pytest.approx(1 / 3)
    assert (metrics["cold_steps"], metrics["steps"]) == (2, 3)
    assert result["blocks"][:, 0].astype(int).tolist() == [
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
        [1, 1, 1, 1, 1, 1],
    ]
    assert result["topk"][1, 0, 0].tolist() == [16, 17, 18, 19, 20, 21, 0, 1]
    assert not result["v"].any()  # the reset step saw only zeros
    cold = {
        name: value[:1] if name in ("scores", "positions", "accepted") else value
        for name, value in trace.items()
    }
    metrics = replay(cold, block_size=8)["metrics"]
    assert metrics["mean_miss"] is metrics["p99_miss"] is metrics["realized_sparsity"] is None
    assert metrics["p99_miss_layer_mean"] is None
    assert metrics["cold_steps"] == 1


# ---------------------------------------------------------------- strategies
LIGHT = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@LIGHT
@given(traces())
def test_traces_are_well_formed(trace: Trace) -> None:
    scores, positions = trace["scores"], trace["positions"]
    n_steps, n_layers, n_rows, n_slots = scores.shape
    assert scores.dtype == np.float32
    assert positions.shape == (n_steps, n_rows)
    assert len(trace["layers"]) == n_layers
    assert trace["top_k"] >= 1
    assert (positions >= 0).all()
    assert (np.diff(positions, axis=1) == 1).all()
    assert (trace["accepted"] >= 0).all()
    assert (trace["accepted"] < n_rows).all()
    visible = (positions + 1) // trace["ratio"]
    assert visible.max() <= n_slots
    hidden = np.arange(n_slots) >= visible[:, None, :, None]
    assert (np.isnan(scores) == hidden).all()


@LIGHT
@given(cases(max_cells=6_000))
def test_replay_invariants(case: tuple[Trace, Params]) -> None:
    trace, params = case
    result = replay(trace, **params)
    blocks, row_blocks, topk = result["blocks"], result["row_blocks"], result["topk"]
    assert not (result["explored"] & ~blocks).any()
    if params["mask_policy"] == "union":
        assert np.array_equal(blocks, row_blocks.any(axis=2))
    chosen = np.unique(np.argwhere(topk >= 0)[:, :3], axis=0)
    for t, layer_index, row in chosen:
        slots = topk[t, layer_index, row]
        slots = slots[slots >= 0]
        assert len(set(slots.tolist())) == len(slots)
        assert blocks[t, layer_index, slots // params["block_size"]].all()
        values = trace["scores"][t, layer_index, row, slots]
        assert (values[:-1] >= values[1:]).all()
    assert np.isfinite(result["v"]).all()
    assert np.isfinite(result["d"]).all()
    if params["sparsity"] == 0.0 and params["reduction"] != "A0":
        assert result["metrics"]["mean_miss"] in (None, 0.0) or params["mask_policy"] == "row0"


@pytest.mark.parametrize("family", SCORE_FAMILIES)
def test_families_hold_no_nan(family: str) -> None:
    scores = family_scores(family, np.random.default_rng(1), (2, 3, 40))
    assert scores.dtype == np.float32
    assert scores.shape == (2, 3, 40)
    assert not np.isnan(scores).any()
    assert not np.isposinf(scores).any()


def test_write_trace(tmp_path: Path) -> None:
    scores = one_layer([[1.0], [2.0, 3.0]], 2)[None]
    trace = {
        "scores": scores,
        "positions": np.array([[0, 1]], dtype=np.int64),
        "accepted": np.array([1], dtype=np.int64),
        "ratio": 1,
        "top_k": 4,
        "layers": [2],
        "sequence_id": 2**64 - 1,
    }
    path = tmp_path / "trace.safetensors"
    write_trace(path, trace, source="by hand")
    with safe_open(path, framework="np") as stored:
        assert stored.metadata() == {
            "format": "spin-trace/1",
            "ratio": "1",
            "top_k": "4",
            "layers": "2",
            "sequence_id": str(2**64 - 1),
            "source": "by hand",
        }
        assert np.array_equal(stored.get_tensor("scores"), scores, equal_nan=True)
        assert stored.get_tensor("positions").dtype == np.int64
        assert stored.get_tensor("accepted").tolist() == [1]
