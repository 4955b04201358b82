# SPDX-License-Identifier: Apache-2.0
"""Without `--use_spin`: TensorRT-LLM's own `trtllm-build`, where this release still has one."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spin_trtllm.errors import SpinError

MODULE = "tensorrt_llm.commands.build"

# In the environment rather than in a variable: their command may start this script as a process.
_GUARD = "TLLM_SPIN_BUILD_HANDED_OVER"


def hand_over(program: str, arguments: Sequence[str]) -> object:
    """Run TensorRT-LLM's command with untouched arguments and return what it returns.

    Raises:
        SpinError: there is none, it cannot be imported, or it came back to this one.
    """
    if _GUARD in os.environ:
        raise SpinError(f"{program}: {MODULE} called this command again, allowed: its own build")
    if not has_own_build():
        raise SpinError(
            f"{program}: got no --use_spin, and no {MODULE} to hand over to: TensorRT-LLM removed "
            f"{program} with its engine backend in mid-2026; for DeepSeek-V4 use "
            f"{program} --use_spin --checkpoint_dir CKPT --output_dir DIR"
        )
    with _as_their_process(program, arguments):
        try:
            module = importlib.import_module(MODULE)
        except ImportError as error:
            raise SpinError(f"{program}: cannot import {MODULE}: {error}") from error
        result: object = module.main()
        return result


def has_own_build() -> bool:
    """Whether an installed TensorRT-LLM has the module; nothing of it is imported to find out."""
    package, *names = MODULE.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a half-removed installation
        return False
    homes = (spec and spec.submodule_search_locations) or []
    return any(Path(home, *names).with_suffix(".py").is_file() for home in homes)


@contextmanager
def _as_their_process(program: str, arguments: Sequence[str]) -> Iterator[None]:
    """Their argument parser reads `sys.argv`; everything is put back afterwards."""
    argv = sys.argv
    sys.argv = [program, *arguments]
    os.environ[_GUARD] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        os.environ.pop(_GUARD, None)
