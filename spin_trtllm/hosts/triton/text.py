# SPDX-License-Identifier: Apache-2.0
"""Turns tokens into text as they come: whole characters only, and never a part of a stop word."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for bytes that are no text


class Detokenizer:
    """The text of a growing list of tokens.

    A character may take several tokens, and a token's text may depend on the one before it. So the
    last tokens are decoded again with each new one, from the last place where whole characters
    stood, one piece earlier for context.

    Args:
        decode: text of a list of tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []  # tokens whose text is settled, before `_open`
        self._open: list[int] = []  # tokens whose text may still change
        self._settled = ""
        self.text = ""  # without a last character that may not be whole yet

    def add(self, token: int) -> None:
        """Take one more token."""
        self._open.append(token)
        new = self._new_text()
        if new.endswith(REPLACEMENT):
            # All of them: some decoders write one for each byte that is there.
            self.text = self._settled + new.rstrip(REPLACEMENT)
            return
        self._settled = self.text = self._settled + new
        if new:
            self._context, self._open = self._open, []

    def finish(self) -> None:
        """No more tokens will come: an unfinished character stays one that is none."""
        self.text = self._settled + self._new_text()

    def _new_text(self) -> str:
        known = len(self._decode(self._context))
        return self._decode([*self._context, *self._open])[known:]


class StopWords:
    """Finds the first stop word in a growing text.

    Args:
        words: not empty, none of them.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(words)
        self._longest = max(map(len, words), default=0)
        self._searched = 0  # characters that no stop word starts in

    def find(self, text: str) -> tuple[int, str] | None:
        """Where the first stop word of a text starts, and which; of several there, the longest.

        Args:
            text: begins with the text of the call before.
        """
        found = [
            (place, word) for word in self._words if (place := text.find(word, self._searched)) >= 0
        ]
        self._searched = max(self._searched, len(text) - self._longest + 1)
        return min(found, key=lambda hit: (hit[0], -len(hit[1])), default=None)

    def safe_length(self, text: str) -> int:
        """Characters of a text that no stop word can take back: what may be shown already."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(word.startswith(text[start:]) for word in self._words):
                return start
        return len(text)
