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
NOTE = (
    "At equal bytes SPIN's answers are those on a straight line between its two nearest cells, "
    "answer by answer; dense is SPIN at a sparsity of 0. Where SPIN's curve bulges upwards the "
    "line lies below it, which favours the other method."
)


@dataclass(frozen=True)
class Match:
    """A method next to SPIN at the bytes of the method.

    Attributes:
        result: the method's.
        between: shares of dense's bytes of SPIN's nearest cells; None where SPIN has none of fewer.
        spin: mean of SPIN's answers there: a share right, or nats a byte.
        difference: the method's mean less SPIN's, with its interval over documents.
        interval: of that; None of too few documents.
    """

    result: Result
    between: tuple[float, float] | None
    spin: float = 0.0
    difference: float = 0.0
    interval: tuple[float, float] | None = None

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
    place = min(_bytes(result), places[-1])  # some read more than dense
    above = bisect_left(places, place)
    if above == 0 and place < places[0]:
        return Match(result, None)
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
    row = {
        "method": label(match.result),
        "bytes": f"{_bytes(match.result):.3f}",
        measure_of(match.result): f"{sum(found) / len(found):.3f}",
    }
    if match.between is None:
        return row
    low, high = match.between
    return row | {
        "SPIN at these bytes": f"{match.spin:.3f}",
        "between its cells at": f"{low:.3f} and {high:.3f}",
        "less SPIN": signed(match.difference, match.interval),
    }


def _bytes(result: Result) -> float:
    return float(result["cost"]["bytes_share"])
