# SPDX-License-Identifier: Apache-2.0
"""Requests: what clients may send, and the one line they get for anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.triton.request import Request, Sampling, Wanted, parse_request
from spin_trtllm.hosts.triton.tensors import INPUTS, OUTPUTS

_NUMPY = {"BOOL": bool, "INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64}


def tensors(text: object = b"hello", **values: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays as Triton gives them; `max_tokens=3` is `sampling_param_max_tokens`."""
    types = {spec.name: spec.data_type for spec in INPUTS}
    texts = text if isinstance(text, list) else [text]
    made = {"text_input": np.array(texts, np.object_)}
    for name, value in values.items():
        full = name if name in types else f"sampling_param_{name}"
        made[full] = np.atleast_1d(np.array(value, _NUMPY.get(types[full], np.object_)))
    return made


def test_a_bare_prompt_has_upstreams_defaults() -> None:
    assert parse_request(tensors()) == Request("hello", Sampling(max_tokens=32), echo=True)
    assert parse_request(tensors()).sampling.is_greedy


def test_everything_that_can_be_asked_for() -> None:
    given = tensors(
        "Grüße".encode(),
        streaming=True,
        best_of=1,
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        max_tokens=3,
        sampling_param_stop=[b"a", "ß".encode()],
        seed=2**64 - 1,
        return_perf_metrics=True,
        return_finish_reason=True,
        return_stop_reason=True,
        return_cumulative_logprob=True,
        return_spin_statistics=True,
    )
    assert parse_request(given, "x") == Request(
        "Grüße",
        Sampling(3, 0.5, 7, 0.25, 0.5, -0.5, 2**64 - 1, ("a", "ß")),
        Wanted(True, True, True, True, True),
        streaming=True,
        request_id="x",
    )


def test_the_prompt_is_repeated_unless_excluded_or_streamed() -> None:
    assert parse_request(tensors()).echo
    assert not parse_request(tensors(exclude_input_from_output=True)).echo
    assert not parse_request(tensors(streaming=True)).echo


def test_a_request_to_stop_needs_no_prompt() -> None:
    parsed = parse_request(tensors([], stop=True), "7")
    assert parsed.cancels
    assert parsed.request_id == "7"


@pytest.mark.parametrize(
    ("values", "greedy"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 1.0}, False),
        ({"temperature": 1.0, "top_k": 1}, True),
        ({"top_p": 0.0}, True),
        ({"top_p": 0.5}, False),
        ({"top_k": 0}, False),
        ({"seed": 1}, True),
    ],
)
def test_what_is_greedy(values: dict[str, Any], greedy: bool) -> None:
    assert parse_request(tensors(**values)).sampling.is_greedy is greedy


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (tensors(b""), "text_input: got '', allowed: at least one character"),
        (tensors(["a", "b"]), "text_input: got '2 prompts', allowed: one; "),
        (tensors([]), "text_input: got '0 prompts', allowed: one; "),
        (tensors(b"ab\xff"), "text_input: got 'byte 0xff at 2', allowed: UTF-8 text"),
        (tensors(max_tokens=0), "sampling_param_max_tokens: got 0, allowed: a finite number >= 1"),
        (tensors(max_tokens=-5), "sampling_param_max_tokens: got -5, "),
        (tensors(max_tokens=[1, 2]), "sampling_param_max_tokens: got '2 values', allowed: one"),
        (tensors(temperature=-1), "sampling_param_temperature: got -1.0, "),
        (tensors(temperature=np.nan), "sampling_param_temperature: got nan, "),
        (tensors(temperature=np.inf), "sampling_param_temperature: got inf, "),
        (tensors(top_p=1.5), "got 1.5, allowed: a finite number >= 0 and <= 1"),
        (tensors(top_k=-1), "sampling_param_top_k: got -1, "),
        (tensors(frequency_penalty=np.inf), "frequency_penalty: got inf, allowed: a finite number"),
        (tensors(best_of=2), "sampling_param_best_of: got 2, allowed: 1"),
        (
            tensors(sampling_param_stop=[b"\xc3"]),
            "sampling_param_stop: got 'byte 0xc3 at 0'",
        ),
        (
            tensors(sampling_param_stop=[b""]),
            "sampling_param_stop: got '', allowed: words",
        ),
        (tensors(sampling_param_stop=[b"x" * 257]), "sampling_param_stop: got 'xxx"),
        (
            tensors(sampling_param_stop=[b"x"] * 33),
            "sampling_param_stop: got '33 words', allowed",
        ),
    ],
)
def test_what_is_refused(given: dict[str, np.ndarray[Any, Any]], line: str) -> None:
    with pytest.raises(SpinError) as refused:
        parse_request(given)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_tensor_names_are_upstreams() -> None:
    """Those of TensorRT-LLM's llmapi model, from its config.pbtxt; without images and LoRA."""
    parameters = (
        "best_of temperature top_k top_p frequency_penalty presence_penalty max_tokens stop seed "
        "exclude_input_from_output return_perf_metrics"
    )
    assert {spec.name for spec in INPUTS if "spin" not in spec.name} == {
        *("text_input", "streaming", "stop"),
        *(f"sampling_param_{name}" for name in parameters.split()),
        *("return_finish_reason", "return_stop_reason", "return_cumulative_logprob"),
    }
    outputs = (
        "text_output finish_reason stop_reason cumulative_logprob kv_cache_reused_block "
        "kv_cache_missed_block kv_cache_alloc_new_blocks kv_cache_alloc_total_blocks "
        "kv_cache_hit_rate arrival_time_ns first_scheduled_time_ns first_token_time_ns "
        "last_token_time_ns acceptance_rate total_accepted_draft_tokens total_draft_tokens"
    )
    assert {spec.name for spec in OUTPUTS if "spin" not in spec.name} == set(outputs.split())
