# SPDX-License-Identifier: Apache-2.0
"""The scores of one sequence, from its first decode step on, until they are a trace (SPEC 9)."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from spin_trtllm.geometry import visible_slots
from spin_trtllm.replay.trace import write_trace

SCORE_BYTES = 4


class Recording:
    """Whole steps that follow one another; room for all of them is taken at the start.

    Args:
        request_id: of the sequence; tenancy: of the lane that it has for as long as SPIN knows it.
        layers: decoder-layer indices; ratio: raw tokens a slot.
        steps, rows, slots: of the trace at most.

    Attributes:
        steps: whole steps of which it is known how many drafts were accepted.
        room_bytes, used_bytes: of scores: taken, and of these steps.
    """

    def __init__(
        self,
        request_id: int,
        tenancy: int,
        layers: tuple[int, ...],
        *,
        ratio: int,
        steps: int,
        rows: int,
        slots: int,
    ) -> None:
        self.request_id, self.tenancy, self.layers, self._ratio = request_id, tenancy, layers, ratio
        self._scores = torch.empty(steps, len(layers), rows, slots)  # touched step by step
        self._starts_tokens: list[int] = []  # first positions, of whole steps
        self._accepted: list[int] = []
        self._position_tokens = 0

    @property
    def steps(self) -> int:
        return len(self._accepted)

    @property
    def is_complete(self) -> bool:
        """Whether there are as many steps as there is room for."""
        return self.steps == len(self._scores)

    @property
    def room_bytes(self) -> int:
        return self._scores.nbytes

    @property
    def used_bytes(self) -> int:
        return self._scores[: self.steps].nbytes

    def goes_on(self, position_tokens: int, rows: int) -> bool:
        """Open a step; False if there is no room, or it does not go on from the one before.

        Args:
            position_tokens: of row 0: it also says how many drafts of the step before it were
                accepted.
        """
        if rows != self._scores.shape[2]:
            return False
        if self._starts_tokens:
            accepted = position_tokens - self._starts_tokens[-1] - 1
            if not 0 <= accepted < rows:
                return False
            if rows > 1:
                self._accepted.append(accepted)
        self._position_tokens = position_tokens
        return not self.is_complete

    def put(self, layer: int, scores: Tensor) -> None:
        """Take a layer of the open step.

        Args:
            layer: place among `layers`.
            scores: fp32 `[rows, width]` on any device; what a row does not see may hold anything.
        """
        target = self._scores[len(self._starts_tokens), layer]
        visible = visible_slots(self._position_tokens + torch.arange(len(target)), self._ratio)
        width = int(visible[-1])
        # NaN counts as -inf (SPEC 4), and in a trace means that the row does not see the slot.
        own = scores[:, :width].cpu().nan_to_num(float("-inf"), float("inf"), float("-inf"))
        target.fill_(float("nan"))
        sees = torch.arange(width) < visible.unsqueeze(1)
        target[:, :width] = own.masked_fill_(~sees, float("nan"))

    def close_step(self) -> None:
        """Call the open step whole: all layers of it are there."""
        self._starts_tokens.append(self._position_tokens)
        if self._scores.shape[2] == 1:
            self._accepted.append(0)

    def save(self, path: str | os.PathLike[str], *, top_k: int, source: str) -> None:
        """Write the steps as a trace, whole or not at all.

        Raises:
            SpinError: a path that cannot be written, a disk that is full.
        """
        rows = torch.arange(self._scores.shape[2])
        write_trace(
            path,
            self._scores[: self.steps],
            torch.tensor(self._starts_tokens[: self.steps])[:, None] + rows,
            torch.tensor(self._accepted),
            ratio=self._ratio,
            top_k=top_k,
            layers=self.layers,
            sequence_id=self.request_id,
            source=source,
        )
