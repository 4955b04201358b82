# SPDX-License-Identifier: Apache-2.0
"""Training sequences of facts and questions, written as in `spin_trtllm.recall`.

Other than a document to test with, a recall episode asks all along, more and more often, and may
ask for the same fact again, so that every position of a sequence learns to look back. A task
episode is a document of the study's tasks, with up to as many questions as fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.study.tasks import TASKS, task_document
from spin_trtllm.recall import ATTRIBUTES, KEYS, STYLES, Draws, Style, key_name

_TAIL = 0.82  # of an episode: from here on there are only questions
_FACT_BYTES = 80  # room for a fact of a task
_QUESTION_BYTES = 80  # more than any question of a task takes
_FACTS_AN_ANSWER = {"multi_key": 2, "multi_needle": 2, "variable_tracking": 3, "aggregation": 12}
_IN_FOURS = ("multi_value", "multi_needle")
_HARD = ("multi_value", "multi_needle", "variable_tracking")  # unlike recall: drawn more often
_DRAWN = (*TASKS, *_HARD, *_HARD)
_OFTEN = 1 / 64, 1 / 110  # facts a byte, at most, of crowded and of spread episodes


@dataclass(frozen=True)
class Asked:
    """One question of an episode.

    Attributes:
        place: where in the episode's text its answer stands.
        distance_bytes: from where the value last stood, as a fact or as an answer.
    """

    place: slice
    distance_bytes: int


@dataclass(frozen=True)
class Episode:
    """Text of exactly the wanted length, and the questions whose answers are wholly in it."""

    text: bytes
    asked: tuple[Asked, ...]

    @property
    def answers(self) -> tuple[slice, ...]:
        """Where the answers stand."""
        return tuple(asked.place for asked in self.asked)


@dataclass
class _Fact:
    key: str
    value: bytes
    last_place: int  # of its value, as fact or answer
    times_asked: int = 0


@dataclass
class _Writer:
    """An episode that grows."""

    draws: Draws
    style: Style
    attribute: str
    keys: list[str]
    numeric: bool
    facts: list[_Fact] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    text: bytearray = field(default_factory=bytearray)

    def fill(self, filler: bytes, count: int) -> None:
        """Add `count` bytes from a random place of the filler."""
        start = self.draws.below(len(filler) - count)
        self.text += filler[start : start + count]

    def tell(self) -> None:
        """Add a new fact."""
        key = self.keys[len(self.facts)]
        value = self.draws.digits() if self.numeric else self.draws.syllables()
        fact, offset = self.style.write_fact(key, self.attribute, value)
        self.facts.append(_Fact(key, value, len(self.text) + offset))
        self.text += fact

    def ask(self) -> None:
        """Add a question about a fact that has been told, rather one not yet asked for."""
        for _ in range(4):
            fact = self.facts[self.draws.below(len(self.facts))]
            if not fact.times_asked:
                break
        self.text += self.style.question.format(key=fact.key, attribute=self.attribute).encode()
        place = len(self.text)
        self.asked.append(Asked(slice(place, place + len(fact.value)), place - fact.last_place))
        fact.last_place = place
        fact.times_asked += 1
        self.text += fact.value + self.style.question_end.encode()


def recall_episode(draws: Draws, length: int, filler: bytes) -> Episode:
    """An episode, the same for the same draws.

    Some episodes are crowded with facts, others spread them in filler text.

    Args:
        length: bytes of the text, at least 256.
        filler: at least 2 KiB of text around the facts.
    """
    crowded = draws.below(100) < (50 if length <= 2_048 else 35)
    facts_at_most = 6 + draws.below(2 + int(length * _OFTEN[0 if crowded else 1]))
    gap_bytes = 30 + draws.below(min(370, max(30, length // (2 * facts_at_most) - 30)))
    writer = _Writer(
        draws,
        style=STYLES[draws.below(len(STYLES))],
        attribute=ATTRIBUTES[draws.below(len(ATTRIBUTES))],
        keys=[key_name(number) for number in draws.distinct(facts_at_most, KEYS)],
        numeric=bool(draws.below(2)),
    )
    while len(writer.text) < length:
        done = len(writer.text) / length
        if crowded:
            writer.fill(filler, draws.below(13) if draws.below(10) < 3 else 0)
        elif done > _TAIL:
            writer.fill(filler, draws.below(24))
        else:
            writer.fill(filler, gap_bytes // 3 + draws.below(gap_bytes * 5 // 3))
        told = len(writer.facts)
        if told < 2:
            writer.tell()
        elif told == facts_at_most or done > _TAIL:
            writer.ask()
        else:
            more_often = min(0.65, 0.25 + done)
            writer.ask() if draws.below(1_000) < 1_000 * more_often else writer.tell()
    whole = tuple(asked for asked in writer.asked if asked.place.stop <= length)
    return Episode(bytes(writer.text[:length]), whole)


def task_episode(draws: Draws, length: int, filler: bytes) -> Episode:
    """A document of any of the study's tasks.

    Args:
        length: bytes of the text, at least 2,048.
        filler: at least `length` bytes.
    """
    task = _DRAWN[draws.below(len(_DRAWN))]
    unit = 4 if task in _IN_FOURS else 1
    query_bytes = _FACT_BYTES * _FACTS_AN_ANSWER.get(task, 1) + _QUESTION_BYTES
    most = 1 if task == "single" else length // query_bytes // unit
    queries = unit * (1 + draws.below(most))
    document = task_document(
        task,
        draws.below(1 << 48),
        context_bytes=length - queries * _QUESTION_BYTES,
        queries=queries,
        filler=filler,
    )
    start = len(document.context)
    asked = tuple(
        Asked(slice(start + place.start, start + place.stop), question.distance_bytes)
        for question, place in zip(document.questions, document.answer_places, strict=True)
    )
    text = document.context + document.asked
    return Episode(text + filler[: length - len(text)], asked)
