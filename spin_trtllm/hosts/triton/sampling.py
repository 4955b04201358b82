# SPDX-License-Identifier: Apache-2.0
"""Picks the next token of one request."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from spin_trtllm.hosts.triton.request import Sampling


class Sampler:
    """Draws tokens from logits as a request asks; with random numbers of its own.

    Args:
        sampling: the request's parameters.
        sums_logprob: also add up what the model itself says of the picked tokens.

    Attributes:
        cumulative_logprob: that sum; None where it was not asked for.
    """

    def __init__(self, sampling: Sampling, *, sums_logprob: bool = False) -> None:
        self._sampling = sampling
        self._picked: Counter[int] = Counter()
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self.cumulative_logprob = 0.0 if sums_logprob else None

    def pick(self, logits: Tensor) -> int:
        """The next token.

        Args:
            logits: `[1, vocabulary]`, on any device.
        """
        weighed = self._penalize(logits[0]) if self._has_penalty else logits[0]
        token = int(weighed.argmax()) if self._sampling.is_greedy else self._draw(weighed)
        if self.cumulative_logprob is not None:
            self.cumulative_logprob += float(logits[0].float().log_softmax(0)[token])
        self._picked[token] += 1
        return token

    @property
    def _has_penalty(self) -> bool:
        return bool(self._sampling.frequency_penalty or self._sampling.presence_penalty)

    def _penalize(self, logits: Tensor) -> Tensor:
        """Logits `[vocabulary]` in fp64, less of what was picked before."""
        logits = logits.double()  # holds any penalty times any count; fp32 would reach infinity
        for token, times in self._picked.items():
            logits[token] -= (
                self._sampling.presence_penalty + self._sampling.frequency_penalty * times
            )
        return logits

    def _draw(self, logits: Tensor) -> int:
        """A random token of `[vocabulary]`: temperature, then top-k, then top-p."""
        sampling = self._sampling
        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        # fp64 on the host: a low temperature must not overflow, and seeds mean the same everywhere
        scaled = (logits - logits.max()).double().cpu() / temperature
        kept = min(sampling.top_k or scaled.numel(), scaled.numel())
        values, tokens = scaled.topk(kept)
        probabilities = values.softmax(0)
        if sampling.top_p is not None:
            before = probabilities.cumsum(0) - probabilities
            probabilities = probabilities.masked_fill(before >= sampling.top_p, 0)
        place = torch.multinomial(probabilities, 1, generator=self._generator)
        return int(tokens[place])
