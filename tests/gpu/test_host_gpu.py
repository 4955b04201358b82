# SPDX-License-Identifier: Apache-2.0
"""The embedded host with its model on a GPU: the promises of `test_host_transformers.py` there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers")

from host_sessions import DENSE, PROMPT_TOKENS, SPARSE, run
from tiny_models import random_ids, tiny_model

from spin_trtllm.hosts.transformers import enable
from spin_trtllm.replay.run import replay
from spin_trtllm.replay.trace import Trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model().cuda()


def test_sparsity_0_changes_no_bit(model: torch.nn.Module) -> None:
    prompt, tokens = random_ids(PROMPT_TOKENS, rows=2).cuda(), random_ids(20, rows=2, seed=1).cuda()
    untouched = run(model, prompt, tokens)
    with enable(model, DENSE, strict=True) as session:
        assert torch.equal(run(model, prompt, tokens), untouched)
    assert session.stats.steps == 40
    assert not session.stats.fallbacks


def test_a_capture_replays_block_for_block(model: torch.nn.Module, tmp_path: Path) -> None:
    """Captured on the GPU, replayed on the CPU: every decision and every bit of the averages."""
    with enable(model, SPARSE, capture=True, strict=True) as session:
        run(model, random_ids(PROMPT_TOKENS).cuda(), random_ids(20, seed=2).cuda())
    assert session.capture is not None
    session.capture.save_trace(tmp_path / "trace")
    session.capture.save_dump(tmp_path / "host")
    replay(Trace(tmp_path / "trace"), SPARSE, dump=tmp_path / "replayed")
    host, replayed = load_file(tmp_path / "host"), load_file(tmp_path / "replayed")
    assert session.stats.sparse_steps > 0
    assert host.keys() == replayed.keys()
    for name, tensor in host.items():
        assert torch.equal(tensor, replayed[name]), name
