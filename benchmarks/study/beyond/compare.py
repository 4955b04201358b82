# SPDX-License-Identifier: Apache-2.0
"""What the sweep finds on several checkpoints: which gains are on all of them.

    python -m benchmarks.study.beyond.compare --output build/beyond-both.md \\
        shipped=build/beyond/beyond.json seed-1=build/beyond-seed-1/beyond.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.study.beyond.arms import ARMS, BASELINE
from benchmarks.study.beyond.defaults import Arms, default_lines
from benchmarks.study.beyond.findings import EQUAL_AT, PAPER, difference_key, row_at
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_file

BETTER, WORSE, UNDECIDED, UNKNOWN = "+", "-", "=", "."
STATISTICS = {"mean_miss": "mean miss", "p99_miss": "p99 miss"}
SHOWN_AT = 0.4  # the paper's target, whose misses the second table gives to all


def verdict(difference: Mapping[str, float | None]) -> str:
    """One sign for a difference from the baseline, of which less is better."""
    low, high = difference["low"], difference["high"]
    if low is None or high is None:
        return UNKNOWN
    return BETTER if high < 0 else WORSE if low > 0 else UNDECIDED


def verdicts(arm: Mapping[str, Any], statistic: str, other: str = BASELINE) -> str:
    """A sign for each budget."""
    key = difference_key(statistic, other)
    return "".join(verdict(row_at(arm, target)[key]) for target in EQUAL_AT)


def everywhere(signs: list[str]) -> str:
    """The verdict of all checkpoints at all budgets, if it is one; else nothing."""
    alike = set("".join(signs))
    return {frozenset(BETTER): "less", frozenset(WORSE): "more"}.get(frozenset(alike), "")


def write_comparison(sweeps: Mapping[str, Arms]) -> str:
    """Verdicts of every arm, one default for each sparsity, and what the paper's misses cost.

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
        "## One default for each sparsity",
        "Of what options of `SpinConfig` make, in blocks of 16 and of 64, the arm that misses "
        f"least in the mean over the checkpoints at the bytes of `{BASELINE}`; then the same of "
        "those that have kernels, which rank by no query and store no 8-bit averages. In brackets: "
        "the 95 % interval of the difference from plain SPIN in the same blocks, "
        f"`{BASELINE}` or `{PAPER}`, at these bytes. The least of many is partly luck, which the "
        "intervals do not count. Targets of layers were found on other documents of the same "
        "checkpoint.",
        "\n".join(default_lines(sweeps)),
        *_comparisons(sweeps),
        f"## As few misses as `{PAPER}` at {SHOWN_AT:g}",
        f"The target sparsity where the mean miss is that of `{PAPER}`, and the bytes read there, "
        "over those of dense; in brackets the 95 % interval of their difference from those of "
        f"`{PAPER}`.",
        "\n".join(_paper_lines(sweeps)),
    ]
    return "\n\n".join(parts) + "\n"


def _verdict_lines(sweeps: Mapping[str, Arms]) -> Iterator[str]:
    columns = [f"{text}, {name}" for text in STATISTICS.values() for name in sweeps]
    yield from _head([*columns, *(f"{text}, all" for text in STATISTICS.values())])
    for name in next(iter(sweeps.values())):
        if name == BASELINE or ARMS[name].fixed:
            continue
        signs = {key: [verdicts(arms[name], key) for arms in sweeps.values()] for key in STATISTICS}
        cells = [f"`{sign}`" for of in signs.values() for sign in of]
        cells += [everywhere(of) for of in signs.values()]
        yield f"| `{name}` | {' | '.join(cells)} |"


def _comparisons(sweeps: Mapping[str, Arms]) -> Iterator[str]:
    """A heading and a table for each arm that others are compared with."""
    names = list(next(iter(sweeps.values())))
    for other in dict.fromkeys(ARMS[name].against for name in names):
        if other in names:
            yield f"## Against `{other}`"
            yield (
                f"The difference of the misses from those of `{other}` at the bytes of "
                f"`{BASELINE}` at {SHOWN_AT:g}, with its 95 % interval, and the signs at all "
                "budgets."
            )
            compared = [name for name in names if ARMS[name].against == other]
            yield "\n".join(_comparison_lines(sweeps, compared, other))
    fixed = [name for name in names if ARMS[name].fixed]
    if fixed:
        yield "## Arms of one setting"
        yield (
            f"What they read, over the bytes of dense, and their misses, with the 95 % interval of "
            f"the difference from those of `{BASELINE}` where it reads as much."
        )
        yield "\n".join(_fixed_lines(sweeps, fixed))


def _comparison_lines(
    sweeps: Mapping[str, Arms], compared: Sequence[str], other: str
) -> Iterator[str]:
    yield from _head([f"{text}, {name}" for text in STATISTICS.values() for name in sweeps])
    for name in compared:
        cells = []
        for statistic in STATISTICS:
            key = difference_key(statistic, other)
            for arms in sweeps.values():
                change = _change(row_at(arms[name], SHOWN_AT)[key])
                cells.append(f"{change}, `{verdicts(arms[name], statistic, other)}`")
        yield f"| `{name}` | {' | '.join(cells)} |"


def _fixed_lines(sweeps: Mapping[str, Arms], fixed: Sequence[str]) -> Iterator[str]:
    figures = ("bytes", *STATISTICS.values())
    yield from _head([f"{text}, {name}" for name in sweeps for text in figures])
    for name in fixed:
        cells = []
        for arms in sweeps.values():
            (row,) = arms[name]["equal_bytes"]
            cells.append(f"{row['read']['value']:.3f}")
            cells += [
                f"{row[key]['value']:.3f} ({_change(row[difference_key(key)])})"
                for key in STATISTICS
            ]
        yield f"| `{name}` | {' | '.join(cells)} |"


def _head(columns: Sequence[str]) -> Iterator[str]:
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (1 + len(columns)) + "|"


def _change(difference: Mapping[str, Any]) -> str:
    if difference["low"] is None:
        return "-"
    return "{value:+.3f}: {low:+.3f} to {high:+.3f}".format(**difference)


def _paper_lines(sweeps: Mapping[str, Arms]) -> Iterator[str]:
    yield from _head([f"{what}, {name}" for name in sweeps for what in ("target", "bytes")])
    for name in next(iter(sweeps.values())):
        if ARMS[name].fixed:
            continue
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
