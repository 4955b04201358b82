# SPDX-License-Identifier: Apache-2.0
"""Batches of a stage, each a function of seed and step alone: training can go on anywhere.

Nothing is drawn from a generator that lives on between steps: any step's batch can be made by any
worker process, in any order, and is the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.tiny_model.episodes import recall_episode, task_episode
from benchmarks.tiny_model.model import BOS
from benchmarks.tiny_model.stages import Stage
from spin_trtllm.errors import refuse
from spin_trtllm.recall import Draws

LOSS_ROWS = 256  # positions of each sequence on which the indexer is compared with the attention
ANSWER_WEIGHT = 6.0


@dataclass(frozen=True)
class Batch:
    """One step's sequences; the plain texts come first, then recall episodes, then tasks.

    Attributes:
        tokens: int64 `[sequences, length]`, what the model reads: BOS, then all bytes but the last.
        targets: int64 `[sequences, length]`, the bytes themselves.
        asked: bool `[sequences, length]`, which targets are bytes of an answer.
        texts: sequences that are plain text.
        loss_rows: int64 `[rows]`, ascending positions for the indexer's loss.
    """

    tokens: Tensor
    targets: Tensor
    asked: Tensor
    texts: int
    loss_rows: Tensor

    @property
    def weights(self) -> Tensor:
        """Loss weight of each target, float32: an answer counts more, for it is rarer."""
        return torch.where(self.asked, ANSWER_WEIGHT, 1.0)

    def to(self, device: torch.device) -> Batch:
        """The batch on another device."""
        moved = (
            tensor.to(device, non_blocking=True)
            for tensor in (self.tokens, self.targets, self.asked, self.loss_rows)
        )
        tokens, targets, asked, loss_rows = moved
        return Batch(tokens, targets, asked, self.texts, loss_rows)

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory, for copies that do not wait."""
        tokens, targets, asked, loss_rows = (
            tensor.pin_memory()
            for tensor in (self.tokens, self.targets, self.asked, self.loss_rows)
        )
        return Batch(tokens, targets, asked, self.texts, loss_rows)


class Batches(Dataset[Batch]):
    """All batches of a stage by step; a `DataLoader` makes them ahead in worker processes."""

    def __init__(self, text: NDArray[np.uint8], stage: Stage, seed: int) -> None:
        """Args:
        text: training text, uint8 `[bytes]`.
        seed: any integer >= 0.

        Raises:
            SpinError: the text is shorter than a sequence.
        """
        longest = max(phase.length for phase in stage.phases)
        if len(text) <= longest:
            refuse("text", len(text), f"more than {longest} bytes")
        self._text = text.tobytes()
        self._stage = stage
        self._seed = seed

    def __len__(self) -> int:
        return self._stage.steps

    def __getitem__(self, step: int) -> Batch:
        phase = self._stage.phase_at(step)
        length = phase.length
        sequences = max(1, self._stage.step_bytes // length)
        draws = Draws((self._seed << 40) | (self._stage.number << 32) | step)
        tasks = _rounded(sequences * phase.task_share, draws)
        episodes = min(_rounded(sequences * phase.recall_share, draws), sequences - tasks)
        texts = sequences - episodes - tasks

        rows = [self._excerpt(length, draws) for _ in range(texts)]
        made = [recall_episode(draws, length, self._text) for _ in range(episodes)]
        made += [task_episode(draws, length, self._excerpt(length, draws)) for _ in range(tasks)]
        asked = torch.zeros(sequences, length, dtype=torch.bool)
        for episode in made:
            for place in episode.answers:
                asked[len(rows), place] = True
            rows.append(episode.text)
        targets = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
        targets = targets.view(sequences, length).long()
        tokens = targets.roll(1, dims=1)
        tokens[:, 0] = BOS
        loss_rows = torch.tensor(sorted(draws.distinct(min(LOSS_ROWS, length), length)))
        return Batch(tokens, targets, asked, texts, loss_rows)

    def _excerpt(self, length: int, draws: Draws) -> bytes:
        """Training text from a random place."""
        start = draws.below(len(self._text) - length)
        return self._text[start : start + length]


def _rounded(number: float, draws: Draws) -> int:
    """One of the two integers around a number, at random so that it is right on average."""
    whole = int(number)
    return whole + (draws.below(1_000) < 1_000 * (number - whole))
