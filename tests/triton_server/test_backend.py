# SPDX-License-Identifier: Apache-2.0
"""The side that Triton calls, on a double of its `triton_python_backend_utils`."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.triton.metrics import TritonMetrics
from spin_trtllm.hosts.triton.reply import Failure, Output, Reply
from spin_trtllm.hosts.triton.request import Request
from spin_trtllm.hosts.trtllm.counters import Snapshot

FINAL = 1


class TritonError(Exception):
    INVALID_ARG, UNSUPPORTED, UNAVAILABLE, CANCELLED, INTERNAL = "IUVCX"

    def __init__(self, message: str, code: str) -> None:
        self.message, self.code = message, code


class FakeRequest:
    """A request, and what was sent in answer to it."""

    def __init__(self, name: str = "", **tensors: Any) -> None:
        self.tensors = {key: np.atleast_1d(np.array(value)) for key, value in tensors.items()}
        self.name, self.cancelled = name, False
        self.sent: list[tuple[Any, int]] = []

    def request_id(self) -> str:
        return self.name

    def is_cancelled(self) -> bool:
        return self.cancelled

    def get_response_sender(self) -> Any:
        return SimpleNamespace(send=lambda response, flags: self.sent.append((response, flags)))

    @property
    def error(self) -> tuple[str, str]:
        """Message and code of the one answer."""
        ((response, flags),) = self.sent
        assert flags == FINAL
        return response.error.message, response.error.code

    @property
    def outputs(self) -> dict[str, Any]:
        """Tensors of the last answer."""
        response, _ = self.sent[-1]
        return {tensor.name: tensor.array for tensor in response.tensors}


class FakeEngine:
    """Notes what it is asked, and answers when told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[Request, Reply]] = []
        self.cancelled: list[str] = []
        self.error: Exception | None = None
        self.closed = False

    def submit(self, request: Request, reply: Reply) -> None:
        if self.error is not None:
            raise self.error
        self.asked.append((request, reply))

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.yaml").write_text("{model: m, triton_config: {decoupled: true}}")
    return tmp_path


@pytest.fixture
def backend(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    utils = ModuleType("triton_python_backend_utils")
    vars(utils).update(
        TritonError=TritonError,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        Tensor=lambda name, array: SimpleNamespace(name=name, array=array),
        InferenceResponse=lambda tensors=(), error=None: SimpleNamespace(
            tensors=tensors, error=error
        ),
        Logger=SimpleNamespace(log_info=lambda _: None, log_error=lambda _: None),
        get_model_dir=lambda: str(folder),
        get_input_tensor_by_name=lambda request, name: (
            SimpleNamespace(as_numpy=lambda: request.tensors[name])
            if name in request.tensors
            else None
        ),
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    name = "spin_trtllm.hosts.triton.backend"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


@pytest.fixture
def engine(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine()
    monkeypatch.setattr(backend, "_make_engine", lambda settings, name: engine)
    return engine


@pytest.fixture
def model(backend: ModuleType, engine: FakeEngine) -> Any:
    model = backend.TritonPythonModel()
    model.initialize(arguments(decoupled=True))
    return model


def arguments(**policy: bool) -> dict[str, str]:
    config = {"model_transaction_policy": policy} if policy else {}
    return {"model_config": json.dumps(config), "model_name": "m"}


def test_model_yaml_settles_the_configuration(backend: ModuleType) -> None:
    said: dict[str, Any] = {}
    config = SimpleNamespace(
        set_max_batch_size=lambda size: said.update(size=size),
        set_model_transaction_policy=said.update,
    )
    assert backend.TritonPythonModel.auto_complete_config(config) is config
    assert said == {"size": 0, "decoupled": True}


def test_a_server_that_did_not_ask_model_yaml(backend: ModuleType, engine: FakeEngine) -> None:
    with pytest.raises(SpinError, match="without --disable-auto-complete-config"):
        backend.TritonPythonModel().initialize(arguments())


def test_answers_have_the_tensors_that_were_asked_for(model: Any, engine: FakeEngine) -> None:
    plain = FakeRequest(text_input=[b"a"])
    rich = FakeRequest(
        text_input=[b"b"],
        streaming=True,
        return_finish_reason=True,
        return_stop_reason=True,
        return_cumulative_logprob=True,
        return_spin_statistics=True,
        sampling_param_return_perf_metrics=True,
    )
    model.execute([plain, rich])
    output = Output("ä", "stop", "x", -1.5, 0.25, {"arrival_time_ns": 2**60, "acceptance_rate": 1})
    for (request, reply), text in zip(engine.asked, "ab", strict=True):
        assert request.prompt == text
        reply.send(Output("ä"), final=False)
        reply.send(output, final=True)
    assert [flags for _, flags in rich.sent] == [0, FINAL]
    assert {name: array.tolist() for name, array in plain.outputs.items()} == {
        "text_output": ["ä".encode()]
    }
    assert {name: array.tolist() for name, array in rich.outputs.items()} == {
        "text_output": ["ä".encode()],
        "finish_reason": [b"stop"],
        "stop_reason": [b"x"],
        "cumulative_logprob": [-1.5],
        "spin_realized_sparsity": [0.25],
        "arrival_time_ns": [2**60],
        "acceptance_rate": [1.0],
    }
    assert rich.outputs["arrival_time_ns"].dtype == np.int64


def test_what_is_not_known_yet_is_none_or_nan(model: Any, engine: FakeEngine) -> None:
    request = FakeRequest(text_input=[b"b"], return_finish_reason=True, return_spin_statistics=True)
    model.execute([request])
    engine.asked[0][1].send(Output(""), final=False)
    assert request.outputs["finish_reason"].tolist() == [b"None"]
    assert np.isnan(request.outputs["spin_realized_sparsity"]).all()


def test_a_bad_request_among_good_ones(model: Any, engine: FakeEngine) -> None:
    requests = [FakeRequest(text_input=[text]) for text in (b"a", b"\xff", b"", b"c")]
    model.execute(requests)
    assert [request.prompt for request, _ in engine.asked] == ["a", "c"]
    assert requests[1].error == (
        "text_input: got 'byte 0xff at 0', allowed: UTF-8 text",
        TritonError.INVALID_ARG,
    )
    assert requests[2].error[1] == TritonError.INVALID_ARG


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SpinError("no room"), ("no room", TritonError.INVALID_ARG)),
        (KeyError("x"), ("KeyError: 'x'", TritonError.INTERNAL)),
    ],
)
def test_what_an_engine_refuses(
    model: Any, engine: FakeEngine, error: Exception, said: tuple[str, str]
) -> None:
    engine.error, request = error, FakeRequest(text_input=[b"a"])
    model.execute([request])
    assert request.error == said


def test_cancelling(model: Any, engine: FakeEngine) -> None:
    stop = FakeRequest("7", text_input=[b"-"], stop=True)
    nameless = FakeRequest(text_input=[b"-"], stop=True)
    asked = FakeRequest("7", text_input=[b"a"])
    model.execute([asked, stop, nameless])
    assert engine.cancelled == ["7"]
    assert stop.error == ("Request cancelled by client", TritonError.CANCELLED)
    assert nameless.error[0].startswith("stop: got True, allowed: with the id")
    (_, reply) = engine.asked[0]
    assert not reply.is_cancelled()
    asked.cancelled = True
    assert reply.is_cancelled()
    reply.fail("gone", Failure.UNAVAILABLE)
    assert asked.error == ("gone", TritonError.UNAVAILABLE)


def test_no_streams_from_a_model_that_answers_once(
    backend: ModuleType, engine: FakeEngine, folder: Path
) -> None:
    (folder / "model.yaml").write_text("model: m")
    model = backend.TritonPythonModel()
    model.initialize(arguments())
    request = FakeRequest(text_input=[b"a"], streaming=True)
    model.execute([request])
    assert request.error[1] == TritonError.UNSUPPORTED
    model.finalize()
    assert engine.closed


@pytest.mark.parametrize("name", ["transformers", "tensorrt_llm"])
def test_the_engine_is_the_one_that_model_yaml_names(
    backend: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from spin_trtllm.hosts.triton import embedded, llm_api

    class NoMetrics(Exception):
        pass

    class Family:
        COUNTER, GAUGE = "counter", "gauge"

        def __init__(self, **_: Any) -> None:
            raise NoMetrics("metrics are off")

    utils = sys.modules["triton_python_backend_utils"]
    monkeypatch.setattr(utils, "MetricFamily", Family, raising=False)
    monkeypatch.setattr(utils, "TritonModelException", NoMetrics, raising=False)
    made: list[Any] = []
    monkeypatch.setattr(embedded, "EmbeddedEngine", lambda settings, show: made.append(show))
    monkeypatch.setattr(llm_api, "LlmApiEngine", made.append)
    (folder / "model.yaml").write_text(f"{{model: m, spin: {{engine: {name}}}}}")
    backend.TritonPythonModel().initialize(arguments())
    if name == "transformers":
        made[0](Snapshot(steps=1))  # shown nowhere, for the server has no metrics
    else:
        assert made[0].settled_engine() == name


# ---- metrics ----


class FakeFamily:
    """Triton's `MetricFamily`; `page` is what the endpoint would show."""

    COUNTER, GAUGE = "counter", "gauge"
    page: dict[tuple[str, str], float]

    def __init__(self, *, name: str, description: str, kind: str) -> None:
        self.name, self.kind = name, kind
        assert description

    def Metric(self, *, labels: dict[str, str]) -> Any:
        key = (self.name, ",".join(f"{name}={value}" for name, value in labels.items()))

        def increment(by: float) -> None:
            assert self.kind == "counter"
            FakeFamily.page[key] = FakeFamily.page.get(key, 0) + by

        return SimpleNamespace(
            increment=increment, set=lambda value: FakeFamily.page.update({key: value})
        )


def test_metrics_grow_by_what_is_new() -> None:
    FakeFamily.page = {}
    metrics = TritonMetrics(SimpleNamespace(MetricFamily=FakeFamily), "m")
    metrics.show(Snapshot(steps=3, cold_rows=1, sparse_rows=2, state_bytes=7))
    metrics.show(Snapshot(steps=5, cold_rows=1, sparse_rows=3, dense_rows={"too_long": 1}))
    assert FakeFamily.page == {
        ("spin_steps_total", "model=m"): 5,
        ("spin_rows_total", "model=m,mode=cold"): 1,
        ("spin_rows_total", "model=m,mode=sparse"): 3,
        ("spin_rows_total", "model=m,mode=dense"): 1,
        ("spin_dense_rows_total", "model=m,cause=too_long"): 1,
        ("spin_state_bytes", "model=m"): 0,
    }
