# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm replay`: what a policy keeps and misses on a captured trace."""

from __future__ import annotations

import json
from typing import Any

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from spin_trtllm.commands.common import check_is_no_input, say_preset, spin_config, spin_options
from spin_trtllm.errors import refuse
from spin_trtllm.replay.policies import POLICIES
from spin_trtllm.replay.run import replay
from spin_trtllm.replay.settings import preset_of
from spin_trtllm.replay.trace import Trace

_LABELS = {
    "mean_miss": "mean miss",
    "p99_miss": "p99 miss",
    "p99_miss_layer_mean": "p99 miss, mean over layers",
    "realized_sparsity": "realized sparsity",
    "cold_steps": "cold steps",
    "steps": "steps",
    "pearson": "Pearson, predicted and true scores",
    "topk_recall": "top-K recall of the prediction",
}


@click.command("replay")
@click.argument("trace", type=click.Path())
@click.option("--policy", default="spin", show_default=True, help=", ".join(POLICIES) + ".")
@spin_options
@click.option("--dump", type=click.Path(), help="Write every decision to this safetensors file.")
@click.option("--predictions", is_flag=True, help="Also measure SPIN's predicted slot scores.")
@click.option("--json", "as_json", is_flag=True, help="Print the metrics as one JSON object.")
def command(
    trace: str, policy: str, dump: str | None, predictions: bool, as_json: bool, **options: Any
) -> None:
    """Replay TRACE (spin-trace/1) and print miss rates and realized sparsity."""
    check_is_no_input("--dump", dump, (options["spin_config"],))
    opened = Trace(trace)
    preset_name = preset_of(opened.ratio, opened.top_k)
    config, _ = spin_config(options, preset_name)
    if predictions and (policy != "spin" or config.reduction == "A2"):
        given = policy if policy != "spin" else "reduction A2"
        refuse("--predictions", given, "policy spin with reduction A0 or A1; predictors always do")
    # A step is a few dozen passes over a few MB: waking a second thread for each costs more than
    # it gives, and far more on a machine that is busy with something else.
    torch.set_num_threads(1)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(escape(f"replay {opened.path.name}"), total=len(opened))
        result = replay(
            opened,
            config,
            policy=policy,
            dump=dump,
            predictions=predictions,
            on_step=lambda done: progress.update(task, completed=done),
        )
    say_preset(preset_name, options["spin_config"])
    if as_json:
        click.echo(json.dumps(result))
        return
    table = Table(title=escape(f"{policy} on {opened.path.name}"), title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for key, value in result.items():
        shown = "not measured" if value is None else f"{value:.6g}"
        table.add_row(_LABELS[key], shown)
    Console().print(table)
