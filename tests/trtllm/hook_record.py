# SPDX-License-Identifier: Apache-2.0
"""What a hooked batch really did, step by step, for comparing it with the traces it wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hook_batch import Step
from safetensors.torch import load_file

from spin_trtllm.config import SpinConfig
from spin_trtllm.geometry import count_blocks
from spin_trtllm.hosts.trtllm.backend import DecodeEngine
from spin_trtllm.replay.run import replay
from spin_trtllm.replay.trace import Trace


@dataclass
class Entry:
    """One sequence in one step: scores `[layers, rows, slots]`, and what each layer did with it."""

    scores: np.ndarray
    kept: list[list[int]]
    visible_blocks: list[int]
    selected: list[list[list[int]]]


class Record:
    """Entries by request id and first position."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = SpinConfig.from_dict(config)
        self.entries: dict[tuple[int, int], Entry] = {}

    def add(self, step: Step, engine: DecodeEngine) -> None:
        """Note a step that ran SPIN."""
        layers = range(len(engine.shape.layers))
        views = [engine.step.layer(n, len(step.rows)) for n in layers]
        for s, (number, start) in enumerate(zip(step.rows, step.starts, strict=True)):
            self.entries[number, start] = Entry(
                step.scores[:, s],
                [[j for j in view.block_list[s].tolist() if j >= 0] for view in views],
                [
                    int(count_blocks(int(v.visible_slots[s]), engine.config.block_size))
                    for v in views
                ],
                [[sorted(row.tolist()) for row in step.selected[n, s]] for n in layers],
            )

    def check(self, path: Path) -> Trace:
        """A trace has the very scores, and its replay the very decisions, of these entries."""
        trace, dump = Trace(path), path.with_suffix(".dump")
        figures = replay(trace, self.config, dump=dump)
        decided, skipped = load_file(dump), []
        dump.unlink()
        for step in trace:
            start = int(step.positions_tokens[0])
            entry = self.entries[trace.sequence_id, start]
            if step.index:
                before = int(trace.positions_tokens[step.index - 1, 0])
                assert start == before + 1 + int(trace.accepted[step.index - 1])
            for n in range(len(trace.layers)):
                kept = decided["blocks"][step.index, n].nonzero().squeeze(1).tolist()
                assert kept == entry.kept[n], (start, n)
                if step.index:  # the first is cold
                    skipped.append(1 - len(kept) / entry.visible_blocks[n])
                for row in range(trace.rows):
                    seen = (start + row + 1) // trace.ratio
                    want = torch.from_numpy(entry.scores[n, row, :seen])
                    assert step.scores[n, row, :seen].equal(want)
                    chosen = decided["topk"][step.index, n, row].tolist()
                    assert sorted(chosen) == entry.selected[n][row]
        assert figures["cold_steps"] == 1
        assert figures["realized_sparsity"] == np.mean(skipped)
        return trace
