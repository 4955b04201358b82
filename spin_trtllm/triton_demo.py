# SPDX-License-Identifier: Apache-2.0
"""`make triton-demo`: the tiny model behind a real Triton server, on any machine.

    python -m spin_trtllm.triton_demo --output build/triton-demo

It builds a model repository with `trtllm-build`, serves it with `spin-trtllm triton` on free ports,
asks over HTTP as any client could, and stops the server.
"""

from __future__ import annotations

import json
import shlex
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from spin_trtllm import tiny
from spin_trtllm.build import cli as trtllm_build
from spin_trtllm.build.triton import DEFAULT_NAME
from spin_trtllm.commands.common import run
from spin_trtllm.hosts.triton.running import RunningServer, running_server
from spin_trtllm.hosts.triton.server import SERVER_VARIABLE

PROMPT = "This License does not grant permission to use the trade names, trademarks, service "
PROMPTS = (PROMPT, PROMPT * 11)  # too short for SPIN to skip anything, and not
NEW_TOKENS = 48
STREAM = "stream"
COUNTERS_SECONDS = 0.5  # they follow the last answer


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=Path("build/triton-demo"))
@click.option("--tritonserver", envvar=SERVER_VARIABLE, help="As `spin-trtllm triton` has it.")
def command(output: Path, tritonserver: str | None) -> None:
    """Build, serve and ask the tiny model."""
    repository = output / "models"
    for name, *more in ((DEFAULT_NAME,), (STREAM, "--triton_streaming")):
        _build(output, repository, name, more)
    click.echo(f"\n$ spin-trtllm triton {repository}")
    with running_server(repository, log=output / "server.log", tritonserver=tritonserver) as server:
        click.echo(f"ready: HTTP {server.http}, gRPC {server.grpc}, metrics {server.metrics}")
        for prompt in PROMPTS:
            _ask(server, prompt)
        _stream(server, PROMPT)
        time.sleep(COUNTERS_SECONDS)
        click.echo(f"\n$ curl {server.metrics}/metrics")
        click.echo("\n".join(_metrics(server)))
    click.echo(f"\nstopped; its log is {output / 'server.log'}")


def _build(output: Path, repository: Path, name: str, more: list[str]) -> None:
    words = ["--use_spin", "--checkpoint_dir", str(tiny.checkpoint_path()), "--force"]
    words += ["--output_dir", str(output / "engine"), "--triton", str(repository)]
    words += ["--triton_name", name, *more]
    click.echo(f"\n$ trtllm-build {shlex.join(words)}")
    trtllm_build.command.main(words, prog_name="trtllm-build", standalone_mode=False)


def _ask(server: RunningServer, prompt: str) -> None:
    body = {
        "text_input": prompt,
        "sampling_param_max_tokens": NEW_TOKENS,
        "sampling_param_exclude_input_from_output": True,
        "return_spin_statistics": True,
    }
    answer = json.loads(b"".join(_post(server, f"{DEFAULT_NAME}/generate", body)))
    click.echo(f"\nprompt of {len(prompt)} bytes: {prompt[:60]!r}...")
    click.echo(f"answer: {answer['text_output']!r}")
    click.echo(f"blocks skipped: {answer['spin_realized_sparsity']:.1%}")


def _stream(server: RunningServer, prompt: str) -> None:
    body = {"text_input": prompt, "sampling_param_max_tokens": NEW_TOKENS, "streaming": True}
    click.echo("\nstreamed: ", nl=False)
    shown = ""
    for line in _post(server, f"{STREAM}/generate_stream", body):
        if line.startswith(b"data: "):
            text = json.loads(line[6:])["text_output"]  # each event has the whole text so far
            click.echo(text[len(shown) :], nl=False)
            shown = text
    click.echo()


def _metrics(server: RunningServer) -> Iterator[str]:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as page:
        for line in page.read().decode().splitlines():
            if line.startswith("spin_"):
                yield line


def _post(server: RunningServer, path: str, body: dict[str, Any]) -> Iterator[bytes]:
    """Lines of an answer, as they come."""
    request = urllib.request.Request(
        f"http://{server.http}/v2/models/{path}", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request) as response:
        yield from response


if __name__ == "__main__":
    run(command, None, "triton_demo")
