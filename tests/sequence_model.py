# SPDX-License-Identifier: Apache-2.0
"""What a host may expect of `SpinStep`: a dictionary of literal sequences by id, no lanes.

Every pair of sequence and layer is one `OracleSequence`. Nothing here knows batch rows, lanes or
generations, so whatever the product mixes up between them shows as a difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from oracle import LayerRecord, OracleSequence
from torch import Tensor

from spin_trtllm.config import SpinConfig
from spin_trtllm.state import SpinState
from spin_trtllm.step import SpinStep, StepPlan

# Small enough to work out by hand: blocks of 8, one layer with index 3, a slot for every token.
SMALL: dict[str, Any] = {"block_size": 8, "sparsity": 0.5, "exploration_policy": "none"}

# What a lane holds before its first step. A tensor added to the state must be added here, and is
# then covered by every test of recycled and padding lanes.
NEVER_SEEN: dict[str, Any] = {"v": 0.0, "d": 0.0, "warm": False, "next_tokens": -1}


def new_step(
    *,
    layers: Sequence[int] = (3,),
    sequences: int = 4,
    slots: int = 64,
    ratio: int = 1,
    top_k: int = 8,
    **params: Any,
) -> SpinStep:
    """A step over a new state; `params` are the oracle's, on top of `SMALL`."""
    params = SMALL | params
    params["target_sparsity"] = params.pop("sparsity")
    config = SpinConfig(top_k=top_k, **params)
    state = SpinState(layers, sequences=sequences, slots=slots, dtype=config.storage_dtype)
    return SpinStep(config, state, ratio=ratio)


def positions_of(starts: Sequence[int], rows: Sequence[int], width: int | None = None) -> Tensor:
    """`rows[s]` consecutive positions from `starts[s]`, padded with -1 to `width` rows."""
    width = width or max(rows, default=1)
    table = torch.full((len(starts), width), -1, dtype=torch.int64)
    for s, (start, count) in enumerate(zip(starts, rows, strict=True)):
        table[s, :count] = torch.arange(start, start + count)
    return table


def run(
    step: SpinStep,
    sequence_ids: Sequence[int | None],
    starts: Sequence[int],
    scores: Tensor,
    *,
    rows: Sequence[int] | None = None,
    accepted: Sequence[int] | None = None,
) -> StepPlan:
    """Plan and observe one step of all layers; one row a sequence unless told otherwise."""
    rows = rows or [1] * len(starts)
    plan = step.plan(step.state.layers, sequence_ids, positions_of(starts, rows))
    counts = list(accepted or [0] * len(starts)) * len(step.state.layers)
    step.observe(plan, scores, torch.tensor(counts, dtype=torch.int64))
    return plan


def indices(mask: Tensor) -> set[int]:
    """Where a one-dimensional mask is set."""
    return set(mask.nonzero().squeeze(-1).tolist())


def tensors_of(state: SpinState) -> dict[str, Tensor]:
    """Every tensor a state holds, found by reflection."""
    return {name: value for name, value in vars(state).items() if isinstance(value, Tensor)}


def snapshot(state: SpinState) -> dict[str, Tensor]:
    """Copies of `tensors_of`."""
    return {name: tensor.clone() for name, tensor in tensors_of(state).items()}


def changed_lanes(state: SpinState, before: dict[str, Tensor]) -> set[int]:
    """Lanes in which any tensor of the state differs from a snapshot, in any layer."""
    lanes: set[int] = set()
    for name, tensor in tensors_of(state).items():
        differs = (tensor != before[name]).flatten(2) if tensor.dim() > 2 else None
        differs = tensor != before[name] if differs is None else differs.any(-1)
        lanes |= indices(differs.any(0))
    return lanes


def tiny_trace(scores: np.ndarray, positions: list[list[int]], **changes: Any) -> dict[str, Any]:
    """A trace as `strategies.write_trace` takes it, of layers 3, 4, ...; nothing is accepted."""
    trace = {
        "scores": scores,
        "positions": np.array(positions, dtype=np.int64),
        "accepted": np.zeros(len(positions), dtype=np.int64),
        "ratio": 1,
        "top_k": 8,
        "layers": list(range(3, 3 + scores.shape[1])),
        "sequence_id": 7,
    }
    return trace | changes


@dataclass
class Track:
    """One sequence in one layer; `open` is its last planned entry, until that is observed."""

    oracle: OracleSequence
    next_tokens: int = -1
    open: Entry | None = None

    def renew(self) -> None:
        """Forget everything."""
        self.oracle.reset()
        self.next_tokens = -1


@dataclass(eq=False)
class Entry:
    """One sequence and layer of a planned step; `track` is None where nothing is remembered."""

    key: tuple[int | None, int]
    track: Track | None
    positions: list[int]
    scores: np.ndarray  # [1, rows, slots], this entry's own
    record: LayerRecord = field(default_factory=lambda: LayerRecord(warm=False))


class SequenceModel:
    """Sequences by id, as many as `capacity`; further ones run dense and leave nothing behind."""

    def __init__(
        self,
        layers: Sequence[int],
        *,
        capacity: int,
        slots: int,
        ratio: int,
        top_k: int,
        layer_sparsity: Mapping[int, float] | None = None,
        **params: Any,
    ) -> None:
        self.own_sparsity = layer_sparsity or {}
        self.layers, self.capacity = tuple(layers), capacity
        self.ratio, self.top_k, self.slots = ratio, top_k, slots
        self.params = SMALL | params
        self.tracks: dict[tuple[int | None, int], Track] = {}
        self.deferred: dict[tuple[int | None, int], Entry] = {}

    @property
    def sequence_ids(self) -> set[int | None]:
        """Sequences that are remembered."""
        return {sequence_id for sequence_id, _ in self.tracks}

    def plan(
        self,
        layers: Sequence[int],
        sequence_ids: Sequence[int | None],
        positions: list[list[int]],
        scores: np.ndarray,
    ) -> list[Entry]:
        """Settle what was deferred, then decide. Scores are `[entries, rows, slots]`."""
        for sequence_id in sequence_ids:
            self._admit(sequence_id)
        self._settle(layers, dict(zip(sequence_ids, positions, strict=True)))
        entries = []
        for layer in layers:
            for sequence_id, places in zip(sequence_ids, positions, strict=True):
                track = self.tracks.get((sequence_id, layer))
                own = scores[len(entries), : len(places)]
                entry = Entry((sequence_id, layer), track, places, own)
                entries.append(entry)
                if places:
                    self._decide(entry)
        return entries

    def observe(self, entries: Sequence[Entry], accepted: Sequence[int]) -> int:
        """Learn; returns how many entries of remembered sequences came too late."""
        late = 0
        for entry, count in zip(entries, accepted, strict=True):
            if self._current(entry):
                self._learn(entry, count)
            else:
                late += entry.track is not None
        return late

    def defer(self, entries: list[Entry]) -> None:
        """Learn once the next step of each sequence shows how much was accepted."""
        self.deferred |= {entry.key: entry for entry in entries if entry.positions}

    def reset(self, sequence_id: int) -> None:
        """Everything known of a sequence is void, also what is under way."""
        if sequence_id in self.sequence_ids:
            self.release(sequence_id)
            self._admit(sequence_id)

    def release(self, sequence_id: int) -> None:
        """The sequence is gone, and its place free."""
        for layer in self.layers:
            self.tracks.pop((sequence_id, layer), None)

    def migrate(self, sequence_id: int) -> None:
        """Leave and come back with the same averages; what is under way is lost."""
        moved = {layer: self.tracks.get((sequence_id, layer)) for layer in self.layers}
        self.release(sequence_id)
        self._admit(sequence_id)
        for layer, track in moved.items():
            if track is not None:
                self.tracks[sequence_id, layer] = Track(track.oracle, track.next_tokens)

    def _admit(self, sequence_id: int | None) -> None:
        known = self.sequence_ids
        if sequence_id is None or sequence_id in known or len(known) == self.capacity:
            return
        for layer in self.layers:
            self.tracks[sequence_id, layer] = Track(self._oracle(sequence_id, layer))

    def _oracle(self, sequence_id: int, layer: int) -> OracleSequence:
        params = dict(self.params)
        params["sparsity"] = self.own_sparsity.get(layer, params["sparsity"])
        return OracleSequence(self.ratio, self.top_k, [layer], sequence_id, self.slots, **params)

    def _decide(self, entry: Entry) -> None:
        track = entry.track
        if track is None:
            track = Track(self._oracle(0, entry.key[1]))  # cold, and dropped at once
        if track.next_tokens != entry.positions[0]:
            track.renew()
        track.open = entry
        # The oracle's step, in its two halves: what was accepted may be known only later.
        entry.record = track.oracle._select(0, entry.positions, entry.scores)

    def _current(self, entry: Entry) -> bool:
        track = entry.track
        return track is not None and self.tracks.get(entry.key) is track and track.open is entry

    def _learn(self, entry: Entry, accepted: int) -> None:
        track = entry.track
        assert track is not None
        track.oracle._observe(0, entry.positions, entry.scores, entry.record.blocks, accepted)
        track.oracle.warm = True
        track.next_tokens = entry.positions[0] + accepted + 1
        track.open = None

    def _settle(self, layers: Sequence[int], following: dict[int | None, list[int]]) -> None:
        stepping = [(i, layer) for i, places in following.items() if places for layer in layers]
        for key in stepping:
            entry = self.deferred.pop(key, None)
            if entry is None or not self._current(entry):
                continue
            accepted = following[key[0]][0] - entry.positions[0] - 1
            if 0 <= accepted < len(entry.positions):
                self._learn(entry, accepted)
