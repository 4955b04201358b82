# SPDX-License-Identifier: Apache-2.0
"""A result as a row of a table: next to dense, its drafts, its answers by distance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.study.documents import TEXT
from benchmarks.study.intervals import compare, mean_interval, share_interval
from benchmarks.study.tables import (
    Result,
    Row,
    counted,
    documents_of_answers,
    flat,
    label,
    signed,
)

BUCKETS_BYTES = (0, 1_024, 4_096, 16_384)  # where distances of the table begin


def is_generated(result: Result) -> bool:
    """Whether the answers were generated, with drafts, and not judged with the true text fed."""
    return "tokens" in result


def measure_of(result: Result) -> str:
    """What answers are judged by: `nats` a byte of text, less being better, else `right`."""
    return "nats" if result["cell"]["question"]["task"] == TEXT else "right"


def values(result: Result) -> list[float]:
    """That measure, of each answer."""
    return [float(value) for value in flat(result[measure_of(result)])]


def less(result: Result, dense: Result) -> list[float]:
    """What a method changed in each answer."""
    return [now - before for now, before in zip(values(result), values(dense), strict=True)]


BETTER, WORSE, EVEN, UNKNOWN = "better", "worse", "not told apart", "too few documents to tell"


def verdict(result: Result, interval: tuple[float, float] | None) -> str:
    """Of a difference of `values`: told when its whole interval lies on one side of zero."""
    if interval is None:
        return UNKNOWN
    low, high = interval
    if measure_of(result) == "nats":
        low, high = -high, -low
    return BETTER if low > 0 else WORSE if high < 0 else EVEN


def quality_row(result: Result, dense: Result) -> Row:
    """A method on a question next to dense, as text."""
    right, before = flat(result["right"]), flat(dense["right"])
    change = compare(before, right, documents_of_answers(result))
    interval = share_interval(right, documents_of_answers(result))
    row = {
        "method": label(result),
        "right": counted(right),
        "share": "{:.3f} to {:.3f}".format(*interval) if interval else "(one document)",
        "lost, gained": f"{change.lost}, {change.gained}",
        "share - dense": signed(change.difference, change.interval),
    }
    if "nats" in result:
        changes = [n - d for n, d in zip(*map(flat, (result["nats"], dense["nats"])), strict=True)]
        mean = sum(changes) / len(changes)
        row["nats - dense"] = signed(mean, mean_interval(changes, documents_of_answers(result)))
    return row | _cost_columns(result)


def draft_row(result: Result, dense: Result) -> Row:
    """How a method's drafts fared, and how far it says what dense says."""
    same = [a == b for a, b in zip(*map(flat, (result["tokens"], dense["tokens"])), strict=True)]
    accepted, proposed, steps = (total(result, name) for name in DRAFTS)
    return {
        "method": label(result),
        "drafts accepted": f"{accepted} of {proposed}",
        "tokens a step": f"{1 + accepted / steps:.2f}" if steps else "-",
        "tokens as dense": f"{sum(same) / len(same):.3f}",
        **_cost_columns(result),
    }


DRAFTS = ("accepted", "proposed", "verifications")  # of a result with drafts, by document


def total(result: Result, name: str) -> int:
    """Of `DRAFTS`, over all documents; earlier results knew no more."""
    if name == "verifications":
        return sum(result["steps_of_rows"].values())
    found = result[name]
    return found if isinstance(found, int) else sum(found)


def distance_rows(results: Sequence[Result]) -> Iterator[Row]:
    """Right answers by the distance to their fact."""
    for result in results:
        buckets: dict[int, list[bool]] = {start: [] for start in BUCKETS_BYTES}
        pairs = zip(*map(flat, (result["distance_bytes"], result["right"])), strict=True)
        for distance, right in pairs:
            buckets[max(start for start in BUCKETS_BYTES if start <= distance)].append(right)
        yield {"method": label(result)} | {
            f"from {start:,} bytes": counted(of) for start, of in buckets.items() if of
        }


def _cost_columns(result: Result) -> Row:
    cost = result["cost"]
    return {
        "bytes": f"{cost['bytes_share']:.3f}",
        "keys": f"{cost['keys'] / cost['dense_keys']:.3f}",
        "products": f"{cost['products'] / cost['dense_products']:.3f}",
    }
