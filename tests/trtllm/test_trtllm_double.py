# SPDX-License-Identifier: Apache-2.0
"""The double of TensorRT-LLM itself: what it computes and what it aliases."""

from __future__ import annotations

import importlib.abc
import struct
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from trtllm_double import TREES, install
from trtllm_scheduler import Serving
from trtllm_steps import assert_dense

NO_DSL = {"use_cute_dsl_paged_mqa_logits": False}


@pytest.mark.parametrize("tree", ["new", "old"])
def test_modules_have_the_names_of_their_tree(tree: str) -> None:
    with install(tree) as double:
        indexer = double.module("dsa.indexer").Indexer
        assert indexer.__module__ == f"{TREES[tree][0]}.sparse.dsa.indexer"
        v4 = double.module("deepseek_v4.indexer").DeepseekV4Indexer
        assert v4.sparse_attn_indexer is indexer.sparse_attn_indexer
        manager = double.module("deepseek_v4.cache_manager").DeepseekV4CacheManager
        assert manager.__mro__[1].__module__ == TREES[tree][1]
        other = TREES["old" if tree == "new" else "new"]
        for name in (f"{other[0]}.sparse.dsa.indexer", other[1]):
            with pytest.raises(ModuleNotFoundError):
                importlib.import_module(name)
    assert "tensorrt_llm" not in sys.modules


def test_every_install_has_fresh_classes() -> None:
    with install() as double:
        first = double.module("dsa.indexer").Indexer
        first.sparse_attn_indexer = None
    with install() as double:
        assert double.module("dsa.indexer").Indexer.sparse_attn_indexer is not None


def test_a_finder_in_front_sees_the_import_of_a_lazy_install() -> None:
    seen: list[str] = []

    class Watch(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname, path=None, target=None):
            seen.append(fullname)

    watch = Watch()
    with install(eager=False) as double:
        sys.meta_path.insert(0, watch)
        try:
            double.module("dsa.indexer")
        finally:
            sys.meta_path.remove(watch)
    assert f"{double.sparse}.dsa.indexer" in seen


CASES = {
    "v4": ("new", "split", {"draft_len": 0}),
    "v4-old-tree": ("old", "split", {"draft_len": 1}),
    "v4-drafts": ("new", "split", {"draft_len": 3}),
    "v4-drafts-expanded": ("new", "split", {"draft_len": 2, "config": NO_DSL}),
    "v4-no-overlap": ("new", "split", {"draft_len": 2, "overlap": False}),
    "v4-few-pages": ("new", "split", {"draft_len": 1, "max_pages": 14}),
    "v4-page-256": ("new", "split", {"tokens_per_block": 256}),
    "v32-v2": ("new", "split", {"model": "v32", "draft_len": 1}),
    "v32-v1": ("new", "split", {"model": "v32", "manager": "v1", "config": NO_DSL}),
    "v32-inlined": ("old", "inlined", {"model": "v32", "manager": "v1"}),
}


@pytest.mark.parametrize("case", CASES)
def test_decode_and_prefill_equal_scores_of_the_raw_keys(case: str) -> None:
    tree, body, options = CASES[case]
    steps = 25 if options.get("model") == "v32" else 80
    with install(tree, body) as double:
        serving = Serving(double, seed=7, longest_prompt=400, **options)
        checked = sum(assert_dense(serving, step) for step in serving.run(steps))
    assert checked > 50


def test_every_context_row_follows_the_causal_rule() -> None:
    with install() as double:
        serving = Serving(double, seed=2, longest_prompt=60)
        for step in serving.run(20):
            assert_dense(serving, step, every_context_row=True)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_cute_dsl_logits_select_the_same_slots(next_n: int) -> None:
    with install(sm_version=100, cutlass_dsl=True) as double:
        serving = Serving(double, seed=5, draft_len=next_n - 1, longest_prompt=300)
        assert serving.indexers[0].use_cute_dsl_paged_mqa_logits
        for step in serving.run(25):
            assert_dense(serving, step)
        names = {name for name, _ in double.config.calls}
    assert "cute_paged_logits" in names
    assert "paged_logits" not in names


def test_fp4_keys_are_scored() -> None:
    with install() as double:
        serving = Serving(double, seed=5, draft_len=1, indexer_k_dtype="fp4", longest_prompt=300)
        agree = total = 0
        for step in serving.run(40):
            for row, sequence, j in step.rows():
                visible = serving.visible(sequence, j)
                if sequence.is_context or sequence.is_dummy or visible <= serving.top_k:
                    continue
                best = serving.dense_scores(0, sequence, j).topk(serving.top_k).indices
                agree += len(set(best.tolist()) & set(step.outputs[0][row].tolist()))
                total += serving.top_k
        assert serving.kv.get_indexer_k_cache_buffers(0).shape[3] == 68
    assert agree / total > 0.7  # fp4 rounds, so not all of them


def test_planar_page_by_hand() -> None:
    """132 * 32 bytes: all keys first, then all scales. Bytes made without the double's writer."""
    page = bytearray(132 * 32)
    for slot, (byte, scale) in {0: (0x38, 1.0), 1: (0x40, 0.5), 31: (0xB8, 4.0)}.items():
        page[slot * 128 : slot * 128 + 128] = bytes([byte]) * 128
        page[32 * 128 + slot * 4 : 32 * 128 + slot * 4 + 4] = struct.pack("<f", scale)
    with install() as double:
        view = torch.frombuffer(page, dtype=torch.uint8).view(1, 32, 1, 132)
        keys = double.module("tensorrt_llm.deep_gemm").decode_keys(view, False)[0]
        assert [keys[s].unique().tolist() for s in (0, 1, 31)] == [[1.0], [1.0], [-4.0]]
        assert keys[2].abs().max() == 0
        raw = torch.stack([torch.full((128,), v) for v in (448.0, 224.0)])
        cache = torch.zeros(3, 32, 1, 132, dtype=torch.uint8)
        double.module("tensorrt_llm._double_quant").write_slots(cache, [2, 2], [0, 31], raw, False)
        flat = cache.view(-1)
        base = 2 * 132 * 32
        assert flat[base].item() == flat[base + 31 * 128 + 127].item() == 0x7E  # 448
        assert bytes(flat[base + 4096 : base + 4100].tolist()) == struct.pack("<f", 1.0)
        assert bytes(flat[base + 4220 : base + 4224].tolist()) == struct.pack("<f", 0.5)


def test_visible_columns_of_draft_rows() -> None:
    with install() as double:
        visible = double.module("tensorrt_llm._double_ops").visible
    assert [visible(p + 1, 1, 0, 4) for p in range(10)] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert [visible(9, 4, j, 4) for j in range(4)] == [1, 1, 2, 2]
    assert [visible(1, 4, j, 4) for j in range(4)] == [0, 0, 0, 0]


def _manager(double, pages: int = 12, batch: int = 3, reuse: bool = True):
    args = double.module("tensorrt_llm.llmapi.llm_args")
    return double.module("deepseek_v4.cache_manager").DeepseekV4CacheManager(
        args.KvCacheConfig("fp8_ds_mla", reuse, max_pages=pages),
        num_layers=3,
        tokens_per_block=128,
        max_seq_len=1024,
        max_batch_size=batch,
        sparse_attn_config=args.DeepSeekV4SparseAttentionConfig(
            compress_ratios=[4, 4, 1], indexer_k_dtype="fp8"
        ),
    )


def _request(double, request_id: int, tokens: list[int]):
    return double.module("tensorrt_llm._torch.pyexecutor.llm_request").LlmRequest(
        request_id, list(tokens)
    )


def test_logits_past_the_length_are_poisoned() -> None:
    with install() as double:
        gemm = double.module("tensorrt_llm.deep_gemm")
        q = torch.zeros(2, 1, 2, 128).to(torch.float8_e4m3fn)
        cache = torch.zeros(4, 32, 1, 132, dtype=torch.uint8)
        lens = torch.tensor([[33], [0]], dtype=torch.int32)
        table = torch.tensor([[0, 3], [0, 0]], dtype=torch.int32)
        schedule = gemm.get_paged_mqa_logits_metadata(lens, 64, 4)
        logits = gemm.fp8_paged_mqa_logits(q, cache, torch.ones(2, 2), lens, table, schedule, 100)
        assert tuple(logits.shape) == (2, 100)
        assert (logits[0, :33] == 0).all()
        assert ((logits[0, 33:].abs() > 1e29) | logits[0, 33:].isnan()).all()
        assert ((logits[1].abs() > 1e29) | logits[1].isnan()).all()
        wide = torch.ops.trtllm.cute_dsl_fp8_paged_mqa_logits(
            q, cache, torch.ones(2, 2), lens[:, 0].contiguous(), table, schedule, 100
        )
        assert wide.stride() == (256, 1)
        for rows in (lens[:1], lens.expand(2, 3).contiguous()):
            wrong = gemm.get_paged_mqa_logits_metadata(rows, 64, 4)
            with pytest.raises(AssertionError, match="schedule"):
                gemm.fp8_paged_mqa_logits(q, cache, torch.ones(2, 2), lens, table, wrong, 100)


def test_metadata_objects_alias_by_buffer_name() -> None:
    with install() as double:
        serving = Serving(double, draft_len=1)
        big, small = (serving.runner.metadata_for(n) for n in (6, 2))
        for name in ("kv_lens_cuda", "kv_lens_cuda_2d", "indexer_k_cache_block_offsets"):
            assert getattr(big, name).data_ptr() == getattr(small, name).data_ptr()
            eager = getattr(serving.eager_metadata, name)
            assert eager.data_ptr() != getattr(big, name).data_ptr()
        assert big is not small
        assert serving.runner.metadata_for(6) is big
        outputs = [
            big.get_empty(big.cuda_graph_buffers, (6, 16), torch.int32, "indexer_topk_out", True)
            for _ in range(2)
        ]
        assert outputs[0].data_ptr() == outputs[1].data_ptr()
        free = serving.eager_metadata
        fresh = [free.get_empty(None, (6, 16), torch.int32, "x", False) for _ in range(2)]
        assert fresh[0].data_ptr() != fresh[1].data_ptr()
        assert serving.indexers[0].index_topk == 16


def test_index_mapper_recycles_and_shares_its_copy_buffer() -> None:
    with install() as double:
        kv = _manager(double)
        requests = [_request(double, i, [5] * 200) for i in (7, 8, 9)]
        for request in requests:
            assert kv.prepare_context(request)
        first = kv.index_mapper.get_copy_index([9, 7], 0, 1)
        assert first.tolist() == [2, 0]
        kv.index_mapper.get_copy_index([8, 8], 0, 1)
        assert first.tolist() == [1, 1]  # the view was overwritten
        kv.free_resources(requests[0])
        with pytest.raises(RuntimeError, match="not found"):
            kv.index_mapper.get_index(7)
        kv.release_index_slot(8)
        assert 8 in kv.kv_cache_map
        late = _request(double, 10, [6] * 10)
        assert kv.prepare_context(late)
        assert kv.index_mapper.get_index(10) == 0
        kv.free_resources(requests[1])
        assert kv.index_mapper.size() == 2


def test_suspend_keeps_the_index_and_changes_the_pages() -> None:
    with install() as double:
        kv = _manager(double, reuse=False)
        request = _request(double, 7, [5] * 200)
        assert kv.prepare_context(request)
        assert kv.resize_context(request, 200)
        cache = kv.kv_cache_map[7]
        before, index = list(cache.pages), kv.index_mapper.get_index(7)
        pool = kv.get_indexer_k_cache_buffers(1)
        pool[before[1] * kv.impl.scale, 3] = 42
        row = kv.host_kv_cache_block_offsets[0, index, 0]
        assert row[:3].tolist() == [*before, -1]
        kv.suspend_request(request)
        assert row[:2].tolist() == before  # stale: nothing clears the row
        assert (pool[before[1] * kv.impl.scale] == 0xFF).all()
        assert kv.resume_request(request)
        assert kv.index_mapper.get_index(7) == index
        assert set(cache.pages).isdisjoint(before)
        assert (pool[cache.pages[1] * kv.impl.scale, 3] == 42).all()
        assert row[:2].tolist() == cache.pages


def test_a_prefix_hit_shares_pages_and_needs_no_forward() -> None:
    with install() as double:
        kv = _manager(double)
        first, second = (_request(double, i, [*range(300), i]) for i in (7, 8))
        assert kv.prepare_context(first)
        assert kv.resize_context(first, 301)
        first.context_current_position = 301
        kv.update_context_resources(SimpleNamespace(context_requests=[first]))
        assert kv.prepare_context(second)
        assert second.context_current_position == 256
        assert kv.kv_cache_map[8].pages == kv.kv_cache_map[7].pages[:2]


def test_pages_of_one_id_lie_at_the_same_place_in_every_layer() -> None:
    with install() as double:
        kv = _manager(double)
        views = [kv.get_indexer_k_cache_buffers(layer) for layer in (0, 1)]
        assert views[1].data_ptr() - views[0].data_ptr() == 132 * 32
        assert [v.shape[0] for v in views] == [24, 23]
        views[0][2 * 5] = 1
        views[1][2 * 5] = 2
        assert (views[0][2 * 5 + 1] == 2).all()
        with pytest.raises(KeyError):
            kv.get_indexer_k_cache_buffers(2)


def test_padding_repeats_one_dummy() -> None:
    with install() as double:
        serving = Serving(double, seed=1, draft_len=2, batch_sizes=(1, 4), transfers=False)
        padded = [s for s in serving.run(60, warm_up=False) if any(q.is_dummy for q in s.sequences)]
        ids = Counter(q.request_id for s in padded for q in s.sequences if q.is_dummy)
        assert ids.keys() <= {0, (1 << 64) - 1 - 2}
        assert any(len([q for q in s.sequences if q.is_dummy]) > 1 for s in padded)
        assert all(q.kv_len == 5 for s in padded for q in s.sequences if q.is_dummy)


def test_warm_up_uses_small_dummy_ids_and_frees_them() -> None:
    with install() as double:
        serving = Serving(double, batch_sizes=(1, 4))
        seen = [step.metadata.request_ids for step in serving.warm_up()]
        assert seen == [[0, 1, 2, 3]] * 2 + [[0]] * 2
        assert serving.kv.index_mapper.size() == 0
        assert serving.next_id == 4


def test_order_of_a_decode_step() -> None:
    with install() as double:
        serving = Serving(double, seed=1, draft_len=1, layers=2, batch_sizes=(2,))
        next(serving.warm_up())
        names = [name for name, _ in double.config.calls]
    # prepare: schedules for next_n 1 and 2; on_update_kv_lens: again; then one layer
    assert names == ["schedule"] * 4 + ["paged_logits", "topk_decode"]


@pytest.mark.parametrize(("config", "expanded"), [(NO_DSL, True), ({}, False)])
def test_expanded_buffers_follow_the_parameter_not_the_hardware(config, expanded) -> None:
    with install(sm_version=90) as double:
        serving = Serving(double, draft_len=2, config=config, batch_sizes=(2,))
        step = next(serving.warm_up())
        assert step.metadata.use_expanded_buffers_for_mtp is expanded
        batch = {facts["batch"] for name, facts in double.config.calls if name == "paged_logits"}
        assert batch == {6 if expanded else 2}


def test_early_exits_of_the_decode_step() -> None:
    with install() as double:
        share = {"index_share_for_mtp_iteration": True}
        serving = Serving(double, seed=1, model="v32", config=share | {"index_topk": 64})
        step = next(serving.warm_up())
        assert step.metadata.skip_indexer_for_gen_reqs  # lengths of 1: dense identity rows
        assert step.outputs[0][0].tolist() == [0] + [-1] * 63
        assert not [name for name, _ in double.config.calls if name == "paged_logits"]
        metadata = step.metadata
        metadata.skip_indexer_for_gen_reqs = False
        metadata.set_in_mtp_draft_loop(True)
        metadata.set_skip_topk(True)
        metadata.shared_topk_indices[:6] = 77
        indexer = serving.indexers[0]
        q = torch.zeros(6, 2, 128).to(torch.float8_e4m3fn)
        out = indexer.sparse_attn_indexer(
            metadata, torch.zeros(6, 1), q, None, None, torch.zeros(6, 2), is_generation=True
        )
        assert (out == 77).all()
        with pytest.raises(AssertionError, match="phase-specific"):
            indexer.sparse_attn_indexer(
                metadata, torch.zeros(5, 1), q, None, None, torch.zeros(6, 2), is_generation=True
            )


def test_v1_manager_has_no_index_and_rows_follow_the_batch() -> None:
    with install() as double:
        serving = Serving(double, seed=3, model="v32", manager="v1", longest_prompt=60)
        assert not hasattr(serving.kv, "index_mapper")
        assert not hasattr(serving.kv, "kv_cache_map")
        assert any(len(step.generations) > 1 for step in serving.run(30))


def test_the_loop_is_repeatable_and_reaches_every_event() -> None:
    def trace() -> tuple[list, Counter]:
        with install() as double:
            serving = Serving(double, seed=11, draft_len=2, max_pages=20)
            steps, events = [], Counter()
            for step in serving.run(400):
                steps.append([(q.request_id, q.position, q.accepted) for q in step.sequences])
                for q in step.sequences:
                    events.update([*q.events, f"accept{q.accepted}", f"dummy{q.is_dummy}"])
                mixed = step.metadata.num_contexts > 0 and step.generations
                events.update(mixed=bool(mixed), freed=len(step.freed), graph=step.graph)
            return steps, events

    first, events = trace()
    assert first == trace()[0]
    wanted = "new chunk prefix_hit resumed restarted imported accept0 accept1 accept2 mixed freed"
    assert not [name for name in [*wanted.split(), "graph", "dummyTrue"] if events[name] < 3]
