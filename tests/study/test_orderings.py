# SPDX-License-Identifier: Apache-2.0
"""The orderings of several checkpoints: what a report found, and nothing else, side by side."""

import json
import shutil
import sys
from dataclasses import asdict

import pytest
from report_cases import write_traces

from benchmarks.study import orderings
from benchmarks.study.cells import DENSE, Cell
from benchmarks.study.claims import CLAIMS
from benchmarks.study.orderings import load_report, write_markdown
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.report.run import plan_report, run_report


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A report of one short trace."""
    folder = tmp_path_factory.mktemp("orderings")
    traces = write_traces(folder, steps=12, count=1)
    config = SpinConfig(block_size=8, target_sparsity=0.5)
    plan = plan_report(traces, str(folder / "report"), config)
    run_report(plan, on_steps=lambda steps: None)
    return plan.output


@pytest.fixture
def folder(whole, tmp_path):
    """The same, to be changed."""
    return shutil.copytree(whole, tmp_path / "report")


def claim(verdict, difference, low, high, sparsity="40%", metric="p99 miss"):
    return {
        "text": f"A1 misses no more than A2, at {sparsity} sparsity",
        "metric": f"{metric}, at a realized sparsity of 0.397, A2 less A1",
        "difference": difference,
        "low": low,
        "high": high,
        "for_it": 3,
        "traces": 4,
        "verdict": verdict,
    }


def found(*claims, config="one"):
    """A report with claims in one study and none in the others."""
    empty = {"columns": {}, "rows": [], "claims": []}
    return {
        "config": {"block_size": 16, "state_dtype": config, "ema_decay": 0.5, "exploration": 0.05},
        "traces": [{"steps": 1_000}, {"steps": 234}],
        "studies": dict.fromkeys(orderings.STUDIES, empty)
        | {"figure3": {**empty, "claims": list(claims)}},
    }


HOLDS = claim("holds", 0.1, 0.05, 0.15)
FAILS = claim("does not hold", -0.1, -0.15, -0.05, "50%")
OPEN = claim("undecided", 0.0123, None, None)


def test_a_report_is_read_without_replays(folder):
    read = load_report(folder)
    table = json.loads((folder / "tables2-5.json").read_text(encoding="utf-8"))
    assert read["config"]["block_size"] == 8
    assert [trace["name"] for trace in read["traces"]] == ["0.trace"]
    assert set(read["studies"]["tables2-5"]) == {"columns", "rows", "claims"}
    for row, whole in zip(read["studies"]["tables2-5"]["rows"], table["rows"], strict=True):
        assert row["mean_miss"]["value"] == pytest.approx(whole["mean_miss"]["value"], abs=5e-6)
    text = write_markdown({"one": read, "other": read})
    assert "| ordering | one | other |" in text
    assert "| prev_iter predicts better than prev_layer | undecided 2 | undecided 2 |" in text
    assert text.count("\n| random | 0.4 | ") == 2  # of Tables 2 to 5, once a checkpoint


def test_verdicts_stand_side_by_side():
    text = write_markdown({"one": found(HOLDS, FAILS), "other": found(OPEN, FAILS)})
    assert "one: 2 traces, 1,234 steps; other: 2 traces, 1,234 steps." in text
    assert (
        "| A1 misses no more than A2 | holds 1, does not hold 1 | does not hold 1, undecided 1 |"
    ) in text
    assert (
        "| A1 misses no more than A2, at 40% sparsity | p99 miss, A2 less A1 "
        "| +0.1000 (+0.0500 to +0.1500), 3 of 4: **holds** "
        "| +0.0123 (- to -), 3 of 4: **undecided** |"
    ) in text
    assert "In answers" not in text


MORE = {
    "claim": "more answers",
    "verdict": "holds",
    "right": 15,
    "right_before": 8,
    "answers": 16,
    "difference": 0.4375,
    "low": 0.125,
    "high": 0.5,
    "gained": 8,
    "lost": 1,
}


def test_answers_stand_side_by_side():
    shown = "15 against 8 of 16: +0.4375 (+0.1250 to +0.5000), +8 -1: **holds**"
    not_run = MORE | {"verdict": "not run"}
    text = write_markdown(
        {
            "one": found(HOLDS) | {"answers": [MORE]},
            "two": found(HOLDS) | {"answers": [not_run]},
            "three": found(HOLDS),
        }
    )
    assert "\n| claim | one | two | three |\n" in text
    assert f"\n| more answers | {shown} | not run | not run |\n" in text


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (found(HOLDS, config="another"), "^two: got 'other parameters'"),
        (found(FAILS), "^two: got 'other claims'"),
    ],
)
def test_reports_that_do_not_compare_are_refused(other, message):
    with pytest.raises(SpinError, match=message):
        write_markdown({"one": found(HOLDS), "two": other})


def test_broken_reports_are_refused(folder):
    study = folder / "figure4.json"
    found_there = json.loads(study.read_text(encoding="utf-8"))
    study.write_text(json.dumps(found_there | {"inputs": {}}), encoding="utf-8")
    with pytest.raises(SpinError, match="are of different traces"):
        load_report(folder)
    study.write_text("{}", encoding="utf-8")
    with pytest.raises(SpinError, match="holds no report: no 'inputs'"):
        load_report(folder)
    study.unlink()
    with pytest.raises(SpinError, match=r"cannot read .*figure4\.json"):
        load_report(folder)


def test_the_command_writes_both_files(folder, tmp_path, monkeypatch, capsys):
    claim = CLAIMS[0]
    cells = [Cell(claim.now.question, *DENSE), claim.before, claim.now]
    (tmp_path / "study").mkdir()
    for cell in cells:
        result = {"cell": asdict(cell), "source": "one model and text", "right": [[True]] * 8}
        path = tmp_path / "study" / f"{cell.name}.json"
        path.write_text(json.dumps(result), encoding="utf-8")
    line = ["orderings", "--output", str(tmp_path / "both")]

    def call(*more):
        monkeypatch.setattr(sys, "argv", [*line, *more])
        orderings.main()

    call(f"one={folder}", "--answers", f"one={tmp_path / 'study'}")
    written = json.loads((tmp_path / "both.json").read_text(encoding="utf-8"))
    assert written["one"]["answers"][0]["right"] == 8
    page = (tmp_path / "both.md").read_text(encoding="utf-8")
    shown = "8 against 8 of 8: +0.0000 (+0.0000 to +0.0000), +0 -0: **undecided**"
    assert f"\n| {claim.text} | {shown} |\n" in page
    assert f"\n| {CLAIMS[-1].text} | not run |\n" in page
    call(f"one={folder}")
    assert "In answers" not in (tmp_path / "both.md").read_text(encoding="utf-8")
    for more, message in (
        ([str(folder)], "NAME=DIRECTORY"),
        ([f"one={folder}", "--answers", "one"], "NAME=DIRECTORY"),
        ([f"one={folder}", "--answers", f"two={folder}"], "a checkpoint with a report: one"),
    ):
        with pytest.raises(SystemExit) as stopped:
            call(*more)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
