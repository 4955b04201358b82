# SPDX-License-Identifier: Apache-2.0
"""Engine `transformers`: the embedded host, for machines without TensorRT-LLM.

Sequences of different lengths cannot share a call of this host, so requests take turns, a step
each. That is fair, and no slower than one after the other; throughput is TensorRT-LLM's job.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

from spin_trtllm.build.checkpoint import read_checkpoint
from spin_trtllm.errors import refuse
from spin_trtllm.hosts.triton.completion import Completion
from spin_trtllm.hosts.triton.model_settings import ModelSettings
from spin_trtllm.hosts.triton.reply import Reply
from spin_trtllm.hosts.triton.request import Request
from spin_trtllm.hosts.triton.scheduler import Scheduler
from spin_trtllm.hosts.triton.spin_model import SpinModel
from spin_trtllm.hosts.trtllm.counters import Snapshot

MAX_WAITING = 4096
METRICS_SECONDS = 1.0


class EmbeddedEngine:
    """Answers requests on the embedded host.

    Args:
        settings: of the model.
        show: where counts go, about every second and whenever there is nothing to do.

    Raises:
        SpinError: another checkpoint than the model was built for, or one that cannot be served.
    """

    def __init__(
        self, settings: ModelSettings, *, show: Callable[[Snapshot], None] = lambda _: None
    ) -> None:
        if settings.fingerprint is not None:
            found = read_checkpoint(settings.checkpoint).fingerprint
            if found != settings.fingerprint:
                refuse("model: fingerprint", found, f"{settings.fingerprint}, or build anew")
        self._model = SpinModel(settings)
        self._jobs: WeakSet[Completion] = WeakSet()
        counters = self._model.counters
        counters.every(METRICS_SECONDS, show)
        self._scheduler = Scheduler(
            settings.max_active,
            max_waiting=MAX_WAITING,
            on_idle=lambda: show(counters.snapshot()),
        )

    def submit(self, request: Request, reply: Reply) -> None:
        """Take a request; its answers come from the scheduler's thread.

        Raises:
            SpinError: no room for it in the context, or too many in line.
        """
        ids = self._model.encode(request.prompt, request.sampling.max_tokens)
        job = Completion(self._model, request, reply, ids)
        self._scheduler.submit(job)
        self._jobs.add(job)

    def cancel(self, request_id: str) -> None:
        """Cancel all requests with this id; unknown ones are ignored."""
        for job in list(self._jobs):
            if job.request_id == request_id:
                job.cancel()

    def close(self) -> None:
        """Answer what is left with an error, and take SPIN off the model."""
        self._scheduler.close()
        self._model.close()
