# SPDX-License-Identifier: Apache-2.0
"""Every task comes as turns of the length asked for; text comes in windows that do not overlap."""

import pytest

from benchmarks.study.documents import NAMES, documents_of, text_document
from spin_trtllm.errors import SpinError

FILLER = b"The quick brown fox jumps over the lazy dog. " * 30


@pytest.mark.parametrize("task", NAMES)
def test_documents_have_their_shape(task):
    found = list(documents_of(task, documents=2, context_bytes=4_096, queries=4, filler=FILLER))
    assert len(found) == 2
    assert found[0] != found[1]
    for turns in found:
        assert len(turns) == (4 if task == "dialogue" else 1)
        assert sum(len(turn.context) for turn in turns) == 4_096
        asked = sum(len(turn.questions) for turn in turns)
        assert asked == (1 if task == "single" else 4)


def test_windows_of_text_follow_each_other():
    text = bytes(range(256))
    windows = [text_document(seed, context_bytes=20, queries=12, text=text) for seed in range(9)]
    assert b"".join(w.context + w.asked for w in windows[:8]) == text
    assert windows[8] == windows[0]  # the text is over, and starts anew
    assert [q.answer for q in windows[1].questions] == [text[n : n + 1] for n in range(52, 64)]
    assert windows[1].is_right(11, list(windows[1].asked))


def test_unknown_tasks_are_refused():
    with pytest.raises(SpinError, match="task: got 'poetry', allowed: text, recall, single"):
        list(documents_of("poetry", documents=1, context_bytes=9, queries=1, filler=b"x"))
