# SPDX-License-Identifier: Apache-2.0
"""The hooked indexer through random lives, against one literal sequence a request id."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hook_batch import HostBatch
from hook_helpers import SMALL, engine_of, hook, witness_of

from spin_trtllm.gpu_step import NO_LANE
from spin_trtllm.hosts.trtllm.cpu_step import CpuStep

LAYERED = {"layer_sparsity": {2: 0.75, 4: 0.2}}
LARGE_PAGES = {"tokens_per_block": 128, "max_seq_len": 2048, "max_batch_size": 3}
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, int]] = [
    ("plain", SMALL, {}, "host", 300),
    ("drafts", SMALL, {"drafts": 3}, "host", 150),
    ("one_draft", SMALL | {"state_dtype": "bf16"}, {"drafts": 1}, "host", 100),
    ("two_drafts_row0", SMALL | {"mask_policy": "row0"}, {"drafts": 2}, "host", 100),
    ("v3.2", SMALL, {"ratio": 1, "tokens_per_block": 8, "max_seq_len": 160}, "host", 100),
    ("phases", SMALL, {"drafts": 1, "phases": True}, "host", 100),
    ("fused", SMALL | {"block_size": 32}, {**LARGE_PAGES, "drafts": 1}, "fused", 40),
    ("layers", SMALL | LAYERED, {"drafts": 1}, "host", 100),
    ("layers_fused", SMALL | LAYERED | {"block_size": 32}, LARGE_PAGES, "fused", 40),
]

LONG = pytest.mark.skipif(
    not os.environ.get("SPIN_LONG_TESTS"), reason="takes a minute; set SPIN_LONG_TESTS=1"
)


def live(case: tuple[str, dict[str, Any], dict[str, Any], str, int], seed: int, steps: int) -> int:
    """Random steps, each checked; returns how many entries really left blocks out."""
    _, config, options, backend, _ = case
    batch = HostBatch(seed, **options)
    hook(config, backend)
    witness = witness_of(batch, config)
    for _ in range(steps):
        step = batch.random_step()
        witness.check(step, engine_of(batch))
    return witness.sparse_entries


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_random_lives_equal_one_literal_sequence_a_request(case: Any) -> None:
    assert live(case, 0, case[-1]) > 20


@LONG
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[:2], ids=[case[0] for case in CASES[:2]])
def test_long_random_lives_equal_one_literal_sequence_a_request(case: Any) -> None:
    assert live(case, 1, 2000) > 1000


@pytest.mark.parametrize("layout", ["expanded", "split"])
def test_layouts_that_give_draft_rows_their_own_tables(layout: str) -> None:
    batch = HostBatch(3, drafts=3)
    if layout == "expanded":
        batch.metadata.use_expanded_buffers_for_mtp = True
    else:
        batch.metadata.dsl_expand_factor = batch.metadata.dsl_atom = 2
    hook(SMALL)
    witness = witness_of(batch, SMALL)
    batch.join(600)
    batch.join(37)
    for t in range(15):
        rows, next_n = list(batch.requests), 1 if t % 5 == 4 else 4
        accepted = {n: batch.rng.randrange(next_n) for n in rows}
        step = batch.step(rows, next_n=next_n, accepted=accepted)
        witness.check(step, engine_of(batch))
    assert witness.sparse_entries > 5


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_without_sparsity_the_outputs_are_those_of_the_dense_host(drafts: int) -> None:
    dense, sparse = HostBatch(7, drafts=drafts), HostBatch(7, drafts=drafts)
    want = [dense.random_step().selected for _ in range(40)]
    hook(SMALL | {"target_sparsity": 0.0})
    for selected in want:
        assert sparse.random_step().selected.equal(selected)


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_layer_without_sparsity_is_the_dense_hosts(
    drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between layers that skip, one to its own target, one to that of all."""
    chosen, top_k = set(), CpuStep.top_k
    monkeypatch.setattr(
        CpuStep, "top_k", lambda step, index, out: chosen.add(index) or top_k(step, index, out)
    )
    own, options = {4: 0.0, 6: 0.8}, {"layers": (2, 4, 6), "drafts": drafts}
    dense, sparse = HostBatch(7, **options), HostBatch(7, **options)
    want = [dense.random_step().selected for _ in range(40)]
    hook(SMALL | {"layer_sparsity": own})
    witness = witness_of(sparse, SMALL | {"layer_sparsity": own})
    for selected in want:
        step = sparse.random_step()
        witness.check(step, engine_of(sparse))
        assert step.selected[1].equal(selected[1])
    assert chosen == {0, 2}  # the middle one's picks are the host's own, order included


def test_a_rank_takes_the_targets_of_its_layers() -> None:
    """Of a pipeline with layers 2 to 9; the counters say what its layers keep on average."""
    own = {2: 0.75, 9: 0.9}
    batch = HostBatch(1)
    counters = hook(SMALL | {"target_sparsity": 0.25, "layer_sparsity": own})
    number = batch.join(606)  # 152 slots in the second step, 19 whole blocks
    for _ in range(2):
        batch.step([number])
    engine, counts = engine_of(batch), counters.snapshot()
    assert engine.config.layer_sparsity == ((2, 0.75),)
    views = [engine.step.layer(index) for index in (0, 1)]
    assert [int(view.block_count[0]) for view in views] == [5, 15]
    assert counts.sparse_rows == 1
    assert counts.kept_slots == sum(int(view.kept_slots[0]) for view in views) // 2


def test_dummies_and_padding_have_no_lane_and_touch_none() -> None:
    batch = HostBatch(11)
    hook(SMALL)
    number = batch.join(300)
    for t in range(6):
        batch.step([*[2**64 - 1 - t % 3] * 2, number, 0])
        engine = engine_of(batch)
        assert engine.lanes.lanes[:4].tolist() == [NO_LANE, NO_LANE, 0, NO_LANE]
        state = engine.step.state
        assert not state.warm[:, 1:].any()
        assert not state.v[:, 1:-1].any()
    assert bool(state.warm[:, 0].all())


def test_two_ranks_agree_bit_for_bit() -> None:
    first, second = HostBatch(13, drafts=2), HostBatch(13, drafts=2)
    hook(SMALL)
    for _ in range(40):
        a, b = first.random_step(), second.random_step()
        assert a.selected.equal(b.selected)
        one, two = engine_of(first).step.state, engine_of(second).step.state
        assert one.v.equal(two.v)
        assert one.d.equal(two.d)
        assert one.warm.equal(two.warm)
