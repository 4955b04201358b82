# SPDX-License-Identifier: Apache-2.0
"""A target sparsity for each layer: its field, its budgets, and everything that runs with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_cli import Capture, call, make_trace, save
from safetensors.numpy import load_file
from steps import CONFIG, LAYERS, RATIO, SLOTS, make, noise, referee, rows
from strategies import cases, write_trace

from spin_trtllm import SpinConfig, SpinError
from spin_trtllm.geometry import block_budget, to_ppm
from spin_trtllm.hosts.tensorrt.nodes import node_fields
from spin_trtllm.layer_sparsity import read_layer_sparsity, write_layer_sparsity
from spin_trtllm.replay.policies import POLICIES, make_policy
from spin_trtllm.replay.run import replay
from spin_trtllm.replay.trace import Trace

NAN, INF = float("nan"), float("inf")
RHOS = (0.0, 1e-6, 0.15, 0.4, 0.65, 0.999999)
OWN = {3: 0.8, 12: 0.0}  # of steps.LAYERS; 7 keeps the target of all
quick = settings(max_examples=150, deadline=None, derandomize=True)
relaxed = settings(
    quick, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
targets = st.dictionaries(st.integers(0, 2**20), st.floats(0.0, 0.999999), max_size=6)


def refusal(given: Any) -> str:
    with pytest.raises(SpinError) as caught:
        SpinConfig(layer_sparsity=given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- the field
@quick
@given(given=targets)
def test_every_way_to_write_it_is_one(given: dict[int, float]) -> None:
    stored = read_layer_sparsity(given)
    assert stored == tuple(sorted(given.items()))
    as_json = json.loads(json.dumps(given))
    for same in (stored, dict(reversed(given.items())), as_json, write_layer_sparsity(stored)):
        assert read_layer_sparsity(same) == stored
    config = SpinConfig(layer_sparsity=given)
    assert hash(config) == hash(SpinConfig(layer_sparsity=stored))
    assert SpinConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert SpinConfig.from_environment(config.to_environment()) == config


def test_text_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = SpinConfig(layer_sparsity={1: 0.5, 3: 0.25})
    assert expected.layer_sparsity == ((1, 0.5), (3, 0.25))
    assert SpinConfig(layer_sparsity=" 3:.25, 1: 0.5 ") == expected
    assert expected.sparsity_text == "0.4 (layers 1:0.5,3:0.25)"
    assert (SpinConfig().sparsity_text, SpinConfig(layer_sparsity=" ")) == ("0.4", SpinConfig())
    file = tmp_path / "spin.yaml"
    file.write_text("spin:\n  layer_sparsity:\n    3: 0.25\n    1: 0.5\n")
    assert SpinConfig.from_yaml(file) == expected
    monkeypatch.setenv("TLLM_SPIN_LAYER_SPARSITY", "1:0.5,3:0.25")
    assert SpinConfig.from_environment() == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "layer_sparsity: got None, allowed: decoder layers with a number in [0, 1) each"),
        (0.5, "layer_sparsity: got 0.5, allowed: decoder layers"),
        ([[1, 0.5]], "layer_sparsity: got [[1, 0.5]], allowed: decoder layers"),
        ((1, 0.5), "layer_sparsity: got (1, 0.5), allowed: decoder layers"),
        ("half", "layer_sparsity: got 'half', allowed: decoder layers"),
        ("1:0.5,", "layer_sparsity: got '', allowed: decoder layers"),
        ("1:", "layer_sparsity: got '1:', allowed: a number after 1:"),
        ("1:0.5:3", "layer_sparsity: got '1:0.5:3', allowed: a number after 1:"),
        ("x:0.5", "layer_sparsity: layer: got 'x', allowed: a decoder-layer index in 0 .. 1048576"),
        ({-1: 0.5}, "layer_sparsity: layer: got -1, allowed: a decoder-layer index"),
        ({True: 0.5}, "layer_sparsity: layer: got True, allowed: a decoder-layer index"),
        ({1.0: 0.5}, "layer_sparsity: layer: got 1.0, allowed: a decoder-layer index"),
        ({2**20 + 1: 0.5}, "layer_sparsity: layer: got 1048577, allowed: a decoder-layer index"),
        ("99999999:0.5", "layer_sparsity: layer: got '99999999', allowed: a decoder-layer index"),
        ({3: 1}, "layer_sparsity: layer 3: got 1, allowed: a number in [0, 1)"),
        ({3: -1e-9}, "layer_sparsity: layer 3: got -1e-09, allowed: a number in [0, 1)"),
        ({3: NAN}, "layer_sparsity: layer 3: got nan, allowed: a number in [0, 1)"),
        ("3:nan", "layer_sparsity: layer 3: got nan, allowed: a number in [0, 1)"),
        ({3: False}, "layer_sparsity: layer 3: got False, allowed: a number in [0, 1)"),
        ({3: "0.5"}, "layer_sparsity: layer 3: got '0.5', allowed: a number in [0, 1)"),
        ({3: 10**400}, "layer_sparsity: layer 3: got 1000"),
        ({3: 0.9999996}, "layer_sparsity: layer 3: got 0.9999996, allowed: a number in [0, 1) in"),
        ("1:0.5,01:0.5", "layer_sparsity: got 'layer 1 twice', allowed: each layer once"),
        ({1: 0.5, "1": 0.5}, "layer_sparsity: got 'layer 1 twice', allowed: each layer once"),
    ],
    ids=str,
)
def test_refused(given: Any, message: str) -> None:
    assert refusal(given).startswith(message)


def test_one_target_for_all_takes_the_place_of_each() -> None:
    config = SpinConfig(layer_sparsity=OWN, target_sparsity=0.3)
    assert [config.layer_ppm(layer) for layer in LAYERS] == [800_000, 300_000, 0]
    assert config.at_sparsity(0.5) == SpinConfig(target_sparsity=0.5)


# ---------------------------------------------------------------- budgets
@quick
@given(
    blocks=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    ppm=st.lists(st.sampled_from([to_ppm(rho) for rho in RHOS]), min_size=1, max_size=4),
    top_k=st.integers(1, 300),
    exploration_ppm=st.sampled_from((0, 50_000, 1_000_000)),
)
def test_budgets_of_layers_are_the_referees(
    blocks: list[int], ppm: list[int], top_k: int, exploration_ppm: int
) -> None:
    found = block_budget(
        torch.tensor(blocks).expand(len(ppm), -1),
        top_k=top_k,
        block_size_slots=8,
        sparsity_ppm=torch.tensor(ppm).unsqueeze(-1),
        exploration_ppm=exploration_ppm,
    )
    for layer, rho_ppm in enumerate(ppm):
        for row, count in enumerate(blocks):
            kept, forced, explored = (
                oracle.budget(count, top_k, 8, rho_ppm, exploration_ppm, explore=True)
                if count
                else (0, set(), 0)
            )
            shares = (found.kept_blocks, found.forced_blocks, found.explored_blocks)
            given = [int(torch.as_tensor(share)[layer, row]) for share in shares]
            assert given == [kept, len(forced), explored]


class LayeredOracle(oracle.OracleSequence):
    """SPEC 4 with another rho in some layers."""

    own: dict[int, float]

    def _select_row(self, layer_index: int, position: int, p0: int) -> tuple[set[int], set[int]]:
        everyone = self.rho_ppm
        if self.layers[layer_index] in self.own:
            self.rho_ppm = round(self.own[self.layers[layer_index]] * 1e6)
        try:
            return super()._select_row(layer_index, position, p0)
        finally:
            self.rho_ppm = everyone


@relaxed
@given(
    case=cases(poolings=("max",), reductions=("A1",)),
    rhos=st.lists(st.sampled_from((None, *RHOS)), min_size=3, max_size=3),
)
def test_replay_equals_the_oracle(case: Any, rhos: list[float | None], tmp_path: Path) -> None:
    """Drafts of 1 to 4 rows, jumps, ties, both masks: every decision and both averages."""
    trace, params = case
    own = {n: rho for n, rho in zip(trace["layers"], rhos, strict=False) if rho is not None}
    write_trace(tmp_path / "trace", trace)
    renamed = {**params, "target_sparsity": params["sparsity"], "layer_sparsity": own}
    del renamed["sparsity"]
    replay(Trace(tmp_path / "trace"), SpinConfig(**renamed), dump=tmp_path / "dump")
    dump = load_file(tmp_path / "dump")

    facts = {name: trace[name] for name in ("ratio", "top_k", "layers", "sequence_id")}
    referee = LayeredOracle(n_slots=trace["scores"].shape[3], **facts, **params)
    referee.own, following = own, None
    for t, positions in enumerate(trace["positions"].tolist()):
        if positions[0] != following:
            referee.reset()
        following = positions[0] + int(trace["accepted"][t]) + 1
        records = referee.step(positions, trace["scores"][t], int(trace["accepted"][t]))
        for layer, record in enumerate(records):
            assert set(np.flatnonzero(dump["blocks"][t, layer])) == record.blocks
            assert set(np.flatnonzero(dump["explored"][t, layer])) == record.explored
            assert dump["topk"][t, layer].tolist() == record.topk
            for row, chosen in enumerate(record.row_blocks):
                assert set(np.flatnonzero(dump["row_blocks"][t, layer, row])) == chosen
    np.testing.assert_array_equal(dump["v"], np.array(referee.v))
    np.testing.assert_array_equal(dump["d"], np.array(referee.d))


def test_the_layers_of_a_batch_do_not_mix() -> None:
    """Two sequences in a plan of all layers, and layer by layer, against one referee each."""
    config = replace(CONFIG, layer_sparsity=OWN)
    together, apart = make(config), make(config)
    referees = {n: referee(n) for n in (1, 2)}
    for each in referees.values():
        each.__class__, each.own = LayeredOracle, OWN
    for t in range(4):
        positions = rows([100 + t], [160 + t])
        scores = noise(t, 2 * len(LAYERS), 1, SLOTS)
        plan = together.plan(LAYERS, [1, 2], positions)
        together.observe(plan, scores, torch.zeros(6, dtype=torch.int64))
        records = {
            n: referees[n].step(positions[n - 1].tolist(), scores[n - 1 :: 2].numpy(), 0)
            for n in (1, 2)
        }
        for place, layer in enumerate(LAYERS):
            alone = apart.plan([layer], [1, 2], positions)
            own = slice(2 * place, 2 * place + 2)
            apart.observe(alone, scores[own], torch.zeros(2, dtype=torch.int64))
            assert torch.equal(alone.selection.blocks, plan.selection.blocks[own])
            for n in (1, 2):
                kept = plan.selection.blocks[2 * place + n - 1].nonzero().squeeze(-1).tolist()
                assert set(kept) == records[n][place].blocks


# ---------------------------------------------------------------- policies and commands
SINGLE = ("--block-size", "8", "--sparsity", "0.5")


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "index_cache"])
def test_every_policy_keeps_a_layers_budget(policy: str, tmp_path: Path) -> None:
    """A layer decides as it does where all layers have its target."""
    path = save(tmp_path, make_trace(steps=12, layers=(2, 4, 6), first=150, rows=2))
    base = SpinConfig(block_size=8, target_sparsity=0.5, exploration=0.2)
    mixed, dumps = {2: 0.7, 6: 0.1}, {}
    for name, config in {
        "mixed": replace(base, layer_sparsity=mixed),
        **{rho: base.at_sparsity(rho) for rho in (0.7, 0.5, 0.1)},
    }.items():
        replay(Trace(path), config, policy=policy, dump=tmp_path / "dump")
        dumps[name] = load_file(tmp_path / "dump")
    for place, rho in enumerate((0.7, 0.5, 0.1)):
        for tensor in ("blocks", "explored", "topk"):
            expected = dumps[rho][tensor][:, place]
            np.testing.assert_array_equal(dumps["mixed"][tensor][:, place], expected)
    assert len({dumps[rho]["blocks"].sum() for rho in (0.7, 0.5, 0.1)}) == 3


def test_index_cache_takes_the_mean(tmp_path: Path, capsys: Capture) -> None:
    path = save(tmp_path, make_trace(steps=5, layers=(0, 2, 4, 6), first=70))
    options = ["replay", path, "--policy", "index_cache", "--block-size", 8, "--json"]
    code, out, _ = call(capsys, *options, "--layer-sparsity", "0:0.95,2:0.65,4:0.8,6:0.8")
    assert code == 0
    assert json.loads(out)["realized_sparsity"] == pytest.approx(3 / 4)  # one of 4: n = 1 / 0.2


def test_realized_sparsity_is_that_of_the_layers(tmp_path: Path, capsys: Capture) -> None:
    """20 blocks and a top-k of 6 slots: 16, 10 and 2 are skipped."""
    trace = make_trace(steps=3, layers=(2, 4, 6), first=152, rows=1)
    path = save(tmp_path, trace)
    options = ["replay", path, *SINGLE, "--layer-sparsity", "2:0.8,6:0.1", "--json"]
    code, out, _ = call(capsys, *options)
    assert code == 0
    assert json.loads(out)["realized_sparsity"] == pytest.approx((16 + 10 + 2) / 60)


# ---------------------------------------------------------------- refusals
def test_layers_without_an_indexer_are_refused(tmp_path: Path) -> None:
    message = r"^layer_sparsity: layer: got 5, allowed: indexer layers \[3, 7, 12\]$"
    with pytest.raises(SpinError, match=message):
        make(replace(CONFIG, layer_sparsity={3: 0.1, 5: 0.5}))
    trace = Trace(save(tmp_path, make_trace(steps=2, layers=(2, 4))))
    for policy in POLICIES:
        with pytest.raises(SpinError, match=r"^layer_sparsity: layer: got 5, allowed: .*\[2, 4\]"):
            make_policy(policy, SpinConfig(layer_sparsity={5: 0.5}), trace)


def test_a0_has_no_budget_of_a_layer(tmp_path: Path) -> None:
    trace = Trace(save(tmp_path, make_trace(steps=2, layers=(2, 4))))
    config = SpinConfig(block_size=8, reduction="A0", layer_sparsity={2: 0.5})
    with pytest.raises(SpinError, match=r"^layer_sparsity: got {2: 0.5}, allowed: {} with .* A0"):
        replay(trace, config)


def test_a_rank_has_the_targets_of_its_layers() -> None:
    config = replace(CONFIG, layer_sparsity=OWN)
    assert config.of_layers((12, 13)) == replace(CONFIG, layer_sparsity={12: 0.0})
    assert config.of_layers(()) == CONFIG


def test_a_node_has_its_layers_target() -> None:
    config = replace(CONFIG, layer_sparsity=OWN, block_size=64)
    for node in ("SpinIndexer", "SpinPredictBlocks"):
        fields = [node_fields(node, config, layer=n, ratio=RATIO, slots=640) for n in LAYERS]
        assert [each["sparsity_ppm"] for each in fields] == [800_000, 500_000, 0]
