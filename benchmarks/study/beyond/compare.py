# SPDX-License-Identifier: Apache-2.0
"""What the sweep finds on several checkpoints: which gains are on all of them.

    python -m benchmarks.study.beyond.compare --output build/beyond-both.md \\
        shipped=build/beyond/beyond.json seed-1=build/beyond-seed-1/beyond.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.study.beyond.arms import BASELINE
from benchmarks.study.beyond.findings import EQUAL_AT, PAPER
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_file

BETTER, WORSE, UNDECIDED, UNKNOWN = "+", "-", "=", "."
STATISTICS = {"mean_miss": "mean miss", "p99_miss": "p99 miss"}
SHOWN_AT = 0.4  # the paper's target, whose misses the second table gives to all

Arms = Mapping[str, Any]  # figures of both tasks by arm


def verdict(difference: Mapping[str, float | None]) -> str:
    """One sign for a difference from the baseline, of which less is better."""
    low, high = difference["low"], difference["high"]
    if low is None or high is None:
        return UNKNOWN
    return BETTER if high < 0 else WORSE if low > 0 else UNDECIDED


def verdicts(arm: Mapping[str, Any], statistic: str) -> str:
    """A sign for each budget."""
    return "".join(verdict(row[f"{statistic}_difference"]) for row in arm["equal_bytes"])


def everywhere(signs: list[str]) -> str:
    """The verdict of all checkpoints at all budgets, if it is one; else nothing."""
    alike = set("".join(signs))
    return {frozenset(BETTER): "less", frozenset(WORSE): "more"}.get(frozenset(alike), "")


def write_comparison(sweeps: Mapping[str, Arms]) -> str:
    """Verdicts of every arm, and what is read where as much is missed as with the paper's blocks.

    Args:
        sweeps: by name of the checkpoint.

    Raises:
        SpinError: sweeps of other arms.
    """
    first, *others = sweeps
    for name in others:
        if list(sweeps[name]) != list(sweeps[first]):
            refuse(name, "other variants", f"a sweep with those of {first}")
    budgets = ", ".join(f"{target:g}" for target in EQUAL_AT)
    parts = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "# Beyond the paper, on " + " and ".join(sweeps),
        f"A sign for each budget, the bytes that `{BASELINE}` reads at {budgets}: `{BETTER}` "
        "misses less than it, the whole 95 % interval of the difference below zero; "
        f"`{WORSE}` more; `{UNDECIDED}` neither; `{UNKNOWN}` no target that was run reads as "
        "much. The last columns say what holds at all budgets on all checkpoints.",
        "\n".join(_verdict_lines(sweeps)),
        f"## As few misses as `{PAPER}` at {SHOWN_AT:g}",
        f"The target sparsity where the mean miss is that of `{PAPER}`, and the bytes read there, "
        "over those of dense; in brackets the 95 % interval of their difference from those of "
        f"`{PAPER}`.",
        "\n".join(_paper_lines(sweeps)),
    ]
    return "\n\n".join(parts) + "\n"


def _verdict_lines(sweeps: Mapping[str, Arms]) -> Iterator[str]:
    columns = [f"{text}, {name}" for text in STATISTICS.values() for name in sweeps]
    columns += [f"{text}, all" for text in STATISTICS.values()]
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (1 + len(columns)) + "|"
    for name in next(iter(sweeps.values())):
        if name == BASELINE:
            continue
        signs = {key: [verdicts(arms[name], key) for arms in sweeps.values()] for key in STATISTICS}
        cells = [f"`{sign}`" for of in signs.values() for sign in of]
        cells += [everywhere(of) for of in signs.values()]
        yield f"| `{name}` | {' | '.join(cells)} |"


def _paper_lines(sweeps: Mapping[str, Arms]) -> Iterator[str]:
    columns = [f"{what}, {name}" for name in sweeps for what in ("target", "bytes")]
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (1 + len(columns)) + "|"
    for name in next(iter(sweeps.values())):
        cells = [cell for arms in sweeps.values() for cell in _as_paper(arms[name])]
        yield f"| `{name}` | {' | '.join(cells)} |"


def _as_paper(arm: Mapping[str, Any]) -> tuple[str, str]:
    (row,) = (row for row in arm["equal_misses"] if row["as_paper_at"] == SHOWN_AT)
    target, read, change = (row[k] for k in ("target_sparsity", "read", "read_difference"))
    if target["value"] is None:
        return "-", "-"
    shown = f"{read['value']:.3f}"
    if change["low"] or change["high"]:
        shown += f" ({change['low']:+.3f} to {change['high']:+.3f})"
    return f"{target['value']:.2f}", shown


def main() -> None:
    """Read and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweeps", nargs="+", metavar="NAME=JSON", help="of a checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="Markdown file")
    arguments = parser.parse_args()
    try:
        sweeps = {}
        for given in arguments.sweeps:
            name, _, path = given.partition("=")
            try:
                sweeps[name] = json.loads(Path(path).read_text(encoding="utf-8"))["found"]["all"]
            except (OSError, ValueError, KeyError) as error:
                raise SpinError(f"compare: cannot read {path!r}: {error!r}") from error
        with atomic_file(arguments.output) as target:
            target.write_text(write_comparison(sweeps), encoding="utf-8")
        print(arguments.output)
    except SpinError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
