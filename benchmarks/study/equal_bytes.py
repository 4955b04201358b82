# SPDX-License-Identifier: Apache-2.0
"""Methods next to SPIN where both read as many bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.study.intervals import mean_interval
from benchmarks.study.questions import DENSE
from benchmarks.study.rows import measure_of, values, verdict
from benchmarks.study.tables import Result, Row, documents_of_answers, label, signed

SPIN = "spin"
ALIKE = 0.005  # shares of dense's bytes that differ by less: the same but for rounding to blocks
NOTE = (
    "At equal bytes SPIN's answers are those on a straight line between its two nearest cells, "
    "answer by answer; dense is SPIN at a sparsity of 0. Where SPIN's curve bulges upwards the "
    "line lies below it, which favours the other method. Where all cells of SPIN read more, the "
    "one that reads least stands for it: a method that is better all the same is told, one that is "
    "worse is not."
)


@dataclass(frozen=True)
class Match:
    """A method next to SPIN at the bytes of the method.

    Attributes:
        result: the method's.
        between: shares of dense's bytes of SPIN's nearest cells, fewer and more; equal where all
            cells of SPIN read more, of which that of the fewest stands for it.
        spin: mean of SPIN's answers there: a share right, or nats a byte.
        difference: the method's mean less SPIN's, with its interval over documents.
        interval: of that; None of too few documents.
    """

    result: Result
    between: tuple[float, float]
    spin: float
    difference: float
    interval: tuple[float, float] | None

    @property
    def is_below(self) -> bool:
        """Whether SPIN reads more in all of its cells, so that only a better method is told."""
        return _bytes(self.result) < self.between[0] - ALIKE

    @property
    def verdict(self) -> str:
        """The method next to SPIN: see `rows.verdict`."""
        return verdict(self.result, self.interval)


def match_all(results: Sequence[Result]) -> list[Match]:
    """Every method of a question but dense and SPIN itself; none where SPIN was not run.

    Args:
        results: of one question, answered with the true text fed, dense among them.
    """
    curve = sorted((r for r in results if r["cell"]["method"] in (DENSE, SPIN)), key=_bytes)
    others = [r for r in results if r["cell"]["method"] not in (DENSE, SPIN)]
    return [_match(result, curve) for result in others] if len(curve) > 1 else []


def match_rows(matches: Sequence[Match]) -> list[Row]:
    """As text."""
    return [_row(match) for match in matches]


def _match(result: Result, curve: Sequence[Result]) -> Match:
    places = [_bytes(one) for one in curve]
    place = min(max(_bytes(result), places[0]), places[-1])  # some read more than dense
    above = bisect_left(places, place)
    below = max(above - 1, 0)
    width = places[above] - places[below]
    weight = (place - places[below]) / width if width else 1.0
    spin = [
        (1 - weight) * low + weight * high
        for low, high in zip(values(curve[below]), values(curve[above]), strict=True)
    ]
    changes = [mine - other for mine, other in zip(values(result), spin, strict=True)]
    return Match(
        result,
        (places[below], places[above]),
        sum(spin) / len(spin),
        sum(changes) / len(changes),
        mean_interval(changes, documents_of_answers(result)),
    )


def _row(match: Match) -> Row:
    found = values(match.result)
    low, high = match.between
    cells = f"{low:.3f} and {high:.3f}" if low < high else f"{low:.3f}"
    return {
        "method": label(match.result),
        "bytes": f"{_bytes(match.result):.3f}",
        measure_of(match.result): f"{sum(found) / len(found):.3f}",
        "SPIN": f"{match.spin:.3f}",
        "from its cells at": f"{cells}, more bytes" if match.is_below else cells,
        "less SPIN": signed(match.difference, match.interval),
    }


def _bytes(result: Result) -> float:
    return float(result["cost"]["bytes_share"])
