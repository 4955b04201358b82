# SPDX-License-Identifier: Apache-2.0
"""Calibrate: replay traces at several targets, share them out, and replay what came of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from spin_trtllm.calibration.allocate import allocate
from spin_trtllm.calibration.curves import layer_curves, mean_miss, skipped_slots, slots_of
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import check_integer, refuse
from spin_trtllm.report.inputs import check_traces
from spin_trtllm.report.record import FloatArray, Record
from spin_trtllm.report.store import MAX_JOBS, Arm, Store, TraceFile

# Replayed; no layer gets more than the last.
TARGETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Figures:
    """What replays found.

    Attributes:
        mean_miss: float64 `[L]`, of each layer.
        p99_miss: over the rows of all layers.
        skipped: share of all slots that was not scored.
    """

    mean_miss: FloatArray
    p99_miss: float
    skipped: float


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found.

    Attributes:
        config: as given, with a target for each layer.
        layers: decoder-layer indices.
        before: with one target for all layers.
        after: with `config`, on the traces that it was made from.
        held_out: each trace with targets made from the others; None of a single trace.
    """

    config: SpinConfig
    layers: Sequence[int]
    before: Figures
    after: Figures
    held_out: Figures | None


def plan_calibration(traces: Sequence[str], config: SpinConfig, jobs: int = 1) -> list[TraceFile]:
    """Check everything that can be checked beforehand, and open the traces.

    Args:
        traces: `spin-trace/1` files of one model; config: `target_sparsity` is the mean to share
            out; jobs: processes that replay, 1 to 1024.

    Raises:
        SpinError: a bad or repeated trace, traces of different models, a sparsity that leaves
            nothing to share out, parameters that the traces cannot be replayed with.
    """
    check_integer("--jobs", jobs, 1, MAX_JOBS)
    if config.reduction == "A0":
        refuse("reduction", config.reduction, "A1, A2: A0 has no budget to share out")
    if not 0 < config.sparsity_ppm <= TARGETS[-1] * 1_000_000:
        refuse("target_sparsity", config.target_sparsity, f"a number in (0, {TARGETS[-1]}]")
    return check_traces(traces, config.at_sparsity(config.target_sparsity))


def steps_of(files: Sequence[TraceFile], config: SpinConfig) -> int:
    """Steps that `calibrate` replays at most."""
    passes = len(_targets(config)) + 1 + (len(files) > 1)
    return passes * sum(len(file.open()) for file in files)


def calibrate(
    files: Sequence[TraceFile],
    config: SpinConfig,
    *,
    jobs: int = 1,
    on_steps: Callable[[int], object] = lambda steps: None,
) -> Calibration:
    """Share `target_sparsity` out among the layers, so that the mean miss is least.

    Together the layers score as many slots as with one target for all. The same traces and
    parameters give the same targets.

    Args:
        files: from `plan_calibration`; config: its `layer_sparsity` counts for nothing.
        on_steps: called with the number of steps just replayed.

    Raises:
        SpinError: NaN in a visible slot, no warm step, or a full disk.
    """
    with tempfile.TemporaryDirectory(prefix="spin.") as folder:
        replays = _Replays(Path(folder), files, config, jobs, on_steps)
        found = replays.best(range(len(files)))
        before = replays.figures(replays.records[config.target_sparsity])
        after = replays.figures(replays.run(found))
        held_out = replays.figures(replays.held_out()) if len(files) > 1 else None
    return Calibration(found, replays.layers, before, after, held_out)


class _Replays:
    """Records of the traces at every target, and more on demand."""

    def __init__(
        self,
        folder: Path,
        files: Sequence[TraceFile],
        config: SpinConfig,
        jobs: int,
        on_steps: Callable[[int], object],
    ) -> None:
        self._folder, self._files, self._config = folder, files, config
        self._jobs, self._on_steps = jobs, on_steps
        traces = [file.open() for file in files]
        self.layers = traces[0].layers
        self._slots = [slots_of(trace) for trace in traces]
        arms = {target: Arm(config.at_sparsity(target)) for target in _targets(config)}
        store = Store(folder, files)
        store.fill(arms.values(), jobs=jobs, on_steps=on_steps)
        self.records = {target: store.records(arm) for target, arm in arms.items()}

    def best(self, chosen: Sequence[int]) -> SpinConfig:
        """The targets that some of the traces ask for."""
        records = {
            target: [of_target[n] for n in chosen] for target, of_target in self.records.items()
        }
        curves = layer_curves(records, [self._slots[n] for n in chosen])
        targets = allocate(curves, self._config.target_sparsity)
        return replace(self._config, layer_sparsity=tuple(zip(self.layers, targets, strict=True)))

    def run(self, config: SpinConfig) -> list[Record]:
        """Records of all traces with these parameters."""
        return self._replay(self._files, config)

    def held_out(self) -> list[Record]:
        """Records of each trace with the targets that the others ask for."""
        everyone = range(len(self._files))
        return [
            self._replay([file], self.best([n for n in everyone if n != left]))[0]
            for left, file in enumerate(self._files)
        ]

    def figures(self, records: Sequence[Record]) -> Figures:
        """What they found, one a trace."""
        misses = np.concatenate([record.miss.ravel() for record in records])
        skipped = skipped_slots(records, self._slots)
        return Figures(
            mean_miss(records), float(np.nanpercentile(misses, 99)), float(skipped.mean())
        )

    def _replay(self, files: Sequence[TraceFile], config: SpinConfig) -> list[Record]:
        store, arm = Store(self._folder, files), Arm(config)
        store.fill([arm], jobs=self._jobs, on_steps=self._on_steps)
        return store.records(arm)


def _targets(config: SpinConfig) -> list[float]:
    return sorted({*TARGETS, config.target_sparsity})
