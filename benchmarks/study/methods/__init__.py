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
from typing import Any, Protocol

import torch

from benchmarks.study.methods.head_subset import HeadSubset
from benchmarks.study.methods.heavy_hitters import HeavyHitters
from benchmarks.study.methods.hisa import Hisa
from benchmarks.study.methods.hooked import HookedRun, model_geometry
from benchmarks.study.methods.index_cache import IndexCache
from benchmarks.study.methods.layers import layer_targets
from benchmarks.study.methods.misses import Misses
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
    "Misses",
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

    @property
    def misses(self) -> Misses:
        """What was skipped and missed so far; empty of a method that does not measure it."""

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
        start: see `on`.
    """

    setting: str
    start: Callable[[torch.nn.Module, Sequence[int], float, bool], Run]

    def on(
        self,
        model: torch.nn.Module,
        sequence_ids: Sequence[int],
        setting: float,
        *,
        drafts: bool = False,
    ) -> Run:
        """Start on a model; the `with` block of the result ends it.

        Args:
            sequence_ids: one for each sequence of the batch; SPIN explores by them.
            setting: a number, 0 where the method has none.
            drafts: whether steps may have several rows.
        """
        return self.start(model, sequence_ids, setting, drafts)


def spin_config(target_sparsity: float, **options: Any) -> SpinConfig:
    """The tiny model's preset, with averages in bf16 as the large models' presets have them."""
    return replace(
        preset("tiny-deepseek-v4"), target_sparsity=target_sparsity, state_dtype="bf16", **options
    )


def _rival(setting: str, rule: Callable[[float], Rule]) -> Method:
    return Method(setting, lambda model, ids, value, drafts: HookedRun(model, rule(value)))


def _spin(*, by_layer: bool = False, **options: Any) -> Method:
    def start(model: torch.nn.Module, ids: Sequence[int], value: float, drafts: bool) -> Run:
        config = spin_config(value, **options)
        if by_layer:
            config = replace(config, layer_sparsity=layer_targets(model, value))
        if drafts:  # which the embedded host's session does not take
            return HookedRun(model, SpinRule(model, config, ids))
        return SpinRun(model, config, ids)

    return Method(_SPARSITY, start)


_SPARSITY = "target sparsity"

METHODS = {
    "dense": _rival("none", lambda _: Rule()),
    "spin": _spin(),
    "spin_unexplored": _spin(exploration_policy="none"),
    "spin_query": _spin(query_share=0.5),
    "spin_query_30": _spin(query_share=0.3),
    "spin_layers": _spin(by_layer=True),
    "spin_64": _spin(block_size=64),
    "spin_64_unexplored": _spin(block_size=64, exploration_policy="none"),
    "spin_row0_mask": _spin(mask_policy="row0"),
    "spin_row0_update": _spin(update_policy="row0"),
    "streaming": _rival(_SPARSITY, lambda value: Streaming(to_ppm(value))),
    "tisa": _rival(_SPARSITY, lambda value: Tisa(to_ppm(value))),
    "hisa": _rival(_SPARSITY, lambda value: Hisa(to_ppm(value))),
    "heavy_hitters": _rival(_SPARSITY, lambda value: HeavyHitters(to_ppm(value))),
    "index_cache": _rival("period in layers", lambda value: IndexCache(int(value))),
    "head_subset": _rival("heads", lambda value: HeadSubset(int(value))),
    "previous_picks": _rival("none", lambda _: PreviousPicks()),
}
