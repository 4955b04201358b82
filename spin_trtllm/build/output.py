# SPDX-License-Identifier: Apache-2.0
"""Where an engine may be written: never over anything that is not an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from spin_trtllm.build import tensorrt
from spin_trtllm.build.engine import ENGINE_FILES, is_engine, write_engine
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_directory


def check_output_dir(output: Path, checkpoint: Path, *, force: bool) -> None:
    """Refuse an output directory whose replacement could cost somebody their files.

    Args:
        output: where the engine is to go, absolute and without links.
        checkpoint: the checkpoint's directory, likewise.
        force: replace an earlier engine, or an empty directory.

    Raises:
        SpinError: the two directories overlap, or `output` exists and may not be replaced.
    """
    if output == checkpoint or output in checkpoint.parents or checkpoint in output.parents:
        refuse("output_dir", str(output), f"a directory apart from checkpoint {str(checkpoint)!r}")
    if not os.path.lexists(output):
        return
    if not os.path.isdir(output):
        refuse("output_dir", str(output), "a directory, not a file")
    if not force:
        refuse("output_dir", str(output), "a new directory, or --force to replace an engine")
    entries = _entries(output)
    if entries and not is_engine(output):
        refuse("output_dir", str(output), "an engine or an empty directory to replace by --force")
    if tensorrt.is_ours(output / tensorrt.FOLDER):
        entries.discard(tensorrt.FOLDER)
    if strange := sorted(entries - set(ENGINE_FILES)):
        refuse(f"output_dir: {str(output)!r} holds", strange[0], f"{', '.join(ENGINE_FILES)}")


def write_output(
    output: Path,
    files: Mapping[str, str],
    *,
    force: bool,
    then: Callable[[Path], None] | None = None,
) -> None:
    """Write an engine all at once: on any error `output` is as it was.

    Args:
        output: where the engine is to go.
        files: as `write_engine` takes them.
        force: replace what `check_output_dir` let pass.
        then: puts more into the new directory before it stands.

    Raises:
        SpinError: the directory cannot be written.
    """
    try:
        with atomic_directory(output, force=force) as directory:
            write_engine(directory, files)
            if then is not None:
                then(directory)
    except OSError as error:
        reason = error.strerror or error
        raise SpinError(f"output_dir: cannot write {str(output)!r}: {reason}") from error


def _entries(directory: Path) -> set[str]:
    try:
        return set(os.listdir(directory))
    except OSError as error:
        raise SpinError(
            f"output_dir: cannot read {str(directory)!r}: {error.strerror or error}"
        ) from error
