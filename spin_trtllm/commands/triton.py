# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm triton`: Triton Inference Server on a repository that trtllm-build wrote."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import click

from spin_trtllm.build.triton import CONFIG_FILE
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.hosts.triton.server import (
    PROGRAM,
    SERVER_VARIABLE,
    Server,
    backend_arguments,
    check_plain,
    environment,
    find_server,
    missing,
    prepare,
)

LOOPBACK = "127.0.0.1"
PORT = click.IntRange(1, 65535)


@click.command("triton")
@click.argument("repository", metavar="DIR", type=click.Path())
@click.argument("arguments", metavar="[-- TRITONSERVER ARGUMENTS]", nargs=-1)
@click.option("--host", default=LOOPBACK, show_default=True, help="Address to listen on.")
@click.option("--http_port", type=PORT, default=8000, show_default=True)
@click.option("--grpc_port", type=PORT, default=8001, show_default=True)
@click.option("--metrics_port", type=PORT, default=8002, show_default=True)
@click.option(
    "--tritonserver",
    "given",
    type=click.Path(),
    envvar=SERVER_VARIABLE,
    help="The server's binary, or a folder that the wheel nvidia-pytriton was installed into. "
    f"Default: {SERVER_VARIABLE}, else the one on PATH, else the wheel of this environment.",
)
@click.option("--dry_run", is_flag=True, help="Print the command, and what is missing here.")
def command(
    repository: str,
    arguments: tuple[str, ...],
    host: str,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    given: str | None,
    dry_run: bool,
) -> None:
    """Serve the models in DIR with Triton: check this machine, print the command, and become it.

    A model that cannot be loaded is unavailable, with the reason in the repository's index; the
    others are served. Models can be loaded again without a restart. What comes after `--` goes to
    tritonserver: spin-trtllm triton DIR -- --log-verbose=1
    """
    path = _repository(repository)
    server = find_server(given)
    found = list(missing(server))
    if found and not dry_run:
        raise SpinError(f"triton: {found[0]}")
    ports = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
    words = [*command_line(server, path, host, ports), *arguments]
    variables = environment(server, os.environ)
    click.echo(_printable(words, variables))
    for line in found:
        click.echo(f"missing here: {line}", err=True)
    if not dry_run:
        _check_free(host, ports)
        prepare(server)
        _become(words, variables)


def command_line(
    server: Server, repository: Path, host: str, ports: Mapping[str, int]
) -> list[str]:
    """The words of the command that serves a repository.

    Args:
        ports: of `http`, `grpc` and `metrics`.
    """
    listening = [
        f"--{name}-{what}={value}"
        for name, port in ports.items()
        for what, value in (("address", host), ("port", port))
    ]
    return [
        str(server.program),
        f"--model-repository={repository}",
        # One model that fails must not take the others down, and can be loaded again once mended.
        "--model-control-mode=explicit",
        "--load-model=*",
        "--exit-on-error=false",
        *listening,
        *backend_arguments(server),
    ]


def _repository(directory: str) -> Path:
    path = Path(os.path.realpath(directory))
    if not path.is_dir() or not any(path.glob(f"*/{CONFIG_FILE}")):
        refuse("repository", directory, "a directory that trtllm-build --triton wrote")
    return check_plain("repository", path)


def _check_free(host: str, ports: Mapping[str, int]) -> None:
    """Triton finds a port that is taken, or one port for two, after it has loaded the models."""
    with ExitStack() as stack:
        for name, port in ports.items():
            try:
                stack.enter_context(socket.create_server((host, port)))
            except OSError as error:
                raise SpinError(
                    f"--{name}_port: cannot listen on {host}:{port}: {error.strerror}"
                ) from error


def _printable(words: Sequence[str], variables: Mapping[str, str]) -> str:
    """The command as a shell takes it, after the variables that are not this process's own."""
    changed = [
        f"{name}={shlex.quote(value)}"
        for name, value in variables.items()
        if value != os.environ.get(name)
    ]
    return " ".join([*changed, shlex.join(words)])


def _become(words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Replace this process: signals of a supervisor reach the server, and nobody else."""
    sys.stdout.flush()  # nothing of ours runs after this
    try:
        os.execve(words[0], list(words), dict(variables))
    except OSError as error:
        raise SpinError(f"{PROGRAM}: cannot start {words[0]}: {error.strerror}") from error
