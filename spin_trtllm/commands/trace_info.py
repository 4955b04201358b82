# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm trace-info`: describe a trace file and check all of it."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spin_trtllm.replay.trace import Trace


@click.command("trace-info")
@click.argument("trace", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(trace: str, as_json: bool) -> None:
    """Check TRACE (spin-trace/1), every score included, and say what it holds."""
    info = describe(Trace(trace))
    if as_json:
        click.echo(json.dumps(info))
        return
    table = Table(title=escape(trace), title_justify="left", show_header=False)
    for key, value in info.items():
        table.add_row(key.replace("_", " "), escape(_printable(str(value))))
    Console().print(table)


def describe(trace: Trace) -> dict[str, object]:
    """Read a whole trace and summarise it.

    Raises:
        SpinError: NaN in a visible slot.
    """
    first: list[int] = trace.positions_tokens[:, 0].tolist()
    expected = [p + a + 1 for p, a in zip(first, trace.accepted.tolist(), strict=True)]
    resets = sum(p != e for p, e in zip(first[1:], expected, strict=False))
    low, high, zeros = float("inf"), float("-inf"), 0
    for step in trace:
        finite = step.scores[step.scores.isfinite()]
        if finite.numel():
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            zeros += int((finite == 0).sum())
    return {
        "format": "spin-trace/1",
        "steps": trace.steps,
        "layers": list(trace.layers),
        "rows": trace.rows,
        "slots": trace.slots,
        "ratio": trace.ratio,
        "top_k": trace.top_k,
        "sequence_id": trace.sequence_id,
        "source": trace.source,
        "model": trace.model,
        "first_position_tokens": first[0] if first else None,
        "last_position_tokens": int(trace.positions_tokens[-1, -1]) if first else None,
        "resets": resets,
        "accepted_drafts": int(trace.accepted.sum()),
        "lowest_score": low if low <= high else None,
        "highest_score": high if low <= high else None,
        "zero_scores": zeros,
        "file_bytes": trace.path.stat().st_size,
    }


def _printable(text: str) -> str:
    """Without bytes that a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
