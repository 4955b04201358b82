# SPDX-License-Identifier: Apache-2.0
"""Ask a model that `spin-trtllm triton` serves. It needs `pip install tritonclient[grpc]` alone.

    python docs/triton_client.py "The licence says"
    python docs/triton_client.py --model stream --stream "The licence says"

Nothing in here knows SPIN but `return_spin_statistics`; without it the same client asks
TensorRT-LLM's own `llmapi` model.
"""

import argparse
import queue

import numpy as np
import tritonclient.grpc as grpc

_TYPES = {str: "BYTES", bool: "BOOL", int: "INT32", float: "FP32"}
_NUMPY = {"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32, "FP32": np.float32}


def tensor(name, value):
    """A tensor of one element."""
    kind = _TYPES[type(value)]
    element = value.encode() if isinstance(value, str) else value
    made = grpc.InferInput(name, [1], kind)
    made.set_data_from_numpy(np.array([element], _NUMPY[kind]))
    return made


def ask(client, model, inputs):
    """One answer with the whole text."""
    answer = client.infer(model, inputs)
    print(answer.as_numpy("text_output")[0].decode())
    print("finish reason:", answer.as_numpy("finish_reason")[0].decode())
    print("realized sparsity:", answer.as_numpy("spin_realized_sparsity")[0])


def stream(client, model, inputs):
    """An answer a token; each has the whole text so far."""
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer(model, inputs, enable_empty_final_response=True)
    shown = ""
    while True:
        result, error = answers.get()
        if error is not None:
            raise error
        if result.as_numpy("text_output") is not None:
            text = result.as_numpy("text_output")[0].decode()
            print(text[len(shown) :], end="", flush=True)
            shown = text
        if result.get_response().parameters["triton_final_response"].bool_param:
            print()
            return


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--url", default="localhost:8001", help="the server's gRPC port")
    parser.add_argument("--model", default="tensorrt_llm")
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--stream", action="store_true", help="the model must be built for it")
    asked = parser.parse_args()
    inputs = [
        tensor("text_input", asked.prompt),
        tensor("streaming", asked.stream),
        tensor("sampling_param_max_tokens", asked.max_tokens),
        tensor("sampling_param_temperature", asked.temperature),
        tensor("return_finish_reason", True),
        tensor("return_spin_statistics", True),
    ]
    with grpc.InferenceServerClient(asked.url) as client:
        (stream if asked.stream else ask)(client, asked.model, inputs)


if __name__ == "__main__":
    main()
