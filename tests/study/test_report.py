# SPDX-License-Identifier: Apache-2.0
"""The report pairs every method with dense, and says what was run on what."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.study import report
from benchmarks.study.cells import PARTS
from benchmarks.study.methods import METHODS
from benchmarks.study.report import (
    chart_of,
    distance_rows,
    draft_row,
    load_results,
    quality_row,
    write_markdown,
    write_page,
)
from spin_trtllm.errors import SpinError

RIGHT = [[True, True], [True, False], [True, True]]


def result(method="dense", setting=0.0, right=RIGHT, keys=100, task="recall", drafts=None, **more):
    question = {"task": task, "context_bytes": 4_096, "documents": 3, "queries": 2}
    return {
        "cell": {"question": question | {"drafts": drafts}, "method": method, "setting": setting},
        "right": right,
        "cost": {
            "dense_keys": 100,
            "keys": keys,
            "dense_products": 200,
            "products": 2 * keys,
            "bytes_share": keys / 100 + 0.05 * (method == "spin"),
        },
        "seconds": 2.0,
        "source": "one model and text",
        "environment": {
            "date": "2026-11-30",
            "device": "a machine",
            "versions": {"torch": "1", "transformers": "2"},
        },
        **more,
    }


FORCED = {
    "nats": [[0.0, 1.0], [0.0, 5.0], [0.0, 0.0]],
    "distance_bytes": [[10, 2_000], [20, 5_000], [1_024, 30]],
}
DENSE = result(**FORCED)
SPIN = result(
    "spin",
    0.4,
    [[True, False], [True, True], [True, False]],
    keys=60,
    **FORCED | {"nats": [[3.0, 1.0], [0.0, 5.0], [3.0, 0.0]]},
)


STUDY = Path(__file__).parent.parent.parent / "benchmarks" / "study"


def save(folder, *results):
    for number, one in enumerate(results):
        (folder / f"{number}.json").write_text(json.dumps(one), encoding="utf-8")


def test_results_of_different_sources_are_not_paired(tmp_path):
    """Another corpus, and only half of the cells run again: the rest is of other documents."""
    save(tmp_path, DENSE, SPIN | {"source": "another text"})
    with pytest.raises(SpinError, match=r"^study: 0.json and 1.json come from different"):
        load_results(tmp_path)


def test_other_json_is_refused(tmp_path):
    save(tmp_path, DENSE, {"share": 1})
    with pytest.raises(SpinError, match=r"1.json' is no result: KeyError"):
        load_results(tmp_path)


def test_a_method_next_to_dense():
    row = quality_row(SPIN, DENSE)
    assert row["method"] == "`spin` 0.4"
    assert row["right"] == "4 of 6"
    assert row["lost, gained"] == "2, 1"
    assert row["share - dense"].startswith("-0.167 (")
    assert row["nats - dense"] == "+1.000 (too few documents)"
    assert (row["bytes"], row["keys"], row["products"]) == ("0.650", "0.600", "0.600")


def test_distances_are_counted_in_their_bucket():
    dense, spin = distance_rows([DENSE, SPIN])
    assert dense == {
        "method": "`dense`",
        "from 0 bytes": "3 of 3",
        "from 1,024 bytes": "2 of 2",
        "from 4,096 bytes": "0 of 1",
    }
    assert spin["from 0 bytes"] == "2 of 3"


def test_drafts_are_counted():
    fields = {"task": "text", "drafts": 3, "proposed": 9, "steps_of_rows": {"1": 1, "4": 3}}
    dense = result(tokens=[[1, 2, 3, 4], [5, 6, 7, 8]], accepted=6, **fields)
    spin = result("spin", 0.4, tokens=[[1, 2, 3, 0], [5, 0, 7, 8]], accepted=3, **fields)
    row = draft_row(spin, dense)
    assert row["drafts accepted"] == "3 of 9"
    assert row["tokens a step"] == "2.00"
    assert row["tokens as dense"] == "0.750"


def test_files_are_grouped_with_dense_first(tmp_path):
    save(tmp_path, SPIN, DENSE, result(task="single"))
    questions = load_results(tmp_path)
    assert [len(results) for results in questions.values()] == [2, 1]
    assert questions["recall at 4,096 bytes, 3 documents, 2 answers each"] == [DENSE, SPIN]
    text = write_markdown(questions)
    assert "3 cells on a machine, torch 1, transformers 2, 2026-11-30: 6 s of decoding." in text
    assert "| `spin` 0.4 | 4 of 6 |" in text


def test_questions_without_dense_alone_are_refused(tmp_path):
    save(tmp_path, SPIN)
    with pytest.raises(SpinError, match="no dense result of recall at 4,096"):
        load_results(tmp_path)


def test_a_question_without_dense_waits_for_it(tmp_path):
    save(tmp_path, SPIN, DENSE, result("spin", 0.4, task="single"))
    assert list(load_results(tmp_path)) == ["recall at 4,096 bytes, 3 documents, 2 answers each"]


def test_the_figure_has_quality_over_bytes(tmp_path):
    methods = ["streaming", "tisa", "hisa"]
    more = [result(method, 0.6, keys=40, **FORCED) for method in methods]
    save(tmp_path, DENSE, SPIN, *more)
    questions = load_results(tmp_path)
    (results,) = questions.values()
    series = {one["label"]: one["points"] for one in chart_of("name", results)["series"]}
    assert set(series) == {"dense", "spin", *methods}
    (point,) = series["spin"]
    assert point["x"] == pytest.approx(0.65)
    assert point["value"] == pytest.approx(4 / 6)
    assert point["low"] < point["value"] < point["high"]
    page = write_page(questions)
    assert page.count("<svg") == 1
    assert "<script" not in page
    assert write_page({"few": results[:2]}).count("<svg") == 0


def test_command_writes_both_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        report.main()
    assert stopped.value.code == 2
    assert "a directory with results" in capsys.readouterr().err
    save(tmp_path, DENSE, SPIN)
    report.main()
    assert (tmp_path / "report.md").read_text(encoding="utf-8").startswith("# Study\n")
    assert (tmp_path / "report.html").exists()


def cells_of(row):
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_readme_quotes_the_first_look():
    section = (STUDY / "results" / "quick-cpu.md").read_text(encoding="utf-8")
    section = section[section.index("## recall at 4,096") :]
    rows = [cells_of(row) for row in section.splitlines() if row.startswith("| `")][:13]
    readme = (STUDY / "README.md").read_text(encoding="utf-8")
    assert {row[0].split("`")[1] for row in rows} == set(METHODS)
    for method, right, share, _, _, _, shared_bytes, *_ in rows:
        assert f"| {method} | {right} | {share} | {shared_bytes} |" in readme


def test_readme_lists_every_part():
    readme = (STUDY / "README.md").read_text(encoding="utf-8")
    for name, part in PARTS.items():
        if name == "quick":
            assert f"{len(part)} cells on the CPU" in readme
        else:
            assert f"| `{name}` | {len(part)} | " in readme
