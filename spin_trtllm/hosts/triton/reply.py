# SPDX-License-Identifier: Apache-2.0
"""What an engine answers, and to whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from spin_trtllm.hosts.triton.request import Request


class Failure(Enum):
    """Why a request has no answer: the names of Triton's error codes."""

    INVALID_ARG = "INVALID_ARG"
    UNSUPPORTED = "UNSUPPORTED"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


CANCELLED_BY_CLIENT = "Request cancelled by client"


@dataclass(frozen=True)
class Output:
    """What there is of an answer.

    Attributes:
        text: the whole text so far, not only what is new.
        finish_reason: `stop` or `length`; None while there is more to come.
        stop_reason: the stop word that ended it; None for anything else.
        cumulative_logprob: of the picked tokens, by the model itself: before temperature, penalties
            and cuts. None where it was not asked for.
        realized_sparsity: of this request's warm steps (SPEC 8); None before the first.
        perf_metrics: values of `tensors.PERF_METRICS` by name.
    """

    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    realized_sparsity: float | None = None
    perf_metrics: Mapping[str, float] = field(default_factory=dict)


class Reply(Protocol):
    """Where the answers to one request go. Any thread may call it, one at a time."""

    def is_cancelled(self) -> bool:
        """Whether nobody waits for an answer any more."""

    def send(self, output: Output, *, final: bool) -> None:
        """Answer; nothing may follow a final answer."""

    def fail(self, message: str, failure: Failure) -> None:
        """Answer with an error, which is final."""


class Engine(Protocol):
    """What answers requests: each gets exactly one final answer, whatever happens."""

    def submit(self, request: Request, reply: Reply) -> None:
        """Take a request; answers come later, from another thread.

        Raises:
            SpinError: it cannot be served; no answer will come.
        """

    def cancel(self, request_id: str) -> None:
        """Cancel all requests with this id."""

    def close(self) -> None:
        """Answer what is left with an error, and stop."""
