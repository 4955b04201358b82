# SPDX-License-Identifier: Apache-2.0
"""What SPIN does not run on, and what it leaves to the host, step by step and layer by layer."""

from __future__ import annotations

import logging
from typing import Any

import hook_standin
import pytest
import torch
from hook_batch import GRAPH_DUMMY, HostBatch
from hook_helpers import SMALL, engine_of, hook, ready

from spin_trtllm.config import SpinConfig
from spin_trtllm.hosts.trtllm import indexer as hooks
from spin_trtllm.hosts.trtllm import pays as measured
from spin_trtllm.hosts.trtllm.backend import make_engine
from spin_trtllm.hosts.trtllm.pays import pays
from spin_trtllm.hosts.trtllm.settings import HookRefused

CONFIG = SpinConfig.from_dict(SMALL)

# ---- metadata and configurations that SPIN does not run on ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sparse_mla_topk", "Metadata has no sparse_mla_topk"),
        ("compress_ratios", "Metadata has no compress_ratios"),
        ("kv_lens_cuda_2d", "Metadata has no kv_lens_cuda_2d"),
    ],
)
def test_metadata_without_an_attribute_is_refused(change: str, message: str) -> None:
    batch = ready()
    delattr(batch.metadata, change)
    with pytest.raises(HookRefused, match=message):
        make_engine(batch.metadata, CONFIG, "host")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"block_size": 8, "top_k": 16}, "top_k: got 16, the model selects 8"),
        ({"block_size": 8, "query_share": 0.5}, "query_share: got 0.5, allowed: 0"),
        ({"block_size": 8, "state_dtype": "log8"}, "state_dtype: got 'log8', allowed: fp32, bf16"),
        ({"block_size": 8, "reduction": "A0"}, "reduction"),
        ({"block_size": 8, "exploration_policy": "age"}, "exploration_policy"),
    ],
)
def test_a_configuration_that_cannot_run_here_is_refused(config: dict, message: str) -> None:
    with pytest.raises(HookRefused, match=message):
        make_engine(ready().metadata, SpinConfig.from_dict(config), "host")


def test_blocks_smaller_than_a_page_are_refused() -> None:
    with pytest.raises(HookRefused, match="block_size: got 8, allowed: a multiple of 32"):
        make_engine(ready(tokens_per_block=128).metadata, CONFIG, "host")


def test_a_pipeline_stage_without_indexers_is_refused() -> None:
    batch = ready()
    batch.metadata.compress_ratios = [4, 1, 1, 1, 1]
    with pytest.raises(HookRefused, match="no layer of this rank has an indexer"):
        make_engine(batch.metadata, CONFIG, "host")


def test_a_refused_model_runs_dense_says_so_once_and_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dense, batch = HostBatch(5), HostBatch(5)
    want = [dense.random_step().selected for _ in range(10)]
    counters = hook({"block_size": 8, "top_k": 16})
    with caplog.at_level(logging.WARNING):
        assert all(batch.random_step().selected.equal(x) for x in want)
    assert [r.message for r in caplog.records] == [
        "SPIN is off, the indexer runs dense: top_k: got 16, the model selects 8"
    ]
    counts = counters.snapshot()
    assert counts.sparse_rows == counts.cold_rows == 0
    assert set(counts.dense_rows) == {"refused"}


def test_a_draft_models_plain_cache_is_none_of_our_business() -> None:
    batch = HostBatch(0)
    counters = hook(SMALL)
    del batch.manager.index_head_dim
    batch.step([batch.join(100)])
    assert counters.snapshot().steps == 0


# ---- what is delegated, step by step and layer by layer ----


def short(batch: HostBatch) -> None:
    batch.metadata.skip_indexer_for_gen_reqs = True


def ragged(batch: HostBatch) -> None:
    batch.metadata.is_ragged_verify = True


def context_parallel(batch: HostBatch) -> None:
    batch.metadata.enable_helix = True


def beams(batch: HostBatch) -> None:
    batch.metadata.beam_width = 2


def draft_loop(batch: HostBatch) -> None:
    batch.metadata.in_mtp_draft_loop = True


def heuristic(batch: HostBatch) -> None:
    for indexer in batch.indexers:
        indexer._enable_heuristic_topk = True


def other_width(batch: HostBatch) -> None:
    for indexer in batch.indexers:
        indexer.index_topk = indexer.top_k.top_k = 4


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (short, "short_sequences"),
        (ragged, "ragged_drafts"),
        (context_parallel, "context_parallel"),
        (beams, "beam_search"),
        (draft_loop, "draft_loop"),
        (heuristic, "heuristic_top_k"),
        (other_width, "top_k"),
    ],
)
def test_what_is_not_certain_runs_dense_and_is_counted(change: Any, cause: str) -> None:
    dense, batch = HostBatch(3), HostBatch(3)
    for each in (dense, batch):
        each.join(400)
        change(each)
    want = [dense.step(list(dense.requests)).selected for _ in range(3)]
    counters = hook(SMALL)
    assert all(batch.step(list(batch.requests)).selected.equal(x) for x in want)
    counted = counters.snapshot().dense_rows
    assert counted.keys() == {cause}
    assert counted[cause] >= 2  # what only a layer can tell counts from the second step on


def test_v32_with_drafts_runs_dense() -> None:
    batch = HostBatch(0, ratio=1, tokens_per_block=8, max_seq_len=160, drafts=1)
    counters = hook(SMALL)
    batch.step([batch.join(50)], next_n=2)
    assert counters.snapshot().dense_rows == {"draft_layers_with_indexer": 2}


def test_more_sequences_than_lanes_or_one_twice_run_dense() -> None:
    batch = HostBatch(0, max_batch_size=2)
    counters = hook(SMALL)
    one, two = batch.join(50), batch.join(60)
    batch.step([one, two, GRAPH_DUMMY])
    batch.step([one, one])
    assert counters.snapshot().dense_rows == {"too_many_sequences": 3, "repeated_request": 2}


def test_unknown_queries_and_keys_run_dense() -> None:
    batch = HostBatch(0)
    hook(SMALL)
    number = batch.join(400)
    batch.step([number])
    engine, indexer, none = engine_of(batch), batch.indexers[0], torch.empty(0)
    weights = torch.zeros(1, 2)
    for dtype, cause in ((torch.float16, "query_dtype"), (torch.int8, "key_cache_layout")):
        query = torch.zeros(1, 2, 128).to(dtype)
        indexer.sparse_attn_indexer(batch.metadata, weights, query, none, none, weights)
        assert engine.layer_obstacle(batch.metadata) == cause


def test_a_layer_that_drops_out_of_a_step_is_cold_in_the_next_and_the_others_are_not() -> None:
    batch = HostBatch(4)
    hook(SMALL)
    number = batch.join(600)
    for _ in range(3):
        batch.step([number])
    batch.indexers[1]._enable_heuristic_topk = True
    batch.step([number])
    batch.indexers[1]._enable_heuristic_topk = False
    batch.step([number])
    state = engine_of(batch).step.state
    assert state.warm[:, 0].tolist() == [True, False]


def test_a_step_whose_first_layer_ran_dense_is_dense_in_all() -> None:
    dense, batch = HostBatch(4), HostBatch(4)
    numbers = [each.join(600) for each in (dense, batch)]
    want = [dense.step(numbers[:1]).selected for _ in range(4)]
    hook(SMALL)
    batch.step(numbers[1:])
    batch.step(numbers[1:])
    batch.indexers[0]._enable_heuristic_topk = True
    for selected in want[2:]:
        assert batch.step(numbers[1:]).selected.equal(selected)


def test_scores_that_do_not_fit_are_not_learned_from() -> None:
    batch = HostBatch(4)
    hook(SMALL)
    number = batch.join(600)
    batch.step([number])
    engine = engine_of(batch)
    rows = hook_standin.paged_logits

    def doubled(*arguments: Any) -> torch.Tensor:
        return rows(*arguments).double()

    hook_standin.paged_logits = doubled
    try:
        batch.step([number])
    finally:
        hook_standin.paged_logits = rows
    batch.step([number])
    assert not engine.step.state.warm.any()


def test_a_step_too_small_to_gain_is_left_alone_unless_a_backend_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, forced = HostBatch(4), HostBatch(4)
    monkeypatch.setitem(measured.MIN_WORK_SLOTS, "host", 2 * batch.slots)
    counters = hook(SMALL, "auto")
    one, two = batch.join(600), batch.join(400)
    batch.step([one])
    batch.step([one, two])
    counts = counters.snapshot()
    assert counts.dense_rows == {"does_not_pay": 1}
    assert counts.cold_rows + counts.sparse_rows == 2
    hooks.unpatch()
    counters = hook(SMALL, "host")
    forced.step([forced.join(600)])
    assert counters.snapshot().dense_rows == {}


def test_the_fused_kernels_always_pay_and_the_hosts_from_a_size_on() -> None:
    least, long = measured.MIN_WORK_SLOTS["host"], measured.LONG_SLOTS
    assert pays("fused", 1, 1, 1)
    assert pays("host", 1, long, 1)
    assert not pays("host", 1, long - 1, 1)
    assert not pays("host", 8, least // 8 - 1, 1)
    assert pays("host", 8, least // 8, 4)
