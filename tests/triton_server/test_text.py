# SPDX-License-Identifier: Apache-2.0
"""Text as it grows: whole characters, no part of a stop word, and never less than before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spin_trtllm.hosts.triton.text import Detokenizer, StopWords


def decode(tokens: Sequence[int]) -> str:
    """A token is a byte; 256 and above are special and have no text."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def decode_words(tokens: Sequence[int]) -> str:
    """A token is a word; the first has no space before it, as in SentencePiece."""
    return " ".join(f"w{token}" for token in tokens)


@given(st.lists(st.integers(0, 257) | st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F])))
def test_any_tokens_end_as_the_text_of_all_of_them(tokens: list[int]) -> None:
    detokenizer, shown = Detokenizer(decode), ""
    for token in tokens:
        detokenizer.add(token)
        assert detokenizer.text.startswith(shown)
        shown = detokenizer.text
    detokenizer.finish()
    assert detokenizer.text.startswith(shown)
    assert detokenizer.text == decode(tokens)


@given(st.text())
def test_no_part_of_a_character_is_shown(text: str) -> None:
    detokenizer = Detokenizer(decode)
    for token in text.encode():
        detokenizer.add(token)
        assert text.startswith(detokenizer.text)
    detokenizer.finish()
    assert detokenizer.text == text


def decode_bytes(tokens: Sequence[int]) -> str:
    """A token is a byte, and each is shown as one while any is missing, as with byte fallback."""
    try:
        return bytes(tokens).decode()
    except UnicodeDecodeError:
        return "\N{REPLACEMENT CHARACTER}" * len(tokens)


@given(st.text())
def test_no_part_of_a_character_is_shown_where_each_byte_is_one(text: str) -> None:
    detokenizer = Detokenizer(decode_bytes)
    for token in text.encode():
        detokenizer.add(token)
        assert text.startswith(detokenizer.text)
    detokenizer.finish()
    assert detokenizer.text == text


@given(st.lists(st.integers(0, 9)))
def test_spaces_between_words_stay(tokens: list[int]) -> None:
    detokenizer = Detokenizer(decode_words)
    for token in tokens:
        detokenizer.add(token)
    assert detokenizer.text == decode_words(tokens)


def test_a_long_text_is_not_decoded_again_and_again() -> None:
    lengths = []

    def counting(tokens: Sequence[int]) -> str:
        lengths.append(len(tokens))
        return decode(tokens)

    detokenizer = Detokenizer(counting)
    for token in b"x" * 1000:
        detokenizer.add(token)
    assert max(lengths) <= 2


words = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(st.lists(st.text("abc", max_size=3)), words)
@example(["ca", "b"], ["ab"])
def test_stop_words_across_pieces(pieces: list[str], stop: list[str]) -> None:
    """Whatever the pieces: the first stop word is found, and nothing of it was shown before."""
    stop_words, text, shown = StopWords(stop), "", ""
    for piece in pieces:
        text += piece
        found = stop_words.find(text)
        starts = [text.find(word) for word in stop if word in text]
        assert (found is not None) == bool(starts)
        if found is not None:
            place, word = found
            assert place == min(starts)
            assert text.startswith(word, place)
            assert len(shown) <= place
            return
        shown = text[: stop_words.safe_length(text)]
        assert len(text) - len(shown) < max(map(len, stop), default=1)


@pytest.mark.parametrize(
    ("text", "length"), [("abc", 3), ("abcEN", 3), ("abcE", 3), ("abcENx", 6), ("", 0)]
)
def test_what_may_be_shown(text: str, length: int) -> None:
    assert StopWords(["END", "stop"]).safe_length(text) == length


def test_of_two_words_at_one_place_the_longer() -> None:
    assert StopWords(["a", "abc", "ab"]).find("xabcab") == (1, "abc")
