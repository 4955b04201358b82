# SPDX-License-Identifier: Apache-2.0
"""A tritonserver as a child of this process, on free ports of the loopback interface."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import spin_trtllm
from spin_trtllm.errors import SpinError

HOST = "127.0.0.1"
START_SECONDS = 300.0
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class RunningServer:
    """A server that answers.

    Attributes:
        process: started by `spin-trtllm triton`, and the server itself since.
        http, grpc, metrics: where it listens, as `host:port`.
        log: file with all that it says.
    """

    process: subprocess.Popen[bytes]
    http: str
    grpc: str
    metrics: str
    log: Path


@contextmanager
def running_server(
    repository: str | os.PathLike[str],
    *,
    log: Path,
    tritonserver: str | None = None,
    arguments: Sequence[str] = (),
) -> Iterator[RunningServer]:
    """Serve a repository until the end of a `with` block.

    Args:
        log: file to write what the server says to.
        tritonserver: which one to start; by default the command's own choice.
        arguments: further ones for tritonserver.

    Raises:
        SpinError: it did not start; the message has the end of its log.
    """
    ports = dict(zip(("http", "grpc", "metrics"), _free_ports(3), strict=True))
    words = [sys.executable, "-m", "spin_trtllm.cli", "triton", os.fspath(repository)]
    words += [f"--{name}_port={port}" for name, port in ports.items()]
    words += ["--tritonserver", tritonserver] if tritonserver else []
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*words, "--", *arguments], stdout=file, stderr=subprocess.STDOUT, env=_environment()
        )
    server = RunningServer(
        process, **{name: f"{HOST}:{port}" for name, port in ports.items()}, log=log
    )
    try:
        _wait_until_live(server)
        yield server
    finally:
        stop(server)


def stop(server: RunningServer) -> int:
    """Ask a server to end, and wait for it: its exit code. Harmless when it has ended."""
    server.process.terminate()
    try:
        return server.process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.process.kill()
        return server.process.wait()


def _wait_until_live(server: RunningServer) -> None:
    """A server listens once it has tried to load its models."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://{server.http}/v2/health/live"):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    lines = server.log.read_text(errors="replace").splitlines()[-5:]
    raise SpinError(f"tritonserver: did not start: {' | '.join(lines)}")


def _environment() -> dict[str, str]:
    """This process's, in which the child finds this very package."""
    package = str(Path(spin_trtllm.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
