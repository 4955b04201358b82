# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm report`: its files, its page, what resumes, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from datetime import date, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_cli import Capture, call, make_trace, process, refused, save
from report_cases import OPTIONS, report, write_traces

from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.report import store
from spin_trtllm.report.charts import draw
from spin_trtllm.report.page import write_page
from spin_trtllm.report.studies import STUDIES

VOID = {"meta"}


class Page(HTMLParser):
    """Parses a page strictly: every element is closed where it should be.

    Attributes:
        seen: every element, as its tag and attributes.
        texts: text by the innermost tag it stands in.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.setdefault(self._open[-1], []).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Attributes of every such element."""
        return [attributes for name, attributes in self.seen if name == tag]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Output of a report of all studies on two short traces, and its results."""
    folder = tmp_path_factory.mktemp("report")
    output = folder / "out"
    done = process("report", *write_traces(folder, 40), "--output", output, "--jobs", "2", *OPTIONS)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines == [str(output / f"{key}.json") for key in STUDIES] + [str(output / "report.html")]
    results = {key: json.loads((output / f"{key}.json").read_text()) for key in STUDIES}
    return output, results


# ---------------------------------------------------------------- results and page
def test_results_say_what_they_are_of(full: tuple[Path, dict[str, Any]]) -> None:
    for key, result in full[1].items():
        assert result["study"] == key
        assert [trace["name"] for trace in result["inputs"]["traces"]] == ["0.trace", "1.trace"]
        assert result["inputs"]["config"]["block_size"] == 8
        assert all(set(result["columns"]) <= set(row) for row in result["rows"])
        assert result["rows"]
        assert result["notes"]


def test_results_say_when_and_where_they_were_made(full: tuple[Path, dict[str, Any]]) -> None:
    page = (full[0] / "report.html").read_text(encoding="utf-8")
    for result in full[1].values():
        made_on = result["environment"]
        assert abs(date.today() - date.fromisoformat(made_on["date"])) <= timedelta(days=1)
        assert made_on["versions"]["torch"] == torch.__version__
        assert f"Made on {made_on['date']} on {made_on['device']}, " in page


def test_every_claim_of_the_paper_is_judged(full: tuple[Path, dict[str, Any]]) -> None:
    texts = {key: " ".join(c["text"] for c in result["claims"]) for key, result in full[1].items()}
    assert "prev_iter predicts better than prev_layer" in texts["table1"]
    assert "prev_layer predicts better than random" in texts["table1"]
    for sparsity in ("40%", "50%"):
        claim = f"random exploration recalls at least as much as none, at {sparsity}"
        assert claim in texts["tables2-5"]
    assert "prefix update misses less in the tail than the row-0 update" in texts["figure2"]
    assert "A1 with max pooling misses no more in the tail than A2, at 40%" in texts["figure3"]


def test_page_is_whole_and_needs_nothing_else(full: tuple[Path, dict[str, Any]]) -> None:
    text = (full[0] / "report.html").read_text(encoding="utf-8")
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    page = Page(text)
    assert {tag for tag, _ in page.seen}.isdisjoint({"script", "link", "img", "iframe", "object"})
    for _, attributes in page.seen:
        assert {"src", "xlink:href", "style", "onclick"}.isdisjoint(attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert "http" not in text
    assert "url(" not in text
    assert "@import" not in text
    names = [attributes["id"] for _, attributes in page.seen if "id" in attributes]
    assert len(names) == len(set(names))


def test_page_shows_every_study_and_claim(full: tuple[Path, dict[str, Any]]) -> None:
    output, results = full
    page = Page((output / "report.html").read_text(encoding="utf-8"))
    assert [section["id"] for section in page.all("section")] == list(STUDIES)
    claims = [claim["text"] for result in results.values() for claim in result["claims"]]
    cells = page.texts["td"]
    for text in set(claims):
        assert cells.count(text) == claims.count(text)
    links = [attributes["href"] for attributes in page.all("a")]
    assert links == [f"#{key}" for key in STUDIES]
    shown = {"strong": [], **page.texts}["strong"]
    assert shown == ["The paper: ", "These traces: "] * len(STUDIES)
    headings = " ".join(page.texts["h2"])
    assert "What a model of 7.6 million parameters can and cannot show" in headings


def test_page_is_accessible(full: tuple[Path, dict[str, Any]]) -> None:
    page = Page((full[0] / "report.html").read_text(encoding="utf-8"))
    pictures, titles = page.all("svg"), [a["id"] for a in page.all("title") if "id" in a]
    described = [a["id"] for a in page.all("desc")]
    assert len(pictures) == len(page.all("figure")) == len(page.all("figcaption")) > 10
    for picture, title, description in zip(pictures, titles, described, strict=True):
        assert picture["role"] == "img"
        assert picture["aria-labelledby"] == f"{title} {description}"
    assert all(len(text) > 20 for text in page.texts["desc"])
    assert all(head["scope"] == "col" for head in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table"))


def claim(verdict: str, value: float) -> dict[str, Any]:
    return {
        "text": f"claim that {verdict}",
        "metric": "a metric",
        "difference": value,
        "low": value - 0.1,
        "high": value + 0.1,
        "for_it": 1,
        "traces": 2,
        "verdict": verdict,
        "reason": "",
    }


def test_a_lost_claim_is_as_prominent_as_a_won_one() -> None:
    inputs = {"version": "1", "config": {}, "traces": []}
    made_on = {
        "date": "2026-11-30",
        "device": "a machine",
        "cpu_cores": 2,
        "versions": {"torch": "3"},
    }
    result = {
        **{
            "environment": made_on,
            "study": "x",
            "title": "X",
            "asks": "Asks.",
            "paper": "Says.",
            "inputs": inputs,
        },
        **{"columns": {"a": "a <b> & c"}, "rows": [{"a": "<&>"}], "charts": [], "notes": []},
        **{"claims": [claim("holds", 0.5), claim("does not hold", -0.5)], "replays": []},
    }
    page = Page(write_page([result]))
    cells = page.texts["td"]
    verdicts = page.texts["span"]
    assert verdicts.count("✓ holds") == verdicts.count("✗ does not hold") == 1
    assert cells[:3] == ["1", "1", "0"]  # of the study: hold, do not hold, undecided
    assert "1 hold, 1 do not hold, 0 undecided" in " ".join(page.texts["p"])
    assert "They contradict the paper where a claim does not hold" in " ".join(page.texts["p"])
    assert "Made on 2026-11-30 on a machine, 2 cores, with torch 3;" in " ".join(page.texts["p"])
    assert "<&>" in cells
    assert "a <b> & c" in page.texts["th"]


@pytest.mark.parametrize("rows", [["#-.x", "##-- ", "x"], ["."], [], ["-#" * 40] * 9])
def test_a_mask_is_drawn_cell_by_cell(rows: list[str]) -> None:
    drawn: dict[tuple[int, int], str] = {}
    chart = {"kind": "mask", "title": "", "rows": rows}
    for path in draw(chart, "key").iter("path"):
        start, *strokes = (path.get("d") or "").split("m")
        x, y = map(float, start.removeprefix("M").split())
        for stroke in strokes:
            right, down, length = map(int, re.split("[ v]", stroke))
            x, y = x + right, y + down
            for step in range(length):
                place = (int(y) + step, int(x))
                assert place not in drawn
                drawn[place] = path.get("stroke") or ""
            y += length
    colours = {"-": "#A6CEE3", "#": "#00487A", "x": "#D55E00"}
    assert drawn == {
        (step, block): colours[mark]
        for step, row in enumerate(rows)
        for block, mark in enumerate(row)
        if mark in colours
    }


# ---------------------------------------------------------------- resuming
@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Policies replayed since, in this process."""
    done: list[str] = []
    measure = store.measure

    def counted(*arguments: Any, **options: Any) -> Any:
        done.append(options["policy"])
        return measure(*arguments, **options)

    monkeypatch.setattr(store, "measure", counted)
    return done


def test_a_second_run_replays_nothing(tmp_path: Path, capsys: Capture, replayed: list[str]) -> None:
    traces, output = write_traces(tmp_path, 20), tmp_path / "out"
    first = report(capsys, traces, output, "--studies", "table1")
    page = (output / "report.html").read_text(encoding="utf-8")
    assert len(replayed) == 6 * 2
    replayed.clear()
    assert report(capsys, traces, output, "--studies", "table1", "--resume") == first
    assert replayed == []
    assert (output / "report.html").read_text(encoding="utf-8") == page


def test_only_what_changed_is_replayed(
    tmp_path: Path, capsys: Capture, replayed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    traces, output = write_traces(tmp_path, 20), tmp_path / "out"
    first = report(capsys, traces, output, "--studies", "table1")
    replayed.clear()
    save(tmp_path, make_trace(steps=20, rows=1, seed=9), "1.trace")
    second = report(capsys, traces, output, "--studies", "table1", "--resume")
    assert len(replayed) == 6, "only the trace that changed"
    assert second["table1"]["rows"] != first["table1"]["rows"]
    replayed.clear()
    report(capsys, traces, output, "--studies", "table1", "--resume", "--seed", "3")
    assert len(replayed) == 6 * 2, "other parameters"
    replayed.clear()
    monkeypatch.setattr(store, "__version__", "99.0")
    report(capsys, traces, output, "--studies", "table1", "--resume")
    assert len(replayed) == 6 * 2, "another version"


def test_an_interrupted_run_resumes(
    tmp_path: Path, capsys: Capture, replayed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    traces, output = write_traces(tmp_path, 20), tmp_path / "out"
    counted, stop_at = store.measure, 4

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if len(replayed) == stop_at:
            raise KeyboardInterrupt
        return counted(*arguments, **options)

    monkeypatch.setattr(store, "measure", interrupted)
    code, _, _ = call(
        capsys, "report", *traces, "--output", output, *OPTIONS, "--studies", "table1"
    )
    assert code == 130
    assert [path.name for path in output.iterdir()] == ["replays"], "no half-written result"
    assert len(list((output / "replays").iterdir())) == stop_at
    stop_at = -1
    report(capsys, traces, output, "--studies", "table1", "--resume")
    assert len(replayed) == 6 * 2


def test_a_broken_record_is_replayed(tmp_path: Path, capsys: Capture, replayed: list[str]) -> None:
    traces, output = write_traces(tmp_path, 20), tmp_path / "out"
    first = report(capsys, traces, output, "--studies", "table1")
    replayed.clear()
    record = next((output / "replays").iterdir())
    record.write_bytes(record.read_bytes()[:100])
    assert report(capsys, traces, output, "--studies", "table1", "--resume") == first
    assert len(replayed) == 1


def test_studies_share_replays(tmp_path: Path, capsys: Capture, replayed: list[str]) -> None:
    traces = write_traces(tmp_path, 20, count=1)
    report(capsys, traces, tmp_path / "out", "--studies", "figure4,tables2-5")
    assert len(replayed) == 4 * 4


def test_processes_find_what_one_finds(tmp_path: Path, capsys: Capture) -> None:
    traces = write_traces(tmp_path, 20)
    one = report(capsys, traces, tmp_path / "one", "--studies", "table1")
    two = report(capsys, traces, tmp_path / "two", "--studies", "table1", "--jobs", "2")
    assert one == two


def test_studies_that_vary_the_sparsity_give_all_layers_the_same(
    tmp_path: Path, capsys: Capture
) -> None:
    traces = write_traces(tmp_path, 20)
    swept = ("--studies", "tables2-5,figure2,figure3,figure4")
    alike = report(capsys, traces, tmp_path / "alike", *swept)
    layered = report(capsys, traces, tmp_path / "own", *swept, "--layer-sparsity", "2:0.7,6:0.0")
    for study, found in alike.items():
        assert found["rows"] == layered[study]["rows"]
    fixed = [
        report(capsys, traces, tmp_path / f"fixed-{n}", "--studies", "table1", *options)
        for n, options in enumerate(([], ["--layer-sparsity", "2:0.7,6:0.0"]))
    ]
    assert fixed[0]["table1"]["rows"] != fixed[1]["table1"]["rows"]


# ---------------------------------------------------------------- bad input
def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path, capsys: Capture) -> None:
    (trace, other), output = write_traces(tmp_path, 10), tmp_path / "out"
    twin = shutil.copy(trace, tmp_path / "twin.trace")
    text = tmp_path / "text"
    text.write_text("no trace")
    query = tmp_path / "query.yaml"
    query.write_text("spin: {query_share: 0.5}")
    for arguments, line in {
        ("report", trace, "--output", output, "--studies", "table9"): "--studies: got 'table9', "
        "allowed: table1, tables2-5, figure1, figure2, figure3, figure4",
        ("report", trace, "--output", output, "--studies", "table1,"): "--studies: got ''",
        ("report", trace, "--output", output, "--jobs", "0"): "--jobs: got 0, allowed: an integer",
        ("report", trace, "--output", output, "--block-size", "7"): "block_size: got 7",
        ("report", trace, tmp_path / "none", "--output", output): "trace: cannot read",
        ("report", trace, tmp_path, "--output", output): "trace: cannot read",
        ("report", trace, text, "--output", output): "not a whole safetensors file",
        ("report", trace, other, twin, "--output", output): "allowed: each trace once",
        ("report", trace, "--output", output, "--spin-config", query): "query_share: got '0.5 with",
        ("report", "--output", output): "Missing argument",
        ("report", trace): "Missing option '--output'",
        ("report", trace, "--output", text): "--output: got",
        ("report", trace, "--output", text / "below"): "--output: cannot make",
    }.items():
        assert line in refused(capsys, *arguments)
        assert not output.exists()


def test_traces_of_different_models_are_refused(tmp_path: Path, capsys: Capture) -> None:
    """Figures over both would be of neither. Weights that are not known may be the same."""
    trace, other = make_trace(rows=1), make_trace(rows=1, seed=1)
    paths = [
        save(tmp_path, trace),
        save(tmp_path, {**other, "top_k": 7}, "wider.trace"),
        save(tmp_path, {**other, "layers": (4, 8)}, "deeper.trace"),
    ]
    for path, facts in ((paths[1], "top-k 7, layers 2, 6"), (paths[2], "top-k 6, layers 4, 8")):
        line = refused(capsys, "report", paths[0], path, "--output", tmp_path / "out")
        assert line.startswith(f"error: traces: got '1 tokens a slot, {facts} in "), line
        assert "allowed: one model's, as 1 tokens a slot, top-k 6, layers 2, 6 in " in line
        assert line.endswith(f"{paths[0]}\n")
    assert not (tmp_path / "out").exists()


def test_a_used_directory_is_refused(tmp_path: Path, capsys: Capture) -> None:
    (trace,) = write_traces(tmp_path, 10, count=1)
    output = tmp_path / "out"
    output.mkdir()
    (output / "mine").write_text("keep")
    line = refused(capsys, "report", trace, "--output", output)
    assert "or --resume to go on with this one" in line
    line = refused(capsys, "report", trace, "--output", output, "--resume")
    assert "or one of an earlier report" in line
    assert [path.name for path in output.iterdir()] == ["mine"]


def test_an_empty_directory_is_taken(tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "out"
    output.mkdir()
    report(capsys, write_traces(tmp_path, 10), output, "--studies", "figure1")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_nan_in_a_visible_slot_stops_without_results(
    tmp_path: Path, capsys: Capture, jobs: str
) -> None:
    bad = make_trace(steps=10, rows=1)
    bad["scores"][6, 1, 0, 3] = float("nan")
    path, output = save(tmp_path, bad), tmp_path / "out"
    options = ("--studies", "table1", "--jobs", jobs)
    line = refused(capsys, "report", path, "--output", output, *options)
    assert "NaN at step 6, layer 6, row 0, slot 3" in line
    assert [path.name for path in output.iterdir()] == ["replays"]
    assert list((output / "replays").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_place_is_refused(tmp_path: Path, capsys: Capture) -> None:
    (trace,) = write_traces(tmp_path, 10, count=1)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert "--output: cannot make" in refused(capsys, "report", trace, "--output", closed / "out")


def test_a_killed_worker_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed:
        def __init__(self, *_: Any) -> None: ...

        def submit(self, *_: Any) -> Any:
            raise BrokenProcessPool

        def shutdown(self, **_: Any) -> None: ...

    monkeypatch.setattr(store, "ProcessPoolExecutor", Killed)
    files = [store.hash_trace(Path(path)) for path in write_traces(tmp_path, 10)]
    with pytest.raises(SpinError, match="--jobs: got 2, allowed: fewer processes"):
        store.Store(tmp_path, files).fill(
            [store.Arm(SpinConfig())], jobs=2, on_steps=lambda _: None
        )


def test_a_trace_without_steps_has_a_report(tmp_path: Path, capsys: Capture) -> None:
    path = save(tmp_path, make_trace(steps=0, rows=1))
    results = report(capsys, [path], tmp_path / "out")
    verdicts = {claim["verdict"] for result in results.values() for claim in result["claims"]}
    assert verdicts == {"undecided"}
    Page((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
