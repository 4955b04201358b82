# SPDX-License-Identifier: Apache-2.0
"""Where the tiny trained DeepSeek-V4 lives: the model of the demo, the tests and the benchmarks."""

from __future__ import annotations

import os
from pathlib import Path

from spin_trtllm.errors import SpinError, refuse

ENVIRONMENT_VARIABLE = "SPIN_TINY_CHECKPOINT"
FILES = ("config.json", "model.safetensors", "tokenizer.json")

_IN_CLONE = Path(__file__).parent.parent / "benchmarks" / "tiny_model" / "checkpoint"


def checkpoint_path() -> Path:
    """Directory of the tiny checkpoint: `SPIN_TINY_CHECKPOINT` if set, else the clone's own.

    Raises:
        SpinError: the variable names a directory without the three files, or it is unset and the
            package is installed without the repository around it (a wheel carries no weights).
    """
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named is not None:
        if not _is_checkpoint(Path(named)):
            refuse(ENVIRONMENT_VARIABLE, named, f"a directory with {', '.join(FILES)}")
        return Path(named)
    if not _is_checkpoint(_IN_CLONE):
        raise SpinError(
            f"tiny checkpoint: not at {str(_IN_CLONE)!r}, an installed package does not carry it: "
            f"clone the repository and set {ENVIRONMENT_VARIABLE} to its "
            "benchmarks/tiny_model/checkpoint"
        )
    return _IN_CLONE


def _is_checkpoint(directory: Path) -> bool:
    return all((directory / name).is_file() for name in FILES)
