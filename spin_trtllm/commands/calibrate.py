# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm calibrate`: a target sparsity for each layer, from captured traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from spin_trtllm import __version__
from spin_trtllm.calibration.run import Calibration, Figures, calibrate, plan_calibration, steps_of
from spin_trtllm.commands.common import check_is_no_input, say_preset, spin_config, spin_options
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_file
from spin_trtllm.replay.settings import preset_of
from spin_trtllm.replay.trace import Trace


@click.command("calibrate")
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path())
@click.option("--output", required=True, type=click.Path(), help="YAML file for the settings.")
@click.option("--jobs", type=int, default=1, show_default=True, help="Processes that replay.")
@spin_options
def command(traces: tuple[str, ...], output: str, jobs: int, **options: Any) -> None:
    """Share --sparsity out among the layers, so that each TRACE (spin-trace/1) misses least.

    All layers together score as many slots as before. The file holds all settings, for
    --spin-config; --sparsity is above 0 and at most 0.9.
    """
    if options["layer_sparsity"] is not None:
        refuse("--layer-sparsity", options["layer_sparsity"], "none: calibrate finds it")
    check_is_no_input("--output", output, (*traces, options["spin_config"]))
    first = Trace(traces[0])
    preset_name = preset_of(first.ratio, first.top_k)
    config, _ = spin_config(options, preset_name)
    torch.set_num_threads(1)  # as in replay: a step is too small to share
    files = plan_calibration(traces, config, jobs)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    # Opened first, so that a bad path is not found out after minutes of replay.
    with atomic_file(output, argument="--output") as target:
        with Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as progress:
            total = steps_of(files, config)
            task = progress.add_task(f"{total:,} steps to replay", total=total)
            found = calibrate(
                files, config, jobs=jobs, on_steps=lambda n: progress.advance(task, n)
            )
        _write(target, _settings(found, len(files)))
    say_preset(preset_name, options["spin_config"])
    Console().print(_table(found))
    click.echo(output)


def _settings(found: Calibration, traces: int) -> str:
    """The text of the file."""
    return (
        f"# Written by spin-trtllm calibrate {__version__} from {traces} trace(s): targets of the "
        f"layers at {found.config.target_sparsity} in all.\n" + found.config.to_yaml()
    )


def _table(found: Calibration) -> Table:
    columns: dict[str, Figures] = {"mean miss before": found.before, "after": found.after}
    if found.held_out is not None:
        columns["held out"] = found.held_out
    table = Table()
    for name in ("layer", "target", *columns):
        table.add_column(name, justify="right")
    targets = dict(found.config.layer_sparsity)
    for place, layer in enumerate(found.layers):
        misses = [f"{figures.mean_miss[place]:.4f}" for figures in columns.values()]
        table.add_row(str(layer), f"{targets[layer]:.3f}", *misses)
    table.add_section()
    whole = {
        "all": [f"{figures.mean_miss.mean():.4f}" for figures in columns.values()],
        "p99": [f"{figures.p99_miss:.4f}" for figures in columns.values()],
        "skipped": [f"{figures.skipped:.4f}" for figures in columns.values()],
    }
    for name, shown in whole.items():
        mean = f"{sum(targets.values()) / len(targets):.3f}" if name == "all" else ""
        table.add_row(name, mean, *shown)
    return table


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise SpinError(f"--output: cannot write {str(path)!r}: {error.strerror}") from error
