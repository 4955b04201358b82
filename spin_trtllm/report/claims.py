# SPDX-License-Identifier: Apache-2.0
"""Does what the paper found hold on these traces? One claim, one difference, one verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from spin_trtllm.report.intervals import Estimate

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"


@dataclass(frozen=True)
class Claim:
    """A claim of the paper next to what these traces say.

    Attributes:
        text: the claim, one line.
        metric: what is compared, and how the difference is formed.
        difference: positive where it speaks for the claim; None where nothing was measured.
        low, high: its interval, or None.
        for_it, traces: in how many traces, of how many, the difference speaks for the claim.
        verdict: `holds`, `does not hold` or `undecided`.
        reason: why it is undecided; empty otherwise.
    """

    text: str
    metric: str
    difference: float | None
    low: float | None
    high: float | None
    for_it: int
    traces: int
    verdict: str
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def judge(text: str, metric: str, difference: Estimate, *, or_equal: bool = False) -> Claim:
    """Hold a claim against a difference that would be positive if it were true.

    The whole interval must lie on one side of zero. The end that touches zero is enough for a
    claim of "at least"; where nothing differs anywhere, nothing was tested.

    Args:
        or_equal: whether the claim is "at least" rather than "more".
    """
    shown = difference.to_json()
    value, low, high = shown["value"], shown["low"], shown["high"]
    verdict, reason = UNDECIDED, ""
    if value is None or low is None or high is None:
        reason = "the traces are too short, or have nothing to compare"
    elif not difference.draws.any():
        reason = "the two do not differ on these traces"
    elif low > 0 or (or_equal and low == 0 and high > 0):
        verdict = HOLDS
    elif high < 0:
        verdict = FAILS
    else:
        reason = "the interval contains zero"
    speaks = difference.by_trace >= 0 if or_equal else difference.by_trace > 0
    count = len(difference.by_trace)
    return Claim(text, metric, value, low, high, int(speaks.sum()), count, verdict, reason)
