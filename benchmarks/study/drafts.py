# SPDX-License-Identifier: Apache-2.0
"""Drafts for speculative decoding without a second model: what followed the same bytes before."""

from __future__ import annotations

from collections.abc import Sequence

from spin_trtllm.errors import refuse


class NGramDrafts:
    """Proposes the continuation of the latest earlier place that reads as the text does now.

    The longest run of tokens that occurred before decides; without any, nothing is proposed.
    """

    def __init__(self, longest: int = 8, shortest: int = 2) -> None:
        """Args:
        longest, shortest: lengths of the runs that are looked up, in tokens.
        """
        if not 1 <= shortest <= longest:
            refuse("shortest", shortest, f"1 .. longest, {longest}")
        self._lengths = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        # For each run of tokens, where its latest occurrence but the text's end stopped.
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens that are certain: the prompt, then what was accepted or picked."""
        for token in tokens:
            end = len(self._tokens)
            for length in self._lengths:
                if length <= end:
                    self._ends[tuple(self._tokens[end - length :])] = end
            self._tokens.append(token)

    def propose(self, count: int) -> list[int]:
        """At most `count` tokens that may come next."""
        for length in self._lengths:
            end = self._ends.get(tuple(self._tokens[-length:]))
            if end is not None and length <= len(self._tokens):
                return self._tokens[end : end + count]
        return []


def accepted_drafts(drafts: Sequence[int], picked: Sequence[int]) -> int:
    """How many drafts a verification step accepts.

    Args:
        drafts: `d` proposed tokens.
        picked: `d + 1` tokens, the model's own after the last certain token and after each draft.
    """
    if len(picked) != len(drafts) + 1:
        refuse("picked", f"{len(picked)} tokens", f"{len(drafts) + 1}: one more than the drafts")
    for count, (draft, own) in enumerate(zip(drafts, picked, strict=False)):
        if draft != own:
            return count
    return len(drafts)
