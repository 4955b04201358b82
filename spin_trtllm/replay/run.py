# SPDX-License-Identifier: Apache-2.0
"""Replay of one trace under one policy, and the dump of what it did (SPEC 9)."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import refuse
from spin_trtllm.files import atomic_file, exists, save_tensors
from spin_trtllm.geometry import count_blocks
from spin_trtllm.replay.metrics import Metrics
from spin_trtllm.replay.policies import Outcome, make_policy
from spin_trtllm.replay.trace import Trace


class Dump:
    """Collects a replay's decisions. Memory grows by blocks and top-k slots, not by scores."""

    def __init__(self, *, layers: int, rows: int, blocks: int, top_k: int) -> None:
        self._blank = {
            "blocks": torch.zeros(0, layers, blocks, dtype=torch.bool),
            "row_blocks": torch.zeros(0, layers, rows, blocks, dtype=torch.bool),
            "explored": torch.zeros(0, layers, blocks, dtype=torch.bool),
            "topk": torch.zeros(0, layers, rows, top_k, dtype=torch.int32),
        }
        self._steps: dict[str, list[Tensor]] = {name: [] for name in self._blank}

    def add(self, outcome: Outcome) -> None:
        """Append one step."""
        selection = outcome.selection
        self._steps["blocks"].append(selection.blocks)
        self._steps["row_blocks"].append(selection.row_blocks)
        self._steps["explored"].append(selection.explored_blocks)
        self._steps["topk"].append(outcome.top_k)

    def save(self, path: Path, v: Tensor, d: Tensor) -> None:
        """Write SPEC 9's dump to a path that `atomic_file` gave."""
        tensors = {
            name: torch.stack(steps) if steps else self._blank[name]
            for name, steps in self._steps.items()
        }
        save_tensors(path, tensors | {"v": v, "d": d}, {}, argument="dump")


def replay(
    trace: Trace,
    config: SpinConfig,
    *,
    policy: str = "spin",
    dump: str | os.PathLike[str] | None = None,
    predictions: bool = False,
    on_step: Callable[[int], Any] | None = None,
) -> dict[str, float | int | None]:
    """Run a policy over a trace.

    Args:
        config: parameters; `top_k` None takes the trace's.
        policy: a name of `policies.POLICIES`.
        dump: file to write the decisions to, or None.
        predictions: also measure SPIN's own slot predictions (predictors always are).
        on_step: called with the number of finished steps.

    Returns:
        The metrics of SPEC 8.

    Raises:
        SpinError: unknown policy, NaN in a visible slot, a dump that cannot be written or would
            overwrite the trace; nothing is written then.
    """
    if dump is not None and exists(Path(dump), "dump") and _is_same(trace.path, Path(dump)):
        refuse("dump", str(dump), "a file other than the trace")
    config = config.with_top_k(trace.top_k)
    chosen = make_policy(policy, config, trace, predictions=predictions)
    layers, top_k = len(trace.layers), chosen.top_k_slots
    metrics = Metrics(
        layers=layers, ratio=trace.ratio, block_size_slots=config.block_size, top_k=top_k
    )
    record = Dump(
        layers=layers,
        rows=trace.rows,
        blocks=count_blocks(trace.slots, config.block_size),
        top_k=top_k,
    )
    # The dump is opened first, so that a bad path is not found out after a long replay.
    with nullcontext() if dump is None else atomic_file(dump, argument="dump") as target:
        for step in trace:
            outcome = chosen.step(step)
            metrics.add(step, outcome)
            if target is not None:
                record.add(outcome)
            if on_step is not None:
                on_step(step.index + 1)
        if target is not None:
            record.save(target, *chosen.final_state)
    return metrics.result()


def _is_same(trace: Path, dump: Path) -> bool:
    return dump.exists() and trace.samefile(dump)  # a dangling link is nobody's
