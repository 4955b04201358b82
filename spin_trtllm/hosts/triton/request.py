# SPDX-License-Identifier: Apache-2.0
"""One request: its tensors checked, and turned into plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spin_trtllm.errors import refuse

DEFAULT_MAX_TOKENS = 32  # TensorRT-LLM's own
MAX_STOP_WORDS = 32
MAX_STOP_CHARACTERS = 256

Tensors = Mapping[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is picked, and when it ends; None is "not given".

    Attributes:
        max_tokens: tokens to pick, at least 1.
        temperature: divides the logits; 0 picks the most likely token.
        top_k: most likely tokens to pick from; 0 is all of them.
        top_p: of those, the fewest that hold this probability; 0 picks the most likely token.
        frequency_penalty: taken off a token's logit for each time it was picked.
        presence_penalty: taken off once if it was picked at all.
        seed: of this request's random numbers.
        stop: words that end the text; they are no part of it.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is picked always; TensorRT-LLM's rule."""
        given = (self.temperature, self.top_k, self.top_p)
        return given == (None, None, None) or self.top_k == 1 or 0 in (self.temperature, self.top_p)


@dataclass(frozen=True)
class Wanted:
    """Which outputs a request asks for, next to the text."""

    finish_reason: bool = False
    stop_reason: bool = False
    cumulative_logprob: bool = False
    perf_metrics: bool = False
    spin_statistics: bool = False


@dataclass(frozen=True)
class Request:
    """What a client asks for.

    Attributes:
        prompt: text to continue.
        sampling: how.
        wanted: which outputs.
        streaming: one response a token rather than one in all.
        echo: put the prompt before the text; only where nothing is streamed.
        cancels: it only cancels the requests that have its id.
        request_id: as the client named it, or empty.
    """

    prompt: str
    sampling: Sampling = Sampling()
    wanted: Wanted = Wanted()
    streaming: bool = False
    echo: bool = False
    cancels: bool = False
    request_id: str = ""


def parse_request(tensors: Tensors, request_id: str = "") -> Request:
    """Check the tensors of a request.

    Args:
        tensors: one-dimensional arrays by name; strings are objects, bytes or str.

    Raises:
        SpinError: a tensor with another number of elements, or a value outside its range.
    """
    if _flag(tensors, "stop"):
        return Request("", cancels=True, request_id=request_id)
    streaming = _flag(tensors, "streaming")
    exclude = _flag(tensors, "sampling_param_exclude_input_from_output")
    return Request(
        prompt=_prompt(tensors),
        sampling=_sampling(tensors),
        wanted=Wanted(
            finish_reason=_flag(tensors, "return_finish_reason"),
            stop_reason=_flag(tensors, "return_stop_reason"),
            cumulative_logprob=_flag(tensors, "return_cumulative_logprob"),
            perf_metrics=_flag(tensors, "sampling_param_return_perf_metrics"),
            spin_statistics=_flag(tensors, "return_spin_statistics"),
        ),
        streaming=streaming,
        echo=not (exclude or streaming),
        request_id=request_id,
    )


def _sampling(tensors: Tensors) -> Sampling:
    best_of = _scalar(tensors, "sampling_param_best_of")
    if best_of not in (None, 1):
        refuse("sampling_param_best_of", best_of, "1")
    max_tokens = _number(tensors, "max_tokens", 1, math.inf)
    return Sampling(
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        temperature=_number(tensors, "temperature", 0, math.inf),
        top_k=_number(tensors, "top_k", 0, math.inf),
        top_p=_number(tensors, "top_p", 0, 1),
        frequency_penalty=_number(tensors, "frequency_penalty", -math.inf, math.inf) or 0.0,
        presence_penalty=_number(tensors, "presence_penalty", -math.inf, math.inf) or 0.0,
        seed=_scalar(tensors, "sampling_param_seed"),
        stop=_stop_words(tensors),
    )


def _prompt(tensors: Tensors) -> str:
    prompts = tensors.get("text_input")
    if prompts is None or prompts.size != 1:
        given = 0 if prompts is None else prompts.size
        refuse("text_input", f"{given} prompts", "one; send a request for each prompt")
    text = _text("text_input", prompts.item())
    if not text:
        refuse("text_input", text, "at least one character")
    return text


def _stop_words(tensors: Tensors) -> tuple[str, ...]:
    words = tensors.get("sampling_param_stop")
    if words is None:
        return ()
    if words.size > MAX_STOP_WORDS:
        refuse("sampling_param_stop", f"{words.size} words", f"up to {MAX_STOP_WORDS}")
    texts = tuple(_text("sampling_param_stop", word) for word in words.flat)
    for text in texts:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            refuse("sampling_param_stop", text, f"words of 1 .. {MAX_STOP_CHARACTERS} characters")
    return texts


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        refuse(name, f"byte {value[error.start]:#04x} at {error.start}", "UTF-8 text")


def _number(tensors: Tensors, name: str, low: float, high: float) -> Any:
    """A finite number in `low .. high`; None if it was not given."""
    name = f"sampling_param_{name}"
    value = _scalar(tensors, name)
    if value is None or (low <= value <= high and math.isfinite(value)):
        return value
    bounds = (f">= {low}" if low > -math.inf else "", f"<= {high}" if high < math.inf else "")
    refuse(name, value, " ".join(["a finite number", " and ".join(filter(None, bounds))]).strip())


def _flag(tensors: Tensors, name: str) -> bool:
    return bool(_scalar(tensors, name))


def _scalar(tensors: Tensors, name: str) -> Any:
    tensor = tensors.get(name)
    if tensor is None:
        return None
    if tensor.size != 1:
        refuse(name, f"{tensor.size} values", "one")
    return tensor.item()
