# SPDX-License-Identifier: Apache-2.0
"""Both engines without Triton: one on a small model, the other on a double of the LLM API."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from serving import CONFIG, MAX_TOKENS, SECONDS, Direct, wait_for

from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.triton.embedded import EmbeddedEngine
from spin_trtllm.hosts.triton.llm_api import LlmApiEngine
from spin_trtllm.hosts.triton.model_settings import ModelSettings
from spin_trtllm.hosts.triton.reply import Failure, Output
from spin_trtllm.hosts.triton.request import Request, Sampling, Wanted
from spin_trtllm.hosts.trtllm.counters import Snapshot

PROMPT = "Permission is granted. " * 10
CANCELLED = ("Request cancelled by client", Failure.CANCELLED)


class Answers:
    """A reply that keeps what it gets."""

    def __init__(self) -> None:
        self.partial: list[Output] = []
        self.first = threading.Event()
        self.left = False
        self._final: queue.Queue[Output | tuple[str, Failure]] = queue.Queue()

    def is_cancelled(self) -> bool:
        return self.left

    def send(self, output: Output, *, final: bool) -> None:
        if final:
            self._final.put(output)
        else:
            self.partial.append(output)
            self.first.set()

    def fail(self, message: str, failure: Failure) -> None:
        self._final.put((message, failure))

    def final(self) -> Any:
        """The final answer, or what the error was; exactly one."""
        answer = self._final.get(timeout=SECONDS)
        assert self._final.empty()
        return answer


def settings_of(checkpoint: Path | str, **changes: Any) -> ModelSettings:
    arguments = {"model": str(checkpoint), "max_batch_size": 4, "max_seq_len": MAX_TOKENS}
    plain = ModelSettings(arguments, True, 10, "auto", 1, None, CONFIG)
    return replace(plain, **changes)


# ---- the embedded host ----


@pytest.fixture(scope="module")
def shown() -> list[Snapshot]:
    return []


@pytest.fixture(scope="module")
def engine(checkpoint: Path, shown: list[Snapshot]) -> Iterator[EmbeddedEngine]:
    engine = EmbeddedEngine(settings_of(checkpoint), show=shown.append)
    yield engine
    engine.close()


def ask(engine: Any, prompt: str = PROMPT, **fields: Any) -> Answers:
    sampling = {
        name: fields.pop(name) for name in list(fields) if name in Sampling.__dataclass_fields__
    }
    answers = Answers()
    engine.submit(Request(prompt, Sampling(**sampling), **fields), answers)
    return answers


def test_more_requests_than_are_active_at_once(engine: EmbeddedEngine, direct: Direct) -> None:
    """Each as if it were alone, averages and explored blocks included."""
    prompts = [f"{n} {PROMPT}" for n in (1, 2, 3, 1, 1, 2)]
    answers = [ask(engine, prompt, max_tokens=40) for prompt in prompts]
    assert [each.final().text for each in answers] == [direct.text(p, 40) for p in prompts]


def test_one_output_a_token(engine: EmbeddedEngine, direct: Direct) -> None:
    answers = ask(engine, max_tokens=9, streaming=True)
    last = answers.final()
    assert len(answers.partial) == 8
    assert {each.finish_reason for each in answers.partial} == {None}
    assert (last.text, last.finish_reason) == (direct.text(PROMPT, 9), "length")


def test_the_end_token_ends_a_text(engine: EmbeddedEngine, direct: Direct) -> None:
    """Whatever the model says: its fifth token is made the one that ends a text."""
    tokens = direct.tokens(PROMPT, 5)
    model = engine._model
    real, model.stop_tokens = model.stop_tokens, frozenset({tokens[4]})
    try:
        answer = ask(engine, max_tokens=40).final()
    finally:
        model.stop_tokens = real
    first = tokens.index(tokens[4]) + 1
    assert (answer.text, answer.finish_reason) == (direct.text(PROMPT, first), "stop")


def test_what_spin_did(engine: EmbeddedEngine, shown: list[Snapshot]) -> None:
    before = shown[-1] if shown else Snapshot()
    answer = ask(engine, max_tokens=12, wanted=Wanted(cumulative_logprob=True)).final()
    assert 0.4 < answer.realized_sparsity < 0.6
    assert answer.cumulative_logprob < 0
    assert wait_for(lambda: shown and shown[-1].steps == before.steps + 11)
    assert shown[-1].cold_rows == before.cold_rows + 1
    assert shown[-1].sparse_rows == before.sparse_rows + 10
    assert ask(engine, max_tokens=1).final().realized_sparsity is None


def test_a_request_that_breaks_in_a_step_harms_no_other(
    engine: EmbeddedEngine, direct: Direct, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine._model
    decode, said = model.decode, direct.text(PROMPT, 30)

    def broken(tokens: Any) -> str:
        if threading.current_thread().name == "spin-scheduler" and broken.after == 0:
            broken.after = -1
            raise RuntimeError("made up")
        broken.after -= 1
        return decode(tokens)

    broken.after = 6  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "decode", broken)
    answers = [ask(engine, max_tokens=30) for _ in range(3)]
    finals = [each.final() for each in answers]
    assert finals.count(("RuntimeError: made up", Failure.INTERNAL)) == 1
    assert [each.text for each in finals if isinstance(each, Output)] == [said, said]


def test_leaving_and_cancelling(engine: EmbeddedEngine) -> None:
    leaver = ask(engine, max_tokens=700, streaming=True, request_id="leaver")
    stopped = [ask(engine, max_tokens=700, streaming=True, request_id="x") for _ in range(2)]
    other = ask(engine, max_tokens=3, request_id="other")
    assert leaver.first.wait(SECONDS)
    leaver.left = True
    engine.cancel("x")
    engine.cancel("unknown")
    assert [each.final() for each in (leaver, *stopped)] == [CANCELLED] * 3
    assert isinstance(other.final(), Output)


def test_lanes_are_free_after_all_kinds_of_ends(engine: EmbeddedEngine) -> None:
    leaver = ask(engine, max_tokens=700, streaming=True)
    assert leaver.first.wait(SECONDS)
    leaver.left = True
    leaver.final()
    ask(engine, max_tokens=3).final()
    assert wait_for(lambda: engine._model._session.live_sequences == [])
    assert len(engine._model._session._state._free) == 4


@pytest.mark.parametrize(
    ("prompt", "tokens", "line"),
    [
        ("x" * MAX_TOKENS, 1, f"text_input: got '{MAX_TOKENS + 1} tokens with 1 to come'"),
        ("x" * 10**6, 1, "text_input: got '1000000 characters', allowed: 1024 tokens in all"),
        ("x", MAX_TOKENS, f"text_input: got '2 tokens with {MAX_TOKENS} to come'"),
    ],
)
def test_no_room(engine: EmbeddedEngine, prompt: str, tokens: int, line: str) -> None:
    with pytest.raises(SpinError) as refused:
        ask(engine, prompt, max_tokens=tokens)
    assert line in str(refused.value)


def test_the_longest_request_that_fits(engine: EmbeddedEngine) -> None:
    assert isinstance(ask(engine, "x" * (MAX_TOKENS - 3), max_tokens=2).final(), Output)


def test_closing_answers_what_is_left(checkpoint: Path) -> None:
    engine = EmbeddedEngine(settings_of(checkpoint))
    answers = ask(engine, max_tokens=700, streaming=True)
    assert answers.first.wait(SECONDS)
    engine.close()
    assert answers.final() == ("the model was unloaded", Failure.UNAVAILABLE)
    with pytest.raises(SpinError, match="unloaded"):
        ask(engine)


def test_another_checkpoint_is_refused(checkpoint: Path) -> None:
    with pytest.raises(SpinError, match="model: fingerprint: got 'sha256:"):
        EmbeddedEngine(settings_of(checkpoint, fingerprint="sha256:0"))


# ---- TensorRT-LLM's LLM API, as far as this package touches it ----


class FakeResult:
    """What `generate_async` returns: a token every few milliseconds."""

    def __init__(self, prompt: str, params: Any, streaming: bool) -> None:
        self.prompt, self.params, self.streaming = prompt, params, streaming
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    async def __aiter__(self) -> AsyncIterator[Any]:
        for n in range(1, self.params.max_tokens + 1):
            await asyncio.sleep(0.005)
            is_last = n == self.params.max_tokens
            if self.prompt == "break":
                raise RuntimeError("made up")
            timing = SimpleNamespace(arrival_time=timedelta(seconds=90_000, microseconds=1))
            completion = SimpleNamespace(
                text="abcdefgh"[:n],
                finish_reason="length" if is_last else None,
                stop_reason=None,
                cumulative_logprob=-1.5,
                request_perf_metrics=SimpleNamespace(timing_metrics=timing)
                if self.params.return_perf_metrics
                else None,
            )
            if self.streaming or is_last:
                yield SimpleNamespace(outputs=[completion], finished=is_last)


class FakeLlm:
    """Notes what it was made with, and what SPIN's variable named then."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.spin = arguments, os.environ.get("TLLM_SPIN")
        self.results: list[FakeResult] = []
        self.is_shut_down = False

    def generate_async(self, prompt: str, params: Any, *, streaming: bool) -> FakeResult:
        if params.max_tokens == 99:
            raise ValueError("max_tokens: too many")
        self.results.append(FakeResult(prompt, params, streaming))
        return self.results[-1]

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture
def llm_api(monkeypatch: pytest.MonkeyPatch) -> Iterator[LlmApiEngine]:
    host = ModuleType("tensorrt_llm")
    host.LLM, host.SamplingParams = FakeLlm, SimpleNamespace  # type: ignore[attr-defined]
    utils = ModuleType("tensorrt_llm.llmapi.llm_utils")
    utils.update_llm_args_with_extra_dict = lambda args, extra: {**args, **extra}  # type: ignore[attr-defined]
    for name, module in {
        "tensorrt_llm": host,
        "tensorrt_llm.llmapi": ModuleType("tensorrt_llm.llmapi"),
        "tensorrt_llm.llmapi.llm_utils": utils,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("TLLM_SPIN", raising=False)
    engine = LlmApiEngine(settings_of("CKPT"))
    yield engine
    if not engine._llm.is_shut_down:
        engine.close()
    os.environ.pop("TLLM_SPIN", None)


def test_spin_is_on_before_the_llm_starts(llm_api: LlmApiEngine) -> None:
    assert llm_api._llm.arguments["model"] == "CKPT"
    assert "target_sparsity: 0.6" in Path(llm_api._llm.spin).read_text()


def test_parameters_go_through(llm_api: LlmApiEngine) -> None:
    answers = ask(llm_api, "p", max_tokens=3, temperature=0.5, stop=("a",), seed=4, streaming=True)
    last = answers.final()
    assert [each.text for each in answers.partial] == ["a", "ab"]
    assert (last.text, last.finish_reason, last.cumulative_logprob) == ("abc", "length", -1.5)
    (result,) = llm_api._llm.results
    given = {name: value for name, value in vars(result.params).items() if value}
    assert given == {
        "max_tokens": 3,
        "temperature": 0.5,
        "stop": ["a"],
        "seed": 4,
        "exclude_input_from_output": True,
    }


def test_one_answer_without_streaming(llm_api: LlmApiEngine) -> None:
    wanted = Wanted(perf_metrics=True, cumulative_logprob=True)
    answers = ask(llm_api, "prompt: ", max_tokens=4, echo=True, wanted=wanted)
    last = answers.final()
    assert (last.text, answers.partial) == ("prompt: abcd", [])
    assert last.perf_metrics == {"arrival_time_ns": 90_000_000_001_000}
    params = llm_api._llm.results[0].params
    # TensorRT-LLM asserts as many log probabilities as tokens in the result.
    assert (params.exclude_input_from_output, params.logprobs) == (True, 1)


@pytest.mark.parametrize(
    ("sampling", "given"),
    [
        ({"top_p": 0.0}, (None, None, None)),  # "top_p > 0", says its C++ side
        ({"temperature": 0.0, "top_p": 0.5}, (None, None, None)),
        ({"temperature": 0.7, "top_k": 1}, (None, None, None)),
        ({"temperature": 0.7, "top_k": 0, "top_p": 0.9}, (0.7, 0, 0.9)),
    ],
)
def test_the_most_likely_token_is_asked_for_by_no_parameters(
    llm_api: LlmApiEngine, sampling: dict[str, Any], given: tuple[Any, ...]
) -> None:
    ask(llm_api, "p", max_tokens=1, **sampling).final()
    params = vars(llm_api._llm.results[0].params)
    assert tuple(params.get(name) for name in ("temperature", "top_k", "top_p")) == given


def test_a_cancel_that_comes_too_late_changes_nothing(llm_api: LlmApiEngine) -> None:
    class LateCancel(Answers):
        def send(self, output: Output, *, final: bool) -> None:
            super().send(output, final=final)
            llm_api._cancel("x")  # in the loop: before the request's task hears of its end

    answers = LateCancel()
    llm_api.submit(Request("p", Sampling(max_tokens=2), request_id="x"), answers)
    assert answers.final().text == "ab"
    assert wait_for(lambda: not llm_api._running)
    assert answers._final.empty()  # a second final answer is an error of Triton's


def test_errors_are_the_requests_own(llm_api: LlmApiEngine) -> None:
    good, bad, broken = (
        ask(llm_api, "p", max_tokens=8),
        ask(llm_api, "p", max_tokens=99),
        ask(llm_api, "break"),
    )
    assert bad.final() == ("max_tokens: too many", Failure.INVALID_ARG)
    assert broken.final() == ("RuntimeError: made up", Failure.INTERNAL)
    assert good.final().text == "abcdefgh"
    with pytest.raises(SpinError, match="return_spin_statistics: got True"):
        ask(llm_api, wanted=Wanted(spin_statistics=True))


def test_cancelled_requests_are_aborted(llm_api: LlmApiEngine) -> None:
    leaver = ask(llm_api, "p", max_tokens=2000, streaming=True)
    stopped = ask(llm_api, "p", max_tokens=2000, streaming=True, request_id="x")
    rest = ask(llm_api, "p", max_tokens=2000, streaming=True, request_id="y")
    assert all(each.first.wait(SECONDS) for each in (leaver, stopped, rest))
    leaver.left = True
    llm_api.cancel("x")
    assert [leaver.final(), stopped.final()] == [CANCELLED] * 2
    llm_api.close()
    assert rest.final() == CANCELLED
    assert [result.aborted for result in llm_api._llm.results] == [True] * 3
    assert llm_api._llm.is_shut_down


def test_without_tensorrt_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    monkeypatch.setenv("TLLM_SPIN", "")
    with pytest.raises(SpinError, match=r"spin.engine: cannot import tensorrt_llm"):
        LlmApiEngine(settings_of("CKPT"))
