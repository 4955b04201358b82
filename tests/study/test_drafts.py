# SPDX-License-Identifier: Apache-2.0
"""Drafts come from the text so far, from its longest and latest match."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.study.drafts import NGramDrafts, accepted_drafts
from spin_trtllm.errors import SpinError


def proposed(text, count, **lengths):
    drafts = NGramDrafts(**lengths)
    drafts.extend(text)
    return bytes(drafts.propose(count))


@pytest.mark.parametrize(
    ("text", "count", "draft"),
    [
        (b"the fox saw the f", 3, b"ox "),
        (b"ab1 ab2 ab", 1, b"2"),  # the latest
        (b"xab1 yab2 xab", 1, b"1"),  # the longest before the latest
        (b"the fox saw the f", 0, b""),
        (b"nothing twice", 3, b""),
        (b"aaaa", 3, b"a"),  # a match may reach the end of the text
        (b"a", 3, b""),
        (b"", 3, b""),
    ],
)
def test_what_followed_before(text, count, draft):
    assert proposed(text, count) == draft


def test_runs_shorter_than_asked_for_are_not_looked_up():
    assert proposed(b"ab1 ab", 1, longest=4, shortest=3) == b""
    assert proposed(b"ab1 ab", 1, longest=4, shortest=2) == b"1"


@given(
    text=st.lists(st.integers(0, 2), max_size=40),
    count=st.integers(0, 4),
    cut=st.integers(0, 40),
    longest=st.integers(2, 4),
)
def test_equals_a_search_through_the_whole_text(text, count, cut, longest):
    drafts = NGramDrafts(longest=longest)
    drafts.extend(text[:cut])
    drafts.extend(text[cut:])
    expected = []
    for length in range(min(longest, len(text) - 1), 1, -1):
        starts = [n for n in range(len(text) - length) if text[n : n + length] == text[-length:]]
        if starts:
            expected = text[starts[-1] + length :][:count]
            break
    assert drafts.propose(count) == expected


@pytest.mark.parametrize(
    ("drafts", "picked", "accepted"),
    [
        ([], [7], 0),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 9, 3, 4], 1),
        ([1, 2, 3], [9, 2, 3, 4], 0),
    ],
)
def test_drafts_are_accepted_up_to_the_first_other_token(drafts, picked, accepted):
    assert accepted_drafts(drafts, picked) == accepted


def test_wrong_lengths_are_refused():
    with pytest.raises(SpinError, match=r"picked: got .2 tokens., allowed: 3: one more"):
        accepted_drafts([1, 2], [1, 2])
    with pytest.raises(SpinError, match=r"shortest: got 9, allowed: 1 \.\. longest, 8"):
        NGramDrafts(shortest=9)
