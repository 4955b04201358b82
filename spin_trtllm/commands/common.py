# SPDX-License-Identifier: Apache-2.0
"""What all command lines share: one-line errors with exit code 2, and the SPIN options."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from spin_trtllm.config import (
    BLOCK_SIZES,
    EXPLORATION_POLICIES,
    MASK_POLICIES,
    POOLINGS,
    QUERY_MERGES,
    QUERY_POOLINGS,
    REDUCTIONS,
    STATE_DTYPES,
    UPDATE_POLICIES,
    SpinConfig,
    preset,
)
from spin_trtllm.errors import SpinError, refuse

Function = TypeVar("Function", bound=Callable[..., Any])

EXIT_BAD_INPUT = 2

# option, SpinConfig field, click type, help
_SPIN_OPTIONS: list[tuple[str, str, Any, str]] = [
    ("--sparsity", "target_sparsity", float, "Share of blocks to skip, in [0, 1)."),
    (
        "--layer-sparsity",
        "layer_sparsity",
        str,
        "The same for single layers, such as 1:0.5,3:0.3; the others keep --sparsity.",
    ),
    ("--block-size", "block_size", int, f"Slots a block: {', '.join(map(str, BLOCK_SIZES))}."),
    ("--ema-decay", "ema_decay", float, "Weight of the past in the averages, in [0, 1)."),
    ("--exploration", "exploration", float, "Share of kept blocks that is explored, in [0, 1]."),
    ("--pooling", "pooling", str, f"{', '.join(POOLINGS)}."),
    ("--reduction", "reduction", str, f"{', '.join(REDUCTIONS)}."),
    ("--exploration-policy", "exploration_policy", str, f"{', '.join(EXPLORATION_POLICIES)}."),
    ("--mask-policy", "mask_policy", str, f"{', '.join(MASK_POLICIES)}."),
    ("--update-policy", "update_policy", str, f"{', '.join(UPDATE_POLICIES)}."),
    (
        "--query-share",
        "query_share",
        float,
        "Share of ranked blocks that the query ranks, in [0, 1].",
    ),
    ("--query-pooling", "query_pooling", str, f"{', '.join(QUERY_POOLINGS)}."),
    ("--query-merge", "query_merge", str, f"{', '.join(QUERY_MERGES)}."),
    ("--top-k", "top_k", int, "Slots the attention reads; default: the model's."),
    ("--seed", "seed", int, "Seed of the exploration priorities."),
    ("--state-dtype", "state_dtype", str, f"{', '.join(STATE_DTYPES)}."),
]


def spin_options(function: Function) -> Function:
    """Add `--spin-config FILE` and one option per SPIN field, None when not given."""
    for option, field, kind, text in reversed(_SPIN_OPTIONS):
        function = click.option(option, field, type=kind, default=None, help=text)(function)
    return click.option(
        "--spin-config",
        type=click.Path(),
        default=None,
        help="YAML file of SPIN fields over the model's preset; single options override both.",
    )(function)


def check_is_no_input(option: str, target: str | None, inputs: Sequence[str | None]) -> None:
    """Refuse to write over what a command reads: its files, and those in its directories."""
    if target is None:
        return
    written = Path(target).resolve()
    for path in (Path(each).resolve() for each in inputs if each is not None):
        inside = path in written.parents and written.exists()
        if inside if path.is_dir() else written == path:
            refuse(option, target, f"a file that is no input, as {str(path)!r} is")


def spin_config(
    options: dict[str, Any], preset_name: str | None = None
) -> tuple[SpinConfig, dict[str, Any]]:
    """Split click's keyword arguments into the SPIN configuration they ask for, and the rest.

    Args:
        options: keyword arguments of a command decorated with `spin_options`.
        preset_name: of the model, where fields that nobody gave come from; None: `SpinConfig()`.
    """
    rest = dict(options)
    file = rest.pop("spin_config", None)
    config = SpinConfig() if preset_name is None else preset(preset_name)
    if file is not None:
        config = config.with_yaml(file)
    given = {field: rest.pop(field) for _, field, _, _ in _SPIN_OPTIONS}
    return replace(config, **{k: v for k, v in given.items() if v is not None}), rest


def say_preset(name: str | None, file: str | None) -> None:
    """Name the preset that a command took, on standard error, once the command is through."""
    if name is not None:
        click.echo(f"settings: {f'{file} over ' if file else ''}preset {name}", err=True)


def run(command: click.Command, arguments: Sequence[str] | None, program: str) -> None:
    """Run a click command as a process does: bad input is one line on stderr and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may be no text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _call(command, arguments, program)
        if sys.stdout is not None:
            sys.stdout.flush()  # while a full disk or a reader that left can still be reported
    except click.ClickException as error:
        _fail(error.format_message())
    except SpinError as error:
        _fail(str(error))
    except click.Abort:
        sys.exit(130)
    except OSError as error:
        _fail(f"output: cannot write: {error.strerror}", code=1)
    sys.exit(code if isinstance(code, int) else 0)


def _call(command: click.Command, arguments: Sequence[str] | None, program: str) -> object:
    args = None if arguments is None else list(arguments)
    try:
        return command.main(args=args, prog_name=program, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "")
        return 0


def _fail(message: str, code: int = EXIT_BAD_INPUT) -> NoReturn:
    click.echo("error: " + " ".join(message.split()), err=True)
    if code != EXIT_BAD_INPUT:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer cannot go out
    sys.exit(code)
