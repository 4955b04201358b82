# SPDX-License-Identifier: Apache-2.0
"""Engine `tensorrt_llm`: TensorRT-LLM's LLM API, with SPIN's hooks in every rank.

It has run on a double of the LLM API only; `docs/triton.md` says so, too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.hosts.triton.model_settings import ModelSettings
from spin_trtllm.hosts.triton.reply import CANCELLED_BY_CLIENT, Failure, Output, Reply
from spin_trtllm.hosts.triton.request import Request
from spin_trtllm.hosts.trtllm import enable

# output tensor: where TensorRT-LLM keeps its value, below `request_perf_metrics`
_PERF_METRICS = {
    "kv_cache_reused_block": ("kv_cache_metrics", "num_reused_blocks"),
    "kv_cache_missed_block": ("kv_cache_metrics", "num_missed_blocks"),
    "kv_cache_alloc_new_blocks": ("kv_cache_metrics", "num_new_allocated_blocks"),
    "kv_cache_alloc_total_blocks": ("kv_cache_metrics", "num_total_allocated_blocks"),
    "kv_cache_hit_rate": ("kv_cache_metrics", "kv_cache_hit_rate"),
    "arrival_time_ns": ("timing_metrics", "arrival_time"),
    "first_scheduled_time_ns": ("timing_metrics", "first_scheduled_time"),
    "first_token_time_ns": ("timing_metrics", "first_token_time"),
    "last_token_time_ns": ("timing_metrics", "last_token_time"),
    "acceptance_rate": ("speculative_decoding", "acceptance_rate"),
    "total_accepted_draft_tokens": ("speculative_decoding", "total_accepted_draft_tokens"),
    "total_draft_tokens": ("speculative_decoding", "total_draft_tokens"),
}


class LlmApiEngine:
    """Answers requests with TensorRT-LLM, from an event loop in a thread of its own.

    Args:
        settings: of the model; SPIN is switched on before the ranks start.

    Raises:
        SpinError: SPIN's settings cannot be used. Whatever the LLM raises is passed on.
    """

    def __init__(self, settings: ModelSettings) -> None:
        enable(settings.spin)
        self._llm = _make_llm(settings.llm_args)
        self._check_seconds = settings.cancellation_check_ms / 1000
        self._running: dict[asyncio.Task[None], str] = {}  # request ids; of the loop alone
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="spin-llm", daemon=True)
        self._thread.start()

    def submit(self, request: Request, reply: Reply) -> None:
        """Take a request; its answers come from the event loop.

        Raises:
            SpinError: it asks for something that TensorRT-LLM's ranks do not tell.
        """
        if request.wanted.spin_statistics:
            refuse("return_spin_statistics", True, "engine transformers, or none")
        self._loop.call_soon_threadsafe(self._start, request, reply)

    def cancel(self, request_id: str) -> None:
        """Cancel all requests with this id."""
        self._loop.call_soon_threadsafe(self._cancel, request_id)

    def close(self) -> None:
        """Cancel what is left, and shut TensorRT-LLM down."""
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._llm.shutdown()

    # ---- in the event loop ----

    def _start(self, request: Request, reply: Reply) -> None:
        task = self._loop.create_task(self._serve(request, reply))
        self._running[task] = request.request_id
        task.add_done_callback(self._running.pop)

    def _cancel(self, request_id: str) -> None:
        for task, name in self._running.items():
            if name == request_id:
                task.cancel()

    async def _cancel_all(self) -> None:
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, request: Request, reply: Reply) -> None:
        """Answer one request, with an error if need be."""
        answering = asyncio.create_task(self._answer(request, reply))
        try:
            while not answering.done():
                await asyncio.wait({answering}, timeout=self._check_seconds)
                if not answering.done() and reply.is_cancelled():
                    answering.cancel()
            await answering
        except asyncio.CancelledError:
            answering.cancel()
            (failed,) = await asyncio.gather(answering, return_exceptions=True)
            if failed is not None:  # or else the whole answer has gone out before
                reply.fail(CANCELLED_BY_CLIENT, Failure.CANCELLED)
        except ValueError as error:  # what TensorRT-LLM says of parameters and lengths
            reply.fail(str(error), Failure.INVALID_ARG)
        except Exception as error:
            reply.fail(f"{type(error).__name__}: {error}", Failure.INTERNAL)

    async def _answer(self, request: Request, reply: Reply) -> None:
        echoed = request.prompt if request.echo else ""
        result = self._llm.generate_async(
            request.prompt, _sampling_params(request), streaming=request.streaming
        )
        try:
            async for each in result:
                if request.streaming or each.finished:
                    reply.send(_output(each.outputs[0], echoed), final=each.finished)
        except asyncio.CancelledError:
            result.abort()
            raise


def _make_llm(arguments: Mapping[str, Any]) -> Any:
    try:
        from tensorrt_llm import LLM
        from tensorrt_llm.llmapi.llm_utils import update_llm_args_with_extra_dict
    except ImportError as error:
        raise SpinError(f"spin.engine: cannot import tensorrt_llm: {error}") from error
    return LLM(**update_llm_args_with_extra_dict({}, dict(arguments)))


def _sampling_params(request: Request) -> Any:
    """The request's parameters.

    The prompt stays out of the result, where its tokens would be taken for some that have log
    probabilities; `_answer` puts it before the text.
    """
    from tensorrt_llm import SamplingParams

    sampling = request.sampling
    given = {name: value for name, value in asdict(sampling).items() if value is not None}
    if sampling.is_greedy:  # said by leaving these out: the C++ side refuses a top-p of 0
        for name in ("temperature", "top_k", "top_p"):
            given.pop(name, None)
    return SamplingParams(
        **{**given, "stop": list(sampling.stop) or None},
        # the sum comes with the single ones only
        logprobs=1 if request.wanted.cumulative_logprob else None,
        exclude_input_from_output=True,
        return_perf_metrics=request.wanted.perf_metrics,
    )


def _output(completion: Any, echoed: str) -> Output:
    return Output(
        text=echoed + completion.text,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        cumulative_logprob=completion.cumulative_logprob,
        perf_metrics=_perf_metrics(getattr(completion, "request_perf_metrics", None)),
    )


def _perf_metrics(found: Any) -> dict[str, float]:
    if not found:
        return {}
    values = {
        tensor: getattr(getattr(found, section, None), name, None)
        for tensor, (section, name) in _PERF_METRICS.items()
    }
    return {tensor: _plain(value) for tensor, value in values.items() if value is not None}


def _plain(value: Any) -> float:
    """A number, or a duration in nanoseconds."""
    if not hasattr(value, "total_seconds"):
        return float(value)
    return (value.days * 86_400 + value.seconds) * 10**9 + value.microseconds * 1000
