# SPDX-License-Identifier: Apache-2.0
"""On trained weights, methods stand in the order that the full study finds; not how far apart."""

import pytest

from benchmarks.study.decoding import answer, read_documents
from benchmarks.study.documents import documents_of
from benchmarks.study.methods import METHODS
from spin_trtllm import tiny
from spin_trtllm.demo import license_text
from spin_trtllm.hosts.transformers import load_model


@pytest.fixture(scope="module", params=["checkpoint", "checkpoint-seed-1"])
def nats(request):
    """Nats an answer by method, of three questions about 1,536 bytes."""
    model, _ = load_model(tiny.checkpoint_path().with_name(request.param), device="cpu")
    sizes = {"documents": 1, "context_bytes": 1_536, "queries": 3}
    batch = read_documents(model, list(documents_of("recall", filler=license_text(), **sizes)))
    found = {}
    for name, setting in (("dense", 0), ("spin", 0.4), ("streaming", 0.6)):
        with METHODS[name].on(model, [0], setting) as run:
            (answers,) = answer(model, batch, run)
        assert len(answers) == 3
        found[name] = sum(one.nats for one in answers) / 3
    return found


@pytest.mark.slow
def test_dense_answers(nats):
    assert nats["dense"] < 0.1


@pytest.mark.slow
def test_recent_blocks_alone_do_not_hold_the_answers(nats):
    assert nats["streaming"] > 2.0
    assert nats["spin"] < 0.5 * nats["streaming"]
