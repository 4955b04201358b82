# SPDX-License-Identifier: Apache-2.0
"""Claims about answers: both sides of a pair answer the same questions."""

import json
import sys

import pytest

from benchmarks.study import pairs
from benchmarks.study.cells import Question
from benchmarks.study.decoding import answer, read_documents
from benchmarks.study.documents import documents_of
from benchmarks.study.methods import METHODS
from benchmarks.study.pairs import PAIRS, Pair, answer_pairs

SIZES = {"context_bytes": 400, "documents": 2, "queries": 1}
QUESTION = Question("recall", **SIZES)
DENSE, HALF = (pairs._USUAL.at_sparsity(sparsity) for sparsity in (0.0, 0.5))


def test_both_sides_answer_the_same_questions(model, filler, monkeypatch, capsys):
    monkeypatch.setattr(pairs, "SIDE_BY_SIDE", 1)
    monkeypatch.setattr(pairs, "PAIRS", (Pair("half", DENSE, HALF), Pair("turned", HALF, DENSE)))
    found = answer_pairs(model, QUESTION, filler)
    half, turned = found["pairs"]
    assert (half["before"], half["now"]) == (turned["now"], turned["before"])
    assert [len(of) for of in half["now"]] == [1, 1]
    assert [line[:3] for line in capsys.readouterr().out.splitlines()] == ["1: ", "2: "]
    batch = read_documents(model, list(documents_of("recall", filler=filler, **SIZES)))
    with METHODS["dense"].on(model, [0, 1], 0) as run:
        dense = [[one.right for one in of] for of in answer(model, batch, run)]
    assert half["before"] == dense  # at sparsity 0 nothing is skipped


def test_pairs_differ_in_what_they_claim():
    for pair in PAIRS[:2]:
        changed = {
            name: value
            for name, value in pair.now.to_dict().items()
            if value != pair.before.to_dict()[name]
        }
        assert changed == {"exploration_policy": "random"}
    paper, query = PAIRS[-1].before, PAIRS[-1].now
    assert (paper.block_size, paper.target_sparsity, paper.query_share) == (64, 0.4, 0)
    assert (query.block_size, query.target_sparsity, query.query_share) == (16, 0.74, 0.5)


def test_the_command_writes_answers(tmp_path, monkeypatch, capsys):
    from benchmarks.tiny_model.corpus import save_corpus

    save_corpus(tmp_path / "c.zip", b"", b"text", {})
    asked = []
    monkeypatch.setattr(pairs, "load_model", lambda path, device: ("a model", None))
    monkeypatch.setattr(pairs, "answer_pairs", lambda *given: asked.append(given) or {"pairs": []})
    target = tmp_path / "answers.json"
    line = ["pairs", "--output", str(target), "--corpus"]
    monkeypatch.setattr(sys, "argv", [*line, str(tmp_path / "c.zip")])
    pairs.main()
    assert json.loads(target.read_text(encoding="utf-8")) == {"pairs": []}
    assert asked == [("a model", Question("recall", 8_192, 16, 4), b"text")]
    monkeypatch.setattr(sys, "argv", [*line, str(tmp_path / "none.zip")])
    with pytest.raises(SystemExit) as stopped:
        pairs.main()
    assert stopped.value.code == 2
    assert "none.zip" in capsys.readouterr().err
