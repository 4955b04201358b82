# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm report`: the paper's studies on captured traces."""

from __future__ import annotations

from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from spin_trtllm.commands.common import say_preset, spin_config, spin_options
from spin_trtllm.replay.settings import preset_of
from spin_trtllm.replay.trace import Trace
from spin_trtllm.report.run import plan_report, run_report
from spin_trtllm.report.studies import STUDIES

_ALL = ",".join(STUDIES)


@click.command("report")
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path())
@click.option("--output", required=True, type=click.Path(), help="Directory for the results.")
@click.option("--studies", default=_ALL, show_default=True, help="Which, separated by commas.")
@click.option("--jobs", type=int, default=1, show_default=True, help="Processes that replay.")
@click.option("--resume", is_flag=True, help="Go on with the replays that --output already has.")
@spin_options
def command(
    traces: tuple[str, ...], output: str, studies: str, jobs: int, resume: bool, **options: Any
) -> None:
    """Run the paper's studies over each TRACE (spin-trace/1), and write JSON and one HTML page.

    Each study varies some of SPIN's parameters; the options give the others. What an interrupted
    run has replayed is kept: --resume goes on from there, and redoes what no longer applies.
    """
    first = Trace(traces[0])
    preset_name = preset_of(first.ratio, first.top_k)
    config, _ = spin_config(options, preset_name)
    names = [name.strip() for name in studies.split(",")]
    torch.set_num_threads(1)  # as in replay: a step is too small to share
    plan = plan_report(traces, output, config, studies=names, jobs=jobs, resume=resume)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        wanted = [arm for arms in plan.arms.values() for arm in arms.values()]
        total = plan.store.missing_steps(wanted)
        task = progress.add_task(f"{total:,} steps to replay", total=total)
        written = run_report(plan, on_steps=lambda n: progress.advance(task, n))
    say_preset(preset_name, options["spin_config"])
    for path in written:
        click.echo(path)
