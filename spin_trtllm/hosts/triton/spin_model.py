# SPDX-License-Identifier: Apache-2.0
"""The embedded host as the engine uses it: one loaded model with SPIN on it, and what SPIN did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from spin_trtllm.errors import refuse
from spin_trtllm.generate import forward, split_prompt
from spin_trtllm.hosts.transformers import (
    SpinSession,
    SpinStats,
    config_of,
    enable,
    encode_prompt,
    load_model,
)
from spin_trtllm.hosts.triton.model_settings import ModelSettings
from spin_trtllm.hosts.trtllm.counters import Counters

CHUNK_TOKENS = 512  # as `prefill` has it: other chunks may round otherwise


class SequenceId(int):
    """An id that equals itself alone, whatever its value.

    Its value decides which blocks are explored (SPEC 6), its identity whose averages are read. With
    one value for all, a request gets the same answer whatever else is being served.
    """

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other


@dataclass
class Usage:
    """What SPIN skipped in the decode steps of one request.

    Attributes:
        warm_entries: warm steps times layers.
        skipped_sum: share of blocks that was not scored, summed over these entries.
    """

    warm_entries: int = 0
    skipped_sum: float = 0.0

    @property
    def realized_sparsity(self) -> float | None:
        """Mean over the warm entries (SPEC 8); None before the first."""
        return self.skipped_sum / self.warm_entries if self.warm_entries else None


class SpinModel:
    """A model, its tokenizer and the session that keeps SPIN on it; for one thread at a time.

    Args:
        settings: which checkpoint, and SPIN's parameters.

    Attributes:
        tokenizer: of the checkpoint.
        stop_tokens: tokens that end a text.
        counters: what SPIN did in all requests.

    Raises:
        SpinError: the checkpoint cannot be loaded, or SPIN cannot run on it as configured.
    """

    def __init__(self, settings: ModelSettings) -> None:
        if settings.cpu_threads is not None:
            torch.set_num_threads(settings.cpu_threads)
        self._model, self.tokenizer = load_model(settings.checkpoint)
        longest = config_of(self._model).max_position_embeddings
        self._max_tokens = min(settings.max_seq_len or longest, longest)
        self._session: SpinSession = enable(
            self._model,
            settings.spin,
            max_sequences=settings.max_active,
            max_tokens=self._max_tokens,
        )
        stop = config_of(self._model).eos_token_id
        self.stop_tokens = frozenset(stop if isinstance(stop, list) else {stop} - {None})
        self.counters = Counters()
        self.counters.add_state_bytes(self._session.state_bytes)
        self._fallbacks: Counter[str] = Counter()

    def encode(self, prompt: str, new_tokens: int) -> list[int]:
        """Token ids of a prompt.

        Raises:
            SpinError: no room for it and the tokens to come.
        """
        most = self._max_tokens * self._longest_token
        if self.tokenizer.normalizer is None and len(prompt) > most:  # takes long to find out
            refuse("text_input", f"{len(prompt)} characters", f"{self._max_tokens} tokens in all")
        ids = encode_prompt(self.tokenizer, prompt, self._model)
        if len(ids) + new_tokens > self._max_tokens:
            given = f"{len(ids)} tokens with {new_tokens} to come"
            refuse("text_input", given, f"{self._max_tokens} tokens in all")
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones."""
        text: str = self.tokenizer.decode(list(tokens))
        return text

    def new_cache(self) -> Any:
        """The cache of a new sequence."""
        from transformers import DynamicCache

        self._session.name_sequences([SequenceId(0)])
        return DynamicCache(config=config_of(self._model))

    def chunks(self, ids: Sequence[int]) -> list[Tensor]:
        """A prompt in pieces `[1, tokens]` that `run` takes one after the other."""
        device = next(self._model.parameters()).device
        return split_prompt(torch.tensor([ids], device=device), CHUNK_TOKENS)

    def run(self, tokens: Tensor, cache: Any, usage: Usage) -> Tensor:
        """Feed tokens `[1, T]` to a sequence: logits `[1, vocabulary]` after the last."""
        before = _reading(self._session.stats)
        logits = forward(self._model, tokens, cache)
        after = _reading(self._session.stats)
        self._count({name: after[name] - before[name] for name in after}, usage)
        return logits

    def step(self, token: int, cache: Any, usage: Usage) -> Tensor:
        """Feed one token: a decode step."""
        device = next(self._model.parameters()).device
        return self.run(torch.tensor([[token]], device=device), cache, usage)

    def close(self) -> None:
        """Take SPIN off the model."""
        self._session.close()

    @cached_property
    def _longest_token(self) -> int:
        """Characters that one token stands for, at most."""
        return max(map(len, self.tokenizer.get_vocab()))

    def _count(self, new: Mapping[str, float], usage: Usage) -> None:
        """Book what one call added: to its request, and to the counters."""
        if not new["steps"]:
            return  # a prefill
        usage.warm_entries += int(new["warm_entries"])
        usage.skipped_sum += new["skipped_sum"]
        is_sparse = bool(new["sparse_steps"])
        self.counters.step(
            sparse_rows=int(new["sparse_steps"]),
            cold_rows=int(new["cold_steps"]),
            kept_slots=int(new["spin_slots_scored"]) if is_sparse else 0,
            visible_slots=int(new["dense_slots_scored"]) if is_sparse else 0,
        )
        fallbacks = self._session.stats.fallbacks
        for reason, count in fallbacks.items():
            if count > self._fallbacks[reason]:
                self.counters.dense(reason, count - self._fallbacks[reason])
        self._fallbacks = fallbacks.copy()


def _reading(stats: SpinStats) -> dict[str, float]:
    """A session's totals, of which two readings give what came between."""
    names = ("steps", "cold_steps", "sparse_steps", "spin_slots_scored", "dense_slots_scored")
    return {name: getattr(stats, name) for name in names} | {
        "warm_entries": stats.warm_entries,
        "skipped_sum": (stats.realized_sparsity or 0.0) * stats.warm_entries,
    }
