# SPDX-License-Identifier: Apache-2.0
"""The stages of training, each a row of phases: how long sequences are, what the indexer does.

A stage begins without the indexer (every query attends to all slots), then teaches it beside the
attention, and ends with the attention reading only what the indexer picks, as in use. The first two
make the model; the third, which may be left out, adds the study's tasks to what it can do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from spin_trtllm.errors import refuse


@dataclass(frozen=True)
class Phase:
    """Steps of one kind.

    Attributes:
        steps: optimizer steps.
        step_seconds: what one takes on an H200. Learning rates follow these seconds rather than
            steps: the longer sequences become, the fewer steps pass in the same time.
        length: bytes of a sequence, a multiple of the model's sliding window.
        recall_share: mean share of sequences that are recall episodes.
        task_share: mean share of sequences that are tasks of the study; the others are plain text.
        teach_indexer: whether the indexer's loss is added.
        sparse: whether the attention reads only the indexer's top-k slots.
    """

    steps: int
    step_seconds: float
    length: int
    recall_share: float
    teach_indexer: bool = False
    sparse: bool = False
    task_share: float = 0.0

    @property
    def seconds(self) -> float:
        """What the phase takes on an H200."""
        return self.steps * self.step_seconds


@dataclass(frozen=True)
class Stage:
    """A row of phases with one learning-rate schedule over all of them.

    Attributes:
        number: 1 to 3; a part of what seeds the batches.
        step_bytes: bytes of one optimizer step, over all its sequences.
        learning_rate: highest rate of everything but the indexer.
        indexer_learning_rate: highest rate of the indexer.
    """

    number: int
    phases: tuple[Phase, ...]
    learning_rate: float
    indexer_learning_rate: float
    step_bytes: int = 65_536

    @property
    def steps(self) -> int:
        """Optimizer steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    def phase_at(self, step: int) -> Phase:
        """The phase of step `0 .. steps - 1`."""
        return self.phases[self._place(step)[0]]

    def learning_rates_at(self, step: int) -> tuple[float, float]:
        """Rates of the model and of its indexer at a step; the latter is 0 before it is taught."""
        first_taught = next(n for n, phase in enumerate(self.phases) if phase.teach_indexer)
        total = sum(phase.seconds for phase in self.phases)
        before = sum(phase.seconds for phase in self.phases[:first_taught])
        phase, done = self._place(step)
        elapsed = (
            sum(p.seconds for p in self.phases[:phase]) + done * self.phases[phase].step_seconds
        )
        rate = self.learning_rate * warm_cosine(elapsed / total, warm_up=0.02, floor=0.04)
        if phase < first_taught:
            return rate, 0.0
        taught = (elapsed - before) / (total - before)
        return rate, self.indexer_learning_rate * warm_cosine(taught, warm_up=0.03, floor=0.05)

    def _place(self, step: int) -> tuple[int, int]:
        """Number of the phase of a step, and the steps done before it in that phase."""
        if not 0 <= step < self.steps:
            refuse("step", step, f"0 .. {self.steps - 1}")
        start = 0
        for number, end in enumerate(accumulate(phase.steps for phase in self.phases)):
            if step < end:
                return number, step - start
            start = end
        raise AssertionError("unreachable: steps is the last end")


def warm_cosine(progress: float, *, warm_up: float, floor: float) -> float:
    """Share of the highest learning rate: a short linear rise, then half a cosine down to `floor`.

    Args:
        progress: share of the schedule that is done, in [0, 1].
        warm_up: share of the schedule that the rise takes.
    """
    rise = min(1.0, progress / warm_up + 0.03)
    return rise * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


# Steps and seconds of the first two are those of the shipped checkpoint's logs.
_FIRST = Stage(
    number=1,
    phases=(
        Phase(1_400, 0.120, length=2_048, recall_share=0.375),
        Phase(160, 0.172, length=8_192, recall_share=0.25),
        Phase(460, 0.183, length=8_192, recall_share=0.25, teach_indexer=True),
        Phase(820, 0.228, length=8_192, recall_share=0.25, teach_indexer=True, sparse=True),
    ),
    learning_rate=2e-3,
    indexer_learning_rate=3e-3,
)
_SECOND = Stage(
    number=2,
    phases=(
        Phase(196, 0.171, length=8_192, recall_share=0.375),
        Phase(172, 0.338, length=32_768, recall_share=0.35),
        Phase(336, 0.349, length=32_768, recall_share=0.35, teach_indexer=True),
        Phase(410, 0.512, length=32_768, recall_share=0.35, teach_indexer=True, sparse=True),
    ),
    learning_rate=8e-4,
    indexer_learning_rate=1.5e-3,
)
_TASKS = {"recall_share": 0.125, "task_share": 0.625}
_THIRD = Stage(
    number=3,
    phases=(
        Phase(1_200, 0.120, length=2_048, **_TASKS),
        Phase(300, 0.171, length=8_192, **_TASKS),
        Phase(150, 0.183, length=8_192, teach_indexer=True, **_TASKS),
        Phase(250, 0.228, length=8_192, teach_indexer=True, sparse=True, **_TASKS),
        Phase(200, 0.512, length=32_768, teach_indexer=True, sparse=True, **_TASKS),
    ),
    learning_rate=1e-3,
    indexer_learning_rate=1.5e-3,
)
STAGES = {stage.number: stage for stage in (_FIRST, _SECOND, _THIRD)}
