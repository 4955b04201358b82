# SPDX-License-Identifier: Apache-2.0
"""Traces of a hooked host hold its dense scores, and replay to what it did; nothing else changes.

`test_trtllm_capture_limits` has what may go wrong.
"""

from __future__ import annotations

import gc
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trtllm_double
from click.testing import CliRunner
from hook_batch import HostBatch
from hook_helpers import SMALL, engine_of, hook
from hook_record import Record
from hook_witness import engine_behind
from trtllm_scheduler import Serving

from spin_trtllm.commands.replay import command
from spin_trtllm.config import SpinConfig
from spin_trtllm.hosts.trtllm import indexer as hooks
from spin_trtllm.hosts.trtllm.capture_settings import CaptureSettings
from spin_trtllm.hosts.trtllm.counters import Counters
from spin_trtllm.replay.run import replay
from spin_trtllm.replay.trace import Trace

LARGE = SMALL | {"block_size": 32}
PAGES = {"tokens_per_block": 128, "max_seq_len": 2048, "max_batch_size": 3}


def settings(folder: Path, **changes: Any) -> CaptureSettings:
    return CaptureSettings(folder, **{"sequences": 1000, "steps": 12} | changes)


def traces(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.parametrize(
    ("config", "options", "backend"),
    [
        (SMALL, {}, "host"),
        (SMALL, {"drafts": 2}, "host"),
        (SMALL | {"target_sparsity": 0.0}, {"drafts": 1}, "host"),
        (SMALL, {"drafts": 1, "phases": True}, "host"),
        (SMALL | {"block_size": 16}, {"ratio": 1, "max_seq_len": 192}, "host"),
        (LARGE, {**PAGES, "drafts": 1}, "fused"),
        (SMALL | {"layer_sparsity": {2: 0.8, 4: 0.0}}, {}, "host"),
        (SMALL | {"update_policy": "row0", "mask_policy": "row0"}, {"drafts": 2}, "host"),
    ],
)
def test_traces_of_a_random_life_replay_to_what_was_done(
    config: dict[str, Any], options: dict[str, Any], backend: str, tmp_path: Path
) -> None:
    """Requests join, move, wait, prefill again, end, draft and are padded; lanes change hands."""
    plain, batch = HostBatch(2, **options), HostBatch(2, **options)
    hook(config, backend)
    want = [plain.random_step() for _ in range(80)]
    hooks.unpatch()
    counters = hook(config, backend, capture=settings(tmp_path, steps=6))
    record = Record(config)
    for expected in want:
        step = batch.random_step()
        assert step.selected.equal(expected.selected)  # a capture changes nothing
        if engine_of(batch).obstacle is None:
            record.add(step, engine_of(batch))
    batch.step([batch.join(5)])
    found = [record.check(path) for path in traces(tmp_path)]
    assert len(found) > 2
    assert max(len(trace) for trace in found) == 6
    assert {trace.rows for trace in found} <= set(range(1, 2 + batch.drafts))
    assert all(trace.layers == batch.layers for trace in found)
    assert counters.snapshot().capture_steps["written"] == sum(len(trace) for trace in found)


def test_the_command_replays_a_trace_and_agrees_with_the_counters(tmp_path: Path) -> None:
    batch, folder, spin = HostBatch(1), tmp_path / "traces", tmp_path / "spin.yaml"
    folder.mkdir()
    counters = hook(SMALL, capture=settings(folder))
    number = batch.join(520)
    for _ in range(12):  # and no step after them
        batch.step([number])
    (path,) = traces(folder)
    assert path.name == f"rank0-request{number}.safetensors"
    spin.write_text(SpinConfig.from_dict(SMALL).to_yaml())
    ran = CliRunner().invoke(command, [str(path), "--spin-config", str(spin), "--json"])
    assert ran.exit_code == 0, ran.output
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert (figures["steps"], figures["cold_steps"]) == (12, 1)
    # the counters have slots, not blocks, from lengths alone
    realized = counters.snapshot().realized_sparsity
    assert figures["realized_sparsity"] == pytest.approx(realized, abs=0.02)
    assert figures["realized_sparsity"] > 0.4


def scores_of_run(serving: Serving) -> dict[tuple[int, int, int], torch.Tensor]:
    """Dense scores of decode rows of a run without hooks, by request, first position and layer."""
    found: dict[tuple[int, int, int], torch.Tensor] = {}
    calls: list[torch.Tensor] = []
    for indexer in serving.indexers.values():
        original = indexer.top_k.forward

        def forward(scores: Any, *args: Any, original: Any = original, **options: Any) -> Any:
            if not options["is_prefill"]:
                calls.append(scores.clone())
            return original(scores, *args, **options)

        indexer.top_k.forward = forward
    for step in serving.run(60):
        if calls:
            for layer, scores in zip(serving.layers, calls, strict=True):
                wide = scores.unflatten(0, (len(step.generations), -1))
                for row, sequence in enumerate(step.generations):
                    found[sequence.request_id, sequence.position, layer] = wide[row]
        calls.clear()
    return found


@pytest.mark.parametrize(
    ("double_settings", "arguments"),
    [
        ({}, {}),
        ({}, {"draft_len": 2}),
        ({}, {"draft_len": 3}),
        (
            {"sm_version": 100, "cutlass_dsl": True},
            {
                "draft_len": 3,
                "tokens_per_block": 256,
                "indexer_k_dtype": "fp4",
                "config": {"use_cute_dsl_paged_mqa_logits": True},
            },
        ),
        ({}, {"model": "v32", "layers": 2, "longest_prompt": 150, "max_seq_len": 320}),
    ],
    ids=["v4", "two_drafts", "expanded", "dsl_fp4", "v32"],
)
def test_traces_of_the_double_hold_the_bits_of_a_run_without_hooks(
    double_settings: dict[str, Any], arguments: dict[str, Any], tmp_path: Path
) -> None:
    """Its tokens do not depend on what is selected, so both runs score the same."""
    with trtllm_double.install(**double_settings) as double:
        dense = scores_of_run(eager(Serving(double, seed=1, **arguments)))
    with trtllm_double.install(**double_settings) as double:
        serving = eager(Serving(double, seed=1, **arguments))
        block = max(32, serving.kv.tokens_per_block // serving.ratio)
        config = SpinConfig.from_dict(SMALL | {"block_size": block})
        module = double.module("dsa.indexer")
        hooks.patch(module, config, "host", Counters(), capture=settings(tmp_path, steps=6))
        kept: dict[tuple[int, int], list[int]] = {}
        for step in serving.run(60):
            engine = engine_behind(module.Indexer, step.metadata)
            if engine.obstacle is None:
                views = [engine.step.layer(n) for n in range(len(serving.layers))]
                for row, s in enumerate(step.generations):
                    kept[s.request_id, s.position] = [int(v.block_count[row]) for v in views]
        hooks.unpatch()
    rows = 0
    for path in traces(tmp_path):
        trace = Trace(path)
        for step in trace:
            for n, layer in enumerate(trace.layers):
                want = dense[trace.sequence_id, int(step.positions_tokens[0]), layer]
                for row, position in enumerate(step.positions_tokens.tolist()):
                    seen = (position + 1) // trace.ratio
                    assert step.scores[n, row, :seen].equal(want[row, :seen])
                    rows += 1
        figures = replay(trace, config)
        counts = [kept[trace.sequence_id, int(p)] for p in trace.positions_tokens[1:, 0]]
        visible = [(int(p) + 1) // trace.ratio for p in trace.positions_tokens[1:, -1]]
        realized = [
            1 - count / -(-slots // block)
            for layers, slots in zip(counts, visible, strict=True)
            if slots
            for count in layers
        ]
        assert figures["realized_sparsity"] == pytest.approx(sum(realized) / len(realized))
    assert rows > 100


def eager(serving: Serving) -> Serving:
    """Without graphs, as `cuda_graph_config: null` has it."""
    serving.runner.metadata_for = lambda _: serving.eager_metadata
    serving.runner.capture_order = list
    return serving


def test_a_lane_that_another_takes_over_is_another_trace(tmp_path: Path) -> None:
    batch, record = HostBatch(1, max_batch_size=1), Record(SMALL)
    hook(SMALL, capture=settings(tmp_path))
    first = batch.join(600)
    for _ in range(4):
        record.add(batch.step([first]), engine_of(batch))
    batch.finish(first)
    second = batch.join(604)  # goes on exactly where the other stopped
    for _ in range(3):
        record.add(batch.step([second]), engine_of(batch))
    assert [path.stem for path in traces(tmp_path)] == [f"rank0-request{first}"]
    batch.finish(second)
    batch.step([batch.join(20)])
    assert [len(record.check(path)) for path in traces(tmp_path)] == [4, 3]


def test_a_sequence_that_starts_again_is_a_second_trace(tmp_path: Path) -> None:
    batch, record = HostBatch(1), Record(SMALL)
    hook(SMALL, capture=settings(tmp_path))
    waits, goes = batch.join(500), batch.join(550)
    for rows in ([waits, goes],) * 3 + ([goes],) + ([goes, waits],) * 9:
        record.add(batch.step(rows), engine_of(batch))
    batch.step([batch.join(9)])
    lengths = {path.stem: len(record.check(path)) for path in traces(tmp_path)}
    assert lengths == {
        f"rank0-request{waits}": 3,
        f"rank0-request{waits}-2": 9,
        f"rank0-request{goes}": 12,
    }


def test_micro_batches_that_take_turns_are_recorded_apart(tmp_path: Path) -> None:
    batch, record = HostBatch(1, drafts=1, max_batch_size=2), Record(SMALL)
    batch.manager.mapping = SimpleNamespace(pp_size=2, rank=3)
    hook(SMALL, capture=settings(tmp_path, steps=5))
    turns = [[batch.join(500), batch.join(550)], [batch.join(520), batch.join(590)]]
    for t in range(14):
        accepted = {n: (n + t) % 2 for n in turns[t % 2]}
        step = batch.step(turns[t % 2], next_n=2, accepted=accepted)
        record.add(step, engine_of(batch))
    assert [len(record.check(path)) for path in traces(tmp_path)] == [5] * 4
    assert traces(tmp_path)[0].name.startswith("rank3-")


def test_layers_and_long_sequences_can_be_chosen(tmp_path: Path) -> None:
    batch = HostBatch(1, layers=(2, 4, 6))
    hook(SMALL, capture=settings(tmp_path, layers=(4, 6, 9), least_tokens=300))
    short, long = batch.join(299), batch.join(300)
    steps = [batch.step([short, long]) for _ in range(12)]
    (path,) = traces(tmp_path)
    trace = Trace(path)
    assert (trace.layers, trace.sequence_id) == ((4, 6), long)
    for recorded, step in zip(trace, steps, strict=True):
        seen = (step.starts[1] + 1) // 4
        want = torch.from_numpy(step.scores[1:, 1, :, :seen])
        assert recorded.scores[..., :seen].equal(want)


def test_what_is_open_is_written_at_the_end_of_the_manager(tmp_path: Path) -> None:
    batch = HostBatch(1, drafts=1)
    hook(SMALL, capture=settings(tmp_path))
    number = batch.join(500)
    for _ in range(5):
        batch.step([number], next_n=2, accepted={number: 1})
    assert traces(tmp_path) == []
    del batch
    hooks.unpatch()
    gc.collect()
    (path,) = traces(tmp_path)
    trace = Trace(path)  # of the last step it is not known which drafts were accepted
    assert trace.accepted.tolist() == [1] * 4
    assert trace.positions_tokens[:, 0].tolist() == [500, 502, 504, 506]


def test_nobody_asked_for_a_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scored: list[int] = []
    batch = HostBatch(1)
    logits = batch.indexers[0].kernels.logits

    def counted(*arguments: Any) -> Any:
        scored.append(1)
        return logits(*arguments)

    for indexer in batch.indexers:
        monkeypatch.setattr(indexer.kernels, "logits", counted)
    counters = hook(SMALL)
    number = batch.join(600)
    for _ in range(5):
        batch.step([number])
    assert engine_of(batch).capture is None
    assert len(scored) == 5 * len(batch.layers)  # nothing is scored twice
    assert counters.snapshot().capture_steps == {}
    assert list(tmp_path.iterdir()) == []


def test_a_capture_that_has_all_it_wants_scores_nothing_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    batch = HostBatch(1)
    counters = hook(SMALL, capture=settings(tmp_path, sequences=1, steps=4))
    first, other = batch.join(500), batch.join(520)
    for _ in range(4):
        batch.step([first, other])
    assert caplog.records[-1].message == "SPIN's capture is complete"
    monkeypatch.setattr(hooks, "scores_in", None)
    batch.step([first, other, batch.join(400)])
    assert [path.name for path in traces(tmp_path)] == [f"rank0-request{first}.safetensors"]
    assert counters.snapshot().capture_steps == {"written": 4}
