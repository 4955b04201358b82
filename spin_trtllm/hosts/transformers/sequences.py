# SPDX-License-Identifier: Apache-2.0
"""Which sequence sits in which row of which cache; a row number alone is never an identity."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spin_trtllm.errors import refuse


@dataclass(eq=False)
class CacheRows:
    """The sequences of one cache object, in row order.

    Attributes:
        sequence_ids: one id a row; distinct over all live caches.
        newest_key: `[rows, head_dim]`, sliding-window key of each row's newest token when last
            seen in a decode step; None after a prefill.
        past: `[rows, slots, D]`, the last indexer layer's keys at the end of the last decode step,
            the host's own tensor; None after a prefill.
        dense: the running step gave up in some layer, so its remaining layers stay dense too.
        pooled_keys: `[rows, whole blocks, P, D]` by layer, what `pool_keys` made so far.
    """

    sequence_ids: tuple[int, ...]
    newest_key: Tensor | None = None
    past: Tensor | None = None
    dense: bool = False
    pooled_keys: dict[int, Tensor] = field(default_factory=dict)

    def forget_keys(self) -> None:
        """The cache may hold other keys than it did."""
        self.newest_key = self.past = None
        self.pooled_keys.clear()

    def follow(self, keys: Tensor, past: Tensor | None) -> list[int]:
        """Ids of the rows that no longer hold what they held: beams moved, or the cache changed.

        A sliding-window key says which tokens came just before; the indexer's keys, of every layer,
        which came before those. Rows that agree in both hold equal texts.

        Args:
            keys: `[rows, 1, window, head_dim]`, the host's sliding-window keys of one layer, this
                step's token last.
            past: `[rows, slots, D]`, the last indexer layer's keys before this step, or None.
        """
        seen, self.newest_key = self.newest_key, keys[:, 0, -1].clone()
        if seen is None:
            return []
        if keys.shape[2] < 2:
            self.pooled_keys.clear()
            return list(self.sequence_ids)
        same = (keys[:, 0, -2] == seen).all(-1)
        # Whoever moves rows makes a new tensor, so what was not touched is not compared.
        if self.past is not None and past is not self.past:
            same = same & _equal_rows(self.past, past)
        if not bool(same.all()):
            self.pooled_keys.clear()
        return [i for i, kept in zip(self.sequence_ids, same.tolist(), strict=True) if not kept]


def _equal_rows(one: Tensor, other: Tensor | None) -> Tensor:
    """Which rows are the same in both: bool `[rows]`."""
    if other is None or other.shape != one.shape:
        return one.new_zeros(one.shape[0], dtype=torch.bool)
    return (one == other).flatten(1).all(1)


class SequenceBook:
    """Gives every row of every cache an id, and notices caches that went away.

    Ids count from 0 in order of first sight, so that runs repeat; `name_next` replaces them.
    """

    def __init__(self) -> None:
        self._rows: weakref.WeakKeyDictionary[Any, CacheRows] = weakref.WeakKeyDictionary()
        self._finalizers: dict[CacheRows, weakref.finalize] = {}
        self._departed: deque[CacheRows] = deque()
        self._counter = itertools.count()
        self._names: tuple[int, ...] | None = None

    def name_next(self, sequence_ids: Sequence[int] | None) -> None:
        """Name the rows of the next cache that is seen for the first time; None: count on.

        Raises:
            SpinError: an id twice, or outside 0 .. 2**64-1.
        """
        names = None if sequence_ids is None else tuple(sequence_ids)
        for name in names or ():
            if isinstance(name, bool) or not isinstance(name, int) or not 0 <= name < 2**64:
                refuse("sequence_ids", name, "integers in 0 .. 2**64-1")
        if names is not None and len(set(names)) != len(names):
            refuse("sequence_ids", list(names), "each id once")
        self._names = names

    def rows(self, cache: Any, count: int) -> CacheRows:
        """The rows of a cache; all new when it is new or its number of rows changed.

        Raises:
            SpinError: names were given, but not one a row, or one that is in use.
        """
        known = self._rows.get(cache)
        if known is not None and len(known.sequence_ids) == count:
            return known
        if known is not None:  # rows were added or dropped: who is who cannot be known
            self._depart(known)
        rows = CacheRows(self._new_ids(count))
        self._rows[cache] = rows
        # Finalizers run at any moment, even inside a step: this one only leaves a note.
        finalizer = weakref.finalize(cache, self._departed.append, rows)
        finalizer.atexit = False
        self._finalizers[rows] = finalizer
        return rows

    def sequence_ids(self, cache: Any) -> tuple[int, ...]:
        """Ids of a cache's rows; empty for a cache that was not seen."""
        rows = self._rows.get(cache)
        return () if rows is None else rows.sequence_ids

    def live(self) -> list[int]:
        """All ids of caches that are alive."""
        return [i for rows in self._rows.values() for i in rows.sequence_ids]

    def take_departed(self) -> list[int]:
        """Ids whose cache went away since the last call."""
        gone: list[int] = []
        while self._departed:
            rows = self._departed.popleft()
            self._finalizers.pop(rows)
            gone.extend(rows.sequence_ids)
        return gone

    def forget(self) -> None:
        """Drop every cache: all rows are new from here on. Their ids are not given out again."""
        for finalizer in self._finalizers.values():
            finalizer.detach()
        self._finalizers.clear()
        self._departed.clear()
        self._rows.clear()

    def _depart(self, rows: CacheRows) -> None:
        self._finalizers[rows].detach()
        self._departed.append(rows)

    def _new_ids(self, count: int) -> tuple[int, ...]:
        live = set(self.live())
        if self._names is None:
            return tuple(itertools.islice((i for i in self._counter if i not in live), count))
        if len(self._names) != count:
            refuse("sequence_ids", list(self._names), f"{count} ids, one a row of the cache")
        taken = live.intersection(self._names)
        if taken:
            refuse("sequence_ids", list(self._names), f"ids not in use; in use: {sorted(taken)}")
        names, self._names = self._names, None
        return names
