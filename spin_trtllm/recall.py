# SPDX-License-Identifier: Apache-2.0
"""Recall documents: facts scattered in filler text, then questions about them.

A question about an old fact is the hard case of a predictive indexer: the block that holds the
answer was of no use until this very question. The formats are those of the synthetic part of the
tiny model's training data, so a dense model answers nearly all questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spin_trtllm.errors import refuse

ANSWER_BYTES = 4


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ADJECTIVES = _words(
    "amber brave calm dark eager fancy giant happy icy jolly keen lucky magic noble olive proud "
    "quiet rapid silver tiny urban vivid warm young zesty bold crisp dusty early fresh green heavy "
    "inner jade kind large misty north oaken pale"
)
_NOUNS = _words(
    "falcon harbor island jacket kettle ladder meadow needle orchid palace quarry river saddle "
    "temple valley window anchor basket candle desert engine forest garden hammer insect jungle "
    "lantern mirror napkin oyster pencil rabbit statue tunnel violin walnut yogurt zipper bridge "
    "castle"
)
KEYS = len(_ADJECTIVES) * len(_NOUNS)
ATTRIBUTES = ("code", "badge", "price", "owner")
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True)
class Style:
    """How one document writes facts and questions; `{key}` and `{attribute}` are filled in.

    A value stands between `fact` and `fact_end`, an answer between `question` and `question_end`.
    """

    fact: str
    fact_end: str
    question: str
    question_end: str

    def write_fact(self, key: str, attribute: str, value: bytes) -> tuple[bytes, int]:
        """The fact's text, and where in it the value starts."""
        before = self.fact.format(key=key, attribute=attribute).encode()
        return before + value + self.fact_end.encode(), len(before)


STYLES = (
    Style("\n[{key} = ", "]\n", "\n[{key} ? ", "]\n"),
    Style(
        "\nNote: the {attribute} of {key} is ",
        ".\n",
        "\nQuestion: what is the {attribute} of {key}? Answer: ",
        ".\n",
    ),
    Style('\n"{key}": "', '",\n', '\nlookup("{key}") -> "', '"\n'),
)


@dataclass(frozen=True)
class Question:
    """One question; a document goes on as `prompt + answer + end`, question after question.

    Attributes:
        prompt: bytes up to the answer.
        answer: the `ANSWER_BYTES` bytes that recall the fact.
        end: bytes that close the line; they come before the next question's prompt.
        distance_bytes: from the fact's value to the place of the answer.
    """

    prompt: bytes
    answer: bytes
    end: bytes
    distance_bytes: int

    @property
    def text(self) -> bytes:
        """The whole question as it stands in the document."""
        return self.prompt + self.answer + self.end


@dataclass(frozen=True)
class RecallDocument:
    """`context` of facts in filler text, then `questions` in the order they are asked.

    Tokens below are those of a byte-level model: the byte's value.
    """

    context: bytes
    questions: tuple[Question, ...]

    @cached_property
    def asked(self) -> bytes:
        """All questions with their true answers: what follows the context."""
        return b"".join(question.text for question in self.questions)

    @cached_property
    def answer_places(self) -> tuple[slice, ...]:
        """Where in `asked` the answer of each question stands."""
        places: list[slice] = []
        end = 0
        for question in self.questions:
            start = end + len(question.prompt)
            places.append(slice(start, start + len(question.answer)))
            end += len(question.text)
        return tuple(places)

    def is_right(self, number: int, tokens: Sequence[int]) -> bool:
        """Whether question `number` is answered exactly.

        Args:
            tokens: what was picked for each byte of `asked`, at least up to that answer.
        """
        place = self.answer_places[number]
        return list(tokens[place]) == list(self.asked[place])

    def share_right(self, tokens: Sequence[int]) -> float:
        """Share of the questions that are answered exactly, in [0, 1]."""
        right = [self.is_right(number, tokens) for number in range(len(self.questions))]
        return sum(right) / len(right)


def recall_document(
    seed: int, *, context_bytes: int, queries: int, filler: bytes, style: Style | None = None
) -> RecallDocument:
    """A recall document, the same for the same arguments on every machine.

    The context is cut into `2 * queries` equal stretches with one fact each, at a random place of
    the stretch; no two facts share a key. Half of the facts are asked for, each once and in random
    order, so that distances range from near to the whole context.

    Args:
        seed: any integer >= 0.
        context_bytes: exact length of the context.
        queries: questions, at least 1.
        filler: text around the facts, read from its start, and again where it is too short.
        style: how facts are written; None lets the seed choose one of `STYLES`.

    Raises:
        SpinError: the facts do not fit into the context, or there are too few keys for them.
    """
    facts_count = 2 * queries
    if not 1 <= queries <= KEYS // 2:
        refuse("queries", queries, f"1 .. {KEYS // 2}")
    if not filler:
        refuse("filler", filler, "at least one byte")
    draws = Draws(seed)
    style = style or STYLES[draws.below(len(STYLES))]
    attribute = ATTRIBUTES[draws.below(len(ATTRIBUTES))]
    draw_value = draws.digits if draws.below(2) else draws.syllables
    keys = [key_name(number) for number in draws.distinct(facts_count, KEYS)]
    values = [draw_value() for _ in keys]

    context, value_places = scatter_facts(
        [style.write_fact(key, attribute, value) for key, value in zip(keys, values, strict=True)],
        context_bytes,
        filler,
        draws,
    )
    questions: list[Question] = []
    end = len(context)
    for fact in draws.distinct(queries, facts_count):
        prompt = style.question.format(key=keys[fact], attribute=attribute).encode()
        distance = end + len(prompt) - value_places[fact]
        question = Question(prompt, values[fact], style.question_end.encode(), distance)
        questions.append(question)
        end += len(question.text)
    return RecallDocument(context, tuple(questions))


def scatter_facts(
    facts: list[tuple[bytes, int]], context_bytes: int, filler: bytes, draws: Draws
) -> tuple[bytes, list[int]]:
    """Lay one fact into each equal stretch of filler.

    Args:
        facts: text of each fact, and where in the text its value starts.
        context_bytes: exact length of the context.
        filler: text around the facts, at least one byte.
        draws: where in its stretch each fact stands.

    Returns:
        The context, and where in it each value starts.

    Raises:
        SpinError: facts that do not fit into their stretches.
    """
    context = bytearray()
    value_places: list[int] = []
    used = 0  # bytes of filler so far
    for number, (fact, value_offset) in enumerate(facts, start=1):
        room = number * context_bytes // len(facts) - len(context) - len(fact)
        if room < 0:
            allowed = f"enough for {len(facts)} facts of up to {len(fact)} bytes"
            refuse("context_bytes", context_bytes, allowed)
        before = draws.below(room + 1)
        context += _repeated(filler, used, before)
        value_places.append(len(context) + value_offset)
        context += fact + _repeated(filler, used + before, room - before)
        used += room
    return bytes(context), value_places


def _repeated(text: bytes, start: int, count: int) -> bytes:
    """`count` bytes from `start` of `text` written over and over."""
    start %= len(text)
    copies = (start + count) // len(text) + 1
    return (text * copies)[start : start + count]


def key_name(number: int) -> str:
    """One of the `KEYS` keys, such as `amber falcon`."""
    adjective, noun = number % len(_ADJECTIVES), number // len(_ADJECTIVES)
    return f"{_ADJECTIVES[adjective]} {_NOUNS[noun]}"


class Draws:
    """Random choices built on `Generator.random` alone, the draw NumPy is least likely to change.

    Bounded integers and permutations have changed their streams between releases.
    """

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def below(self, bound: int) -> int:
        """A uniform integer in `0 .. bound - 1`."""
        return int(self._generator.random() * bound)

    def distinct(self, count: int, bound: int) -> list[int]:
        """`count` distinct integers in `0 .. bound - 1`, in random order."""
        order = self._generator.random(bound).argsort(kind="stable")
        return [int(i) for i in order[:count]]

    def digits(self) -> bytes:
        """A value of four digits."""
        return b"%04d" % self.below(10_000)

    def syllables(self) -> bytes:
        """A value of two syllables, such as `kuto`."""
        letters = [source[self.below(len(source))] for source in (_CONSONANTS, _VOWELS) * 2]
        return "".join(letters).encode()
