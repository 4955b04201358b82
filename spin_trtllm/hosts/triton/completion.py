# SPDX-License-Identifier: Apache-2.0
"""One request on the embedded host: a job that decodes a token a turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from spin_trtllm.hosts.triton.reply import CANCELLED_BY_CLIENT, Failure, Output, Reply
from spin_trtllm.hosts.triton.request import Request
from spin_trtllm.hosts.triton.sampling import Sampler
from spin_trtllm.hosts.triton.spin_model import SpinModel, Usage
from spin_trtllm.hosts.triton.text import Detokenizer, StopWords


class Completion:
    """Decodes one request and answers it.

    Args:
        model: who else takes turns on it does not matter.
        request, reply: what to do, and where the answers go.
        ids: token ids of the prompt.
    """

    def __init__(
        self, model: SpinModel, request: Request, reply: Reply, ids: Sequence[int]
    ) -> None:
        self._model = model
        self._request = request
        self._reply = reply
        self._cache: Any = None
        self._to_read: list[Tensor] = model.chunks(ids)  # the prompt, last piece first
        self._to_read.reverse()
        self._sampler = Sampler(request.sampling, sums_logprob=request.wanted.cumulative_logprob)
        self._detokenizer = Detokenizer(model.decode)
        self._stop_words = StopWords(request.sampling.stop)
        self._usage = Usage()
        self._tokens = 0
        self._last_token = 0
        self._times_ns = {"arrival_time_ns": time.monotonic_ns()}
        self._cancelled = False

    @property
    def request_id(self) -> str:
        """As the client named it, or empty."""
        return self._request.request_id

    def cancel(self) -> None:
        """Let the next turn end it; any thread may call this."""
        self._cancelled = True

    def turn(self) -> bool:
        """Read a piece of the prompt, or decode a token. Whether there is more to do."""
        if self._cancelled or self._reply.is_cancelled():
            self.fail(CANCELLED_BY_CLIENT, Failure.CANCELLED)
            return False
        logits = self._advance()
        if self._to_read:
            return True
        return self._take(self._sampler.pick(logits))

    def fail(self, message: str, failure: Failure) -> None:
        """End it with an error."""
        self._cache = None
        self._reply.fail(message, failure)

    def _advance(self) -> Tensor:
        """The next call of the model: logits `[1, vocabulary]`."""
        if self._cache is None:
            self._times_ns["first_scheduled_time_ns"] = time.monotonic_ns()
            self._cache = self._model.new_cache()
        if self._to_read:
            return self._model.run(self._to_read.pop(), self._cache, self._usage)
        return self._model.step(self._last_token, self._cache, self._usage)

    def _take(self, token: int) -> bool:
        """Book a picked token, and answer where it is time to. Whether there is more to do."""
        self._tokens += 1
        self._last_token = token
        now = time.monotonic_ns()
        self._times_ns.setdefault("first_token_time_ns", now)
        self._times_ns["last_token_time_ns"] = now
        self._detokenizer.add(token)

        is_end = token in self._model.stop_tokens
        is_last = is_end or self._tokens >= self._request.sampling.max_tokens
        if is_last:
            self._detokenizer.finish()
        text = self._detokenizer.text
        found = self._stop_words.find(text)
        if found is not None:
            self._finish(text[: found[0]], "stop", found[1])
        elif is_last:
            self._finish(text, "stop" if is_end else "length", None)
        elif self._request.streaming:
            shown = text[: self._stop_words.safe_length(text)]
            self._reply.send(self._output(shown), final=False)
        return not (is_last or found is not None)

    def _finish(self, text: str, finish_reason: str, stop_reason: str | None) -> None:
        self._cache = None  # its averages are free for others from here on
        if self._request.echo:
            text = self._request.prompt + text
        self._reply.send(self._output(text, finish_reason, stop_reason), final=True)

    def _output(
        self, text: str, finish_reason: str | None = None, stop_reason: str | None = None
    ) -> Output:
        return Output(
            text=text,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            cumulative_logprob=self._sampler.cumulative_logprob,
            realized_sparsity=self._usage.realized_sparsity,
            perf_metrics=dict(self._times_ns),
        )
