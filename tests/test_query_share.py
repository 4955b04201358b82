# SPDX-License-Identifier: Apache-2.0
"""Blocks ranked by the current query: pooled keys, merged rankings, and a replay by plain loops."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from steps import BLOCKS, CONFIG, LAYERS, RATIO, SLOTS, TOP_K, make, noise, rows
from strategies import cases, family_scores
from torch import Tensor

from spin_trtllm import SpinConfig, SpinError
from spin_trtllm.gpu_step import GpuState, GpuStep
from spin_trtllm.reference import pool_keys, score_blocks, score_slots, select_blocks
from spin_trtllm.reference.pool_keys import key_bytes_read
from spin_trtllm.reference.rank_blocks import rank_blocks
from spin_trtllm.replay.run import replay
from spin_trtllm.replay.trace import Trace, write_trace

INF, NAN = float("inf"), float("nan")
PPM = 1_000_000
MERGES = ("split", "union", "max")
POOLINGS = ("mean", "minmax")
SHARES = (1e-6, 0.3, 0.5, 0.999999, 1.0)
QUERY_FAMILIES = ("gaussian", "integer", "equal", "negative", "neg_inf", "all_neg_inf", "huge")
quick = settings(max_examples=80, deadline=None, derandomize=True)
relaxed = settings(
    quick,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


# ---------------------------------------------------------------- the rankings, by plain loops
def in_order(scores: dict[int, float]) -> list[int]:
    """Best first, equal ones lower block first; NaN and -inf below all others."""
    lowest = -float(np.finfo(np.float32).max)

    def rank(j: int) -> tuple[float, int]:
        x = scores[j]
        return (-(lowest if math.isnan(x) else max(x, lowest)), j)

    return sorted(scores, key=rank)


def scaled(scores: dict[int, float]) -> dict[int, np.float32]:
    limit = np.float32(2.0**126)
    bounded = {
        j: -limit if math.isnan(x) else np.float32(min(max(x, -limit), limit))
        for j, x in scores.items()
    }
    finite = [bounded[j] for j, x in scores.items() if math.isfinite(x)]
    if not finite or min(finite) == max(finite):
        return dict.fromkeys(bounded, np.float32(0))
    low, span = min(finite), np.float32(max(finite) - min(finite))
    places = {j: np.float32(np.float32(x - low) / span) for j, x in bounded.items()}
    return {j: min(max(x, np.float32(0)), np.float32(1)) for j, x in places.items()}


def ranked_part(
    history: dict[int, float],
    query: dict[int, float],
    count: int,
    share_ppm: int,
    merge: str,
    spare: int,
) -> set[int]:
    """SPEC 4, step 7, of blocks given by number; `union` keeps `spare` fewer at most."""
    if not share_ppm:
        return set(in_order(history)[:count])
    if merge == "max" and history:
        mine, theirs = np.float32(1 - share_ppm / PPM), np.float32(share_ppm / PPM)
        a, b = scaled(history), scaled(query)
        both = {j: float(max(np.float32(a[j] * mine), np.float32(b[j] * theirs))) for j in a}
        return set(in_order(both)[:count])
    by_query = -(-count * share_ppm // PPM)
    kept = set(in_order(history)[: count - by_query])
    wish = in_order(query)
    if merge == "union":
        kept |= set(wish[:by_query])
        count -= spare
    for j in wish:
        if len(kept) < count:
            kept.add(j)
    return kept


class SharedOracle(oracle.OracleSequence):
    """`OracleSequence` whose rows also listen to the current query."""

    queries: np.ndarray  # [layers, rows, blocks], of the step that runs
    share_ppm: int
    merge: str

    def _select_row(self, layer_index: int, position: int, p0: int) -> tuple[set[int], set[int]]:
        n_slots = oracle.visible_slots(position, self.ratio)
        n_blocks = oracle.ceil_div(n_slots, self.block_size)
        if n_slots == 0 or not self.warm:
            return set(range(n_blocks)), set()
        m, forced, e = oracle.budget(
            n_blocks, self.top_k, self.block_size, self.rho_ppm, self.gamma_ppm, self.explore
        )
        v, d, b = self.v[layer_index], self.d[layer_index], self.block_size
        q = oracle.query_slot(position, self.ratio)
        others = [j for j in range(n_blocks) if j not in forced]
        if self.reduction == "A2":
            history = {j: float(max(v[j], d[q // b - j])) for j in others}
        else:
            history = {
                j: float(max(max(v[i], d[q - i]) for i in range(j * b, (j + 1) * b)))
                for j in others
            }
        query = {j: float(self.queries[layer_index, position - p0, j]) for j in others}
        spare = m - oracle.ceil_div(self.top_k, b) if m < n_blocks else 0
        count = m - e - len(forced)
        ranked = ranked_part(history, query, count, self.share_ppm, self.merge, spare)
        rest = [j for j in others if j not in ranked]
        layer = self.layers[layer_index]
        rest.sort(key=lambda j: (oracle.priority(self.seed, self.sequence_id, layer, p0, j), j))
        return forced | ranked | set(rest[:e]), set(rest[:e])


@relaxed
@given(
    case=cases(poolings=("max",), reductions=("A1", "A1", "A2")),
    share=st.sampled_from(SHARES),
    merge=st.sampled_from(MERGES),
    family=st.sampled_from(QUERY_FAMILIES),
    seed=st.integers(0, 2**32 - 1),
)
def test_replay_equals_plain_loops(
    case: Any, share: float, merge: str, family: str, seed: int, tmp_path: Path
) -> None:
    """Drafts of 1 to 4 rows, jumps, ties, both masks: every decision and both averages."""
    trace, params = case
    scores, size = trace["scores"], params["block_size"]
    blocks = -(-scores.shape[3] // size)
    queries = family_scores(family, np.random.default_rng(seed), (*scores.shape[:3], blocks))
    facts = {name: trace[name] for name in ("ratio", "top_k", "layers", "sequence_id")}
    write_trace(
        tmp_path / "trace",
        torch.from_numpy(scores),
        torch.from_numpy(trace["positions"]),
        torch.from_numpy(trace["accepted"]),
        **facts,
        query_scores=torch.from_numpy(queries),
        query_block_size_slots=size,
        query_pooling="minmax",
    )
    renamed = {**params, "target_sparsity": params["sparsity"]}
    del renamed["sparsity"]
    config = SpinConfig(**renamed, query_share=share, query_merge=merge, query_pooling="minmax")
    replay(Trace(tmp_path / "trace"), config, dump=tmp_path / "dump")
    dump = load_file(tmp_path / "dump")

    referee = SharedOracle(n_slots=scores.shape[3], **facts, **params)
    referee.share_ppm, referee.merge = round(share * PPM), merge
    following = None
    for t, positions in enumerate(trace["positions"].tolist()):
        if positions[0] != following:
            referee.reset()
        following = positions[0] + int(trace["accepted"][t]) + 1
        referee.queries = queries[t]
        records = referee.step(positions, scores[t], int(trace["accepted"][t]))
        for layer, record in enumerate(records):
            assert set(np.flatnonzero(dump["blocks"][t, layer])) == record.blocks
            assert set(np.flatnonzero(dump["explored"][t, layer])) == record.explored
            assert dump["topk"][t, layer].tolist() == record.topk
            for row, chosen in enumerate(record.row_blocks):
                assert set(np.flatnonzero(dump["row_blocks"][t, layer, row])) == chosen
    np.testing.assert_array_equal(dump["v"], np.array(referee.v))
    np.testing.assert_array_equal(dump["d"], np.array(referee.d))


# ---------------------------------------------------------------- budgets and edges
def draw_scores(seed: int, ties: bool, shape: tuple[int, ...]) -> Tensor:
    family = "integer" if ties else "gaussian"
    return torch.from_numpy(family_scores(family, np.random.default_rng(seed), shape))


def select(
    history: Tensor,
    positions: Tensor,
    sparsity_ppm: int,
    exploration_ppm: int,
    top_k: int = 10,
    **query: Any,
) -> Any:
    count = len(positions)
    return select_blocks(
        history,
        positions,
        torch.ones(count, dtype=torch.bool),
        torch.arange(count),
        torch.arange(count) + 2,
        ratio=RATIO,
        block_size_slots=8,
        top_k=top_k,
        sparsity_ppm=sparsity_ppm,
        exploration_ppm=exploration_ppm,
        seed=3,
        **query,
    )


steps_of_drafts = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "ties": st.booleans(),
        "first": st.integers(0, 600),
        "row_count": st.integers(1, 4),
        "sparsity_ppm": st.sampled_from((0, 400_000, 700_000, 990_000)),
        "exploration_ppm": st.sampled_from((0, 50_000, 500_000, PPM)),
        "share_ppm": st.sampled_from([round(share * PPM) for share in SHARES]),
    }
)


@quick
@given(drawn=steps_of_drafts, merge=st.sampled_from(MERGES))
def test_budgets_at_every_share(drawn: dict[str, Any], merge: str) -> None:
    first, row_count = drawn["first"], drawn["row_count"]
    positions = (first + torch.arange(row_count)).repeat(2, 1)
    shape = (2, row_count, 20)
    history = draw_scores(drawn["seed"], drawn["ties"], shape)
    query = draw_scores(drawn["seed"] + 1, drawn["ties"], shape)
    budget = (drawn["sparsity_ppm"], drawn["exploration_ppm"])
    plain = select(history, positions, *budget)
    off = select(history, positions, *budget, query_scores=query, query_merge=merge)
    for name in ("blocks", "row_blocks", "explored_blocks"):
        assert torch.equal(getattr(off, name), getattr(plain, name))  # share 0

    share = {"query_scores": query, "query_share_ppm": drawn["share_ppm"], "query_merge": merge}
    shared = select(history, positions, *budget, **share)
    before, after = plain.row_blocks.sum(-1), shared.row_blocks.sum(-1)
    assert bool((after <= before).all())
    if merge != "union":
        assert torch.equal(after, before)
    # What a row does not see whole is its newest block or none, and never asked about.
    whole = ((positions + 1) // RATIO // 8).unsqueeze(-1)
    garbage = torch.where(torch.arange(20) < whole, query, INF)
    again = select(history, positions, *budget, **{**share, "query_scores": garbage})
    assert torch.equal(again.row_blocks, shared.row_blocks)

    only = select(history, positions, *budget, **{**share, "query_share_ppm": PPM})
    if merge != "max" or drawn["ties"]:  # scaled scores may tie where their differences are tiny
        instead = select(query, positions, *budget)
        assert torch.equal(only.row_blocks, instead.row_blocks)


@quick
@given(
    seed=st.integers(0, 2**31),
    ties=st.booleans(),
    ranked=st.integers(0, 12),
    share_ppm=st.sampled_from([0, *(round(share * PPM) for share in SHARES)]),
    spare=st.integers(0, 12),
)
def test_union_is_split_less_what_both_choose(
    seed: int, ties: bool, ranked: int, share_ppm: int, spare: int
) -> None:
    """Each ranking has its share, whole; with nothing in common, or to spare, it is `split`."""
    history, query = draw_scores(seed, ties, (1, 1, 14)), draw_scores(seed + 1, ties, (1, 1, 14))
    candidates = torch.ones(1, 1, 14, dtype=torch.bool)
    candidates[..., 3], candidates[..., 9] = False, False

    def choose(scores: Tensor, count: int, **shared: Any) -> Tensor:
        return rank_blocks(candidates, scores, torch.tensor([[count]]), **shared)

    by_query = -(-ranked * share_ppm // PPM)
    shares = choose(history, ranked - by_query), choose(query, by_query)
    shared = {"query_scores": query, "query_share_ppm": share_ppm, "spare_blocks": spare}
    split, union = (
        choose(history, ranked, query_merge=merge, **shared) for merge in ("split", "union")
    )
    repeated = int((shares[0] & shares[1]).sum())
    assert bool((union <= split).all())
    assert bool((shares[0] | shares[1] <= union).all())
    assert int(split.sum()) == ranked
    assert int(union.sum()) == ranked - min(repeated, spare)


@quick
@given(drawn=steps_of_drafts, mask_policy=st.sampled_from(("union", "row0")))
def test_a_step_with_union_keeps_no_block_that_split_does_not(
    drawn: dict[str, Any], mask_policy: str
) -> None:
    """Explored blocks and drafts included; it fills the top-k, and 0 is still dense."""
    first, row_count = drawn["first"], drawn["row_count"]
    positions = (first + torch.arange(row_count)).repeat(2, 1)
    history, query = (
        draw_scores(drawn["seed"] + n, drawn["ties"], (2, row_count, 20)) for n in range(2)
    )
    budget = (drawn["sparsity_ppm"], drawn["exploration_ppm"], 40)
    shared = {"query_scores": query, "query_share_ppm": drawn["share_ppm"]}
    split, union = (
        select(history, positions, *budget, **shared, query_merge=merge, mask_policy=mask_policy)
        for merge in ("split", "union")
    )
    for name in ("blocks", "row_blocks"):
        assert bool((getattr(union, name) <= getattr(split, name)).all())
    kept, present = union.row_blocks.sum(-1), -(-((positions + 1) // RATIO) // 8)
    assert bool((kept >= present.clamp(max=5)).all())  # 40 slots are five blocks
    dense = split.row_blocks.sum(-1) == present
    assert torch.equal(kept[dense], present[dense])
    if not drawn["sparsity_ppm"]:
        assert bool(dense.all())
    # Of one row, as many blocks are explored as ever.
    if row_count == 1:
        assert torch.equal(union.explored_blocks.sum(-1), split.explored_blocks.sum(-1))


def test_a_ranking_by_hand() -> None:
    """Eight candidates, four blocks; history likes 0 1 2 3, the query 3 2 5 6."""
    candidates = torch.ones(1, 1, 8, dtype=torch.bool)
    history = torch.tensor([[[9.0, 8, 7, 6, 0, 0, 0, 0]]])
    query = torch.tensor([[[0.0, 0, 2, 4, 0, 1, 1, -1]]])

    def chosen(merge: str, share_ppm: int, wanted: int = 4, spare: int = 8) -> list[int]:
        mask = rank_blocks(
            candidates,
            history,
            torch.tensor([[wanted]]),
            query_scores=query,
            query_share_ppm=share_ppm,
            query_merge=merge,
            spare_blocks=torch.tensor([[spare]]),
        )
        return mask[0, 0].nonzero().squeeze(-1).tolist()

    assert chosen("split", 500_000) == [0, 1, 2, 3]
    assert chosen("split", 500_001) == [0, 2, 3, 5]  # rounded up: three for the query
    assert chosen("split", 1) == [0, 1, 2, 3]
    assert chosen("split", 1, wanted=1) == [3]  # at least one block for the query
    assert chosen("split", 1, wanted=0) == []
    assert chosen("union", 500_000) == [0, 1, 2, 3]
    assert chosen("union", 250_000) == [0, 1, 2, 3]
    assert chosen("union", 750_000) == [0, 2, 3, 5]
    assert chosen("union", 500_000, wanted=6) == [0, 1, 2, 3, 5]  # 2 is both's, not made up for
    assert chosen("split", 500_000, wanted=6) == [0, 1, 2, 3, 5, 6]
    assert chosen("union", 500_000, wanted=6, spare=0) == [0, 1, 2, 3, 5, 6]
    assert chosen("union", 500_000, wanted=8) == [0, 1, 2, 3, 5, 6]
    assert chosen("union", 500_000, wanted=8, spare=1) == [0, 1, 2, 3, 4, 5, 6]
    # Weighted: history 4.5/9, 4/9, ..; the query (x + 1) / 5 / 2
    assert chosen("max", 500_000, wanted=2) == [0, 3]
    assert chosen("max", 900_000, wanted=2) == [2, 3]


def test_without_a_share_nothing_is_scaled() -> None:
    """On a scale that begins at -1e30, 1 and 3 would tie."""
    history = torch.tensor([[[-1e30, 1.0, 2.0, 3.0]]])
    candidates = torch.ones(1, 1, 4, dtype=torch.bool)
    query = {"query_scores": torch.zeros(1, 1, 4), "query_merge": "max"}
    found = rank_blocks(candidates, history, torch.tensor([[2]]), query_share_ppm=0, **query)
    assert found[0, 0].tolist() == [False, False, True, True]


@pytest.mark.parametrize("merge", MERGES)
def test_scores_that_are_no_numbers(merge: str) -> None:
    """NaN and -inf rank below all numbers, and no block is chosen that is no candidate."""
    candidates = torch.tensor([[[False, True, True, True, True, True, False]]])
    query = torch.tensor([[[INF, NAN, -INF, -3.0, 2.0, 1.0, INF]]])
    for count, wanted in ((1, [4]), (2, [4, 5]), (4, [1, 3, 4, 5]), (5, [1, 2, 3, 4, 5])):
        if merge == "max" and count == 4:
            wanted = [1, 2, 4, 5]  # the lowest number is at 0 too
        found = rank_blocks(
            candidates,
            torch.zeros(1, 1, 7),
            torch.tensor([[count]]),
            query_scores=query,
            query_share_ppm=PPM,
            query_merge=merge,
        )
        assert found[0, 0].nonzero().squeeze(-1).tolist() == wanted


# ---------------------------------------------------------------- pooled keys
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooled_keys_by_loops(dtype: torch.dtype) -> None:
    keys = noise(1, 2, 45, 5).to(dtype)
    mean = pool_keys(keys, block_size_slots=8, query_pooling="mean")
    ends = pool_keys(keys, block_size_slots=8, query_pooling="minmax")
    assert (mean.shape, ends.shape) == ((2, 5, 1, 5), (2, 5, 2, 5))
    assert mean.dtype == ends.dtype == dtype
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for s, j, c in np.ndindex(2, 5, 5):
        values = [float(keys[s, i, c]) for i in range(8 * j, 8 * j + 8)]
        assert float(mean[s, j, 0, c]) == pytest.approx(sum(values) / 8, abs=tolerance)
        assert ends[s, j, :, c].tolist() == [min(values), max(values)]


@quick
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=5).map(sorted),
    pooling=st.sampled_from(POOLINGS),
)
def test_pooled_keys_grow_with_the_sequence(lengths: list[int], pooling: str) -> None:
    """Block by block as slots arrive, or all at once: the same bits."""
    keys = noise(2, 2, 70, 6)
    known = None
    for length in lengths:
        known = pool_keys(keys[:, :length], block_size_slots=8, query_pooling=pooling, known=known)
    at_once = pool_keys(keys[:, : lengths[-1]], block_size_slots=8, query_pooling=pooling)
    assert torch.equal(known, at_once)


def test_a_known_block_is_not_pooled_again() -> None:
    keys = noise(3, 1, 24, 4)
    known = torch.full((1, 2, 1, 4), 7.0)
    grown = pool_keys(keys, block_size_slots=8, query_pooling="mean", known=known)
    assert torch.equal(grown[:, :2], known)
    assert torch.equal(
        grown[:, 2:], pool_keys(keys, block_size_slots=8, query_pooling="mean")[:, 2:]
    )


def test_scores_of_blocks_by_loops() -> None:
    query, weights, keys = noise(4, 2, 3, 4, 6), noise(5, 2, 3, 4), noise(6, 2, 16, 6)
    mean = pool_keys(keys, block_size_slots=8, query_pooling="mean")
    ends = pool_keys(keys, block_size_slots=8, query_pooling="minmax")
    by_mean, by_ends = score_blocks(query, weights, mean), score_blocks(query, weights, ends)
    assert by_mean.shape == by_ends.shape == (2, 3, 2)
    assert by_mean.dtype == by_ends.dtype == torch.float32
    for s, r, j in np.ndindex(2, 3, 2):
        middle = bound = 0.0
        for h in range(4):
            q, w = query[s, r, h].tolist(), float(weights[s, r, h])
            low, high = ends[s, j].tolist()
            pairs = [(x * a, x * b) for x, a, b in zip(q, low, high, strict=True)]
            most, least = sum(map(max, pairs)), sum(map(min, pairs))
            bound += w * max(most if w > 0 else least, 0.0)
            dot = sum(x * k for x, k in zip(q, mean[s, j, 0].tolist(), strict=True))
            middle += w * max(dot, 0.0)
        assert float(by_mean[s, r, j]) == pytest.approx(middle, abs=1e-5)
        assert float(by_ends[s, r, j]) == pytest.approx(bound, abs=1e-5)


@quick
@given(seed=st.integers(0, 2**31), spread=st.sampled_from((0.0, 0.1, 1.0)))
def test_minmax_bounds_every_slot(seed: int, spread: float) -> None:
    """Weights of both signs; without any spread both poolings are the score itself."""
    query, weights = noise(seed, 1, 2, 4, 6), noise(seed + 1, 1, 2, 4)
    middle = noise(seed + 2, 1, 5, 1, 6)
    keys = (middle + spread * noise(seed + 3, 1, 5, 8, 6)).flatten(1, 2)
    scores = score_slots(
        query,
        keys,
        weights,
        torch.ones(1, 5, dtype=torch.bool),
        torch.tensor([[39, 39]]),
        ratio=1,
        block_size_slots=8,
    )
    best = scores.unflatten(-1, (5, 8)).amax(-1)
    for pooling in POOLINGS:
        pooled = pool_keys(keys, block_size_slots=8, query_pooling=pooling)
        found = score_blocks(query, weights, pooled)
        if pooling == "minmax":
            assert bool((found >= best - 1e-4).all())
        if not spread:
            torch.testing.assert_close(found, best, atol=1e-4, rtol=1e-5)


def test_bytes_of_a_step() -> None:
    """8,192 slots in 512 blocks of 16, 133 kept; pooled keys of the 510 between the ends."""
    fixed = {"block_size_slots": 16, "key_bytes": 132}
    assert key_bytes_read(8192, 133 * 16, **fixed) == 133 * 16 * 132
    assert key_bytes_read(8192, 133 * 16, **fixed, query_pooling="mean") == (133 * 16 + 510) * 132
    assert key_bytes_read(8192, 0, **fixed, query_pooling="minmax") == 2 * 510 * 132
    assert key_bytes_read(33, 33, **fixed, query_pooling="mean") == (33 + 1) * 132
    for few in (0, 1, 16, 17, 32):
        assert key_bytes_read(few, few, **fixed, query_pooling="mean") == few * 132


# ---------------------------------------------------------------- step and replay
SHARED = SpinConfig(**{**CONFIG.to_dict(), "query_share": 0.5})
POSITIONS = [[160, 161], [42, 43]]


def test_a_step_takes_scores_of_whole_blocks_or_more() -> None:
    """Positions up to 161 see 40 slots, five whole blocks of the capacity's six."""
    entries = len(LAYERS) * 2
    scores = noise(7, entries, 2, BLOCKS)
    plans = [
        make(SHARED).plan(LAYERS, [1, 2], rows(*POSITIONS), scores[..., :width])
        for width in (5, BLOCKS)
    ]
    assert torch.equal(plans[0].selection.row_blocks, plans[1].selection.row_blocks)
    assert plans[0].query_scores is not None
    assert make(CONFIG).plan(LAYERS, [1, 2], rows(*POSITIONS)).query_scores is None


@pytest.mark.parametrize(
    "scores",
    [
        torch.zeros(6, 2, 4),
        torch.zeros(6, 2, 7),
        torch.zeros(6, 1, 5),
        torch.zeros(3, 2, 5),
        torch.zeros(6, 5),
        torch.zeros(6, 2, 5, dtype=torch.float64),
    ],
    ids=lambda x: f"{x.dtype} {list(x.shape)}",
)
def test_scores_that_do_not_fit_are_refused(scores: Tensor) -> None:
    with pytest.raises(SpinError) as caught:
        make(SHARED).plan(LAYERS, [1, 2], rows(*POSITIONS), scores)
    given = f"'{scores.dtype} {list(scores.shape)}'"
    assert str(caught.value) == f"query_scores: got {given}, allowed: float32 [6, 2, 5 .. 6]"


def test_scores_are_given_exactly_when_there_is_a_share() -> None:
    with pytest.raises(SpinError, match=r"^query_scores: got None, allowed: .* query_share of 0.5"):
        make(SHARED).plan(LAYERS, [1, 2], rows(*POSITIONS))
    with pytest.raises(SpinError, match=r"^query_scores: got 'a tensor', allowed: None, with"):
        make(CONFIG).plan(LAYERS, [1, 2], rows(*POSITIONS), torch.zeros(6, 2, 5))


def write(path: Path, **query: Any) -> Trace:
    positions = 150 + torch.arange(5).unsqueeze(1)
    accepted = torch.zeros(5, dtype=torch.int64)
    facts = {"ratio": RATIO, "top_k": TOP_K, "layers": [2], "sequence_id": 1}
    write_trace(path, noise(8, 5, 1, 1, SLOTS), positions, accepted, **facts, **query)
    return Trace(path)


def test_a_trace_without_the_querys_scores_is_refused(tmp_path: Path) -> None:
    without = write(tmp_path / "without")
    with pytest.raises(SpinError) as caught:
        replay(without, SHARED)
    assert str(caught.value) == (
        "query_share: got '0.5 with blocks of 8 by mean', "
        "allowed: 0, or what the trace has query_scores of: none"
    )
    query = {"query_scores": noise(9, 5, 1, 1, BLOCKS), "query_block_size_slots": 8}
    other = write(tmp_path / "other", **query, query_pooling="minmax")
    with pytest.raises(SpinError, match=r"query_scores of: blocks of 8 slots pooled by minmax$"):
        replay(other, SHARED)
    assert replay(other, CONFIG) == replay(without, CONFIG)  # not read without a share
    assert replay(other, SHARED, policy="streaming") == replay(without, CONFIG, policy="streaming")


def test_a0_has_no_budget_to_share(tmp_path: Path) -> None:
    query = {"query_scores": noise(9, 5, 1, 1, BLOCKS), "query_block_size_slots": 8}
    trace = write(tmp_path / "trace", **query)
    config = SpinConfig(**{**SHARED.to_dict(), "reduction": "A0"})
    with pytest.raises(SpinError, match=r"^query_share: got 0.5, allowed: 0 with reduction A0"):
        replay(trace, config)


def test_the_kernels_refuse_a_share() -> None:
    state = GpuState(LAYERS, sequences=1, slots=SLOTS, dtype=torch.float32, device="cpu")
    with pytest.raises(SpinError, match=r"^query_share: got 0.5, allowed: 0: no kernel"):
        GpuStep(SHARED, state, ratio=RATIO, sequences=1)
    without = SpinConfig(**{**CONFIG.to_dict(), "query_merge": "union"})  # nothing to merge
    GpuStep(without, state, ratio=RATIO, sequences=1)
    GpuStep(CONFIG, state, ratio=RATIO, sequences=1)
