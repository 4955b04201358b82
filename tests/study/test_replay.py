# SPDX-License-Identifier: Apache-2.0
"""What a run says it skipped and missed is what a replay of its own trace says, on every task."""

import copy
from dataclasses import replace

import pytest
import torch

from benchmarks.study.decoding import answer, read_documents
from benchmarks.study.documents import NAMES, documents_of
from benchmarks.study.methods import HookedRun, SpinRule, SpinRun, spin_config
from spin_trtllm.generate import forward
from spin_trtllm.reference.topk_slots import expand_blocks
from spin_trtllm.replay.run import replay
from spin_trtllm.replay.trace import Trace, write_trace

CONFIG = spin_config(0.5)
SEQUENCE = 7
ROWS, STEPS = 4, 12


@pytest.fixture(scope="module", params=NAMES)
def batch(request, model, filler):
    """A document of a task, the questions cut to what fits into few steps."""
    queries = {"text": ROWS * STEPS, "multi_value": 4, "multi_needle": 4}.get(request.param, 1)
    (document,) = documents_of(
        request.param, documents=1, context_bytes=1_024, queries=queries, filler=filler
    )
    return read_documents(model, [[cut(turn) for turn in document]])


def cut(turn):
    questions = (replace(question, prompt=question.prompt[-8:]) for question in turn.questions)
    return replace(turn, questions=tuple(questions))


def check(misses, path, cold_steps):
    """Both list a miss for each layer, warm step and row, in this order."""
    found, replayed = misses.to_dict(), replay(Trace(path), CONFIG)
    assert replayed["cold_steps"] == cold_steps < replayed["steps"]
    # Shares of kept blocks are summed in another order.
    sparsity = pytest.approx(replayed["realized_sparsity"], rel=1e-12)
    assert found == {name: replayed[name] for name in found} | {"realized_sparsity": sparsity}
    assert set(found) == set(replayed) - {"steps", "cold_steps"}
    assert 0.3 < found["realized_sparsity"] < 0.6
    assert 0 < found["mean_miss"] < found["p99_miss"]


def test_a_replay_finds_what_a_run_measured(batch, model, tmp_path):
    with SpinRun(model, CONFIG, [SEQUENCE], capture=True) as run:
        answer(model, batch, run)
    run.capture.save_trace(tmp_path / "trace", SEQUENCE)
    check(run.misses, tmp_path / "trace", cold_steps=len(batch.documents[0]))


class Recorded(SpinRule):
    """Keeps what a trace of steps of equally many rows needs: of the session's own, one row."""

    def __init__(self, *given):
        super().__init__(*given)
        self.scores, self.positions, self.accepted = [], [], []

    def learn(self, step, scores, accepted):
        kept = expand_blocks(self._plans[step.layer].selection.blocks, step.slots, 16)
        dense = torch.where(kept.unsqueeze(1), scores, step.score(step.keys))
        self.scores.append(dense.masked_fill(~step.visible, float("nan"))[0])
        if step.number == 0:
            self.positions.append(step.positions_tokens[0])
            self.accepted.append(accepted)
        super().learn(step, scores, accepted)

    def save_trace(self, path, ratio, top_k, layers):
        width = max(scores.shape[-1] for scores in self.scores)
        padded = [
            torch.nn.functional.pad(scores, (0, width - scores.shape[-1]), value=float("nan"))
            for scores in self.scores
        ]
        write_trace(
            path,
            torch.stack(padded).unflatten(0, (-1, len(layers))),
            torch.stack(self.positions),
            torch.tensor(self.accepted),
            ratio=ratio,
            top_k=top_k,
            layers=layers,
            sequence_id=SEQUENCE,
        )


def test_a_replay_finds_what_drafts_measured(batch, model, tmp_path):
    """Rows that are accepted in turn: none, one, two and all three drafts."""
    cache = copy.deepcopy(batch.cache)
    text = batch.documents[0][0].asked * STEPS
    rule, at = Recorded(model, CONFIG, [SEQUENCE]), 0
    with HookedRun(model, rule) as run:
        for number in range(STEPS):
            rows = torch.tensor([list(text[at : at + ROWS])])
            accepted = number % ROWS
            before = copy.deepcopy(cache)
            forward(model, rows, cache)
            run.commit(accepted)
            cache, at = before, at + 1 + accepted
            with run.again(1 + accepted):
                forward(model, rows[:, : 1 + accepted], cache)
    rule.save_trace(tmp_path / "trace", ratio=4, top_k=16, layers=[1, 3])
    check(run.misses, tmp_path / "trace", cold_steps=1)
