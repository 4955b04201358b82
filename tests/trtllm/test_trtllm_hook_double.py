# SPDX-License-Identifier: Apache-2.0
"""The hooks on the double of TensorRT-LLM, under its whole scheduler.

The double's scores are floats, so each step's own are read back from where the hook put them for
the next step, compared with scores of raw keys, and given to the model.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import trtllm_double
from hook_batch import IDLE_DUMMY, Step
from hook_witness import Witness, engine_behind
from trtllm_scheduler import Serving

from spin_trtllm.config import SpinConfig
from spin_trtllm.hosts.trtllm import indexer as hooks
from spin_trtllm.hosts.trtllm.backend import DecodeEngine
from spin_trtllm.hosts.trtllm.counters import Counters
from spin_trtllm.hosts.trtllm.cpu_step import CpuStep

LONG = bool(os.environ.get("SPIN_LONG_TESTS"))  # the longest schedule takes 40 s then, or else 12

CONFIG: dict[str, Any] = {
    "block_size": 32,
    "target_sparsity": 0.6,
    "exploration": 0.2,
    "seed": 5,
}
SMALL_V32 = {"model": "v32", "layers": 2, "longest_prompt": 150, "max_seq_len": 320}
# name, settings of the double, arguments of Serving, backend, steps
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, int]] = [
    ("v4", {}, {}, "host", 60),
    ("v4_two_drafts", {}, {"draft_len": 2}, "host", 2000 if LONG else 600),
    ("v4_old_tree", {"tree": "old", "sm_version": 100}, {"tokens_per_block": 256}, "host", 60),
    ("v4_expanded", {}, {"draft_len": 3}, "host", 80),
    ("v4_one_draft", {}, {"draft_len": 1}, "host", 60),
    (
        "v4_dsl_fp4",
        {"sm_version": 100, "cutlass_dsl": True},
        {
            "draft_len": 3,
            "tokens_per_block": 256,
            "indexer_k_dtype": "fp4",
            "config": {"use_cute_dsl_paged_mqa_logits": True},
        },
        "host",
        60,
    ),
    ("v4_fused", {}, {"draft_len": 1}, "fused", 60),
    ("v32_v1", {}, SMALL_V32 | {"manager": "v1"}, "host", 60),
    ("v32_v2", {}, SMALL_V32 | {"manager": "v2"}, "host", 60),
]


def scores_of(engine: DecodeEngine, serving: Serving, step: Any) -> np.ndarray:
    """What the step scored, fp32 `[layers, G, rows, slots]`, NaN elsewhere; checked by the raw
    keys of one row of each layer."""
    assert isinstance(engine.step, CpuStep)
    found = torch.stack([engine.step._expand(n) for n in range(len(serving.layers))])
    if serving.kv.use_fp4:
        return found.numpy()
    for n, layer in enumerate(serving.layers):
        g = step.index % len(step.generations)
        if step.generations[g].is_dummy:
            continue
        want = serving.dense_scores(layer, step.generations[g], 0).float()
        got = found[n, g, 0, : len(want)]
        scored = ~got.isnan()
        torch.testing.assert_close(got[scored], want[scored], rtol=1e-4, atol=1e-4)
    return found.numpy()


def as_step(serving: Serving, engine: DecodeEngine, step: Any) -> Step:
    """A step of the double as the witness takes it."""
    generations = step.generations
    next_n = len(generations[0].tokens)
    first = step.metadata.num_ctx_tokens
    rows = [step.outputs[layer][first:] for layer in serving.layers]
    return Step(
        rows=[IDLE_DUMMY if s.is_dummy else s.request_id for s in generations],
        starts=[s.position for s in generations],
        next_n=next_n,
        contexts=[s.request_id for s in step.sequences if s.is_context],
        scores=scores_of(engine, serving, step),
        selected=torch.stack(rows).unflatten(1, (len(generations), next_n)),
    )


def serve(case: tuple[str, dict[str, Any], dict[str, Any], str, int], seed: int) -> Counters:
    """A run of the scheduler, each step checked; short ones are probed, which changes nothing."""
    _, settings, arguments, backend, steps = case
    counters = Counters()
    with trtllm_double.install(**settings) as double:
        serving = Serving(double, seed=seed, **arguments)
        module = double.module("dsa.indexer")
        config = CONFIG | {"block_size": max(32, serving.kv.tokens_per_block // serving.ratio)}
        probe_every = 5 if steps < 100 else 0
        spin = SpinConfig.from_dict(config)
        hooks.patch(module, spin, backend, counters, probe_every=probe_every)
        witness: Witness | None = None
        for step in serving.run(steps):
            engine = engine_behind(module.Indexer, step.metadata)
            shape = engine.shape
            witness = witness or Witness(
                shape.layers, shape.ratio, shape.top_k, shape.slots, shape.sequences, config
            )
            if engine.obstacle is None:
                witness.check(as_step(serving, engine, step), engine)
            else:
                assert step.metadata.skip_indexer_for_gen_reqs or not step.generations
                witness.forget(s.request_id for s in step.sequences if s.is_context)
        assert witness is not None
        assert witness.sparse_entries > 20
        hooks.unpatch()
    return counters


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_random_schedule_equals_one_literal_sequence_a_request(case: Any) -> None:
    counts = serve(case, 0).snapshot()
    assert counts.sparse_rows > counts.cold_rows > 0
    assert counts.dense_rows.keys() <= {"short_sequences", "warm_up"}
    assert (counts.probed_slots > 0) == (case[-1] < 100)
    assert counts.missed_slots <= counts.probed_slots


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_first_step_without_decode_rows_makes_the_engine(case: Any) -> None:
    """Such is the profiling forward, before which nothing of a decode step is known."""
    _, settings, arguments, backend, _ = case
    with trtllm_double.install(**settings) as double:
        serving = Serving(double, seed=0, **arguments)
        module, pages = double.module("dsa.indexer"), serving.kv.tokens_per_block // serving.ratio
        config = CONFIG | {"block_size": max(32, pages)}
        hooks.patch(module, SpinConfig.from_dict(config), backend, Counters())
        step = next(serving.run(1, warm_up=False))
        assert not step.generations
        assert engine_behind(module.Indexer, step.metadata).obstacle == "prefill"
        hooks.unpatch()


@pytest.mark.parametrize("arguments", [{}, {"draft_len": 2}, SMALL_V32])
def test_without_sparsity_the_double_answers_as_if_it_were_not_hooked(arguments: dict) -> None:
    answers: list[list[torch.Tensor]] = []
    for hooked in (False, True):
        with trtllm_double.install() as double:
            serving = Serving(double, seed=3, **arguments)
            if hooked:
                config = SpinConfig.from_dict(CONFIG | {"target_sparsity": 0.0})
                hooks.patch(double.module("dsa.indexer"), config, "host", Counters())
            answers.append([x for step in serving.run(40) for x in step.outputs.values()])
            hooks.unpatch()
    assert len(answers[0]) == len(answers[1])
    assert all(a.equal(b) for a, b in zip(*answers, strict=True))
