# SPDX-License-Identifier: Apache-2.0
"""Clients of the model, and the same model without a server."""

from __future__ import annotations

import queue
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy as np

from spin_trtllm import SpinConfig
from spin_trtllm.generate import generate
from spin_trtllm.hosts.transformers import enable, encode_prompt, load_model
from spin_trtllm.hosts.triton.tensors import INPUTS

CONFIG = SpinConfig(block_size=8, target_sparsity=0.6, exploration=0.1)
MAX_TOKENS = 1024
SECONDS = 60.0  # longer than any answer takes, shorter than a hang
NUMPY = {"BOOL": bool, "INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64}
TYPES = {spec.name: spec.data_type for spec in INPUTS}


class Direct:
    """What `generate` says to a prompt, with SPIN and without a server."""

    def __init__(self, checkpoint: Path) -> None:
        self._model, self._tokenizer = load_model(checkpoint, device="cpu")
        self._session = enable(self._model, CONFIG, max_tokens=MAX_TOKENS)

    def __enter__(self) -> Direct:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session.close()

    def tokens(self, prompt: str, max_tokens: int) -> list[int]:
        """The greedy tokens, as the first sequence of a session has them."""
        self._session.name_sequences([0])
        ids = encode_prompt(self._tokenizer, prompt, self._model)
        return generate(self._model, ids, max_tokens).tokens

    def text(self, prompt: str, max_tokens: int) -> str:
        """The same as text."""
        return str(self._tokenizer.decode(self.tokens(prompt, max_tokens)))


def byte_tokenizer() -> Any:
    """A tokenizer of 256 tokens, one for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def inputs(client: ModuleType, text: object, **values: Any) -> list[Any]:
    """Tensors for `tritonclient.http` or `.grpc`; `max_tokens=3` is `sampling_param_max_tokens`."""
    values = {"text_input": text, **values}
    return [
        _input(client, name if name in TYPES else f"sampling_param_{name}", value)
        for name, value in values.items()
    ]


def _input(client: ModuleType, name: str, value: object) -> Any:
    kind = "BYTES" if TYPES[name] == "STRING" else TYPES[name]
    array = np.atleast_1d(np.array(value, NUMPY.get(kind, np.object_)))
    tensor = client.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


class Stream:
    """A gRPC stream to the model `stream`."""

    def __init__(self, address: str) -> None:
        import tritonclient.grpc as grpc

        self._grpc = grpc
        self._client = grpc.InferenceServerClient(address)
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))

    def ask(self, text: object, request_id: str = "", **values: Any) -> None:
        """Send a request that is to be streamed."""
        self._client.async_stream_infer(
            "stream",
            inputs(self._grpc, text, **{"streaming": True, **values}),
            request_id=request_id,
            enable_empty_final_response=True,
        )

    def answer(self) -> Any:
        """The next answer.

        Raises:
            InferenceServerException: an error came.
        """
        result, error = self._answers.get(timeout=SECONDS)
        if error is not None:
            raise error
        return result

    def answers(self, text: object, **values: Any) -> Iterator[Any]:
        """All answers to one request."""
        self.ask(text, **values)
        while True:
            result = self.answer()
            yield result
            if is_final(result):
                return

    def leave(self, *, cancel: bool = False) -> None:
        """Close the stream; `cancel` drops what is not answered yet."""
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


def is_final(result: Any) -> bool:
    """Whether nothing follows an answer of a stream."""
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def text_of(result: Any) -> str:
    """The text of an answer."""
    return bytes(result.as_numpy("text_output")[0]).decode()


def metric(address: str, name: str, *labels: str) -> float:
    """The value of a metric with all these labels, 0 if there is none."""
    page = get(f"http://{address}/metrics").decode()
    lines = [line for line in page.splitlines() if line.startswith(name + "{")]
    lines = [line for line in lines if all(label in line for label in labels)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=SECONDS) as response:
        return bytes(response.read())


def wait_for(what: Callable[[], bool]) -> bool:
    """Whether something comes to be in time."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.05)
    return False
