# SPDX-License-Identifier: Apache-2.0
"""Drafts change how many steps an answer takes, and with a dense indexer nothing else."""

import pytest
import torch

from benchmarks.study import speculation
from benchmarks.study.decoding import answer, read_documents
from benchmarks.study.documents import documents_of
from benchmarks.study.drafts import NGramDrafts
from benchmarks.study.methods import METHODS
from benchmarks.study.speculation import speculate
from spin_trtllm.errors import SpinError

TOKENS = 24


def read(model, filler, task="text", documents=1, queries=TOKENS):
    made = documents_of(
        task, documents=documents, context_bytes=600, queries=queries, filler=filler
    )
    return read_documents(model, list(made))


def run(model, batch, name="dense", setting=0.0, drafts=3):
    with METHODS[name].on(model, [0], setting, drafts=True) as found:
        return speculate(model, batch, found, drafts=drafts), found.cost


class Drafts(NGramDrafts):
    """Proposes what a text will be, with every `wrong`-th token changed."""

    text = ()
    wrong = 10**6

    def __init__(self):
        super().__init__()
        self.known = 0

    def extend(self, tokens):
        self.known += len(tokens)

    def propose(self, count):
        place = self.known - 601
        return [
            1 if number % self.wrong == self.wrong - 1 else token
            for number, token in enumerate(self.text)
        ][place : place + count]


@pytest.fixture
def proposing(model, filler, monkeypatch):
    """Sets what is proposed: the model's own continuation, some tokens of it changed."""
    plain, _ = run(model, read(model, filler), drafts=0)

    def propose(wrong):
        drafts = type("Some", (Drafts,), {"text": plain.tokens, "wrong": wrong})
        monkeypatch.setattr(speculation, "NGramDrafts", drafts)
        return plain.tokens

    return propose


def test_right_drafts_are_accepted(model, filler, proposing):
    tokens = proposing(wrong=10**6)
    found, cost = run(model, read(model, filler))
    assert found.tokens == tokens
    assert len(tokens) == TOKENS
    # The first token follows from the text, then five steps of four; the last makes the rest.
    assert found.steps == {4: 5, 3: 1}
    assert found.accepted == found.proposed == 17
    assert cost.keys == cost.dense_keys


@pytest.mark.parametrize("wrong", [1, 2, 3, 5])
def test_wrong_drafts_are_rolled_back(wrong, model, filler, proposing):
    tokens = proposing(wrong)
    found, _ = run(model, read(model, filler))
    assert found.tokens == tokens
    assert found.accepted < found.proposed
    if wrong == 1:
        assert found.accepted == 0
        assert sum(found.steps.values()) == TOKENS - 1


def test_a_rollback_leaves_no_trace_in_the_cache(model, filler, proposing):
    proposing(wrong=2)
    batch = read(model, filler)
    caches = []
    for drafts in (0, 3):
        with METHODS["dense"].on(model, [0], 0, drafts=True) as found:
            stream = speculation._Stream(model, batch, found, drafts)
            stream.generate(TOKENS)
        caches.append(stream._cache.layers[3].compressed_kv["indexer"])
    assert caches[0].shape[1] == (601 + TOKENS - 1) // 4
    torch.testing.assert_close(caches[1], caches[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["spin", "spin_query", "tisa", "previous_picks"])
def test_a_method_that_skips_takes_drafts(name, model, filler, proposing):
    proposing(wrong=3)
    found, cost = run(model, read(model, filler), name, 0.5)
    assert len(found.tokens) == TOKENS
    assert 0 < found.accepted < found.proposed
    assert max(found.steps) == 4
    assert cost.keys < cost.dense_keys


def test_policies_of_drafts(model, filler, proposing):
    """Row 0's blocks are fewer than those of all rows; what is learnt changes what is kept."""
    tokens = proposing(wrong=3)
    batch = read(model, filler)
    runs = {}
    for name in ("spin", "spin_row0_mask", "spin_row0_update"):
        with METHODS[name].on(model, [0], 0.5, drafts=True) as found:
            assert speculate(model, batch, found, drafts=3).accepted > 0
        runs[name] = found
    keys = {name: found.cost.keys / found.cost.dense_keys for name, found in runs.items()}
    assert keys["spin_row0_mask"] < keys["spin"]
    assert runs["spin_row0_update"].misses.rates != runs["spin"].misses.rates
    assert len(tokens) == TOKENS


def test_rows_of_drafts_are_measured(model, filler, proposing):
    """Of a step of four rows, what each row would read dense and its blocks do not hold."""
    proposing(wrong=10**6)
    batch = read(model, filler)
    kept, missed = {}, []
    with METHODS["spin"].on(model, [0], 0.5, drafts=True) as found:
        rule = found._rule
        learn, keep = rule.learn, rule.keep

        def keeps(step):
            kept[step.layer] = keep(step)
            return kept[step.layer]

        def learns(step, scores, accepted):
            if step.layer == 1:
                dense = step.score(step.keys)[0]
                for row, position in enumerate(step.positions_tokens[0].tolist()):
                    slots = dense[row, : (position + 1) // 4].topk(16).indices
                    out = sum(not kept[1][0, slot // 16] for slot in slots.tolist())
                    missed.append(out / 16)
            learn(step, scores, accepted)

        rule.keep, rule.learn = keeps, learns
        speculate(model, batch, found, drafts=3)
    assert sum(missed[:4]) == 0  # the first step is cold, and does not count
    assert found.misses.rates[1] == pytest.approx(missed[4:])
    assert sum(missed) > 0


def test_questions_are_fed_and_answers_generated(model, filler):
    batch = read(model, filler, "recall", queries=2)
    found, cost = run(model, batch)
    (turn,) = batch.documents[0]
    assert len(found.right) == 2
    assert len(found.tokens) == 8
    assert found.steps[1] <= 8
    plain, _ = run(model, batch, drafts=0)
    assert found.tokens == plain.tokens
    with METHODS["dense"].on(model, [0], 0) as forced:
        first = answer(model, batch, forced)[0][0]
    assert found.right[0] == first.right
    assert cost.dense_keys > len(turn.asked) * 2 * 150 // 2


def test_one_document_at_a_time(model, filler):
    with pytest.raises(SpinError, match=r"batch: got 'documents of \[1, 1\] turns', allowed: one"):
        run(model, read(model, filler, documents=2))
