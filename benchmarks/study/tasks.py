# SPDX-License-Identifier: Apache-2.0
"""Tasks of the study: documents with questions about them, in the formats of `spin_trtllm.recall`.

They follow RULER (Hsieh et al., 2024) and multi-round coreference resolution (MRCR), in the words
that the tiny model was trained on. All are pure functions of their arguments, and their documents
have exactly the length asked for. A token of the tiny model is a byte.

    document = task_document("multi_value", seed=0, context_bytes=8_192, queries=8, filler=text)
    document.context, document.asked  # what to read, then what to decode
    document.is_right(0, tokens)      # whether the first answer was picked
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spin_trtllm.errors import refuse
from spin_trtllm.recall import (
    ATTRIBUTES,
    KEYS,
    STYLES,
    Draws,
    Question,
    RecallDocument,
    Style,
    key_name,
    scatter_facts,
)

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
NEEDLES_ASKED = 4  # of the eight of one key
VALUES_OF_A_KEY = 4
HOPS = 2
TALLY = (6, 3, 2, 1)  # how often each value of a key is told, where the most frequent is asked for
CROWD_BYTES = 128  # of context to a fact, where the other facts are what makes it hard


@dataclass(frozen=True)
class _Fact:
    key: str
    value: bytes


@dataclass(frozen=True)
class _Ask:
    """One question, of one answer or several in a row.

    Attributes:
        key: what it asks for, in the place of a fact's key.
        answers: number of the fact in its group, whose value is the answer.
    """

    key: str
    group: int
    answers: tuple[int, ...]


@dataclass(frozen=True)
class _Plan:
    """What a task tells and asks. Facts of a group are told in order, groups all mixed up."""

    groups: list[list[_Fact]]
    asks: list[_Ask]


class _Words:
    """Keys that do not repeat, and values."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self._keys = iter(draws.distinct(KEYS, KEYS))
        self._numeric = bool(draws.below(2))

    def key(self) -> str:
        """A key not used before."""
        number = next(self._keys, None)
        if number is None:
            refuse("queries", "more facts than keys", f"at most {KEYS} keys")
        return key_name(number)

    def value(self) -> bytes:
        """Four bytes."""
        return self.draws.digits() if self._numeric else self.draws.syllables()

    def values(self, count: int) -> list[bytes]:
        """Different values."""
        found: dict[bytes, None] = {}
        while len(found) < count:
            found[self.value()] = None
        return list(found)

    def fact(self) -> _Fact:
        """A fact of its own."""
        return _Fact(self.key(), self.value())


def single(words: _Words, context_bytes: int, queries: int) -> _Plan:
    """One fact in the whole context, and the question for it."""
    if queries != 1:
        refuse("queries", queries, "1: a single fact")
    fact = words.fact()
    return _Plan([[fact]], [_Ask(fact.key, 0, (0,))])


def multi_key(words: _Words, context_bytes: int, queries: int) -> _Plan:
    """A few questions among many facts that look alike."""
    facts = [words.fact() for _ in range(max(2 * queries, context_bytes // CROWD_BYTES))]
    asked = words.draws.distinct(queries, len(facts))
    return _Plan([[fact] for fact in facts], [_Ask(facts[n].key, n, (0,)) for n in asked])


def multi_query(words: _Words, context_bytes: int, queries: int) -> _Plan:
    """Every fact is asked for, in another order."""
    facts = [words.fact() for _ in range(queries)]
    asked = words.draws.distinct(queries, queries)
    return _Plan([[fact] for fact in facts], [_Ask(facts[n].key, n, (0,)) for n in asked])


def multi_value(words: _Words, context_bytes: int, queries: int) -> _Plan:
    """Each key has several values, asked for all at once, in the order they were told."""
    groups: list[list[_Fact]] = []
    for _ in range(_groups(queries, VALUES_OF_A_KEY)):
        key = words.key()
        groups.append([_Fact(key, value) for value in words.values(VALUES_OF_A_KEY)])
    every = tuple(range(VALUES_OF_A_KEY))
    return _Plan(groups, [_Ask(group[0].key, n, every) for n, group in enumerate(groups)])


def multi_needle(words: _Words, context_bytes: int, queries: int) -> _Plan:
    """Each key has eight values; a question names one by its place in the order of telling."""
    groups: list[list[_Fact]] = []
    asks: list[_Ask] = []
    for number in range(_groups(queries, NEEDLES_ASKED)):
        key = words.key()
        groups.append([_Fact(key, value) for value in words.values(len(ORDINALS))])
        for needle in words.draws.distinct(NEEDLES_ASKED, len(ORDINALS)):
            asks.append(_Ask(f"{ORDINALS[needle]} {key}", number, (needle,)))
    return _Plan(groups, asks)


def variable_tracking(words: _Words, context_bytes: int, queries: int) -> _Plan:
    """A key's value is another key, whose value is another; the question is for the last's."""
    chains: list[list[_Fact]] = []
    for _ in range(queries):
        chain = [words.fact()]
        for _ in range(HOPS):
            chain.append(_Fact(words.key(), chain[-1].key.encode()))
        chains.append(chain)
    return _Plan(chains, [_Ask(chain[-1].key, n, (0,)) for n, chain in enumerate(chains)])


def aggregation(words: _Words, context_bytes: int, queries: int) -> _Plan:
    """A key is told a dozen times; the question is for its most frequent value."""
    groups: list[list[_Fact]] = []
    asks: list[_Ask] = []
    for number in range(queries):
        key, values = words.key(), words.values(len(TALLY))
        told = [v for v, times in zip(values, TALLY, strict=True) for _ in range(times)]
        told = [told[n] for n in words.draws.distinct(len(told), len(told))]
        groups.append([_Fact(key, value) for value in told])
        last = max(n for n, value in enumerate(told) if value == values[0])
        asks.append(_Ask(f"usual {key}", number, (last,)))
    return _Plan(groups, asks)


def _groups(queries: int, size: int) -> int:
    if queries % size:
        refuse("queries", queries, f"a multiple of {size}")
    return queries // size


TASKS: dict[str, Callable[[_Words, int, int], _Plan]] = {
    task.__name__: task
    for task in (
        single,
        multi_key,
        multi_value,
        multi_query,
        multi_needle,
        variable_tracking,
        aggregation,
    )
}


def task_document(
    task: str,
    seed: int,
    *,
    context_bytes: int,
    queries: int,
    filler: bytes,
    style: int | None = None,
) -> RecallDocument:
    """A document of one task, the same for the same arguments on every machine.

    Args:
        task: one of `TASKS`.
        seed: any integer >= 0.
        context_bytes: exact length of the context.
        queries: scored answers, at least 1; some tasks need a multiple of four, `single` exactly 1.
        filler: text around the facts, read from a random place on, and again where it is too short.
        style: number of one of the `STYLES`; None lets the seed choose.

    Returns:
        Context and questions. A question of several answers is one `Question` for each.

    Raises:
        SpinError: an unknown task, or facts that do not fit into the context.
    """
    if task not in TASKS:
        refuse("task", task, ", ".join(TASKS))
    if queries < 1:
        refuse("queries", queries, "an integer >= 1")
    draws = Draws(seed)
    writer = _Writer(draws, filler, style)
    plan = TASKS[task](_Words(draws), context_bytes, queries)
    context, places = writer.tell(plan.groups, context_bytes)
    return RecallDocument(context, writer.ask(plan, places, len(context)))


class _Writer:
    """Writes facts and questions in one style."""

    def __init__(self, draws: Draws, filler: bytes, style: int | None) -> None:
        if not filler:
            refuse("filler", filler, "at least one byte")
        self._draws = draws
        self._style: Style = STYLES[draws.below(len(STYLES)) if style is None else style]
        self._attribute = ATTRIBUTES[draws.below(len(ATTRIBUTES))]
        start = draws.below(len(filler))
        self._filler = filler[start:] + filler[:start]

    def tell(
        self, groups: list[list[_Fact]], context_bytes: int
    ) -> tuple[bytes, dict[tuple[int, int], int]]:
        """Scatter all facts over the context.

        Returns:
            The context, and where in it each value starts, by group and number in the group.
        """
        turns = [number for number, group in enumerate(groups) for _ in group]
        turns = [turns[n] for n in self._draws.distinct(len(turns), len(turns))]
        told = [0] * len(groups)
        order: list[tuple[int, int]] = []
        for number in turns:
            order.append((number, told[number]))
            told[number] += 1
        written = [self._write(groups[group][number]) for group, number in order]
        context, places = scatter_facts(written, context_bytes, self._filler, self._draws)
        return context, dict(zip(order, places, strict=True))

    def _write(self, fact: _Fact) -> tuple[bytes, int]:
        return self._style.write_fact(fact.key, self._attribute, fact.value)

    def ask(
        self, plan: _Plan, places: dict[tuple[int, int], int], end: int
    ) -> tuple[Question, ...]:
        """Write the questions.

        Args:
            places: of the values, from the start of the document, as `end` is.
            end: where the first question starts.
        """
        questions: list[Question] = []
        for ask in plan.asks:
            prompt = self._style.question.format(key=ask.key, attribute=self._attribute).encode()
            for number in ask.answers:
                value = plan.groups[ask.group][number].value
                last = number == ask.answers[-1]
                line_end = self._style.question_end.encode() if last else b""
                distance = end + len(prompt) - places[ask.group, number]
                questions.append(Question(prompt, value, line_end, distance))
                end += len(questions[-1].text)
                prompt = b" "
        return tuple(questions)


def dialogue(
    seed: int, *, turns: int, turn_bytes: int, queries: int, filler: bytes
) -> tuple[RecallDocument, ...]:
    """A dialogue of turns that each read some text, then answer questions.

    In the manner of tau-bench: what a tool returned in an early turn is needed in a later one. A
    turn's text is read at once, so that a predictive indexer starts anew on each turn's answers.

    Args:
        seed: any integer >= 0.
        turns: at least 1.
        turn_bytes: length of the text that a turn reads, with `2 * queries` facts in it.
        queries: questions a turn, about half of them on facts of earlier turns; no fact twice.
        filler: text around the facts.

    Returns:
        The turns in order; distances count over the whole dialogue.

    Raises:
        SpinError: no turn, no question, or facts that do not fit into a turn.
    """
    for name, number in (("turns", turns), ("queries", queries)):
        if number < 1:
            refuse(name, number, "an integer >= 1")
    draws = Draws(seed)
    writer, words = _Writer(draws, filler, None), _Words(draws)
    done: list[RecallDocument] = []
    old: dict[_Fact, int] = {}  # facts not yet asked for, and where their values stand
    end = 0
    for _ in range(turns):
        new = [[words.fact()] for _ in range(2 * queries)]
        context, places = writer.tell(new, turn_bytes)
        told = {group[0]: end + places[number, 0] for number, group in enumerate(new)}
        asked = _some(list(old), queries // 2, draws)
        asked += _some(list(told), queries - len(asked), draws)
        asked = _some(asked, len(asked), draws)
        old |= told
        plan = _Plan([[f] for f in asked], [_Ask(f.key, n, (0,)) for n, f in enumerate(asked)])
        end += len(context)
        questions = writer.ask(plan, {(n, 0): old.pop(f) for n, f in enumerate(asked)}, end)
        done.append(RecallDocument(context, questions))
        end += len(done[-1].asked)
    return tuple(done)


def _some(facts: list[_Fact], count: int, draws: Draws) -> list[_Fact]:
    """At most `count` of the facts, in random order."""
    return [facts[n] for n in draws.distinct(min(count, len(facts)), len(facts))]
