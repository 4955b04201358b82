# SPDX-License-Identifier: Apache-2.0
"""`trtllm-build`: with `--use_spin` our build, without it TensorRT-LLM's own command."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, TypeVar

import click

from spin_trtllm import __version__
from spin_trtllm.build.engine import RUN_FILE
from spin_trtllm.build.handover import hand_over
from spin_trtllm.build.pipeline import BuildRequest, Built, build
from spin_trtllm.build.progress import Stages
from spin_trtllm.build.target import TARGET_SMS
from spin_trtllm.build.tensorrt import FOLDER, ROTATIONS, TensorrtOptions
from spin_trtllm.build.triton import DEFAULT_NAME, TritonOptions
from spin_trtllm.commands.common import run
from spin_trtllm.config import BLOCK_SIZES
from spin_trtllm.errors import refuse
from spin_trtllm.hosts.tensorrt.indexer import PRECISIONS
from spin_trtllm.hosts.tensorrt.plugin import missing_plugin
from spin_trtllm.hosts.triton.model_settings import ENGINES
from spin_trtllm.step import SpinStep

PROGRAM = "trtllm-build"
DEFAULT_BATCH_SIZE = 64
EXIT_NO_ENGINES = 1

Function = TypeVar("Function", bound=Callable[..., Any])

_BUILD = "Build"
_SPIN = "SPIN (overrides the file or preset)"
_SIZES = "Deployment"
_TENSORRT = "TensorRT"
_TRITON = "Triton"

# option, SpinConfig field, type, help
_SPIN_FIELDS: list[tuple[str, str, type, str]] = [
    ("--spin_sparsity", "target_sparsity", float, "Share of blocks to skip, in [0, 1)."),
    ("--spin_block_size", "block_size", int, f"Slots a block: {', '.join(map(str, BLOCK_SIZES))}."),
    ("--spin_ema_decay", "ema_decay", float, "Weight of the past in the averages, in [0, 1)."),
    ("--spin_exploration", "exploration", float, "Share of kept blocks explored, in [0, 1]."),
    (
        "--spin_exploration_policy",
        "exploration_policy",
        str,
        f"{', '.join(SpinStep.exploration_policies)}.",
    ),
    ("--spin_state_dtype", "state_dtype", str, "Averages in fp32 or bf16."),
    ("--spin_seed", "seed", int, "Seed of the exploration priorities."),
]


class _Option(click.Option):
    """An option that says under which heading `--help` lists it."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class _Command(click.Command):
    """A command whose help groups its options; the built-in ones come last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, options in groupby(
            self.get_params(ctx), lambda option: getattr(option, "section", "Other")
        ):
            records = [option.get_help_record(ctx) for option in options]
            with formatter.section(heading):
                formatter.write_dl([record for record in records if record])


def _option(*names: str, section: str, **attributes: Any) -> Callable[[Function], Function]:
    return click.option(*names, cls=_Option, section=section, **attributes)


def _spin_fields(function: Function) -> Function:
    for option, field, kind, text in reversed(_SPIN_FIELDS):
        function = _option(option, field, section=_SPIN, type=kind, help=text)(function)
    return function


@click.command(
    cls=_Command,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Without --use_spin all arguments go to TensorRT-LLM's own trtllm-build, which exists "
    "up to its release 1.3.0rc22.",
)
@_option("--use_spin", section=_BUILD, is_flag=True, expose_value=False, help="Build with SPIN.")
@_option("--checkpoint_dir", section=_BUILD, required=True, help="DeepSeek-V4 or V3.2 checkpoint.")
@_option("--output_dir", section=_BUILD, required=True, help="Directory to write the engine to.")
@_option("--force", section=_BUILD, is_flag=True, help="Replace an earlier engine.")
@_option("--dry_run", section=_BUILD, is_flag=True, help="Print the files instead of writing them.")
@_option("--spin_config", section=_SPIN, metavar="FILE", help="YAML file over the model's preset.")
@_option("--spin_preset", section=_SPIN, metavar="NAME", help="Preset; default: the model's.")
@_spin_fields
@_option(
    "--target_sm",
    section=_SIZES,
    metavar="SM",
    help=f"GPU to serve on: {', '.join(map(str, TARGET_SMS))}; sm_90 and 90a are fine too. "
    "Default: this machine's, or 90.",
)
@_option(
    "--max_batch_size",
    section=_SIZES,
    type=int,
    default=DEFAULT_BATCH_SIZE,
    show_default=True,
    help="Sequences that decode at once.",
)
@_option(
    "--max_seq_len",
    section=_SIZES,
    type=int,
    help="Longest sequence in tokens. Default: the model's limit.",
)
@_option(
    "--tensorrt",
    section=_TENSORRT,
    is_flag=True,
    help="Also write the indexer's layers as ONNX with SPIN's plugin, and as engines where a "
    "TensorRT with a builder is installed.",
)
@_option(
    "--precision",
    section=_TENSORRT,
    help=f"Of the projections: {', '.join(PRECISIONS)}. Default: bf16.",
)
@_option(
    "--key_rotation",
    section=_TENSORRT,
    help=f"What cached keys went through: {', '.join(ROTATIONS)}. Default: hadamard.",
)
@_option("--max_draft_len", section=_TENSORRT, type=int, help="Draft tokens a step. Default: 0.")
@_option(
    "--onnx_only",
    section=_TENSORRT,
    is_flag=True,
    default=None,
    help="Build no engines here; build_engines.sh does where it is called.",
)
@_option(
    "--triton",
    section=_TRITON,
    metavar="DIR",
    help="Also write a model into this repository of Triton Inference Server.",
)
@_option("--triton_name", section=_TRITON, metavar="NAME", help=f"Default: {DEFAULT_NAME}.")
@_option(
    "--triton_streaming",
    section=_TRITON,
    is_flag=True,
    default=None,
    help="Stream tokens; such a model answers gRPC streams and generate_stream only.",
)
@_option("--triton_engine", section=_TRITON, help=f"{', '.join(ENGINES)}. Default: {ENGINES[0]}.")
@click.version_option(__version__, prog_name=f"{PROGRAM} (spin-trtllm)")
def command(**options: Any) -> None:
    """Prepare a DeepSeek-V4 or V3.2 checkpoint for serving with SPIN.

    Writes a directory with the SPIN configuration, arguments for trtllm-serve and a run.sh; the
    weights stay where they are. Exits with 2 if nothing was written, and with 1 if a TensorRT that
    is here failed to build engines and all else was written.
    """
    overrides = {field: options.pop(field) for _, field, _, _ in _SPIN_FIELDS}
    tensorrt = _tensorrt_options(options)
    triton = _triton_options(options)
    request = BuildRequest(overrides=overrides, tensorrt=tensorrt, triton=triton, **options)
    built = build(request, Stages(request.stages))
    if request.dry_run:
        for name, text in {**built.files, **built.model_files}.items():
            _echo(f"\n# ---- {name}\n{text}")
        return
    _echo_use(built, triton)
    if built.engines is not None and built.engines.failed:
        click.echo(f"error: engines: {built.engines.reason}", err=True)
        click.get_current_context().exit(EXIT_NO_ENGINES)


def _tensorrt_options(options: dict[str, Any]) -> TensorrtOptions | None:
    """Take TensorRT's options out of all of them; None without `--tensorrt`."""
    wanted = options.pop("tensorrt")
    defaults: dict[str, Any] = {
        "precision": "bf16",
        "key_rotation": ROTATIONS[0],
        "max_draft_len": 0,
        "onnx_only": False,
    }
    given = {name: options.pop(name) for name in defaults}
    given = {name: value for name, value in given.items() if value is not None}
    if given and not wanted:
        name, value = next(iter(given.items()))
        refuse(f"--{name}", value, "only with --tensorrt")
    return TensorrtOptions(**(defaults | given)) if wanted else None


def _triton_options(options: dict[str, Any]) -> TritonOptions | None:
    """Take Triton's options out of all of them; None without `--triton`."""
    repository = options.pop("triton")
    names = {"triton_name": "name", "triton_streaming": "streaming", "triton_engine": "engine"}
    given = {option: options.pop(option) for option in names}
    given = {option: value for option, value in given.items() if value is not None}
    if repository is None:
        if given:
            option, value = next(iter(given.items()))
            refuse(f"--{option}", value, "only with --triton")
        return None
    return TritonOptions(repository, **{names[option]: value for option, value in given.items()})


def _echo_use(built: Built, triton: TritonOptions | None) -> None:
    if built.engines is not None:
        folder = shlex.quote(str(built.output / FOLDER))
        what = "engines" if built.engines.builder else "only ONNX, no engines"
        _echo(f"TensorRT: {what} in {folder}\n")
        if missing := missing_plugin():
            _echo(f"TensorRT: {missing} and put it there\n")
    _echo(f"serve it: {shlex.quote(str(built.output / RUN_FILE))}\n")
    if triton is not None:
        _echo(f"with Triton: spin-trtllm triton {shlex.quote(str(triton.folder.parent))}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if _is_ours(given):
        with _stopped_by(signal.SIGTERM, signal.SIGHUP):
            run(command, given, PROGRAM)
    run(click.Command(PROGRAM, callback=lambda: hand_over(PROGRAM, given)), [], PROGRAM)


@contextmanager
def _stopped_by(*numbers: signal.Signals) -> Iterator[None]:
    """Let signals end a build as Ctrl-C does, which takes away what was half-made."""

    def stop(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough
        sys.exit(128 + number)

    ours = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]  # no nohup
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _is_ours(arguments: Sequence[str]) -> bool:
    """`--use_spin` decides; a call for help is answered even where TensorRT-LLM could not."""
    words = {argument.partition("=")[0] for argument in arguments}
    return bool(words & {"--use_spin", "--help", "-h", "--version"})


def _echo(text: str) -> None:
    click.echo(os.fsencode(text), nl=False)  # a path may be bytes that no text stream takes


if __name__ == "__main__":
    main()
