# SPDX-License-Identifier: Apache-2.0
"""A real tritonserver: what clients get, good and bad, alone and together."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import MAX_TOKENS, SECONDS, Direct, Stream, inputs, metric, text_of, wait_for

from spin_trtllm import triton_demo
from spin_trtllm.hosts.triton.running import RunningServer, running_server, stop

grpc = pytest.importorskip("tritonclient.grpc")
http = pytest.importorskip("tritonclient.http")
InferenceServerException = pytest.importorskip("tritonclient.utils").InferenceServerException

CLIENTS = 32
REQUESTS = int(os.environ.get("SPIN_TRITON_REQUESTS", "200"))  # of each client
PROMPT = "Permission is granted. " * 10


@pytest.fixture(params=[http, grpc], ids=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: RunningServer) -> Any:
    """A client and the module that it is from."""
    address = server.http if request.param is http else server.grpc
    with request.param.InferenceServerClient(address) as client:
        yield client, request.param


@pytest.fixture
def stream(server: RunningServer) -> Any:
    stream = Stream(server.grpc)
    yield stream
    stream.leave(cancel=True)


def ask(client: Any, text: object, model: str = "tensorrt_llm", **values: Any) -> Any:
    """One request, one answer."""
    connection, module = client
    return connection.infer(model, inputs(module, text, **values))


# ---- one request ----


def test_ready_with_upstreams_tensors(client: Any) -> None:
    connection, module = client
    assert connection.is_server_live()
    assert connection.is_server_ready()
    assert connection.is_model_ready("tensorrt_llm")
    options = {} if module is http else {"as_json": True}
    metadata = connection.get_model_metadata("tensorrt_llm", **options)
    names = {each["name"] for each in metadata["inputs"]}
    assert {"text_input", "streaming", "sampling_param_max_tokens", "stop"} <= names


def test_greedy_is_what_generate_says(client: Any, direct: Direct) -> None:
    answer = ask(client, PROMPT.encode(), max_tokens=40, exclude_input_from_output=True)
    assert text_of(answer) == direct.text(PROMPT, 40)
    assert answer.as_numpy("finish_reason") is None


def test_the_prompt_comes_first_by_default(client: Any, direct: Direct) -> None:
    assert text_of(ask(client, PROMPT.encode(), max_tokens=5)) == PROMPT + direct.text(PROMPT, 5)


def test_outputs_that_were_asked_for(client: Any) -> None:
    answer = ask(
        client,
        PROMPT.encode(),
        max_tokens=30,
        return_finish_reason=True,
        return_stop_reason=True,
        return_cumulative_logprob=True,
        return_spin_statistics=True,
        return_perf_metrics=True,
    )
    assert answer.as_numpy("finish_reason").tolist() == [b"length"]
    assert answer.as_numpy("stop_reason").tolist() == [b"None"]
    assert -30 * 6 < answer.as_numpy("cumulative_logprob").item() < 0
    # 251 tokens and more are 62 slots in 8 blocks: 5 of them are kept, for 60 % of 8 is 4.8.
    assert answer.as_numpy("spin_realized_sparsity").item() == pytest.approx(0.5, abs=0.06)
    order = ("arrival", "first_scheduled", "first_token", "last_token")
    times = [answer.as_numpy(f"{name}_time_ns").item() for name in order]
    assert times == sorted(times)


def test_stop_words(client: Any, direct: Direct) -> None:
    text = direct.text(PROMPT, 40)
    word = text[10:13]
    answer = ask(
        client,
        PROMPT.encode(),
        max_tokens=40,
        sampling_param_stop=[b"never there", word.encode()],
        exclude_input_from_output=True,
        return_finish_reason=True,
        return_stop_reason=True,
    )
    assert text_of(answer) == text[: text.index(word)]
    assert answer.as_numpy("finish_reason").tolist() == [b"stop"]
    assert answer.as_numpy("stop_reason").tolist() == [word.encode()]


def test_a_seed_repeats(client: Any) -> None:
    options = {"max_tokens": 12, "temperature": 1.5, "top_p": 0.95, "top_k": 50}
    one, same, other = (
        text_of(ask(client, b"Once", seed=seed, **options)) for seed in (2**63, 2**63, 7)
    )
    assert one == same != other


def test_the_generate_endpoint(server: RunningServer, direct: Direct) -> None:
    body = {"text_input": "Grüße", "sampling_param_max_tokens": 3}
    answer = post(f"http://{server.http}/v2/models/tensorrt_llm/generate", body)
    assert json.loads(answer)["text_output"] == "Grüße" + direct.text("Grüße", 3)


# ---- streaming ----


def test_a_stream_grows_to_what_generate_says(stream: Stream, direct: Direct) -> None:
    answers = list(stream.answers(PROMPT.encode(), max_tokens=40, return_finish_reason=True))
    texts = [text_of(answer) for answer in answers]
    assert len(texts) == 40
    assert all(new.startswith(old) for old, new in pairwise(texts))
    assert texts[-1] == direct.text(PROMPT, 40)
    reasons = [answer.as_numpy("finish_reason").item() for answer in answers]
    assert reasons == [b"None"] * 39 + [b"length"]


def test_a_stream_shows_nothing_of_a_stop_word(stream: Stream, direct: Direct) -> None:
    text = direct.text(PROMPT, 40)
    word = text[10:15]
    texts = [
        text_of(answer)
        for answer in stream.answers(PROMPT.encode(), max_tokens=40, sampling_param_stop=[word])
    ]
    assert texts[-1] == text[: text.index(word)]
    assert all(texts[-1].startswith(shown) for shown in texts)


def test_the_generate_stream_endpoint(server: RunningServer, direct: Direct) -> None:
    body = {"text_input": PROMPT, "sampling_param_max_tokens": 4, "streaming": True}
    events = post(f"http://{server.http}/v2/models/stream/generate_stream", body).decode()
    texts = [json.loads(line[6:])["text_output"] for line in events.splitlines() if line]
    assert len(texts) == 4
    assert texts[-1] == direct.text(PROMPT, 4)


def test_streaming_needs_the_model_for_it(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="only supported in decoupled mode"):
        ask(client, b"x", streaming=True)


# ---- bad requests ----


@pytest.mark.parametrize(
    ("text", "values", "line"),
    [
        (b"", {}, "text_input: got ''"),
        ([b"a", b"b"], {}, "text_input: got '2 prompts'"),
        ([], {}, "text_input: got '0 prompts'"),
        ([[b"a"]], {}, "unexpected shape"),
        (b"a\xff", {}, "text_input: got 'byte 0xff at 1', allowed: UTF-8 text"),
        (b"x" * 2**20, {}, f"'1048576 characters', allowed: {MAX_TOKENS} tokens in all"),
        (b"x" * MAX_TOKENS, {}, f"got '{MAX_TOKENS + 1} tokens with 32 to come'"),
        (b"x", {"max_tokens": MAX_TOKENS}, "got '2 tokens with 1024 to come'"),
        (b"x", {"max_tokens": 0}, "sampling_param_max_tokens: got 0"),
        (b"x", {"max_tokens": -(2**31)}, "sampling_param_max_tokens: got -2147483648"),
        (b"x", {"max_tokens": [1, 2]}, "unexpected shape"),
        (b"x", {"temperature": float("nan")}, "sampling_param_temperature: got nan"),
        (b"x", {"top_p": 2.0}, "sampling_param_top_p: got 2.0"),
        (b"x", {"best_of": 4}, "sampling_param_best_of: got 4"),
        (b"x", {"sampling_param_stop": [b"\xff"]}, "sampling_param_stop: got 'byte 0xff at 0'"),
        (b"x", {"stop": True}, "stop: got True, allowed: with the id"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(
    client: Any, text: object, values: dict[str, Any], line: str
) -> None:
    with pytest.raises(InferenceServerException) as refused:
        ask(client, text, **values)
    assert line in refused.value.message()
    assert "\n" not in refused.value.message()
    assert refused.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


def test_other_types_than_the_models_are_refused(client: Any) -> None:
    connection, module = client
    tensors = inputs(module, b"x")
    wrong = module.InferInput("sampling_param_max_tokens", [1], "FP32")
    wrong.set_data_from_numpy(np.ones(1, np.float32))
    with pytest.raises(InferenceServerException, match="data-type is 'FP32'"):
        connection.infer("tensorrt_llm", [*tensors, wrong])
    with pytest.raises(InferenceServerException, match=r"expected .* inputs but got|text_input"):
        connection.infer("tensorrt_llm", [])


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xff\xff\xff",
        b"\x05\x00\x00\x00abc",
        b"ab",
        b"",
        b"\x01\x00\x00\x00a\x01\x00\x00\x00b",
    ],
)
def test_bytes_that_are_no_strings_do_not_reach_the_model(
    server: RunningServer, content: bytes
) -> None:
    size = {"binary_data_size": len(content)}
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "parameters": size}
    head = json.dumps({"inputs": [tensor]}).encode()
    request = urllib.request.Request(
        f"http://{server.http}/v2/models/tensorrt_llm/infer",
        head + content,
        {"Inference-Header-Content-Length": str(len(head))},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=SECONDS)
    assert refused.value.code == 400


# ---- many at once ----


def test_many_clients_each_get_their_own_answer(server: RunningServer, direct: Direct) -> None:
    """Good and bad together: each good answer is that of the prompt alone."""
    prompts = [f"{PROMPT[: 3 * n]} number {n}." for n in range(CLIENTS)]
    expected = [prompt + direct.text(prompt, 2) for prompt in prompts]

    def run(n: int) -> int:
        right = 0
        with grpc.InferenceServerClient(server.grpc) as connection:
            for turn in range(REQUESTS):
                client = (connection, grpc)
                if (n + turn) % 4 == 0:
                    with pytest.raises(InferenceServerException, match="top_p: got 9"):
                        ask(client, prompts[n].encode(), top_p=9.0)
                    right += 1
                else:
                    answer = ask(client, prompts[n].encode(), max_tokens=2)
                    right += text_of(answer) == expected[n]
        return right

    started = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        assert list(pool.map(run, range(CLIENTS))) == [REQUESTS] * CLIENTS
    # 0.02 s each on two cores to themselves; the bound is for a hang, not for speed
    assert time.monotonic() - started < 30 + 0.1 * CLIENTS * REQUESTS


def test_streams_advance_together(server: RunningServer, direct: Direct) -> None:
    """None waits for another to finish: when the first ends, all others nearly do."""
    streams, tokens = [Stream(server.grpc) for _ in range(8)], 40
    prompts = [f"{n} {PROMPT}" for n in range(8)]
    expected = [direct.text(prompt, tokens) for prompt in prompts]
    for each, prompt in zip(streams, prompts, strict=True):
        each.ask(prompt.encode(), max_tokens=tokens, return_perf_metrics=True)

    def run(each: Stream) -> tuple[list[int], str]:
        answers = [each.answer() for _ in range(tokens)]
        times = [answer.as_numpy("last_token_time_ns").item() for answer in answers]
        return times, text_of(answers[-1])

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, streams))
    for each in streams:
        each.leave()
    assert [text for _, text in results] == expected
    first_end = min(times[-1] for times, _ in results)
    assert min(sum(t <= first_end for t in times) for times, _ in results) > tokens / 2


# ---- cancellation ----


def test_a_client_that_leaves_costs_no_more_steps(server: RunningServer) -> None:
    stream = Stream(server.grpc)
    stream.ask(PROMPT.encode(), max_tokens=700)
    for _ in range(3):
        stream.answer()
    stream.leave(cancel=True)
    assert_idle_before(server, 600)


def test_a_request_is_stopped_by_its_id(server: RunningServer, stream: Stream) -> None:
    stream.ask(PROMPT.encode(), "one", max_tokens=700)
    stream.answer()
    other = Stream(server.grpc)
    other.ask(b"-", "one", stop=True, streaming=False)
    with pytest.raises(InferenceServerException, match="cancelled by client"):
        other.answer()
    other.leave()
    with pytest.raises(InferenceServerException, match="cancelled by client"):
        [stream.answer() for _ in range(600)]
    assert_idle_before(server, 600)


def assert_idle_before(server: RunningServer, steps: int) -> None:
    """The streaming model stops soon: its counter of steps stands still."""

    def count() -> float:
        return metric(server.metrics, "spin_steps_total", 'model="stream"')

    def stands() -> bool:
        seen = count()
        time.sleep(1.2)  # longer than the counters lag behind
        return count() == seen

    before = count()
    assert wait_for(stands)
    assert count() - before < steps


def test_counters_are_among_tritons_metrics(server: RunningServer, client: Any) -> None:
    model = 'model="tensorrt_llm"'
    before = metric(server.metrics, "spin_rows_total", model, 'mode="sparse"')
    ask(client, PROMPT.encode(), max_tokens=11)
    assert wait_for(
        # the first of ten steps is cold
        lambda: metric(server.metrics, "spin_rows_total", model, 'mode="sparse"') == before + 9
    )
    kept = metric(server.metrics, "spin_kept_slots_total", model)
    assert 0 < kept < metric(server.metrics, "spin_visible_slots_total", model)
    assert metric(server.metrics, "spin_state_bytes", model) > 0


# ---- the demo and the example, on this server ----


def test_the_demo(
    server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(triton_demo, "running_server", lambda *_, **__: nullcontext(server))
    triton_demo.command.main(["--output", str(tmp_path)], standalone_mode=False)
    shown = capsys.readouterr().out
    assert shown.count("\n$ trtllm-build --use_spin ") == 2
    assert (tmp_path / "models" / "stream" / "1" / "model.yaml").is_file()
    assert len(re.findall(r"blocks skipped: [1-9]\d\.\d%", shown)) == 2
    assert 'spin_steps_total{model="stream"}' in shown


@pytest.mark.parametrize("options", [[], ["--model", "stream", "--stream"]])
def test_the_example_client(server: RunningServer, direct: Direct, options: list[str]) -> None:
    client = Path(__file__).parents[2] / "docs" / "triton_client.py"
    words = [sys.executable, str(client), "Grüße", "--url", server.grpc, "--max_tokens", "9"]
    said = subprocess.run([*words, *options], capture_output=True, text=True, timeout=SECONDS)
    assert said.returncode == 0, said.stderr
    prompt = "" if options else "Grüße"
    assert said.stdout.startswith(prompt + direct.text("Grüße", 9))


# ---- the server's life ----


def test_unloaded_broken_mended_and_loaded_again(
    server: RunningServer, repository: Path, direct: Direct
) -> None:
    file = repository / "stream" / "1" / "model.yaml"
    good = file.read_text()
    with http.InferenceServerClient(server.http, network_timeout=SECONDS) as connection:
        stream = Stream(server.grpc)
        stream.ask(PROMPT.encode(), max_tokens=60)
        stream.answer()
        connection.unload_model("stream")
        *_, last = (stream.answer() for _ in range(59))  # what is under way is answered
        assert text_of(last) == direct.text(PROMPT, 60)
        stream.leave()  # Triton keeps a model for as long as a stream to it is open
        assert wait_for(lambda: reason_in_index(connection, "stream") == "unloaded")

        for text, reason in (
            ("model: [", "is not YAML"),
            (good.replace("target_sparsity: 0.6", "target_sparsity: 7"), "target_sparsity: got 7"),
        ):
            file.write_text(text)
            with pytest.raises(InferenceServerException, match=reason):
                connection.load_model("stream")
            assert reason in reason_in_index(connection, "stream")
        answer = ask((connection, http), b"still there", max_tokens=3)
        assert text_of(answer) == "still there" + direct.text("still there", 3)

        file.write_text(good.replace("target_sparsity: 0.6", "target_sparsity: 0.0"))
        connection.load_model("stream")
        assert connection.is_server_ready()
    file.write_text(good)
    stream = Stream(server.grpc)
    *_, last = stream.answers(PROMPT.encode(), max_tokens=9, return_spin_statistics=True)
    stream.leave()
    assert last.as_numpy("spin_realized_sparsity").item() == 0  # the new settings are in force


def test_a_server_ends_and_another_starts(
    server: RunningServer,
    repository: Path,
    tritonserver: str | None,
    direct: Direct,
    tmp_path: Path,
) -> None:
    """SIGTERM ends it in good order, and its models' processes. The last test of this file."""
    models = children(server.process.pid)
    assert len(models) == 2
    assert stop(server) == 0
    assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in models))
    log = tmp_path / "again.log"
    with running_server(repository, log=log, tritonserver=tritonserver) as again:
        body = {"text_input": "again", "sampling_param_max_tokens": 3}
        answer = post(f"http://{again.http}/v2/models/tensorrt_llm/generate", body)
        assert json.loads(answer)["text_output"] == "again" + direct.text("again", 3)


def reason_in_index(connection: Any, model: str) -> str:
    index = connection.get_model_repository_index()
    return next(entry.get("reason", "") for entry in index if entry["name"] == model)


def post(url: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        return bytes(response.read())


def children(pid: int) -> list[int]:
    """Processes that any thread of a process started."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in lists for child in each.read_text().split()]
