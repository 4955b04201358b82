# SPDX-License-Identifier: Apache-2.0
"""Writing that leaves nothing half-written: a temporary name beside the target, then a rename."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
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
    try:
        handle, name = tempfile.mkstemp(prefix=_PREFIX, dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise SpinError(f"{argument}: cannot write {str(target)!r}: {error.strerror}") from error
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
        temporary = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=target.parent))
    except OSError as error:
        raise SpinError(f"{argument}: cannot make {str(target)!r}: {error.strerror}") from error
    try:
        yield temporary
        os.chmod(temporary, 0o777 & ~_umask())
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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
