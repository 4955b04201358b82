# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm`: one subcommand a module of `spin_trtllm.commands`, imported when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import click

from spin_trtllm import __version__
from spin_trtllm.commands.common import run

# name: (module, one line of help), so that --help imports nothing heavy
_COMMANDS: dict[str, tuple[str, str]] = {
    "calibrate": ("calibrate", "Find a target sparsity for each layer on captured traces."),
    "doctor": ("doctor", "Say what will run on this machine, what will not, and how to fix it."),
    "generate": ("generate", "Decode a prompt with SPIN on the embedded host, next to dense."),
    "replay": ("replay", "Replay a trace of indexer scores: what SPIN keeps and what it misses."),
    "report": ("report", "Run the paper's studies on captured traces: JSON and one HTML page."),
    "serve": ("serve", "Serve an engine with trtllm-serve, once this machine is fit for it."),
    "trace": ("trace", "Capture a trace of indexer scores from a checkpoint and a prompt."),
    "trace-info": ("trace_info", "Describe and check a trace file."),
    "triton": ("triton", "Serve a model repository with Triton Inference Server."),
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module = importlib.import_module(f"spin_trtllm.commands.{_COMMANDS[name][0]}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="spin-trtllm")
def cli() -> None:
    """SPIN (Shadow Predictive Indexer) for DeepSeek-V4 deployments."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    run(cli, arguments, "spin-trtllm")


if __name__ == "__main__":
    main()
