# SPDX-License-Identifier: Apache-2.0
"""What Triton costs on the embedded engine, and how it bears many clients: the tiny model, CPU.

overhead   one request at a time, next to `generate` in this process, in turns
streams    eight streams at once, next to the same eight requests one after the other
clients    32 clients with 200 requests each; every answer is compared with `generate`'s
soak       10,000 good and bad requests; failures, and the memory of the server's processes

python benchmarks/bench_triton.py [--tritonserver FOLDER] [--requests 200] [--soak 10000]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import statistics
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from spin_trtllm import preset, tiny
from spin_trtllm.build import cli as trtllm_build
from spin_trtllm.generate import generate
from spin_trtllm.hosts.transformers import enable, encode_prompt, load_model
from spin_trtllm.hosts.triton.running import RunningServer, running_server

RESULTS = Path(__file__).parent / "results"
TEXT = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")
CLIENTS = 32
STREAMS = 8
PROMPT_BYTES, NEW_TOKENS = 1000, 64  # of overhead and streams
SHORT_TOKENS = 2  # of clients and soak

Inputs = dict[str, tuple[str, Any]]

# What clients get wrong, and a part of what they are told.
BAD: tuple[tuple[Inputs, str], ...] = (
    ({"text_input": ("BYTES", [b""])}, "at least one character"),
    ({"text_input": ("BYTES", [b"a", b"b"])}, "2 prompts"),
    ({"text_input": ("BYTES", [b"\xff\xfe"])}, "UTF-8"),
    ({"text_input": ("BYTES", [b"x" * 2**20])}, "tokens in all"),
    ({"text_input": ("BYTES", [b"x" * 40_000])}, "tokens in all"),
    ({"text_input": ("INT32", [1])}, "data-type"),
    ({"sampling_param_max_tokens": ("INT32", [-1])}, "max_tokens"),
    ({"sampling_param_max_tokens": ("INT32", [1, 2])}, "shape"),
    ({"sampling_param_temperature": ("FP32", [float("nan")])}, "temperature"),
    ({"sampling_param_stop": ("BYTES", [b"\xff"])}, "UTF-8"),
    ({"streaming": ("BOOL", [True])}, "decoupled"),
    ({"stop": ("BOOL", [True])}, "stop"),
)
_NUMPY = {"BYTES": np.object_, "INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_}


class Direct:
    """`generate` in this process, as the server's engine has it."""

    def __init__(self, max_sequences: int) -> None:
        self._model, self._tokenizer = load_model(tiny.checkpoint_path(), device="cpu")
        config = preset("tiny-deepseek-v4")
        self._session = enable(self._model, config, max_sequences=max_sequences)

    def text(self, prompt: str, tokens: int) -> str:
        self._session.name_sequences([0])
        ids = encode_prompt(self._tokenizer, prompt, self._model)
        return str(self._tokenizer.decode(generate(self._model, ids, tokens).tokens))


def tensors(inputs: Inputs) -> list[Any]:
    made = []
    for name, (kind, values) in inputs.items():
        tensor = grpc.InferInput(name, [len(values)], kind)
        tensor.set_data_from_numpy(np.array(values, _NUMPY[kind]))
        made.append(tensor)
    return made


def good(prompt: str, tokens: int, **more: tuple[str, Any]) -> Inputs:
    return {
        "text_input": ("BYTES", [prompt.encode()]),
        "sampling_param_max_tokens": ("INT32", [tokens]),
        "sampling_param_exclude_input_from_output": ("BOOL", [True]),
        **more,
    }


def ask(client: Any, inputs: Inputs) -> str:
    """The text of an answer."""
    answer = client.infer("tensorrt_llm", tensors(inputs), client_timeout=600)
    return bytes(answer.as_numpy("text_output")[0]).decode()


def overhead(server: RunningServer, direct: Direct, rounds: int) -> dict[str, Any]:
    """One request at a time, both ways in turns: medians."""
    both: dict[str, list[float]] = {"direct": [], "triton": []}
    with grpc.InferenceServerClient(server.grpc) as client:
        for turn in range(rounds + 1):  # the first one warms up
            prompt = TEXT[turn * 100 :][:PROMPT_BYTES]
            texts: dict[str, str] = {}
            for name, work in (
                ("direct", lambda p=prompt: direct.text(p, NEW_TOKENS)),
                ("triton", lambda p=prompt: ask(client, good(p, NEW_TOKENS))),
            ):
                started = time.perf_counter()
                texts[name] = work()
                both[name].append(time.perf_counter() - started)
            if texts["direct"] != texts["triton"]:
                raise SystemExit(f"other text through Triton: {texts}")
    medians = {name: statistics.median(seconds[1:]) for name, seconds in both.items()}
    pairs = [t / d for d, t in zip(both["direct"][1:], both["triton"][1:], strict=True)]
    return {
        "prompt_tokens": PROMPT_BYTES + 1,
        "new_tokens": NEW_TOKENS,
        "rounds": rounds,
        "direct_seconds": medians["direct"],
        "triton_seconds": medians["triton"],
        "overhead": statistics.median(pairs) - 1,
    }


def stream(server: RunningServer, prompt: str) -> list[float]:
    """Times at which each token of one request arrived."""
    arrived: queue.Queue[Any] = queue.Queue()
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: arrived.put((time.perf_counter(), error)))
        inputs = good(prompt, NEW_TOKENS, streaming=("BOOL", [True]))
        client.async_stream_infer("stream", tensors(inputs))
        times = []
        for _ in range(NEW_TOKENS):
            when, error = arrived.get(timeout=600)
            if error is not None:
                raise error
            times.append(when)
    return times


def streams(server: RunningServer, rounds: int) -> dict[str, Any]:
    """Streams together and one after the other: best times, and how far the slowest got."""
    prompts = [TEXT[100 * n :][:PROMPT_BYTES] for n in range(STREAMS)]
    stream(server, prompts[0])
    together, sequence, behind = [], [], []
    with ThreadPoolExecutor(STREAMS) as pool:
        for _ in range(rounds):
            started = time.perf_counter()
            for prompt in prompts:
                stream(server, prompt)
            sequence.append(time.perf_counter() - started)
            started = time.perf_counter()
            all_times = list(pool.map(lambda prompt: stream(server, prompt), prompts))
            together.append(time.perf_counter() - started)
            first_end = min(times[-1] for times in all_times)
            behind.append(min(sum(t <= first_end for t in times) for times in all_times))
    pairs = [t / s for s, t in zip(sequence, together, strict=True)]
    return {
        "streams": STREAMS,
        "rounds": rounds,
        "sequence_seconds": statistics.median(sequence),
        "together_seconds": statistics.median(together),
        "loss": statistics.median(pairs) - 1,
        "tokens_of_slowest_when_first_ends": min(behind),
    }


def clients(server: RunningServer, direct: Direct, requests: int) -> dict[str, Any]:
    """Many clients at once; each knows what it should hear."""
    prompts = [TEXT[37 * n :][: 20 + n] for n in range(CLIENTS)]
    expected = [direct.text(prompt, SHORT_TOKENS) for prompt in prompts]

    def run(n: int) -> int:
        with grpc.InferenceServerClient(server.grpc) as client:
            return sum(
                ask(client, good(prompts[n], SHORT_TOKENS)) == expected[n] for _ in range(requests)
            )

    started = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        right = sum(pool.map(run, range(CLIENTS)))
    return {
        "clients": CLIENTS,
        "requests": CLIENTS * requests,
        "as_generate": right,
        "seconds": time.perf_counter() - started,
    }


def soak(server: RunningServer, requests: int) -> dict[str, Any]:
    """Good and bad requests in turn; what each was told, and the memory along the way."""
    outcomes: Counter[str] = Counter()
    memory: list[int] = []
    lock, warm_up = threading.Lock(), requests // 10

    def one(client: Any, n: int) -> str:
        if n % 5 < 3:
            prompt = TEXT[n % 5000 :][: 10 + n % 60]
            more: dict[str, tuple[str, Any]] = {}
            if n % 5 == 1:
                more = {"sampling_param_temperature": ("FP32", [1.5])}
            ask(client, good(prompt, 1 + n % 3, **more))
            return "answered"
        wrong, line = BAD[n % len(BAD)]
        try:
            ask(client, {**good("x", 1), **wrong})
        except InferenceServerException as error:
            return "refused" if line in str(error) else f"unexpected: {error}"
        return f"unexpected answer to {wrong}"

    def run(first: int) -> None:
        with grpc.InferenceServerClient(server.grpc) as client:
            for n in range(first, requests, CLIENTS):
                outcome = one(client, n)
                with lock:
                    outcomes[outcome] += 1
                    if sum(outcomes.values()) % warm_up == 0:
                        memory.append(resident_bytes(server))

    started = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(run, range(CLIENTS)))
    return {
        "requests": requests,
        "outcomes": dict(outcomes),
        "seconds": time.perf_counter() - started,
        "resident_bytes": memory,
        "growth_after_first_tenth": memory[-1] / memory[0] - 1,
    }


def resident_bytes(server: RunningServer) -> int:
    """Memory of the server and of its models' processes."""
    pid = server.process.pid
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [pid, *(int(child) for each in lists for child in each.read_text().split())]
    pages = [int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in pids]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def build(folder: Path) -> Path:
    """A repository with the tiny model twice: answering at once, and streaming."""
    for name, *more in (("tensorrt_llm",), ("stream", "--triton_streaming")):
        words = ["--use_spin", "--checkpoint_dir", str(tiny.checkpoint_path()), "--target_sm", "90"]
        words += [
            "--output_dir",
            str(folder / f"engine-{name}"),
            "--triton",
            str(folder / "models"),
        ]
        words += ["--triton_name", name, "--triton_engine", "transformers", *more]
        trtllm_build.command.main(words, standalone_mode=False)
    return folder / "models"


def main() -> None:
    """Run all parts against one server, print a line each and save the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tritonserver", default=os.environ.get("SPIN_TRITONSERVER"))
    parser.add_argument("--rounds", type=int, default=7, help="of overhead")
    parser.add_argument("--requests", type=int, default=200, help="of each client")
    parser.add_argument("--soak", type=int, default=10_000, help="requests")
    parser.add_argument("--output", type=Path, default=RESULTS / "triton-cpu.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # as the engine
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        repository, log = build(Path(folder)), Path(folder) / "server.log"
        direct = Direct(max_sequences=trtllm_build.DEFAULT_BATCH_SIZE)
        with running_server(repository, log=log, tritonserver=asked.tritonserver) as server:
            with grpc.InferenceServerClient(server.grpc) as client:
                tritonserver_version = client.get_server_metadata().version
            for name, part in (
                ("overhead", lambda: overhead(server, direct, asked.rounds)),
                ("streams", lambda: streams(server, 3)),
                ("clients", lambda: clients(server, direct, asked.requests)),
                ("soak", lambda: soak(server, asked.soak)),
            ):
                result[name] = part()
                print(f"{name}: {json.dumps(result[name])}", flush=True)
    result |= {
        "cpu_cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "tritonclient": version("tritonclient"),
            "tritonserver": tritonserver_version,
        },
        "date": date.today().isoformat(),
    }
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    asked.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
