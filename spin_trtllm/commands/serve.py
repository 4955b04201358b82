# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm serve`: TensorRT-LLM's own server on an engine, with SPIN switched on."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence

import click

from spin_trtllm.build.engine import LLM_ARGS_FILE, RUN_FILE, SPIN_FILE, Engine, load_engine
from spin_trtllm.build.run_script import checkpoint_of
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.hosts.trtllm.activate import STARTUP_FILE, has_hooks, startup_file
from spin_trtllm.hosts.trtllm.backend import read_backend
from spin_trtllm.hosts.trtllm.settings import SPIN_VARIABLE, read_settings
from spin_trtllm.probe import Report, probe

PROGRAM = "trtllm-serve"
CHECKPOINT_VARIABLE = "SPIN_CHECKPOINT"  # as run.sh has it


class _Serve(click.Command):
    """Tells whose an unknown option may be."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(
                f"{error.format_message()} Those of {PROGRAM} come after `--`.", ctx
            ) from error


@click.command("serve", cls=_Serve)
@click.argument("engine_dir", metavar="DIR", type=click.Path())
@click.argument("arguments", metavar="[-- TRTLLM-SERVE ARGUMENTS]", nargs=-1)
@click.option(
    "--checkpoint", type=click.Path(), help="Where the checkpoint is now. Default: as in run.sh."
)
@click.option("--dry_run", is_flag=True, help="Print the command, and what is missing here.")
def command(
    engine_dir: str, arguments: tuple[str, ...], checkpoint: str | None, dry_run: bool
) -> None:
    """Serve the engine in DIR: check this machine, print the command, and become it.

    What comes after `--` goes to trtllm-serve: spin-trtllm serve DIR -- --tp_size 8 --port 8000
    """
    engine = load_engine(engine_dir)
    words = command_line(engine, _checkpoint(engine, checkpoint), arguments)
    environment = {**os.environ, SPIN_VARIABLE: str(engine.path / SPIN_FILE)}
    # What a rank would complain about, before there are ranks.
    read_settings(environment)
    read_backend(engine.config, environment)
    found = list(missing(engine, probe(), arguments))
    if found and not dry_run:
        raise SpinError(f"serve: {found[0]}")
    click.echo(_printable(words, environment))
    for line in found:
        click.echo(f"missing here: {line}", err=True)
    if not dry_run:
        _become(words, environment)


def command_line(engine: Engine, checkpoint: str, arguments: Sequence[str]) -> list[str]:
    """The words of the command that serves an engine."""
    return [PROGRAM, checkpoint, "--config", str(engine.path / LLM_ARGS_FILE), *arguments]


def missing(engine: Engine, report: Report, arguments: Sequence[str]) -> Iterator[str]:
    """What this machine lacks to serve an engine with SPIN, one line each with what to do."""
    if shutil.which(PROGRAM) is None:
        yield f"no {PROGRAM} on PATH, allowed: an environment with TensorRT-LLM in it"
    yield from _missing_hooks(report, arguments)
    sms = sorted({device.sm for device in report.devices})
    if sms != [engine.target_sm]:
        shown = ", ".join(f"sm_{sm}" for sm in sms) or "no CUDA device"
        yield (
            f"GPU: got {shown}, allowed: sm_{engine.target_sm}, the engine's target; "
            "or build anew with --target_sm"
        )
    if not report.kernel_library.found:
        yield f"kernel library: {report.kernel_library.note}; `make kernels` in a clone builds it"


def _missing_hooks(report: Report, arguments: Sequence[str]) -> Iterator[str]:
    host = report.host("tensorrt_llm")
    if not host.found:
        yield "tensorrt_llm is not installed in this Python environment"
    elif not host.matches:
        hook = host.hooks[0]
        yield (
            f"tensorrt_llm: got {host.version} with {hook.name} {hook.note}, allowed: "
            "1.3.0rc24 .. 1.4.0rc4"
        )
    if not has_hooks():
        yield "hooks: this version of spin-trtllm has none for TensorRT-LLM; run.sh serves dense"
    by_argument = any(word.split("=")[0] == "--custom_module_dirs" for word in arguments)
    if startup_file() is None and not by_argument:
        yield (
            f"no {STARTUP_FILE} in site-packages, so that ranks would run dense, allowed: "
            "spin-trtllm installed in this environment, or --custom_module_dirs"
        )


def _checkpoint(engine: Engine, given: str | None) -> str:
    """Where the checkpoint is: as given, in the environment, or as run.sh says."""
    given = given or os.environ.get(CHECKPOINT_VARIABLE)
    if given is None:
        try:
            script = (engine.path / RUN_FILE).read_text("utf-8", errors="surrogateescape")
        except OSError as error:
            raise SpinError(f"engine_dir: cannot read {RUN_FILE}: {error.strerror}") from error
        given = checkpoint_of(script)
    if given is None:
        refuse("--checkpoint", None, f"a directory, as {RUN_FILE} no longer names one")
    return str(engine.check_checkpoint(given).path)


def _printable(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """The command as a shell takes it."""
    return f"{SPIN_VARIABLE}={shlex.quote(environment[SPIN_VARIABLE])} {shlex.join(words)}"


def _become(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Replace this process: signals of a supervisor reach the server, and nobody else."""
    program = shutil.which(words[0])
    assert program is not None
    sys.stdout.flush()  # nothing of ours runs after this
    try:
        os.execve(program, list(words), dict(environment))
    except OSError as error:
        raise SpinError(f"{PROGRAM}: cannot start {program}: {error.strerror}") from error
