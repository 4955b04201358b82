# SPDX-License-Identifier: Apache-2.0
"""Writing that leaves nothing half-written: a temporary name beside the target, then a rename."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spin_trtllm.errors import SpinError


@contextmanager
def atomic_file(path: str | os.PathLike[str], *, argument: str = "output") -> Iterator[Path]:
    """Give a temporary path to write; on success it becomes `path`, on any error it vanishes.

    Raises:
        SpinError: the folder does not exist, is not writable, or `path` is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise SpinError(f"{argument}: {str(target)!r} is a directory, allowed: a file name")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
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
    if target.exists() and not target.is_dir():
        raise SpinError(f"{argument}: {str(target)!r} is a file, allowed: a directory name")
    if target.exists() and not force:
        raise SpinError(
            f"{argument}: {str(target)!r} exists, allowed: a new directory, or --force to replace"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
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
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    old = aside / target.name
    os.replace(target, old)
    try:
        os.replace(new, target)
    except BaseException:
        os.replace(old, target)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
