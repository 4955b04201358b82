# SPDX-License-Identifier: Apache-2.0
"""Checks steps of a hooked host against one literal sequence a request id."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from hook_batch import Step, model_ids
from sequence_model import SequenceModel

from spin_trtllm.geometry import count_blocks
from spin_trtllm.hosts.trtllm import indexer as hooks
from spin_trtllm.hosts.trtllm.backend import DecodeEngine


def engine_behind(indexer: type, metadata: Any) -> DecodeEngine:
    """The engine of a metadata's manager, read off the closure of the hook on `Indexer`."""
    cells = indexer.sparse_attn_indexer.__closure__ or ()  # type: ignore[attr-defined]
    host = next(c.cell_contents for c in cells if isinstance(c.cell_contents, hooks.Host))
    engine = host.engine(metadata)
    assert isinstance(engine, DecodeEngine), engine
    return engine


class Witness:
    """What every step must have kept, selected and remembered.

    With `lower_first` False, equal scores at the end of a top-k may go either way.
    """

    def __init__(
        self,
        layers: Sequence[int],
        ratio: int,
        top_k: int,
        slots: int,
        capacity: int,
        config: dict[str, Any],
        *,
        lower_first: bool = True,
    ) -> None:
        oracle = {k: v for k, v in config.items() if k != "target_sparsity"}
        oracle |= {"sparsity": config["target_sparsity"], "exploration_policy": "random"}
        self.layers, self.lower_first = tuple(layers), lower_first
        self.model = SequenceModel(
            layers, capacity=capacity, slots=slots, ratio=ratio, top_k=top_k, **oracle
        )
        self.sparse_entries = 0

    def check(self, step: Step, engine: DecodeEngine) -> None:
        """Run the model through the same step and compare all that shows."""
        lane_of = engine.lanes.lane_of
        self.forget({*step.contexts, *(self.model.sequence_ids - lane_of.keys())})
        ids = model_ids(step.rows)
        assert all(i is None or i in lane_of for i in ids)
        positions = [list(range(p, p + step.next_n)) for p in step.starts]
        entries = self.model.plan(
            self.layers, ids, positions, step.scores.reshape(-1, *step.scores.shape[2:])
        )
        for index in range(len(self.layers)):
            view = engine.step.layer(index, len(ids))
            for s in range(len(ids)):
                record = entries[index * len(ids) + s].record
                kept = [j for j in view.block_list[s].tolist() if j >= 0]
                assert kept == sorted(record.blocks)
                self.sparse_entries += len(kept) < count_blocks(
                    int(view.visible_slots[s]), engine.config.block_size
                )
                for row in range(step.next_n):
                    got = sorted(step.selected[index, s, row].tolist())
                    want = sorted(record.topk[row])
                    if not self.lower_first:
                        got, want = (_values(step.scores[index, s, row], x) for x in (got, want))
                    assert got == want
        self._check_state(engine)
        self.model.defer(entries)

    def forget(self, numbers: Iterable[int]) -> None:
        """Sequences that prefill, or whose lane went to another one."""
        for number in numbers:
            self.model.release(number)

    def _check_state(self, engine: DecodeEngine) -> None:
        state, lane_of = engine.step.state, engine.lanes.lane_of
        held = {number: state._read(lane_of[number]) for number in self.model.sequence_ids}
        for (number, layer), track in self.model.tracks.items():
            index, own = self.layers.index(layer), held[number]
            assert bool(own["warm"][index]) == track.oracle.warm
            assert int(own["next_tokens"][index]) == track.next_tokens
            assert own["v"][index].tolist() == [float(x) for x in track.oracle.v[0]]
            assert own["d"][index].tolist() == [float(x) for x in track.oracle.d[0]]


def _values(scores: np.ndarray, slots: list[int]) -> list[float | None]:
    """The scores of distinct slots, sorted: what equal scores may not change."""
    assert len({n for n in slots if n >= 0}) == sum(n >= 0 for n in slots)
    return [None for n in slots if n < 0] + sorted(float(scores[n]) for n in slots if n >= 0)
