# SPDX-License-Identifier: Apache-2.0
"""The traces that figures are made of: readable, all different, and of one model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import refuse
from spin_trtllm.replay.policies import make_policy
from spin_trtllm.report.store import TraceFile, hash_trace


def check_traces(paths: Sequence[str], config: SpinConfig) -> list[TraceFile]:
    """Open every trace once.

    Args:
        paths: `spin-trace/1` files.
        config: what they are to be replayed with.

    Raises:
        SpinError: no trace, a bad or repeated one, traces of different models, or parameters that
            they cannot be replayed with.
    """
    if not paths:
        refuse("traces", list(paths), "at least one trace file")
    files = [_check_trace(path, config) for path in paths]
    _check_one_model(files)
    first: dict[str, TraceFile] = {}
    for file in files:
        if file.sha256 in first:
            allowed = f"each trace once; {str(first[file.sha256].path)!r} is the same"
            refuse("traces", str(file.path), allowed)
        first[file.sha256] = file
    return files


def _check_trace(path: str, config: SpinConfig) -> TraceFile:
    file = hash_trace(Path(path))
    make_policy("spin", config, file.open())  # the trace may lack what the parameters need
    return file


def _check_one_model(files: Sequence[TraceFile]) -> None:
    """Figures over all traces would mix what different models do."""
    first = files[0].open()
    for file in files[1:]:
        trace = file.open()
        if not trace.of_same_model(first):
            given = f"{trace.model_facts} in {file.path}"  # a long path is what may be cut off
            refuse("traces", given, f"one model's, as {first.model_facts} in {first.path}")
