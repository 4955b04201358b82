# SPDX-License-Identifier: Apache-2.0
"""The paper's tables of answers: 2 to 5, quality against sparsity, and 7, what drafts gain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from benchmarks.study.documents import TEXT
from benchmarks.study.intervals import (
    compare,
    mean_estimate,
    mean_interval,
    percentiles,
    ratio_draws,
)
from benchmarks.study.rows import (
    DRAFTS,
    draft_row,
    is_generated,
    less,
    measure_of,
    total,
    values,
)
from benchmarks.study.tables import (
    Result,
    Row,
    counted,
    documents_of_answers,
    flat,
    label,
    setting,
    signed,
)
from spin_trtllm.report.claims import FAILS, HOLDS, UNDECIDED, Claim, judge
from spin_trtllm.report.studies.quality import CLAIMED_SPARSITIES

Questions = Mapping[str, Sequence[Result]]

UNEXPLORED = {"spin": "spin_unexplored", "spin_64": "spin_64_unexplored"}
POLICIES = {
    "dense": "dense",
    "spin": "union mask, prefix update",
    "spin_row0_mask": "row-0 mask, prefix update",
    "spin_row0_update": "union mask, row-0 update",
}
_MISSES = {"realized_sparsity": "realized", "mean_miss": "mean miss", "p99_miss": "p99 miss"}


# ---------------------------------------------------------------- Tables 2 to 5
def quality_rows(questions: Questions) -> list[Row]:
    """SPIN with exploration and without, at each sparsity that was run."""
    family = (*UNEXPLORED, *UNEXPLORED.values())
    return [
        _quality_row(name, result, results)
        for name, results in _forced(questions)
        for result in sorted(results, key=setting)
        if result["cell"]["method"] in family
    ]


def exploration_claims(questions: Questions) -> Iterator[tuple[float, str, Claim]]:
    """Sparsity, question and verdict wherever both cells of a claim of the paper were run.

    The paper's claim is of exact answers, so none of text.
    """
    for name, results in _answered(questions):
        for explored in results:
            other = _without_exploration(explored, results)
            if other is None or setting(explored) not in CLAIMED_SPARSITIES:
                continue
            estimate = mean_estimate(less(explored, other), documents_of_answers(explored))
            text = f"{label(explored)} answers at least as much as {label(other)}"
            claim = judge(text, "share right, difference", estimate, or_equal=True)
            yield setting(explored), name, claim


def exploration_found(questions: Questions) -> list[str]:
    """What the cells say of answers lost, and of exploration, in sentences."""
    lines = [*_lost(questions)]
    claims = list(exploration_claims(questions))
    for sparsity in CLAIMED_SPARSITIES:
        verdicts = [claim for at, _, claim in claims if at == sparsity]
        if verdicts:
            lines.append(f"With exploration against without, at {sparsity:.0%}: {count(verdicts)}.")
        else:
            lines.append(f"Without exploration at {sparsity:.0%}: not run.")
    return lines


def difference(claims: Iterable[Claim]) -> str:
    """Where the paper and the cells differ, in a sentence."""
    verdicts = Counter(claim.verdict for claim in claims)
    parts = (
        (verdicts[HOLDS], "They agree on {}"),
        (verdicts[FAILS], "They contradict the paper on {}"),
        (verdicts[UNDECIDED], "They neither confirm nor contradict it on {}"),
    )
    of = verdicts.total()
    said = [f"{words.format(number)} of {of} comparisons." for number, words in parts if number]
    return " ".join(said) or "Nothing to compare: no cells without exploration were run."


def count(claims: Sequence[Claim]) -> str:
    """How many verdicts there are of each kind."""
    verdicts = Counter(claim.verdict for claim in claims)
    shown = (f"{verdict} {verdicts[verdict]}" for verdict in (HOLDS, FAILS, UNDECIDED))
    return f"{', '.join(shown)}, of {len(claims)} questions"


def _forced(questions: Questions) -> Iterator[tuple[str, Sequence[Result]]]:
    """Questions answered with the true text fed."""
    return ((name, rs) for name, rs in questions.items() if not is_generated(rs[0]))


def _answered(questions: Questions) -> Iterator[tuple[str, Sequence[Result]]]:
    """Those of them that ask for facts."""
    forced = _forced(questions)
    return ((name, rs) for name, rs in forced if rs[0]["cell"]["question"]["task"] != TEXT)


def _quality_row(name: str, result: Result, results: Sequence[Result]) -> Row:
    documents = documents_of_answers(result)
    found, other = values(result), _without_exploration(result, results)
    by_nats = measure_of(result) == "nats"
    shown = f"{sum(found) / len(found):.4f} nats" if by_nats else counted(flat(result["right"]))
    row = {"question": short(name), "method": label(result)}
    row |= {heading: _figure(result, key) for key, heading in _MISSES.items()}
    for heading, against in (("less dense", results[0]), ("less unexplored", other)):
        change = less(result, against) if against else []
        mean = sum(change) / len(change) if change else 0.0
        row |= {heading: signed(mean, mean_interval(change, documents)) if change else "-"}
    return {**row, "answers": shown}


def _without_exploration(explored: Result, results: Sequence[Result]) -> Result | None:
    """The cell that differs in nothing but exploration."""
    name = UNEXPLORED.get(explored["cell"]["method"])
    same = (r for r in results if r["cell"]["method"] == name and setting(r) == setting(explored))
    return next(same, None)


def _lost(questions: Questions) -> Iterator[str]:
    """Right answers that SPIN loses, at each sparsity, over all tasks but text."""
    sums: dict[float, Counter[str]] = {}
    for _, results in _answered(questions):
        dense = results[0]
        for result in results:
            if result["cell"]["method"] != "spin":
                continue
            before, now = flat(dense["right"]), flat(result["right"])
            change = compare(before, now, documents_of_answers(dense))
            found = {"right": sum(before), "lost": change.lost, "gained": change.gained, "of": 1}
            sums.setdefault(setting(result), Counter()).update(found)
    for sparsity, of in sorted(sums.items()):
        yield (
            f"At {sparsity:.0%} SPIN loses {of['lost']:,} of dense's {of['right']:,} right answers "
            f"and gains {of['gained']:,}, over {of['of']} questions."
        )


# ---------------------------------------------------------------- Table 7
def acceptance_rows(questions: Questions) -> list[Row]:
    """What a step with drafts yields, by mask and update policy."""
    return [
        _acceptance_row(name, result, results)
        for name, results in _drafted(questions)
        for result in sorted(results, key=setting)
        if result["cell"]["method"] in POLICIES
    ]


def acceptance_found(questions: Questions) -> list[str]:
    """What the cells say of acceptance lengths, in sentences."""
    lines = []
    for name, results in _drafted(questions):
        for result in results:
            of = result["cell"]["method"]
            if of != "dense" and of in POLICIES:
                against = _against(result, results)
                shown = (
                    f"{_length(result)} tokens a step; less dense's {_longer(result, results[0])}"
                )
                if of != "spin" and against:
                    shown += f", less those of {label(against)} {_longer(result, against)}"
                lines.append(f"{short(name)}, {label(result)}: {shown}.")
    return lines or ["No cell with drafts has been run."]


def _drafted(questions: Questions) -> Iterator[tuple[str, Sequence[Result]]]:
    return ((name, rs) for name, rs in questions.items() if is_generated(rs[0]))


def _acceptance_row(name: str, result: Result, results: Sequence[Result]) -> Row:
    of = result["cell"]["method"]
    against = _against(result, results) if of not in ("dense", "spin") else None
    drafts = draft_row(result, results[0])
    return {
        "question": short(name),
        "method": label(result),
        "policies": POLICIES[of],
        "drafts accepted": drafts["drafts accepted"],
        "tokens a step": _length(result),
        "less dense": "-" if of == "dense" else _longer(result, results[0]),
        "less `spin`": _longer(result, against) if against else "-",
        **{heading: _figure(result, key) for key, heading in _MISSES.items()},
    }


def _against(result: Result, results: Sequence[Result]) -> Result | None:
    """SPIN with its own policies, at the same target."""
    same = (r for r in results if r["cell"]["method"] == "spin" and setting(r) == setting(result))
    return next(same, None)


def _length(result: Result) -> str:
    accepted, steps = total(result, DRAFTS[0]), total(result, DRAFTS[2])
    if not steps:
        return "-"
    interval = percentiles(_length_draws(result))
    shown = "" if interval is None else " ({:.3f} to {:.3f})".format(*interval)
    return f"{1 + accepted / steps:.3f}{shown}"


def _longer(result: Result, against: Result) -> str:
    """Difference of two acceptance lengths, over the same documents."""
    steps = [total(one, DRAFTS[2]) for one in (result, against)]
    if not all(steps):
        return "-"
    mine, other = (
        total(one, DRAFTS[0]) / n for one, n in zip((result, against), steps, strict=True)
    )
    draws = _length_draws(result) - _length_draws(against)
    interval = percentiles(draws)
    return signed(mine - other, interval) if interval else f"{mine - other:+.3f} (no interval)"


def _length_draws(result: Result) -> np.ndarray:
    """Resampled over documents: NaN where an earlier result has totals alone."""
    accepted, steps = result["accepted"], result.get("verifications")
    if isinstance(accepted, int) or steps is None:
        return ratio_draws([], [])
    return 1 + ratio_draws(accepted, steps)


# ---------------------------------------------------------------- both
def short(name: str) -> str:
    """A question by its task and length."""
    return name.partition(" bytes")[0] + " bytes"


def _figure(result: Result, key: str) -> str:
    value = result.get(key)
    return "-" if value is None else f"{value:.3f}"
