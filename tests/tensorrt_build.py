# SPDX-License-Identifier: Apache-2.0
"""What tests of `trtllm-build --tensorrt` share: its command line, its output, a played builder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints import TINY

from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.tensorrt.builder import BuiltEngine, EngineJob

LAYERS = (1, 3, 4, 6)
NETWORKS = [f"layer_{layer}.onnx" for layer in LAYERS]
ENGINES = [f"layer_{layer}.engine" for layer in LAYERS]
SIZES = ("--max_batch_size", 4, "--max_seq_len", 8000)


def arguments(output: Path, *more: object, checkpoint: Path = TINY) -> list[str]:
    places = ("--checkpoint_dir", checkpoint, "--output_dir", output)
    return [str(a) for a in ("--use_spin", "--tensorrt", *places, *SIZES, *more)]


def manifest(output: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((output / "tensorrt" / "manifest.json").read_text())
    return values


def layers_in(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "tensorrt").glob("layer_*"))


class PlayedBuilder:
    """Writes engines of one byte, and fails when it has built `fails_at` of them."""

    def __init__(self) -> None:
        self.fails_at: int | None = None
        self.built: list[str] = []

    def __call__(self, jobs: Sequence[EngineJob], **more: Any) -> list[BuiltEngine]:
        self.built = []
        for number, job in enumerate(jobs):
            if number == self.fails_at:
                raise SpinError(f"{Path(job.network).name}: out of memory")
            Path(job.engine).write_bytes(b"x")
            self.built.append(Path(job.engine).name)
        return [BuiltEngine(job.engine, 1.0 + n, 1) for n, job in enumerate(jobs)]
