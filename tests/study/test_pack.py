# SPDX-License-Identifier: Apache-2.0
"""Results in one file: the same bytes from the same results, and nothing else is taken for one."""

import os
import sys

import pytest

from benchmarks.study import pack as command
from benchmarks.study.pack import SUFFIX, pack, read_files
from spin_trtllm.errors import SpinError


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "study"
    made.mkdir()
    for name in ("b.json", "a.json", "report.html"):
        (made / name).write_text(f'{{"name": "{name}"}}', encoding="utf-8")
    return made


def test_every_result_comes_back_by_name(folder, tmp_path):
    target = tmp_path / f"all{SUFFIX}"
    assert pack(folder, target) == 2
    expected = [("a.json", b'{"name": "a.json"}'), ("b.json", b'{"name": "b.json"}')]
    assert list(read_files(target)) == list(read_files(folder)) == expected


def test_the_same_results_make_the_same_bytes(folder, tmp_path):
    first, second = (tmp_path / f"{n}{SUFFIX}" for n in (1, 2))
    pack(folder, first)
    for number, file in enumerate(sorted(folder.iterdir(), reverse=True)):
        os.utime(file, (10**9 + number, 10**9 + number))
        file.chmod(0o600)
    pack(folder, second)
    assert first.read_bytes() == second.read_bytes()
    (folder / "a.json").write_text("{}", encoding="utf-8")
    pack(folder, second)
    assert first.read_bytes() != second.read_bytes()


def test_other_files_are_refused(folder, tmp_path):
    empty, target = tmp_path / "empty", tmp_path / f"all{SUFFIX}"
    empty.mkdir()
    for given in (empty, tmp_path / "none", folder / "a.json"):
        with pytest.raises(SpinError, match=r"^folder: got .* allowed: a directory with results"):
            pack(given, target)
    with pytest.raises(SpinError, match=r"^target: got .*all.zip', allowed: .* \.tar\.xz"):
        pack(folder, tmp_path / "all.zip")
    for given in (folder / "a.json", tmp_path / "none"):
        with pytest.raises(SpinError, match=r"^results: got .* or one packed as \.tar\.xz"):
            list(read_files(given))
    assert not target.exists()


def test_damaged_files_are_one_line(folder, tmp_path):
    target = tmp_path / f"all{SUFFIX}"
    pack(folder, target)
    whole = target.read_bytes()
    for damaged in (b"", b"text", whole[:40], whole[: len(whole) // 2]):
        target.write_bytes(damaged)
        with pytest.raises(SpinError, match=r"^results: cannot read .*all\.tar\.xz'"):
            list(read_files(target))


def test_command(folder, tmp_path, monkeypatch, capsys):
    target = tmp_path / f"all{SUFFIX}"
    monkeypatch.setattr(sys, "argv", ["pack", str(folder), str(target)])
    command.main()
    assert capsys.readouterr().out == f"{target}: 2 files, 0.0 MiB\n"
    monkeypatch.setattr(sys, "argv", ["pack", str(target), str(target)])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("folder: got")
