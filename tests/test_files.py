# SPDX-License-Identifier: Apache-2.0
"""Files and folders appear whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spin_trtllm.errors import SpinError
from spin_trtllm.files import atomic_directory, atomic_file, write_file, write_new_file


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def everything(folder: Path) -> dict[str, str | None]:
    """Every path below a folder, with the text of files."""
    return {
        str(p.relative_to(folder)): p.read_text() if p.is_file() else None
        for p in folder.rglob("*")
    }


# ---------------------------------------------------------------- atomic_file
@pytest.mark.parametrize("old", [None, "old"])
def test_a_file_appears_only_at_the_end(tmp_path: Path, old: str | None) -> None:
    target = tmp_path / "out.bin"
    if old is not None:
        target.write_text(old)
    with atomic_file(target) as temporary:
        temporary.write_text("half")
        assert temporary.parent == target.parent  # one file system: the rename is atomic
        assert temporary != target
        assert (target.read_text() if target.exists() else None) == old
        temporary.write_text("new")
    assert everything(tmp_path) == {"out.bin": "new"}


@pytest.mark.parametrize("error", [RuntimeError, SpinError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("old", [{}, {"out.bin": "old"}])
def test_a_failure_leaves_what_was_there(
    tmp_path: Path, error: type[BaseException], old: dict[str, str]
) -> None:
    for name, text in old.items():
        (tmp_path / name).write_text(text)

    def write_half() -> None:
        with atomic_file(str(tmp_path / "out.bin")) as temporary:
            temporary.write_text("half")
            raise error("stop")

    with pytest.raises(error, match="stop"):
        write_half()
    assert everything(tmp_path) == old


def test_file_permissions_follow_the_umask(tmp_path: Path, umask: int) -> None:
    with atomic_file(tmp_path / "out.bin") as temporary:
        temporary.write_text("x")
    assert mode(tmp_path / "out.bin") == 0o666 & ~umask
    assert os.umask(umask) == umask  # unchanged by the call


def test_the_umask_is_left_to_other_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read it is to set it, for all of them."""
    masks: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "umask", lambda mask: masks.append(mask) or 0o022)
        write_file(tmp_path / "out.bin", b"x")
        write_new_file([tmp_path / "new.bin"], Path.touch)
        with atomic_directory(tmp_path / "engine"):
            pass
    assert masks == []


def test_a_temporary_file_that_vanished(tmp_path: Path) -> None:
    def lose() -> None:
        with atomic_file(tmp_path / "out.bin") as temporary:
            temporary.unlink()

    with pytest.raises(FileNotFoundError):
        lose()
    assert everything(tmp_path) == {}


def test_a_target_that_became_a_folder_meanwhile(tmp_path: Path) -> None:
    def collide() -> None:
        with atomic_file(tmp_path / "out.bin") as temporary:
            temporary.write_text("x")
            (tmp_path / "out.bin").mkdir()

    with pytest.raises(OSError, match="directory"):
        collide()
    assert everything(tmp_path) == {"out.bin": None}


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    before = everything(tmp_path)
    for target, reason in [
        (tmp_path, "is no regular file, allowed: a file name"),
        (tmp_path / "missing" / "out.bin", "No such file or directory"),
        (tmp_path / "file" / "out.bin", "Not a directory"),
        ("/proc/out.bin", ""),
    ]:
        with pytest.raises(SpinError) as caught, atomic_file(target, argument="dump"):
            pytest.fail("must not be entered")
        message = str(caught.value)
        assert message.startswith("dump: ")
        assert repr(str(target)) in message
        assert reason in message
        assert "\n" not in message
    assert everything(tmp_path) == before


# What a path may be instead of a file or a folder, and how it comes about.
def nothing(path: Path) -> None:
    pass


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def looping(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("name", "make", "reason"),
    [
        ("pipe", os.mkfifo, "is no regular file"),
        ("dangling", dangling, "is no regular file"),
        ("loop", looping, "is no regular file"),
        ("device", lambda path: path.symlink_to("/dev/null"), "is no regular file"),
        ("/dev/null", nothing, "is no regular file"),
        ("", nothing, "is no regular file"),
        ("..", nothing, "is no regular file"),
        ("x" * 300, nothing, "File name too long"),
        ("nul\0", nothing, "null byte"),
    ],
    ids=lambda x: x[:10] if isinstance(x, str) else "",
)
def test_names_that_no_file_can_take(
    name: str,
    make: Callable[[Path], None],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / name)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(SpinError) as caught, atomic_file(name, argument="dump"):
        pytest.fail("must not be entered")
    message = str(caught.value)
    assert message.startswith("dump: ")
    assert reason in message
    assert message.isprintable()
    assert sorted(os.listdir(tmp_path)) == before


# ---------------------------------------------------------------- write_new_file
@pytest.fixture(params=["links", "no links"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems with hard links and without."""

    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    if request.param == "no links":
        monkeypatch.setattr(os, "link", unsupported)


@pytest.mark.usefixtures("links")
def test_a_new_file_replaces_nothing_that_came_meanwhile(tmp_path: Path, umask: int) -> None:
    first, second, third = targets = [tmp_path / name for name in "abc"]

    def write(temporary: Path) -> None:
        temporary.write_text("new")
        first.write_text("another's")
        second.symlink_to(tmp_path / "nowhere")

    assert write_new_file(targets, write) == third
    assert (first.read_text(), third.read_text()) == ("another's", "new")
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]
    assert second.is_symlink()
    assert mode(third) == 0o666 & ~umask


@pytest.mark.usefixtures("links")
def test_a_new_file_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text("half")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_new_file([tmp_path / "a"], write)
    for name in ("missing/a", "x" * 300):
        with pytest.raises(SpinError, match=r"^trace: cannot write ") as caught:
            write_new_file([tmp_path / name], lambda _: None, argument="trace")
        assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- atomic_directory
def test_a_folder_appears_only_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "engine"
    with atomic_directory(target) as temporary:
        (temporary / "config.json").write_text("{}")
        assert not target.exists()
        assert temporary.parent == target.parent
    assert everything(tmp_path) == {
        "a": None,
        "a/b": None,
        "a/b/engine": None,
        "a/b/engine/config.json": "{}",
    }


def test_an_existing_folder_needs_force(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    (target / "deep").mkdir(parents=True)
    (target / "deep" / "old").write_text("old")
    before = everything(tmp_path)
    with pytest.raises(SpinError) as caught, atomic_directory(target):
        pytest.fail("must not be entered")
    expected = f"output_dir: {str(target)!r} exists, allowed: a new directory, or --force"
    assert str(caught.value).startswith(expected)
    assert everything(tmp_path) == before
    with atomic_directory(target, force=True) as temporary:
        (temporary / "new").write_text("new")
        assert (target / "deep" / "old").read_text() == "old"
    assert everything(tmp_path) == {"engine": None, "engine/new": "new"}


@pytest.mark.parametrize("error", [RuntimeError, SpinError, KeyboardInterrupt])
@pytest.mark.parametrize("force", [False, True])
def test_a_failed_folder_leaves_what_was_there(
    tmp_path: Path, error: type[BaseException], force: bool
) -> None:
    target = tmp_path / "engine"
    if force:
        target.mkdir()
        (target / "old").write_text("old")
    before = everything(tmp_path)

    def fill_half() -> None:
        with atomic_directory(target, force=force) as temporary:
            (temporary / "sub").mkdir()
            (temporary / "sub" / "half").write_text("half")
            raise error("stop")

    with pytest.raises(error, match="stop"):
        fill_half()
    assert everything(tmp_path) == before


def test_folder_permissions_follow_the_umask(tmp_path: Path, umask: int) -> None:
    for force in (False, True):
        with atomic_directory(tmp_path / "engine", force=force):
            pass
        assert mode(tmp_path / "engine") == 0o777 & ~umask


def test_force_on_a_new_folder(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "engine", force=True) as temporary:
        (temporary / "x").write_text("x")
    assert everything(tmp_path) == {"engine": None, "engine/x": "x"}


@pytest.mark.parametrize("force", [False, True])
def test_folders_that_cannot_be_made(tmp_path: Path, force: bool) -> None:
    (tmp_path / "file").write_text("x")
    before = everything(tmp_path)
    for target, reason in [
        (tmp_path / "file", "is no directory, allowed: a directory name"),
        (tmp_path / "file" / "engine", "cannot make"),
        ("/proc/engine", "cannot make"),
    ]:
        with (
            pytest.raises(SpinError) as caught,
            atomic_directory(target, force=force, argument="engine"),
        ):
            pytest.fail("must not be entered")
        message = str(caught.value)
        assert message.startswith("engine: ")
        assert reason in message
        assert "\n" not in message
    assert everything(tmp_path) == before


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("name", "make", "reason"),
    [
        (".", nothing, "got '.', allowed: a directory name"),
        ("", nothing, "got '', allowed: a directory name"),
        ("..", nothing, "got '..', allowed: a directory name"),
        ("a/..", nothing, "got 'a/..', allowed: a directory name"),
        ("/", nothing, "got '/', allowed: a directory name"),
        ("pipe", os.mkfifo, "is no directory"),
        ("dangling", dangling, "is no directory"),
        ("loop", looping, "is no directory"),
        ("/dev/null", nothing, "is no directory"),
        ("nul\0", nothing, "null byte"),
        ("x" * 300, nothing, "File name too long"),
    ],
    ids=lambda x: x[:10] if isinstance(x, str) else "",
)
def test_names_that_no_folder_can_take(
    name: str,
    make: Callable[[Path], None],
    reason: str,
    force: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / name)
    before = sorted(os.listdir(tmp_path))
    with (
        pytest.raises(SpinError) as caught,
        atomic_directory(name, force=force, argument="engine"),
    ):
        pytest.fail("must not be entered")
    message = str(caught.value)
    assert message.startswith("engine: ")
    assert reason in message
    assert message.isprintable()
    assert sorted(os.listdir(tmp_path)) == before


def test_an_old_folder_that_cannot_be_put_back_is_kept_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "engine"
    target.mkdir()
    (target / "old").write_text("old")
    rename = os.replace

    def gone(source: Path, destination: Path) -> None:
        if Path(destination) == target:
            raise OSError(5, "Input/output error")
        rename(source, destination)

    def replace() -> None:
        with atomic_directory(target, force=True) as temporary:
            (temporary / "new").write_text("new")

    monkeypatch.setattr(os, "replace", gone)
    with pytest.raises(OSError, match="Input/output error"):
        replace()
    assert not target.exists()
    assert [p.read_text() for p in tmp_path.rglob("*") if p.is_file()] == ["old"]


def test_a_replacement_that_fails_half_way_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "engine"
    target.mkdir()
    (target / "old").write_text("old")
    before = everything(tmp_path)
    rename, made = os.replace, []

    def full_disk(source: Path, destination: Path) -> None:
        if made and Path(source) == made[0]:
            assert not target.exists()  # the old folder is already out of the way
            raise OSError(28, "No space left on device")
        rename(source, destination)

    def replace() -> None:
        with atomic_directory(target, force=True) as temporary:
            (temporary / "new").write_text("new")
            made.append(temporary)

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        replace()
    assert made
    assert everything(tmp_path) == before


def test_a_mount_point_stays_and_so_does_all_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "engine"
    target.mkdir()
    before = everything(tmp_path)
    rename = os.replace

    def mounted(source: Path, destination: Path) -> None:
        if Path(source) == target:
            raise OSError(16, "Device or resource busy")
        rename(source, destination)

    def replace() -> None:
        with atomic_directory(target, force=True) as temporary:
            (temporary / "new").write_text("new")

    monkeypatch.setattr(os, "replace", mounted)
    with pytest.raises(OSError, match="busy"):
        replace()
    assert everything(tmp_path) == before


def test_a_full_disk_is_told_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(Path, "write_bytes", full)
    target = tmp_path / "out.bin"
    with pytest.raises(SpinError) as caught:
        write_file(target, b"content", argument="output_dir")
    assert str(caught.value) == f"output_dir: cannot write {str(target)!r}: File too large"
    assert everything(tmp_path) == {}
    monkeypatch.undo()
    write_file(target, b"content")
    assert target.read_bytes() == b"content"


def test_the_longest_names_work(tmp_path: Path) -> None:
    name = "x" * 255
    with atomic_file(tmp_path / name) as temporary:
        temporary.write_text("whole")
    assert (tmp_path / name).read_text() == "whole"
    with atomic_directory(tmp_path / ("y" * 255)):
        pass
    assert (tmp_path / ("y" * 255)).is_dir()
