# SPDX-License-Identifier: Apache-2.0
"""What is counted in a TensorRT-LLM process, what the environment asks, and how it is shown."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.trtllm.counters import MAX_CAUSES, Counters, Snapshot, summary
from spin_trtllm.hosts.trtllm.metrics import export, process_counters
from spin_trtllm.hosts.trtllm.settings import Settings, read_settings


def counted() -> Counters:
    counters = Counters()
    counters.step(sparse_rows=3, cold_rows=1, kept_slots=600, visible_slots=1000)
    counters.step(sparse_rows=4, kept_slots=1400, visible_slots=2000)
    counters.dense("prefill in the batch", 2)
    counters.dense("no lane")
    counters.probe([(0, 512), (5, 512), (26, 512)])
    counters.add_state_bytes(3 * 2**20)
    return counters


def test_snapshot() -> None:
    counts = counted().snapshot()
    assert counts == Snapshot(
        steps=2,
        sparse_rows=7,
        cold_rows=1,
        dense_rows={"prefill in the batch": 2, "no lane": 1},
        kept_slots=2000,
        visible_slots=3000,
        probed_slots=1536,
        missed_slots=31,
        miss_rows=(1, 1, 0, 0, 1, 0, 0, 0),
        state_bytes=3145728,
    )
    assert counts.realized_sparsity == pytest.approx(1 / 3)
    assert counts.miss == pytest.approx(31 / 1536)
    assert (Snapshot().realized_sparsity, Snapshot().miss) == (None, None)


def test_summary_is_one_line() -> None:
    assert summary(counted().snapshot()) == (
        "SPIN: 2 steps; rows sparse 7, cold 1, dense 3; dense by cause: prefill in the batch 2, "
        "no lane 1; skipped 33.3% of the slots; missed 2.02% of the dense top-k of 3 probed rows; "
        "state 3.0 MiB"
    )
    assert summary(Snapshot()) == "SPIN: 0 steps; rows sparse 0, cold 0, dense 0; state 0 B"


def test_causes_stay_few() -> None:
    counters = Counters()
    for cause in range(3 * MAX_CAUSES):
        counters.dense(f"request {cause}")
    dense = counters.snapshot().dense_rows
    assert len(dense) == MAX_CAUSES + 1
    assert dense["other"] == 2 * MAX_CAUSES


def test_threads_count_together() -> None:
    counters = Counters()

    def work() -> None:
        for _ in range(2000):
            counters.step(sparse_rows=1)
            counters.dense("x")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = counters.snapshot()
    assert (counts.steps, counts.sparse_rows, counts.dense_rows) == (8000, 8000, {"x": 8000})


def test_prometheus() -> None:
    registry = CollectorRegistry()
    counters = counted()
    export(counters, registry)
    assert registry.get_sample_value("spin_rows_total", {"mode": "sparse"}) == 7
    assert registry.get_sample_value("spin_rows_total", {"mode": "cold"}) == 1
    assert registry.get_sample_value("spin_rows_total", {"mode": "dense"}) == 3
    assert registry.get_sample_value("spin_dense_rows_total", {"cause": "no lane"}) == 1
    assert registry.get_sample_value("spin_kept_slots_total") == 2000
    assert registry.get_sample_value("spin_visible_slots_total") == 3000
    assert registry.get_sample_value("spin_missed_slots_total") == 31
    assert registry.get_sample_value("spin_probed_slots_total") == 1536
    assert registry.get_sample_value("spin_miss_rows_total", {"up_to": "0.01"}) == 1
    assert registry.get_sample_value("spin_miss_rows_total", {"up_to": "0.1"}) == 1
    assert registry.get_sample_value("spin_miss_rows_total", {"up_to": "1.0"}) == 0
    assert registry.get_sample_value("spin_state_bytes") == 3145728
    counters.step()
    assert registry.get_sample_value("spin_steps_total") == 3  # read when scraped
    assert b"# TYPE spin_state_bytes gauge" in generate_latest(registry)


RANK = """
import sys
from spin_trtllm.hosts.trtllm.counters import Counters
from spin_trtllm.hosts.trtllm.metrics import export
now = 0.0
counters = Counters(clock=lambda: now)
export(counters)
counters.add_state_bytes(100)
for second in range(7):
    now = float(second)
    counters.step(sparse_rows=int(sys.argv[1]), cold_rows=1)
counters.dense("prefill", 4)
counters.probe([(1, 4)])
now = 12.0
counters.step()
"""
SERVER = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_ranks_leave_their_counters_where_a_server_reads_them(tmp_path: Path) -> None:
    """Processes of their own, as `trtllm-serve` and its ranks are."""

    def run(code: str, *arguments: str, rank: str = "") -> str:
        environment = {
            **os.environ,
            "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
            "OMPI_COMM_WORLD_RANK": rank,
        }
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        return done.stdout.decode()

    run(RANK, "3", rank="0")
    run(RANK, "5", rank="1")
    lines = run(SERVER).splitlines()
    assert 'spin_rows_total{mode="sparse",rank="0"} 21.0' in lines
    assert 'spin_rows_total{mode="sparse",rank="1"} 35.0' in lines
    assert 'spin_rows_total{mode="cold",rank="1"} 7.0' in lines
    assert 'spin_dense_rows_total{cause="prefill",rank="0"} 4.0' in lines
    assert 'spin_steps_total{rank="0"} 8.0' in lines
    assert 'spin_miss_rows_total{rank="1",up_to="0.5"} 1.0' in lines
    assert 'spin_state_bytes{rank="1"} 100.0' in lines


@pytest.mark.parametrize(("log_seconds", "lines"), [(60, 4), (0, 0), (1000, 0)])
def test_log_rate(log_seconds: float, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    """One step each second for five minutes, after an hour in which nothing ran."""
    now = 0.0
    counters = Counters(log_seconds=log_seconds, clock=lambda: now)
    with caplog.at_level(logging.INFO, "spin_trtllm"):
        for second in range(1, 300):
            now = float(second)
            counters.step(sparse_rows=1)
    assert len(caplog.records) == lines
    assert all("SPIN: " in record.message for record in caplog.records)


def test_a_pause_is_not_made_up_for(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 3600.0, 3601.0, 3602.0])
    counters = Counters(log_seconds=60, clock=lambda: next(times))
    with caplog.at_level(logging.INFO, "spin_trtllm"):
        for _ in range(3):
            counters.step()
    assert len(caplog.records) == 1


@pytest.fixture
def spin_file(tmp_path: Path) -> Path:
    path = tmp_path / "spin.yaml"
    path.write_text(SpinConfig(block_size=32).to_yaml())
    return path


def test_settings(spin_file: Path) -> None:
    spin = {"TLLM_SPIN": str(spin_file)}
    config = SpinConfig(block_size=32)
    assert read_settings({}) is None
    assert read_settings({"TLLM_SPIN": "", "TLLM_SPIN_PROBE": "?"}) is None
    assert read_settings(spin) == Settings(spin_file, config, False, 60.0, 0)
    asked = spin | {"TLLM_SPIN_METRICS": "1", "TLLM_SPIN_PROBE": "1/100"}
    assert read_settings(asked) == Settings(spin_file, config, True, 0.0, 100)
    both = read_settings(asked | {"TLLM_SPIN_LOG_SECONDS": "2.5"})
    assert both is not None
    assert (both.metrics, both.log_seconds) == (True, 2.5)
    off = spin | {"TLLM_SPIN_METRICS": "0", "TLLM_SPIN_PROBE": "0", "TLLM_SPIN_LOG_SECONDS": "0"}
    assert read_settings(off) == Settings(spin_file, config, False, 0.0, 0)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        *(
            ("TLLM_SPIN_PROBE", t)
            for t in ("1", "1/0", "2/3", "1/-1", "1/x", "1/ 2", "1/٣", "1/" + "9" * 10)
        ),
        *(("TLLM_SPIN_METRICS", t) for t in ("yes", "2", "true")),
        *(("TLLM_SPIN_LOG_SECONDS", t) for t in ("-1", "nan", "inf", "soon")),
    ],
)
def test_settings_refuse_nonsense(spin_file: Path, variable: str, text: str) -> None:
    with pytest.raises(SpinError, match=f"{variable}: got "):
        read_settings({"TLLM_SPIN": str(spin_file), variable: text})


def test_the_counters_of_the_process(
    spin_file: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    process_counters.cache_clear()
    request.addfinalizer(process_counters.cache_clear)
    registered: list[Any] = []
    monkeypatch.setattr(REGISTRY, "register", registered.append)
    monkeypatch.setenv("TLLM_SPIN", str(spin_file))
    assert process_counters() is process_counters()
    assert registered == []
    process_counters.cache_clear()
    monkeypatch.setenv("TLLM_SPIN_METRICS", "1")
    process_counters().step(cold_rows=2)
    (collector,) = registered
    rows = next(iter(collector.collect()))
    assert {s.labels["mode"]: s.value for s in rows.samples} == {"sparse": 0, "cold": 2, "dense": 0}
    process_counters.cache_clear()
    monkeypatch.delenv("TLLM_SPIN")
    process_counters().step()
    assert len(registered) == 1


def test_an_action_that_fails_is_dropped_and_counting_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    counters = Counters(clock=lambda: now[0])
    shown: list[int] = []

    def fail(_: Snapshot) -> None:
        raise FileNotFoundError("no such folder")

    counters.every(5, fail)
    counters.every(5, lambda counts: shown.append(counts.steps))
    for _ in range(3):
        now[0] += 6
        counters.step()
    assert shown == [1, 2, 3]
    assert [r.message for r in caplog.records] == [
        "SPIN: counters are shown no more: no such folder"
    ]


def test_a_collection_under_the_lock_may_count() -> None:
    """A manager that dies while its thread takes a snapshot counts its memory from there."""
    counters = Counters()

    def collected() -> None:
        with counters._lock:
            counters.add_state_bytes(5)

    thread = threading.Thread(target=collected, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    assert counters.snapshot().state_bytes == 5
