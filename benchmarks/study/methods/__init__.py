# SPDX-License-Identifier: Apache-2.0
"""Ways to choose what a decode step scores: dense, SPIN, and its rivals, on equal terms.

    with METHODS["spin"].on(model, sequence_ids, 0.4) as run:
        ...            # decode steps, `run.commit(0)` after each
    run.cost.bytes_read(model_geometry(model))

A run acts on every call of the model but those under `run.reading()`. It narrows what the scorer
sees and widens what it returns, so skipped keys are really not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

import torch

from benchmarks.study.methods.head_subset import HeadSubset
from benchmarks.study.methods.heavy_hitters import HeavyHitters
from benchmarks.study.methods.hisa import Hisa
from benchmarks.study.methods.hooked import HookedRun, model_geometry
from benchmarks.study.methods.index_cache import IndexCache
from benchmarks.study.methods.previous_picks import PreviousPicks
from benchmarks.study.methods.rule import Rule
from benchmarks.study.methods.spin import SpinRule, SpinRun
from benchmarks.study.methods.step import Cost, Geometry, Step
from benchmarks.study.methods.streaming import Streaming
from benchmarks.study.methods.tisa import Tisa
from spin_trtllm.config import SpinConfig, preset
from spin_trtllm.geometry import to_ppm

__all__ = [
    "METHODS",
    "Cost",
    "Geometry",
    "HookedRun",
    "Method",
    "Rule",
    "Run",
    "SpinRule",
    "SpinRun",
    "Step",
    "model_geometry",
    "spin_config",
]


class Run(Protocol):
    """A method at work on a model; see `HookedRun`."""

    @property
    def cost(self) -> Cost:
        """What was read so far."""

    def __enter__(self) -> Run: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def reading(self) -> AbstractContextManager[None]:
        """Calls in here read text; afterwards the method starts anew."""

    def again(self, rows: int) -> AbstractContextManager[None]:
        """The call in here runs the first rows of the last step again."""

    def commit(self, accepted: int) -> None:
        """A step is over, and so many of its drafts were accepted."""


@dataclass(frozen=True)
class Method:
    """One way to choose, up to a setting.

    Attributes:
        setting: what the setting is.
        make: a rule for a model, sequence ids and a setting.
    """

    setting: str
    make: Callable[[torch.nn.Module, Sequence[int], float], Rule]

    def on(
        self,
        model: torch.nn.Module,
        sequence_ids: Sequence[int],
        setting: float,
        *,
        drafts: bool = False,
    ) -> Run:
        """Start on a model, to be ended by a `with` block.

        Args:
            sequence_ids: one for each row of the batch.
            drafts: whether steps may have several rows.
        """
        return HookedRun(model, self.make(model, sequence_ids, setting))


class _SpinMethod(Method):
    def on(
        self,
        model: torch.nn.Module,
        sequence_ids: Sequence[int],
        setting: float,
        *,
        drafts: bool = False,
    ) -> Run:
        """Through the embedded host's own session, but for drafts, which it does not take."""
        if drafts:
            return super().on(model, sequence_ids, setting, drafts=True)
        return SpinRun(model, spin_config(setting), sequence_ids)


def spin_config(target_sparsity: float) -> SpinConfig:
    """The tiny model's preset, with averages in bf16 as the large models' presets have them."""
    return replace(preset("tiny-deepseek-v4"), target_sparsity=target_sparsity, state_dtype="bf16")


_SPARSITY = "target sparsity"

METHODS = {
    "dense": Method("none", lambda model, ids, setting: Rule()),
    "spin": _SpinMethod(
        _SPARSITY, lambda model, ids, setting: SpinRule(model, spin_config(setting), ids)
    ),
    "streaming": Method(_SPARSITY, lambda model, ids, setting: Streaming(to_ppm(setting))),
    "tisa": Method(_SPARSITY, lambda model, ids, setting: Tisa(to_ppm(setting))),
    "hisa": Method(_SPARSITY, lambda model, ids, setting: Hisa(to_ppm(setting))),
    "heavy_hitters": Method(_SPARSITY, lambda model, ids, setting: HeavyHitters(to_ppm(setting))),
    "index_cache": Method("period in layers", lambda model, ids, setting: IndexCache(int(setting))),
    "head_subset": Method("heads", lambda model, ids, setting: HeadSubset(int(setting))),
    "previous_picks": Method("none", lambda model, ids, setting: PreviousPicks()),
}
