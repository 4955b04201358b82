# SPDX-License-Identifier: Apache-2.0
"""Where the hooks on the indexer go, what they refuse, and what they leave to the host."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import hook_standin
import pytest
import torch
from hook_batch import GRAPH_DUMMY, HostBatch
from hook_witness import Witness
from test_trtllm_hook_schedule import SMALL, engine_of, hook, witness_of

from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.trtllm import indexer as hooks
from spin_trtllm.hosts.trtllm.backend import make_engine, read_backend
from spin_trtllm.hosts.trtllm.counters import Counters
from spin_trtllm.hosts.trtllm.sequences import is_dummy
from spin_trtllm.hosts.trtllm.settings import HookRefused

CONFIG = SpinConfig.from_dict(SMALL)


@pytest.fixture(autouse=True)
def _unhooked() -> Iterator[None]:
    yield
    hooks.unpatch()


def module_with(indexer: type | None, top_k: Any = hook_standin.TopK) -> ModuleType:
    """A module as another version of the host might define it."""
    changed = ModuleType("changed.dsa.indexer")
    for name, value in (("Indexer", indexer), ("TopK", top_k)):
        if value is not None:
            setattr(changed, name, value)
    return changed


# ---- putting the hooks there, and taking them away ----


def test_hooking_names_what_it_did_and_unhooking_restores_it() -> None:
    before = dict(vars(hook_standin.Indexer))
    names = hooks.patch(hook_standin.module(), CONFIG, "host", Counters())
    assert names == ["Indexer.sparse_attn_indexer", "Indexer.prepare"]
    assert hooks.patch(hook_standin.module(), CONFIG, "host", Counters()) == []
    assert dict(vars(hook_standin.Indexer)) != before
    hooks.unpatch()
    assert dict(vars(hook_standin.Indexer)) == before


def test_inherited_methods_are_given_back_to_the_parent() -> None:
    class Indexer(hook_standin.Indexer):
        pass

    hooks.patch(module_with(Indexer), CONFIG, "host", Counters())
    assert "prepare" in vars(Indexer)
    hooks.unpatch()
    assert not {"prepare", "sparse_attn_indexer"} & set(vars(Indexer))


class NoPrepare(torch.nn.Module):
    sparse_attn_indexer = hook_standin.Indexer.sparse_attn_indexer
    prepare_scheduler_metadata = staticmethod(hook_standin.Indexer.prepare_scheduler_metadata)


class OtherNames(hook_standin.Indexer):
    def sparse_attn_indexer(self, metadata: Any, hidden_states: Any, query: Any) -> Any:
        raise NotImplementedError


class NeedsMore(hook_standin.Indexer):
    def sparse_attn_indexer(  # type: ignore[override]
        self,
        metadata: Any,
        hidden_states: Any,
        q_fp8: Any,
        k_fp8: Any,
        k_scale: Any,
        weights: Any,
        phase: Any,
        q_scale: Any = None,
        is_generation: Any = None,
    ) -> Any:
        raise NotImplementedError


class PrepareNeedsMore(hook_standin.Indexer):
    @staticmethod
    def prepare(metadata: Any, plan: Any) -> None:  # type: ignore[override]
        raise NotImplementedError


class OtherTopK(torch.nn.Module):
    def forward(self, values: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (module_with(None), "has no class Indexer"),
        (module_with(NoPrepare), "NoPrepare.prepare: not there"),
        (module_with(OtherNames), "takes no q_fp8, k_fp8"),
        (module_with(NeedsMore), "needs phase, which the hooks do not know"),
        (module_with(PrepareNeedsMore), "needs plan"),
        (module_with(hook_standin.Indexer, None), "TopK.forward: not there"),
        (module_with(hook_standin.Indexer, OtherTopK), "OtherTopK.forward: takes no scores"),
    ],
)
def test_a_changed_host_is_refused_and_left_alone(module: ModuleType, message: str) -> None:
    owner = getattr(module, "Indexer", None)
    before = dict(vars(owner)) if owner else {}
    with pytest.raises(HookRefused, match=message):
        hooks.patch(module, CONFIG, "host", Counters())
    assert (dict(vars(owner)) if owner else {}) == before


def test_further_arguments_with_a_default_are_handed_through() -> None:
    seen = []

    class Indexer(hook_standin.Indexer):
        def sparse_attn_indexer(  # type: ignore[override]
            self,
            metadata: Any,
            hidden_states: Any,
            q_fp8: Any,
            k_fp8: Any,
            k_scale: Any,
            weights: Any,
            q_scale: Any = None,
            is_generation: Any = None,
            tier: int = 0,
        ) -> Any:
            seen.append(tier)
            return hook_standin.Indexer.sparse_attn_indexer(
                self, metadata, hidden_states, q_fp8, k_fp8, k_scale, weights, None, is_generation
            )

    hooks.patch(module_with(Indexer), CONFIG, "host", Counters())
    none = torch.empty(0)
    batch = HostBatch(0)
    batch.step([batch.join(5)])
    indexer = Indexer(2, 8, 4)
    query = torch.zeros(1, 2, 128).to(torch.float8_e4m3fn)
    weights = torch.zeros(1, 2)
    indexer.sparse_attn_indexer(batch.metadata, weights, query, none, none, weights, tier=3)
    assert seen == [3]


def test_the_backend_comes_from_the_environment() -> None:
    assert read_backend({}) == "auto"
    assert read_backend({"TLLM_SPIN_BACKEND": "fused"}) == "fused"
    with pytest.raises(SpinError, match="TLLM_SPIN_BACKEND: got 'fast', allowed: auto, host"):
        read_backend({"TLLM_SPIN_BACKEND": "fast"})


# ---- metadata and configurations that SPIN does not run on ----


def ready(**options: Any) -> HostBatch:
    """A batch that has taken a step."""
    batch = HostBatch(0, **options)
    batch.step([batch.join(50)])
    return batch


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


@pytest.mark.parametrize("where", ["prepare", "layer"])
def test_a_failure_of_ours_leaves_the_host_dense_and_says_where(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dense, batch = HostBatch(5), HostBatch(5)
    for each in (dense, batch):
        each.join(400)
    want = [dense.step(list(dense.requests)).selected for _ in range(4)]
    counters = hook(SMALL)
    batch.step(list(batch.requests))

    def fail(*_: Any) -> None:
        raise RuntimeError("unforeseen")

    name = {"prepare": "prepare", "layer": "begin"}[where]
    monkeypatch.setattr(engine_of(batch), name, fail)
    assert all(batch.step(list(batch.requests)).selected.equal(x) for x in want[1:])
    assert [r.message for r in caplog.records if r.levelno >= logging.ERROR] == [
        "SPIN is off, the indexer runs dense: RuntimeError: unforeseen"
    ]
    assert counters.snapshot().dense_rows["failed"] >= 2


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
        assert engine.layer_obstacle == cause


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
    state = engine_of(batch).lanes.state
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
    assert not engine.lanes.state.warm.any()


# ---- whose state is it ----


def checked(batch: HostBatch) -> tuple[Any, Witness]:
    """A function that runs steps under the witness, and the witness."""
    witness = witness_of(batch, SMALL)

    def step(rows: list[int], **options: Any) -> Any:
        done = batch.step(rows, **options)
        witness.check(done, engine_of(batch))
        return done

    return step, witness


def kept(batch: HostBatch, row: int = 0) -> float:
    """Share of a row's blocks that the last step kept in the first layer."""
    view = engine_of(batch).step.layer(0)
    return int(view.block_count[row]) / -(-int(view.visible_slots[row]) // 8)


def test_a_recycled_lane_is_cold() -> None:
    batch = HostBatch(1, max_batch_size=1)
    hook(SMALL)
    step, _ = checked(batch)
    first = batch.join(600)
    for _ in range(4):
        step([first])
    assert kept(batch) < 0.6
    batch.finish(first)
    second = batch.join(604)  # goes on exactly where the other stopped
    step([second])
    assert kept(batch) == 1
    assert engine_of(batch).lanes.state._lane_of == {second: 0}


def test_a_sequence_whose_prefill_was_elsewhere_or_cached_starts_cold() -> None:
    batch = HostBatch(1)
    hook(SMALL)
    step, _ = checked(batch)
    old, new = batch.join(500), batch.join(550)
    step([old])
    step([old])
    step([old, new])
    assert kept(batch, 0) < 0.6
    assert kept(batch, 1) == 1


def test_a_request_that_prefills_again_is_cold_even_if_it_seems_to_go_on() -> None:
    batch = HostBatch(1)
    hook(SMALL)
    step, _ = checked(batch)
    number = batch.join(500)
    for _ in range(3):
        step([number])
    batch.requests[number].tokens -= 2
    step([GRAPH_DUMMY], contexts=[number])  # recomputes its last tokens
    step([number])
    assert kept(batch) == 1


def test_a_suspended_sequence_comes_back_cold_on_other_pages_and_others_stay_warm() -> None:
    batch = HostBatch(1)
    hook(SMALL)
    step, _ = checked(batch)
    waits, goes = batch.join(500), batch.join(550)
    for _ in range(3):
        step([waits, goes])
    step([goes])
    batch.move(waits)
    step([goes, waits])
    assert kept(batch, 0) < 0.6
    assert kept(batch, 1) == 1
    step([waits, goes])
    assert kept(batch, 0) < 0.6


def test_a_step_with_prefills_keeps_the_decoding_rows_warm() -> None:
    batch = HostBatch(1)
    hook(SMALL)
    step, _ = checked(batch)
    number = batch.join(500)
    step([number])
    step([number])
    step([number], contexts=[batch.join(20)])
    assert kept(batch) < 0.6


def test_metadata_objects_of_one_manager_share_lanes() -> None:
    batch = HostBatch(1)
    hook(SMALL)
    step, _ = checked(batch)
    number = batch.join(500)
    other = hook_standin.Metadata(
        batch.manager, ratio=4, top_k=8, drafts=0, buffers=batch.metadata.cuda_graph_buffers
    )
    for _ in range(3):
        step([number])
        batch.metadata, other = other, batch.metadata
    step([number])
    assert kept(batch) < 0.6


@pytest.mark.parametrize(
    ("request_id", "dummy"),
    [(0, True), (1, False), (2**63, False), (2**64 - 1, True), (2**64 - 1 - 2**20, True)],
)
def test_dummies_are_told_by_their_ids(request_id: int, dummy: bool) -> None:
    assert is_dummy(request_id) is dummy


def test_ids_beyond_63_bits_are_sequences_like_any() -> None:
    batch = HostBatch(1)
    hook(SMALL)
    step, _ = checked(batch)
    number = batch.join(500, 2**63 + 5)
    for _ in range(3):
        step([number])
    assert kept(batch) < 0.6


# ---- figures ----


def test_counters_tell_sparse_from_cold_rows_and_the_share_of_slots() -> None:
    batch = HostBatch(1)
    counters = hook(SMALL)
    number = batch.join(600)
    for _ in range(3):
        batch.step([number, GRAPH_DUMMY])
    counts = counters.snapshot()
    assert (counts.steps, counts.sparse_rows, counts.cold_rows) == (3, 2, 1)
    view = engine_of(batch).step.layer(0)
    assert counts.kept_slots % int(view.kept_slots[0]) <= 8
    assert counts.realized_sparsity == pytest.approx(0.6, abs=0.05)
    assert counts.state_bytes == sum(engine_of(batch).bytes)


def test_memory_is_given_back_with_the_manager() -> None:
    counters = hook(SMALL)
    batch = HostBatch(1)
    batch.step([batch.join(50)])
    assert counters.snapshot().state_bytes > 0
    batch.manager = batch.metadata.kv_cache_manager = SimpleNamespace()  # type: ignore[assignment]
    assert counters.snapshot().state_bytes == 0
