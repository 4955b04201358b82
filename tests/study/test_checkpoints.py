# SPDX-License-Identifier: Apache-2.0
"""Two checkpoints are compared by what a method costs each of them, document by document."""

import json
import sys

import pytest

from benchmarks.study import checkpoints
from benchmarks.study.checkpoints import write_comparison
from spin_trtllm.errors import SpinError

DOCUMENTS = 8
ALL = [[True, True]] * DOCUMENTS
HALF = [[True, False]] * DOCUMENTS


def save(folder, *results):
    folder.mkdir()
    for number, (method, right, more) in enumerate(results):
        question = {"task": "recall", "context_bytes": 4_096, "documents": 8, "queries": 2}
        question |= {"drafts": None} | more.get("question", {})
        cell = {"question": question, "method": method, "setting": 0.4 * (method == "spin")}
        found = {"cell": cell, "right": right, "source": folder.name, "seconds": 1.0}
        found |= {"environment": {"date": "2026-11-30", "device": folder.name, "versions": {}}}
        found |= more.get("answers", {})
        (folder / f"{number}.json").write_text(json.dumps(found), encoding="utf-8")


def cells(text, start):
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_costs_are_paired_by_document(tmp_path):
    save(tmp_path / "a", ("dense", ALL, {}), ("spin", HALF, {}))
    save(tmp_path / "b", ("dense", ALL, {}), ("spin", [[True, True], *HALF[1:]], {}))
    text = write_comparison(tmp_path / "a", tmp_path / "b")
    assert "## recall at 4,096 bytes, 8 documents, 2 answers each" in text
    for place, name in (("First", "a"), ("Second", "b")):
        assert f"- {place}: `{tmp_path / name}`\n- 2 cells on {name}, " in text
    assert cells(text, "`dense`") == ["`dense`", "16 of 16", "16 of 16", "-", "-", "-"]
    spin = cells(text, "`spin` 0.4")
    assert spin[1:3] == ["8 of 16", "9 of 16"]
    assert spin[3] == "-0.500 (-0.500 to -0.500)"
    assert spin[4].startswith("-0.438 (")
    assert spin[5].startswith("+0.062 (+0.000 to ")  # one document of eight gained one of two


def test_dense_may_differ_too(tmp_path):
    """What a checkpoint does not answer by itself is no cost of the method."""
    save(tmp_path / "a", ("dense", ALL, {}), ("spin", ALL, {}))
    save(tmp_path / "b", ("dense", HALF, {}), ("spin", HALF, {}))
    spin = cells(write_comparison(tmp_path / "a", tmp_path / "b"), "`spin` 0.4")
    assert spin[3:] == ["+0.000 (+0.000 to +0.000)"] * 3


def test_text_is_compared_in_nats(tmp_path):
    def text(nats):
        return {"question": {"task": "text"}, "answers": {"nats": [[nats, 1.0]] * DOCUMENTS}}

    save(tmp_path / "a", ("dense", ALL, text(1.0)), ("spin", ALL, text(2.0)))
    save(tmp_path / "b", ("dense", ALL, text(3.0)), ("spin", ALL, text(7.0)))
    spin = cells(write_comparison(tmp_path / "a", tmp_path / "b"), "`spin` 0.4")
    assert [cell.split()[0] for cell in spin[3:]] == ["+0.500", "+2.000", "+1.500"]


def test_what_only_one_ran_is_left_out(tmp_path):
    save(tmp_path / "a", ("dense", ALL, {}), ("spin", ALL, {}), ("tisa", ALL, {}))
    save(tmp_path / "b", ("dense", ALL, {}), ("spin", ALL, {}))
    assert "tisa" not in write_comparison(tmp_path / "a", tmp_path / "b")


def test_nothing_in_common_is_refused(tmp_path, monkeypatch, capsys):
    save(tmp_path / "a", ("dense", ALL, {}))
    save(tmp_path / "b", ("dense", ALL, {"question": {"context_bytes": 8_192}}))
    with pytest.raises(SpinError, match=r"^second: got .*b', allowed: a directory with"):
        write_comparison(tmp_path / "a", tmp_path / "b")
    folders = [str(tmp_path / name) for name in ("a", "b", "both.md")]
    monkeypatch.setattr(sys, "argv", ["checkpoints", *folders[:2], "--output", folders[2]])
    with pytest.raises(SystemExit) as stop:
        checkpoints.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("second: got")
    assert not (tmp_path / "both.md").exists()
