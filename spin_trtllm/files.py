# SPDX-License-Identifier: Apache-2.0
"""Writing that leaves nothing half-written: a temporary name beside the target, then a rename."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from spin_trtllm.errors import SpinError

_PREFIX = ".spin."  # of temporary names: short, so that the longest legal target still works


def exists(path: Path, argument: str) -> bool:
    """Whether anything, a dangling link included, has this name.

    Raises:
        SpinError: a name that no file can have, or a folder that may not be searched.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        shown = str(path) if len(str(path)) < 120 else f"{str(path)[:117]}..."
        raise SpinError(f"{argument}: cannot use {shown!r}: {reason}") from error
    return True


@contextmanager
def atomic_file(path: str | os.PathLike[str], *, argument: str = "output") -> Iterator[Path]:
    """Give a temporary path to write; on success it becomes `path`, on any error it vanishes.

    Raises:
        SpinError: the folder does not exist, is not writable or full, or `path` is there and is
            no regular file.
    """
    target = Path(path)
    # A rename would put a file in the place of a device or a pipe.
    if exists(target, argument) and not target.is_file():
        raise SpinError(f"{argument}: {str(target)!r} is no regular file, allowed: a file name")
    with _temporary_file(target, argument) as temporary:
        yield temporary
        os.replace(temporary, target)


def write_new_file(
    targets: Iterable[Path], write: Callable[[Path], None], *, argument: str = "output"
) -> Path:
    """Write a file whole under the first name that nothing has when it is done, or not at all.

    Nothing is replaced, whoever else writes in the folder meanwhile.

    Args:
        targets: names in one folder, as many as it takes.
        write: given a temporary path, writes it.

    Returns:
        The name that it got.

    Raises:
        SpinError: the folder does not exist, is not writable or full.
    """
    targets = iter(targets)
    target = next(targets)
    with _temporary_file(target, argument) as temporary:
        write(temporary)
        try:
            while not _give_name(temporary, target):
                target = next(targets)
        except OSError as error:
            reason = error.strerror
            raise SpinError(f"{argument}: cannot write {str(target)!r}: {reason}") from error
    return target


def write_file(path: str | os.PathLike[str], content: bytes, *, argument: str = "output") -> None:
    """Write a file whole or not at all.

    Raises:
        SpinError: as `atomic_file`; the disk is full or gone.
    """
    try:
        with atomic_file(path, argument=argument) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        reason = error.strerror or error
        raise SpinError(f"{argument}: cannot write {str(path)!r}: {reason}") from error


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, argument: str
) -> None:
    """Write a safetensors file to a path that `atomic_file` gave.

    Raises:
        SpinError: the disk is full or gone.
    """
    try:
        save_file({k: v.contiguous() for k, v in tensors.items()}, path, dict(metadata))
    except (SafetensorError, OSError) as error:
        raise SpinError(f"{argument}: cannot write: {' '.join(str(error).split())}") from error


@contextmanager
def atomic_directory(
    path: str | os.PathLike[str], *, force: bool = False, argument: str = "output_dir"
) -> Iterator[Path]:
    """Give a temporary directory to fill; on success it becomes `path`, on any error it vanishes.

    Args:
        force: replace an existing directory; the old one is removed only after the new one stands.

    Raises:
        SpinError: `path` exists and `force` is off, is a file, or cannot be made.
    """
    target = Path(path)
    if target.name in ("", ".."):
        raise SpinError(f"{argument}: got {str(path)!r}, allowed: a directory name")
    if exists(target, argument) and not target.is_dir():
        raise SpinError(f"{argument}: {str(target)!r} is no directory, allowed: a directory name")
    if target.exists() and not force:
        raise SpinError(
            f"{argument}: {str(target)!r} exists, allowed: a new directory, or --force to replace"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _make_temporary(target.parent, Path.mkdir)
    except OSError as error:
        raise SpinError(f"{argument}: cannot make {str(target)!r}: {error.strerror}") from error
    try:
        yield temporary
        if target.exists():
            _exchange(temporary, target)
        else:
            os.replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _exchange(new: Path, target: Path) -> None:
    """Put `new` where the directory `target` stands; on failure the old one stands again."""
    aside = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}old.", dir=target.parent))
    old = aside / target.name
    try:
        os.replace(target, old)  # a mount point does not go
        try:
            os.replace(new, target)
        except BaseException:
            os.replace(old, target)  # should this fail too, the old directory stays aside
            raise
    except BaseException:
        with suppress(OSError):
            aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _temporary_file(target: Path, argument: str) -> Iterator[Path]:
    """A new file beside `target`; what is left of it at the end vanishes."""
    try:
        temporary = _make_temporary(target.parent, lambda path: path.touch(exist_ok=False))
    except OSError as error:
        raise SpinError(f"{argument}: cannot write {str(target)!r}: {error.strerror}") from error
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _make_temporary(folder: Path, make: Callable[[Path], None]) -> Path:
    """Make something of a new name, with the permissions that anything new has.

    `tempfile` grants them to the owner alone. To add the others takes the umask, which can only be
    read by setting it, for all threads of the process; so the kernel has to apply it.
    """
    while True:
        path = folder / f"{_PREFIX}{secrets.token_hex(8)}"
        with suppress(FileExistsError):
            make(path)
            return path


def _give_name(temporary: Path, target: Path) -> bool:
    """Whether a file got a name, which it does not if anything has it."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links: the name is taken first, then replaced
        try:
            target.touch(exist_ok=False)
        except FileExistsError:
            return False
        os.replace(temporary, target)
    return True
