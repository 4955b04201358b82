# SPDX-License-Identifier: Apache-2.0
"""What Triton's Python backend calls: tensors to requests, answers to tensors.

A model's `model.py` imports `TritonPythonModel` from here. Triton starts a process for it that
holds this model alone. Requests are answered from an engine's thread through their response
senders, so `execute` returns at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.hosts.triton.metrics import TritonMetrics
from spin_trtllm.hosts.triton.model_settings import (
    TRANSFORMERS,
    ModelSettings,
    read_model_settings,
)
from spin_trtllm.hosts.triton.reply import CANCELLED_BY_CLIENT, Engine, Failure, Output
from spin_trtllm.hosts.triton.request import Wanted, parse_request
from spin_trtllm.hosts.triton.tensors import INPUTS, PERF_METRICS, SPARSITY, TensorSpec
from spin_trtllm.hosts.trtllm.counters import Snapshot

_NUMPY = {"INT32": np.int32, "INT64": np.int64, "FP32": np.float32}


class TritonPythonModel:
    """One model of a repository."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Settle what `config.pbtxt` leaves to `model.yaml`."""
        settings = read_model_settings(pb_utils.get_model_dir())
        config.set_max_batch_size(0)
        config.set_model_transaction_policy({"decoupled": settings.decoupled})
        return config

    def initialize(self, arguments: Mapping[str, str]) -> None:
        """Load the model.

        Raises:
            SpinError: one line with what is wrong; Triton shows it as the reason why the model is
                unavailable.
        """
        self._settings = read_model_settings(pb_utils.get_model_dir())
        _check_policy(json.loads(arguments["model_config"]), self._settings)
        self._engine = _make_engine(self._settings, arguments["model_name"])

    def execute(self, requests: Sequence[Any]) -> None:
        """Hand requests to the engine."""
        for request in requests:
            reply = TritonReply(request)
            try:
                self._take(request, reply)
            except SpinError as error:
                reply.fail(str(error), Failure.INVALID_ARG)
            except Exception as error:
                pb_utils.Logger.log_error(f"SPIN: {type(error).__name__}: {error}")
                reply.fail(f"{type(error).__name__}: {error}", Failure.INTERNAL)

    def finalize(self) -> None:
        """Stop; Triton calls this when the model is unloaded."""
        self._engine.close()

    def _take(self, request: Any, reply: TritonReply) -> None:
        parsed = parse_request(dict(_tensors(request)), request.request_id())
        if parsed.cancels:
            if not parsed.request_id:
                refuse("stop", True, "with the id of the request to cancel")
            self._engine.cancel(parsed.request_id)
            reply.fail(CANCELLED_BY_CLIENT, Failure.CANCELLED)
            return
        if parsed.streaming and not self._settings.decoupled:
            reply.fail("Streaming is only supported in decoupled mode.", Failure.UNSUPPORTED)
            return
        reply.wanted = parsed.wanted
        self._engine.submit(parsed, reply)


class TritonReply:
    """Answers one request of Triton's.

    Attributes:
        wanted: which outputs go along with the text.
    """

    def __init__(self, request: Any) -> None:
        self.wanted = Wanted()
        self._request = request
        self._sender = request.get_response_sender()

    def is_cancelled(self) -> bool:
        """Whether the client left or cancelled."""
        return bool(self._request.is_cancelled())

    def send(self, output: Output, *, final: bool) -> None:
        """Answer with tensors."""
        response = pb_utils.InferenceResponse(list(_output_tensors(output, self.wanted)))
        self._send(response, final=final)

    def fail(self, message: str, failure: Failure) -> None:
        """Answer with an error."""
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, failure.value))
        self._send(pb_utils.InferenceResponse(error=error), final=True)

    def _send(self, response: Any, *, final: bool) -> None:
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(response, flags=flags)


def _make_engine(settings: ModelSettings, model_name: str) -> Engine:
    """The engine that the settings ask for; only its own libraries are imported."""
    engine = settings.settled_engine()
    pb_utils.Logger.log_info(f"SPIN: model {model_name} with engine {engine}")
    if engine == TRANSFORMERS:
        from spin_trtllm.hosts.triton.embedded import EmbeddedEngine

        return EmbeddedEngine(settings, show=_metrics_of(model_name))
    from spin_trtllm.hosts.triton.llm_api import LlmApiEngine

    return LlmApiEngine(settings)


def _metrics_of(model_name: str) -> Callable[[Snapshot], None]:
    """What shows counts among Triton's metrics; nothing where the server was told to have none."""
    try:
        return TritonMetrics(pb_utils, model_name).show
    except pb_utils.TritonModelException as error:
        pb_utils.Logger.log_info(f"SPIN: no metrics of {model_name}: {error}")
        return lambda _: None


def _check_policy(config: Mapping[str, Any], settings: ModelSettings) -> None:
    """A server that was told not to complete configurations has not read `model.yaml`."""
    policy = config.get("model_transaction_policy", {}).get("decoupled", False)
    if policy != settings.decoupled:
        refuse(
            "triton_config.decoupled",
            settings.decoupled,
            f"{policy}, as Triton has it; start it without --disable-auto-complete-config",
        )


def _tensors(request: Any) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    for spec in INPUTS:
        tensor = pb_utils.get_input_tensor_by_name(request, spec.name)
        if tensor is not None:
            yield spec.name, tensor.as_numpy()


def _output_tensors(output: Output, wanted: Wanted) -> Iterator[Any]:
    yield _text_tensor("text_output", output.text)
    if wanted.finish_reason:
        yield _text_tensor("finish_reason", str(output.finish_reason))
    if wanted.stop_reason:
        yield _text_tensor("stop_reason", str(output.stop_reason))
    if wanted.cumulative_logprob:
        value = np.nan if output.cumulative_logprob is None else output.cumulative_logprob
        yield pb_utils.Tensor("cumulative_logprob", np.array([value], np.float32))
    if wanted.spin_statistics:
        yield _number_tensor(SPARSITY, output.realized_sparsity)
    if wanted.perf_metrics:
        for spec in PERF_METRICS:
            if spec.name in output.perf_metrics:
                yield _number_tensor(spec, output.perf_metrics[spec.name])


def _text_tensor(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode()], np.object_))


def _number_tensor(spec: TensorSpec, value: float | None) -> Any:
    """One number; NaN for none."""
    number = np.nan if value is None else value
    return pb_utils.Tensor(spec.name, np.array([number], _NUMPY[spec.data_type]))
