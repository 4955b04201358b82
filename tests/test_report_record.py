# SPDX-License-Identifier: Apache-2.0
"""Records of replays: equal to `replay` to the last bit, and to the referee."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import strategies
import torch
from hypothesis import HealthCheck, given, settings
from replay_cli import make_trace, save
from report_cases import referee, regroup, single_rows

from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.replay.policies import POLICIES
from spin_trtllm.replay.run import replay
from spin_trtllm.replay.trace import Trace, write_trace
from spin_trtllm.report.drafts import DraftedTrace, Drafts
from spin_trtllm.report.record import Record, measure

CONFIG = SpinConfig(block_size=8, target_sparsity=0.5)
FIGURES = ("mean_miss", "p99_miss", "p99_miss_layer_mean", "realized_sparsity")


@given(case=strategies.cases(max_cells=4_000))
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_figures_are_those_of_replay(tmp_path: Path, case: tuple[dict, dict]) -> None:
    trace, parameters = case
    options = {**parameters, "target_sparsity": parameters["sparsity"]}
    del options["sparsity"]
    config = SpinConfig(**options)
    opened = Trace(save(tmp_path, trace))
    predictions = config.reduction != "A2"
    expected = replay(opened, config, predictions=predictions)
    assert measure(opened, config, predictions=predictions).figures() == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_figures_of_every_policy_are_those_of_replay(tmp_path: Path, policy: str) -> None:
    trace = Trace(save(tmp_path, make_trace(steps=20, layers=(1, 2, 5), jumps=(7,), ratio=4)))
    found = measure(trace, CONFIG, policy=policy).figures()
    assert found == replay(trace, CONFIG, policy=policy)
    assert found["mean_miss"] is not None


@pytest.mark.parametrize("steps", [0, 1])
def test_a_trace_without_warm_steps_has_no_figures(tmp_path: Path, steps: int) -> None:
    trace = Trace(save(tmp_path, make_trace(steps=steps)))
    record = measure(trace, CONFIG, predictions=True)
    assert record.miss.shape == (steps, 2, 3)
    assert record.figures() == replay(trace, CONFIG, predictions=True)
    assert record.figures()["mean_miss"] is None


def test_record_is_read_back_as_it_was(tmp_path: Path) -> None:
    record = measure(Trace(save(tmp_path, make_trace())), CONFIG, predictions=True)
    record.save(tmp_path / "record")
    again = Record.load(tmp_path / "record")
    for name in ("warm", "sparsity", "miss", "pearson", "recall"):
        np.testing.assert_array_equal(getattr(again, name), getattr(record, name))
        assert getattr(again, name).dtype == getattr(record, name).dtype


def test_misses_are_those_of_the_referee(tmp_path: Path) -> None:
    trace = make_trace(steps=20, jumps=(7,))
    found = measure(Trace(save(tmp_path, trace)), CONFIG).figures()
    expected = referee(trace)
    assert {k: found[k] for k in FIGURES} == pytest.approx({k: expected[k] for k in FIGURES})
    assert found["mean_miss"] > 0


# ---------------------------------------------------------------- drafts
def test_drafts_are_consecutive_rows_of_the_trace(tmp_path: Path) -> None:
    trace = single_rows(steps=40, seed=3)
    drafted = DraftedTrace(save(tmp_path, trace), Drafts(tokens=3, acceptance=0.5))
    accepted = drafted.accepted.tolist()
    starts, start, jump = [], 0, 20
    for count in accepted:  # the first stretch has rows 0 .. 19, the second 20 .. 39
        if start < jump <= start + 3:
            start = jump
        starts.append(start)
        start += count + 1
    expected = regroup(trace, 3, starts, accepted)
    assert starts[-1] + 3 < 40
    assert start + 3 >= 40, "rows were left over"
    np.testing.assert_array_equal(drafted.positions_tokens.numpy(), expected["positions"])
    assert {0, 1, 3} <= set(accepted) <= {0, 1, 2, 3}
    found = measure(drafted, CONFIG).figures()
    figures = referee(expected)
    assert {k: found[k] for k in FIGURES} == pytest.approx({k: figures[k] for k in FIGURES})
    assert (found["steps"], found["cold_steps"]) == (len(starts), 2)


def test_drafts_keep_what_the_query_said(tmp_path: Path) -> None:
    trace = single_rows(steps=40, seed=3)
    queries = torch.randn(40, 2, 1, 13)
    path = tmp_path / "t.trace"
    write_trace(
        path,
        torch.from_numpy(trace["scores"]),
        torch.from_numpy(trace["positions"]),
        torch.from_numpy(trace["accepted"]),
        **{key: trace[key] for key in ("ratio", "top_k", "layers", "sequence_id")},
        query_scores=queries,
        query_block_size_slots=8,
    )
    first = next(iter(DraftedTrace(path, Drafts(tokens=3, acceptance=0.5)))).query_scores
    assert first is not None
    assert torch.equal(first[..., :7], queries[:4, :, 0, :7].transpose(0, 1))
    config = replace(CONFIG, query_share=0.5)
    assert measure(DraftedTrace(path, Drafts(3, 0.5)), config).figures()["mean_miss"] > 0


@pytest.mark.parametrize(("acceptance", "accepted"), [(0.0, 0), (1.0, 3)])
def test_certain_acceptance(tmp_path: Path, acceptance: float, accepted: int) -> None:
    path = save(tmp_path, single_rows(steps=40, seed=3))
    drafted = DraftedTrace(path, Drafts(tokens=3, acceptance=acceptance))
    assert set(drafted.accepted.tolist()) == {accepted}
    assert len(drafted) == {0: 2 * 17, 3: 2 * 5}[accepted]


def test_a_draft_is_accepted_up_to_its_first_refusal(tmp_path: Path) -> None:
    trace = single_rows(steps=4_000, seed=0)
    trace["positions"] = np.arange(4_000)[:, None]
    trace["scores"] = np.zeros((4_000, 2, 1, 2), dtype=np.float32)
    path = save(tmp_path, {**trace, "ratio": 2_000})
    accepted = DraftedTrace(path, Drafts(tokens=3, acceptance=0.5)).accepted.double()
    assert accepted.mean() == pytest.approx(1 / 2 + 1 / 4 + 1 / 8, abs=0.06)


@pytest.mark.parametrize(
    ("positions", "starts"),
    [
        ([60, 61, 62, 63, 61, 62], [60, 61, 62, 61]),
        # One more row is dropped: a step that goes on at 63 would not be seen as a reset.
        ([60, 61, 62, 63, 63, 64, 65], [60, 61, 62, 64]),
    ],
)
def test_a_jump_stays_a_reset(tmp_path: Path, positions: list[int], starts: list[int]) -> None:
    trace = single_rows(steps=len(positions), seed=0)
    trace["positions"] = np.array(positions)[:, None]
    trace["scores"] = np.zeros((len(positions), 2, 1, 70), dtype=np.float32)
    drafted = DraftedTrace(save(tmp_path, trace), Drafts(tokens=1, acceptance=0.0))
    assert drafted.positions_tokens[:, 0].tolist() == starts
    assert measure(drafted, CONFIG).figures()["cold_steps"] == 2


def test_drafts_need_single_rows(tmp_path: Path) -> None:
    path = save(tmp_path, make_trace(rows=3))
    with pytest.raises(SpinError, match=r"rows: got 3, allowed: 1"):
        DraftedTrace(path, Drafts(tokens=3, acceptance=0.5))
