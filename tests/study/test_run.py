# SPDX-License-Identifier: Apache-2.0
"""Cells are run once, kept whole, and taken up where a call stopped."""

import contextlib
import dataclasses
import json
import sys
from functools import partial
from itertools import groupby

import pytest
import torch

from benchmarks.study import pool
from benchmarks.study import run as command
from benchmarks.study.cells import DENSE, LENGTHS_BYTES, MEASURED, PARTS, Cell, Question
from benchmarks.study.documents import NAMES, documents_of
from benchmarks.study.estimate import Estimate
from benchmarks.study.methods import METHODS
from benchmarks.study.pool import CELLS_OF_A_JOB, jobs_of, run_side_by_side
from benchmarks.study.run import AGAIN, measured_in, open_study, run_part
from benchmarks.study.study import Study
from spin_trtllm import tiny
from spin_trtllm.errors import SpinError

TEXT = Question("text", 500, 2, 6)
RECALL = Question("recall", 500, 2, 1)
DRAFTS = Question("text", 500, 2, 40, 3)
SETTINGS = (DENSE, ("spin", 0.0), ("spin", 0.5))
PART = tuple(Cell(question, *setting) for question in (TEXT, RECALL) for setting in SETTINGS)


@pytest.fixture
def study(model, filler, tmp_path):
    return Study(model, "weights", filler, tmp_path)


def results(study, cells=PART):
    return {cell.name: study.result(cell) for cell in cells}


def answers(result):
    return {name: result[name] for name in ("right", "nats", "distance_bytes")}


def test_a_part_is_run_once(study, monkeypatch, capsys):
    assert run_part(study, PART, float("inf")) == []
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [f"[{n}/6]" for n in range(1, 7)]
    found = results(study)
    assert {path.name for path in study.output.iterdir()} == {f"{name}.json" for name in found}
    monkeypatch.setattr(Study, "read", None)  # nothing is read where nothing is left
    assert run_part(study, PART, float("inf")) == []
    assert results(study) == found


def test_results_have_the_shape_of_the_documents(study):
    run_part(study, PART, float("inf"))
    found = results(study)
    for question, asked in ((TEXT, 6), (RECALL, 1)):
        dense, off, half = (found[f"{question.name}-{m}-{s:g}"] for m, s in SETTINGS)
        for result in (dense, off, half):
            assert {len(of) for values in answers(result).values() for of in values} == {asked}
            assert {len(values) for values in answers(result).values()} == {2}
            assert result["cell"]["question"] == dataclasses.asdict(question)
            assert result["cost"]["dense_keys"] == dense["cost"]["keys"]
            assert set(result["environment"]) == {"date", "device", "cpu_cores", "versions"}
        assert answers(off) == answers(dense)  # paired: the same documents, and the same bits
        assert answers(half) != answers(dense)
        assert dense["cost"]["bytes_share"] == 1.0
        assert half["cost"]["keys"] < dense["cost"]["keys"]


def test_a_call_stops_for_its_seconds_and_goes_on(study, monkeypatch):
    clock = iter(range(0, 10**6, 10))  # each look at it costs ten seconds
    monkeypatch.setattr(command.time, "perf_counter", lambda: next(clock))
    left = run_part(study, PART, 25.0)
    assert 0 < len(left) < len(PART)
    assert left == list(PART[-len(left) :]) == study.left(PART)
    monkeypatch.undo()
    assert run_part(study, PART, float("inf")) == []
    assert len(list(study.output.iterdir())) == len(PART)


@pytest.mark.parametrize("field", ["weights", "filler"])
def test_other_inputs_make_a_cell_anew(field, study):
    part = PART[:1]
    run_part(study, part, float("inf"))
    other = dataclasses.replace(study, **{field: "other" if field == "weights" else b"other text "})
    assert other.left(part) == list(part)
    assert study.left(part) == []


def test_a_cell_that_fails_leaves_no_file(study, monkeypatch):
    monkeypatch.setattr("benchmarks.study.study.environment", lambda model: object())
    with pytest.raises(TypeError, match="JSON"):
        study.run(PART[0], study.read(TEXT))
    assert list(study.output.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_file_that_is_no_result_is_refused(text, study):
    study.path(PART[0]).write_text(text)
    with pytest.raises(SpinError, match="is no result"):
        study.left(PART)


def test_drafts_run_document_by_document(study):
    part = (Cell(DRAFTS, *DENSE), Cell(DRAFTS, "spin", 0.5))
    assert run_part(study, part, float("inf")) == []
    dense, half = (study.result(cell) for cell in part)
    assert [len(tokens) for tokens in dense["tokens"]] == [40, 40]
    steps = {int(rows): steps for rows, steps in dense["steps_of_rows"].items()}
    assert [len(dense[name]) for name in ("verifications", "proposed", "accepted")] == [2, 2, 2]
    assert min(dense["proposed"]) > 0
    assert sum(dense["proposed"]) == sum((rows - 1) * number for rows, number in steps.items())
    assert sum(dense["verifications"]) == sum(steps.values())
    for said, verified, accepted in zip(
        dense["tokens"], dense["verifications"], dense["accepted"], strict=True
    ):
        assert len(said) == 1 + verified + accepted  # the first follows from the text
    assert half["cost"]["keys"] < half["cost"]["dense_keys"]


def test_drafts_that_were_only_counted_together_are_left(study):
    """As results were written once."""
    (cell,) = part = (Cell(DRAFTS, *DENSE),)
    run_part(study, part, float("inf"))
    found = study.result(cell)
    totals = {name: sum(found[name]) for name in ("proposed", "accepted")}
    study.path(cell).write_text(json.dumps(found | totals))
    assert study.left(part) == [cell]


def test_spin_says_what_it_missed(study):
    cells = [Cell(q, m, 0.5) for q in (TEXT, DRAFTS) for m in ("spin", "spin_unexplored")]
    dense = [Cell(TEXT, *DENSE), Cell(TEXT, "streaming", 0.5)]
    run_part(study, (*cells, *dense), float("inf"))
    for cell in cells:
        found = study.result(cell)
        assert 0.3 < found["realized_sparsity"] < 0.6
        assert 0 < found["mean_miss"] < found["p99_miss"] <= 1
    assert not any("mean_miss" in study.result(cell) for cell in dense)


def test_a_part_may_ask_for_misses(study):
    """Results without them are good for all others."""
    cell = Cell(TEXT, "spin", 0.5)
    run_part(study, (cell,), float("inf"))
    asking = dataclasses.replace(study, measured=frozenset([cell]))
    assert asking.left([cell]) == []
    found = study.result(cell)
    del found["mean_miss"]
    study.path(cell).write_text(json.dumps(found))
    assert study.left([cell]) == []
    assert asking.left([cell]) == [cell]


def test_the_paper_s_part_asks_for_misses():
    measured = measured_in(["paper", "curve-8k"])
    assert {cell.method for cell in PARTS["paper"]} - {cell.method for cell in measured} == {
        "dense"
    }
    assert measured < set(PARTS["paper"])
    assert measured_in(["curve-8k"]) == frozenset()
    assert set(MEASURED) <= set(PARTS)


def test_command_lists_runs_and_refuses(study, monkeypatch, capsys):
    monkeypatch.setattr(command, "open_study", lambda *_: study)
    monkeypatch.setitem(PARTS, "quick", PART[:2])

    def call(*more):
        arguments = ["run", "--part", "quick", "--output", str(study.output), *more]
        monkeypatch.setattr(sys, "argv", arguments)
        command.main()
        return capsys.readouterr().out

    assert call("--list").splitlines()[-1].startswith("2 of 2 cells left, ")
    with pytest.raises(SystemExit) as stopped:
        call("--seconds", "0")
    assert stopped.value.code == AGAIN
    assert call().splitlines()[-1] == "0 of 2 cells left, 0 s"
    study.path(PART[0]).write_text("{")
    with pytest.raises(SystemExit) as stopped:
        call()
    assert stopped.value.code == 2
    assert "is no result" in capsys.readouterr().err


def test_every_cell_can_be_run_and_has_its_dense_one():
    cells = [cell for part in PARTS.values() for cell in part]
    for part in PARTS.values():
        assert len({cell.name for cell in part}) == len(part)
    assert len({cell.name for cell in cells}) == len(set(cells))
    assert {cell.method for cell in cells} == set(METHODS)
    assert {cell.question.task for cell in cells} == set(NAMES)
    dense = {cell.question for cell in cells if (cell.method, cell.setting) == DENSE}
    assert {cell.question for cell in cells} == dense


def test_the_paper_s_part_pairs_exploration_with_none():
    settings = {}
    for cell in PARTS["paper"]:
        name = f"{cell.question.task} {cell.question.context_bytes}"
        settings.setdefault(name, set()).add((cell.method, cell.setting))
    blocks_of_16 = {("dense", 0), ("spin_query_30", 0.5)} | {
        (method, sparsity)
        for method in ("spin", "spin_unexplored")
        for sparsity in (0.2, 0.3, 0.4, 0.5)
    }
    blocks_of_64 = {
        (method, sparsity)
        for method in ("spin_64", "spin_64_unexplored")
        for sparsity in (0.4, 0.5)
    }
    both = dict.fromkeys(("recall 31744", "multi_key 16384"), blocks_of_16 | blocks_of_64)
    others = ("recall 8192", "single 16384", "multi_query 16384", "aggregation 16384")
    assert settings == both | dict.fromkeys(others, blocks_of_16)
    questions = [cell.question for cell in PARTS["paper"]]
    assert len(list(groupby(questions))) == 6  # each is read once


def test_hard_tasks_are_asked_once_at_every_length():
    asked = {cell.question for cell in PARTS["hard"]}
    assert {(one.task, one.context_bytes) for one in asked} == {
        (task, length)
        for task in ("multi_value", "multi_needle", "variable_tracking")
        for length in LENGTHS_BYTES
    }
    assert len(asked) == 12
    assert {cell.question for cell in PARTS["hard-rivals"]} < asked


def test_estimates_follow_what_was_measured():
    guess = Estimate("cpu").cell(PART[0])
    measured = Estimate("cpu", [(PART[0], 3 * guess), (PART[1], 3 * guess)])
    assert measured.cell(PART[5]) == pytest.approx(3 * Estimate("cpu").cell(PART[5]))
    total = measured.total(PART[:3])
    assert total == pytest.approx(sum(map(measured.cell, PART[:3])) + measured.reading(TEXT))
    dialogue = Question("dialogue", 4_096, 4, 4)
    assert Estimate("cpu").cell(Cell(dialogue, *DENSE)) > Estimate("cpu").reading(dialogue)


@pytest.mark.parametrize("part", PARTS)
def test_the_documents_of_every_cell_can_be_written(part):
    filler = b"the quick brown fox jumps over the lazy dog\n" * 2000
    for question in {cell.question for cell in PARTS[part]}:
        documents = documents_of(
            question.task,
            documents=question.documents,
            context_bytes=question.context_bytes,
            queries=question.queries,
            filler=filler,
        )
        assert sum(len(turn.context) for turn in next(documents)) > question.context_bytes // 2


def test_processes_run_the_same_cells(study, tmp_path):
    """Each process opens the study anew, so this one needs a checkpoint on disk."""
    opening = partial(open_study, tiny.checkpoint_path(), None, tmp_path / "pool", "cpu")
    run_side_by_side(opening, run_part, PART, Estimate("cpu"), 2, float("inf"))
    alone = dataclasses.replace(opening(), output=tmp_path / "alone")
    alone.output.mkdir()
    run_part(alone, PART, float("inf"))
    for name, result in results(alone).items():
        assert answers(result) == answers(results(opening())[name])


def reads_alone(study, part, seconds):
    """Stands for `run_part` in a process: what reading holds is there, and free again after it."""
    with study.reading:
        assert not study.reading.acquire(block=False)
    study.read(part[0].question)
    assert study.reading.acquire(timeout=60)
    study.reading.release()


def test_one_process_reads_at_a_time(tmp_path):
    opening = partial(open_study, tiny.checkpoint_path(), None, tmp_path, "cpu")
    run_side_by_side(opening, reads_alone, PART, Estimate("cpu"), 2, float("inf"))


def test_documents_are_read_under_the_lock(study, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def held():
        seen.append("held")
        yield
        seen.append("free")

    monkeypatch.setattr("benchmarks.study.study.read_documents", lambda *_: seen.append("read"))
    dataclasses.replace(study, reading=held()).read(RECALL)
    assert seen == ["held", "read", "free"]


def test_processes_stop_for_their_seconds_too(study, tmp_path):
    opening = partial(open_study, tiny.checkpoint_path(), None, tmp_path, "cpu")
    run_side_by_side(opening, run_part, PART, Estimate("cpu"), 1, 0.0)
    assert opening().left(PART) == list(PART)


def test_jobs_are_the_cells_in_order_of_one_question_each():
    cells = PARTS["curve-8k"] + PARTS["text"]
    jobs = list(jobs_of(cells))
    assert sum(jobs, ()) == cells
    assert all(len({cell.question for cell in job}) == 1 for job in jobs)
    assert max(map(len, jobs)) <= CELLS_OF_A_JOB


def test_jobs_share_a_reading_and_those_with_drafts_do_not():
    cells = [Cell(question, *DENSE) for question in (RECALL, DRAFTS, TEXT)]
    more = [Cell(question, "spin", 0.5) for question in (RECALL, DRAFTS, TEXT)]
    assert [[cell.question for cell in job] for job in jobs_of(cells + more)] == [
        [RECALL, RECALL],
        [DRAFTS],
        [DRAFTS],
        [TEXT, TEXT],
    ]


def asks(study, part, seconds):
    """Stands for `run_part` in a process: leaves a file, in the order of the calls."""
    number = len(list(study.output.iterdir()))
    (study.output / f"{number}-{part[0].question.task}").touch()


def test_long_jobs_come_first(tmp_path):
    long, short = Question("text", 500, 2, 90), Question("recall", 500, 2, 1)
    cells = [Cell(question, *DENSE) for question in (short, long)]
    opening = partial(open_study, tiny.checkpoint_path(), None, tmp_path, "cpu")
    run_side_by_side(opening, asks, cells, Estimate("cpu"), 1, float("inf"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-text", "1-recall"]


def test_a_job_without_memory_is_left(study, monkeypatch, capsys):
    def fail(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(pool, "_study", study, raising=False)
    pool._work(fail, PART, float("inf"))
    assert capsys.readouterr().out == f"out of memory, left: {TEXT.name}\n"
