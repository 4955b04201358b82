# SPDX-License-Identifier: Apache-2.0
"""Recording decode steps, and writing them as a trace and as a replay dump (SPEC 9).

A trace holds all scores: in kept blocks the very values SPIN used, in the others what the dense
scorer says. So a replay with the same configuration decides as the host did, block for block, and
ends with the same averages, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spin_trtllm.errors import refuse
from spin_trtllm.files import atomic_file, save_tensors
from spin_trtllm.geometry import count_blocks
from spin_trtllm.hosts.transformers.call import ABSENT
from spin_trtllm.reference.averages import read_averages
from spin_trtllm.replay.trace import write_trace
from spin_trtllm.step import SpinStep, StepPlan


@dataclass(eq=False)
class _Entry:
    """One layer of a step: `N` visible slots in `B` blocks, on the CPU."""

    scores: Tensor  # fp32 [N]
    blocks: Tensor  # bool [B]
    row_blocks: Tensor  # bool [B]
    explored: Tensor  # bool [B]
    topk: Tensor  # int32 [K]
    query_scores: Tensor | None  # fp32 [N // block size]


@dataclass(eq=False)
class _Step:
    position_tokens: int
    warm: bool
    layers: dict[int, _Entry] = field(default_factory=dict)


@dataclass(eq=False)
class _Recording:
    """One sequence, from a cold step on: only from there can a replay follow."""

    steps: list[_Step] = field(default_factory=list)
    averages: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # layer: V, D now


class Capture:
    """Recordings of all sequences of a session: 4 bytes a slot, layer and step, on the CPU.

    A recording starts over when its sequence became cold in a way that positions do not show
    (SPEC 9: only a gap or a step back is a reset): after `reset`, a fallback or a moved beam.
    """

    def __init__(self, step: SpinStep) -> None:
        self._step = step
        self._recordings: dict[int, _Recording] = {}

    @property
    def sequence_ids(self) -> list[int]:
        """Sequences of which something was recorded."""
        return list(self._recordings)

    def add(self, layer: int, sequence_ids: Sequence[int], plan: StepPlan, scores: Tensor) -> None:
        """Record one layer of a step that was observed.

        Args:
            layer: decoder-layer index; sequence_ids: `S` ids.
            scores: fp32 `[S, N]`, all visible slots, no NaN.
        """
        state = self._step.state
        topk = self._step.top_k(plan, scores.unsqueeze(1))[:, 0].cpu()
        for row, sequence_id in enumerate(sequence_ids):
            lane = int(plan.lanes[row])
            if lane % (state.sequences + 1) == state.scratch:
                continue  # no averages, so nothing that a replay could follow
            position = int(plan.positions_tokens[row, 0])
            recording = self._open(sequence_id, layer, position, bool(plan.warm[row]))
            if recording is None:
                continue
            recording.steps[-1].layers[layer] = self._entry(plan, row, scores[row], topk[row])
            slots = scores.shape[1]
            recording.averages[layer] = (
                read_averages(state.v.flatten(0, 1)[lane, :slots]).cpu(),
                read_averages(state.d.flatten(0, 1)[lane, : slots + 1]).cpu(),
            )

    def forget(self, sequence_ids: Sequence[int]) -> None:
        """Drop the recordings of these sequences."""
        for sequence_id in sequence_ids:
            self._recordings.pop(sequence_id, None)

    def save_trace(
        self,
        path: str | os.PathLike[str],
        sequence: int = 0,
        *,
        source: str = "",
        model: str = "",
    ) -> None:
        """Write a `spin-trace/1` file of one sequence (SPEC 9).

        Args:
            path: file to write, replaced whole or not at all.
            sequence: sequence id.
            source: free text on what made the trace.

        Raises:
            SpinError: a sequence of which nothing was recorded, or a path that cannot be written.
        """
        steps = self._steps(sequence)
        config, width = self._step.config, _width(steps)
        queries = None
        if config.query_share_ppm:
            blocks = count_blocks(width, config.block_size)
            queries = self._stack(steps, "query_scores", blocks, float("nan")).unsqueeze(2)
        write_trace(
            path,
            self._stack(steps, "scores", width, float("nan")).unsqueeze(2),
            torch.tensor([[step.position_tokens] for step in steps]),
            torch.zeros(len(steps), dtype=torch.int64),
            ratio=self._step.ratio,
            top_k=self._step.top_k_slots,
            layers=self._step.state.layers,
            sequence_id=sequence,
            source=source,
            model=model,
            query_scores=queries,
            query_block_size_slots=config.block_size,
            query_pooling=config.query_pooling,
        )

    def save_dump(self, path: str | os.PathLike[str], sequence: int = 0) -> None:
        """Write what the host did, in the form of `spin-trtllm replay --dump` (SPEC 9).

        `topk` is SPIN's own order and tie rule in every step; where all blocks were kept the
        attention read the host's picks, which may differ among equal scores.

        Raises:
            SpinError: as `save_trace`.
        """
        steps = self._steps(sequence)
        slots = _width(steps)
        blocks = count_blocks(slots, self._step.config.block_size)
        averages = self._recordings[sequence].averages
        layers = self._step.state.layers
        tensors = {
            "blocks": self._stack(steps, "blocks", blocks, False),
            "row_blocks": self._stack(steps, "row_blocks", blocks, False).unsqueeze(2),
            "explored": self._stack(steps, "explored", blocks, False),
            "topk": self._stack(steps, "topk", self._step.top_k_slots, -1).unsqueeze(2),
            "v": torch.stack([_pad(averages[n][0], slots, 0.0) for n in layers]),
            "d": torch.stack([_pad(averages[n][1], slots + 1, 0.0) for n in layers]),
        }
        with atomic_file(path, argument="dump") as temporary:
            save_tensors(temporary, tensors, {}, argument="dump")

    def _open(self, sequence_id: int, layer: int, position: int, warm: bool) -> _Recording | None:
        """The recording whose last step this layer belongs to; None when none can be made."""
        recording = self._recordings.get(sequence_id)
        if layer == self._step.state.layers[0]:
            follows = recording is not None and recording.steps[-1].position_tokens + 1 == position
            if not warm and (recording is None or follows):
                recording = self._recordings[sequence_id] = _Recording()
            if recording is not None:
                recording.steps.append(_Step(position, warm))
        elif recording is not None and recording.steps[-1].warm != warm:
            self.forget([sequence_id])
            return None
        return recording

    def _entry(self, plan: StepPlan, row: int, scores: Tensor, topk: Tensor) -> _Entry:
        chosen = plan.selection
        blocks = count_blocks(scores.shape[0], self._step.config.block_size)
        queries = plan.query_scores
        if queries is not None:  # NaN counts as -inf (SPEC 4), and in a trace means "no such block"
            queries = queries[row, 0].cpu().nan_to_num(ABSENT, float("inf"), ABSENT)
        return _Entry(
            scores.cpu().clone(),
            chosen.blocks[row, :blocks].cpu().clone(),
            chosen.row_blocks[row, 0, :blocks].cpu().clone(),
            chosen.explored_blocks[row, :blocks].cpu().clone(),
            topk,
            queries,
        )

    def _steps(self, sequence: int) -> list[_Step]:
        """The whole steps of a sequence: its last one may have been cut off by an exception."""
        recording = self._recordings.get(sequence)
        layers = set(self._step.state.layers)
        steps = [s for s in recording.steps if set(s.layers) == layers] if recording else []
        if not steps:
            refuse("sequence", sequence, f"a recorded one: {self.sequence_ids or 'there is none'}")
        return steps

    def _stack(self, steps: list[_Step], name: str, width: int, fill: float) -> Tensor:
        """One field of all entries, filled up to `width`: `[steps, layers, width]`."""
        layers = self._step.state.layers
        return torch.stack(
            [
                torch.stack([_pad(getattr(step.layers[n], name), width, fill) for n in layers])
                for step in steps
            ]
        )


def _width(steps: list[_Step]) -> int:
    """The most slots that any step sees."""
    return max(len(entry.scores) for step in steps for entry in step.layers.values())


def _pad(tensor: Tensor, width: int, fill: float) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[0]), value=fill)
