# SPDX-License-Identifier: Apache-2.0
"""Answers are judged at their own places, and read with the text before them alone."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.study.tasks import dialogue, task_document

pytest.importorskip("transformers")
from benchmarks.study import answers
from benchmarks.study.answers import answer_all, right_answers
from benchmarks.tiny_model.corpus import save_corpus
from benchmarks.tiny_model.forward import Forward
from spin_trtllm import tiny

STUDY = Path(__file__).parent.parent.parent / "benchmarks" / "study"
FILLER = b"The quick brown fox jumps over the lazy dog. " * 30


@pytest.fixture(scope="module")
def forward():
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny.checkpoint_path(), dtype=torch.float32
    )
    return Forward(model.eval(), torch.float32)


class Oracle:
    """In the place of a model: logits of the true next byte, but for some places of the text."""

    def __init__(self, text, wrong):
        self.text, self.wrong = text, wrong
        self.model = torch.nn.Linear(1, 1)
        self.model.config = type("Config", (), {"sliding_window": 64})

    def __call__(self, tokens, *, sparse):
        assert sparse
        assert tokens.shape[1] % 64 == 0
        assert tokens[0, : len(self.text)].tolist() == [256, *self.text[:-1]]
        right = torch.tensor([*self.text, *[0] * (tokens.shape[1] - len(self.text))])
        right[list(self.wrong)] = 7
        logits = torch.nn.functional.one_hot(right, 272).float()[None]
        return type("Output", (), {"logits": logits})


def test_every_answer_is_judged_at_its_place():
    turns = list(dialogue(0, turns=3, turn_bytes=512, queries=2, filler=FILLER))
    text = b"".join(turn.context + turn.asked for turn in turns)
    assert right_answers(Oracle(text, ()), turns) == [True] * 6
    end, places = 0, []
    for turn in turns:
        end += len(turn.context)
        places += [slice(end + p.start, end + p.stop) for p in turn.answer_places]
        end += len(turn.asked)
    for number, place in enumerate(places):
        for wrong in (place.start, place.stop - 1):
            right = right_answers(Oracle(text, (wrong,)), turns)
            assert right == [n != number for n in range(6)]


def test_the_shipped_model_answers_what_it_was_trained_for(forward):
    document = task_document("multi_query", 0, context_bytes=1_024, queries=4, filler=FILLER)
    assert right_answers(forward, [document]) == [True] * 4


def test_readme_quotes_the_results():
    figures = json.loads((STUDY / "results" / "shipped-cpu.json").read_text(encoding="utf-8"))
    text = (STUDY / "README.md").read_text(encoding="utf-8")
    for task, counts in figures["context_bytes"]["4096"].items():
        low, high = counts["interval"]
        row = f"| `{task}` | {counts['right']} of {counts['answers']} | {low:.3f} to {high:.3f} |"
        assert row in text


def test_the_command_says_what_answered(tmp_path, monkeypatch):
    save_corpus(tmp_path / "corpus.zip", b"", FILLER, {})
    asked = []
    monkeypatch.setattr(answers, "answer_all", lambda forward, **given: asked.append(given) or {})
    target, checkpoint = tmp_path / "made" / "answers.json", tiny.checkpoint_path()
    line = ["answers", "--checkpoint", str(checkpoint), "--output", str(target), "--corpus"]
    monkeypatch.setattr(sys, "argv", [*line, str(tmp_path / "corpus.zip"), "--queries", "3"])
    answers.main()
    assert asked == [{"documents": 6, "context_bytes": 4_096, "queries": 3, "filler": FILLER}]
    figures = json.loads(target.read_text(encoding="utf-8"))
    weights = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    assert figures["sha256"]["model.safetensors"] == weights
    assert figures["environment"]["versions"]["torch"] == torch.__version__
    assert figures["context_bytes"] == {"4096": {}}


def test_all_tasks_are_counted(forward):
    class Nothing(Oracle):
        def __call__(self, tokens, *, sparse):
            return type("Output", (), {"logits": torch.zeros(1, tokens.shape[1], 272)})

    found = answer_all(Nothing(b"", ()), documents=2, context_bytes=4_096, queries=4, filler=FILLER)
    assert {task: counts["answers"] for task, counts in found.items()} == {
        "single": 2,
        "multi_key": 8,
        "multi_value": 8,
        "multi_query": 8,
        "multi_needle": 8,
        "variable_tracking": 8,
        "aggregation": 8,
        "dialogue": 8,
    }
    assert {counts["right"] for counts in found.values()} == {0}
