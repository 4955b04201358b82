# SPDX-License-Identifier: Apache-2.0
"""`enable`: SPIN in the decode steps of a Transformers model, until the session is closed.

A decode step is a call with a cache and one query token. Everything else (prefill, chunked
prefill, no cache) runs untouched, and a call of several tokens makes its sequences cold.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import refuse
from spin_trtllm.geometry import visible_slots
from spin_trtllm.hosts.transformers.capture import Capture
from spin_trtllm.hosts.transformers.decoder import SpinDecoder
from spin_trtllm.hosts.transformers.hooks import (
    IndexerHooks,
    find_indexers,
    geometry_of,
    scorer_of,
)
from spin_trtllm.hosts.transformers.load import config_of
from spin_trtllm.hosts.transformers.stats import SpinStats
from spin_trtllm.state import SpinState
from spin_trtllm.step import SpinStep

_hooked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # indexers that a session is on


def enable(
    model: torch.nn.Module,
    config: SpinConfig,
    *,
    max_sequences: int = 16,
    max_tokens: int | None = None,
    sequence_ids: Sequence[int] | None = None,
    probe: bool = False,
    capture: bool = False,
    strict: bool = False,
) -> SpinSession:
    """Run SPIN in every decode step of a model, until the returned session is closed.

    The averages take `layers * (max_sequences + 1) * 2 * slots` values of 4 bytes (2 as bf16),
    `slots = max_tokens / ratio`: 4.5 MB for the tiny model's 4 layers and 32K tokens, 0.75 GB for
    21 layers and a million tokens.

    Args:
        model: a DeepSeek-V4 of Transformers in any precision, its indexers on one device; one
            forward at a time. `torch.compile` it after this call, not before.
        config: parameters; `top_k` unset or the model's own `index_topk`.
        max_sequences: sequences that have averages at one time; those beyond run dense.
        max_tokens: longest sequence that SPIN serves, longer ones run dense; default: the model's
            `max_position_embeddings`.
        sequence_ids: names the rows of the first cache; see `SpinSession.name_sequences`.
        probe: also score all blocks, to measure what SPIN misses.
        capture: also record scores and decisions of every step; probes as well.
        strict: let unexpected exceptions through instead of serving the step densely.

    Raises:
        SpinError: a model without indexer or with a session already, or a configuration that it
            cannot run.
    """
    indexers = find_indexers(model)
    if not _hooked.isdisjoint(indexers.values()):
        refuse("model", "a model that SPIN is enabled on", "one session at a time; close the first")
    if getattr(model, "_orig_mod", None) is not None or getattr(model, "_compiled_call_impl", None):
        refuse("model", "a compiled model", "a model that is compiled after enable, if at all")
    devices = {p.device for indexer in indexers.values() for p in indexer.parameters()}
    if len(devices) != 1:
        refuse("model", sorted(map(str, devices)), "all indexers on one device")
    ratio, top_k = geometry_of(next(iter(indexers.values())))
    if config.top_k not in (None, top_k):
        refuse("top_k", config.top_k, f"{top_k}, the model's index_topk, or unset")
    if max_tokens is None:
        max_tokens = config_of(model).max_position_embeddings
    with torch.inference_mode(False):  # the averages outlive the mode that the caller is in
        state = SpinState(
            list(indexers),
            sequences=max_sequences,
            slots=visible_slots(max_tokens - 1, ratio),
            dtype=config.storage_dtype,
            device=devices.pop(),
        )
    step = SpinStep(config.with_top_k(top_k), state, ratio=ratio)
    return SpinSession(
        step, indexers, sequence_ids=sequence_ids, probe=probe, capture=capture, strict=strict
    )


class SpinSession:
    """SPIN on one model; made by `enable`, closed by `close` or the end of a `with` block.

    Attributes:
        config: parameters, `top_k` settled.
        layers: decoder layers that have an indexer.
        stats: what happened so far.
        capture: what was recorded; None unless it was asked for.
    """

    def __init__(
        self,
        step: SpinStep,
        indexers: dict[int, torch.nn.Module],
        *,
        sequence_ids: Sequence[int] | None,
        probe: bool,
        capture: bool,
        strict: bool,
    ) -> None:
        self.config = step.config
        self.layers = step.state.layers
        self.capture = Capture(step) if capture else None
        self._state = step.state
        self._indexers = indexers
        self._decoder = SpinDecoder(
            step,
            {layer: scorer_of(indexer) for layer, indexer in indexers.items()},
            probe=probe,
            capture=self.capture,
            strict=strict,
        )
        self.name_sequences(sequence_ids)
        self._hooks = [IndexerHooks(n, indexer, self._decoder) for n, indexer in indexers.items()]
        _hooked.update(indexers.values())

    def __enter__(self) -> SpinSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def stats(self) -> SpinStats:
        """Counts and metrics, kept after the session is closed."""
        return self._decoder.stats

    @property
    def state_bytes(self) -> int:
        """Bytes of the averages."""
        return self._state.state_bytes

    @property
    def indexer_digest(self) -> str:
        """Hex digest that tells the weights of these indexers from others', whatever their dtype.

        Of the projections that weigh the heads: small next to all others, and trained with them.
        """
        digest = hashlib.sha256()
        for layer, indexer in self._indexers.items():
            project: Any = scorer_of(indexer).weights_proj
            digest.update(b"%d" % layer + project.weight.detach().float().cpu().numpy().tobytes())
        return digest.hexdigest()

    @property
    def live_sequences(self) -> list[int]:
        """Ids of all sequences whose cache is alive."""
        self._decoder.release_departed()
        return self._decoder.book.live()

    def sequence_ids(self, cache: Any) -> tuple[int, ...]:
        """Ids of a cache's rows, in row order; empty for a cache that was not seen yet."""
        return self._decoder.book.sequence_ids(cache)

    def name_sequences(self, sequence_ids: Sequence[int] | None) -> None:
        """Name the rows of the next cache that is seen for the first time.

        A name is SPEC 6's `sequence_id`: with the seed it decides which blocks are explored. By
        default ids count from 0 in order of first sight; None goes back to that.

        Raises:
            SpinError: an id twice, or outside 0 .. 2**64-1. Names that do not fit the cache, or
                are in use, are refused when it is seen.
        """
        self._decoder.book.name_next(sequence_ids)

    def reset(self) -> None:
        """Make every sequence cold: its next step keeps all blocks."""
        self._decoder.make_cold(self.live_sequences)

    def close(self) -> None:
        """Take SPIN off the model, which is then as it was; harmless when done already."""
        if not self._hooks:
            return
        for hooks in self._hooks:
            hooks.remove()
        self._hooks = []
        self._decoder.book.forget()
        for indexer in self._indexers.values():
            _hooked.discard(indexer)
