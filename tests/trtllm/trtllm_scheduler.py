# SPDX-License-Identifier: Apache-2.0
"""A randomised serving loop over the double. Seeded: the same arguments give the same run.

    for step in Serving(double, seed=3, draft_len=2).run(200): ...

Every step has run prepare(), the device correction of stale lengths, on_update_kv_lens() and one
indexer forward per layer before it is yielded; `accepted` is what sampling decided afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import trtllm_content as content
from trtllm_steps import SequenceStep, Step, Transfers


class Serving(Transfers):
    def __init__(
        self,
        double: Any,
        seed: int = 0,
        model: str = "v4",  # "v4" | "v32"
        manager: str = "v2",  # V3.2 only: "v1" | "v2"
        draft_len: int = 0,
        layers: int = 4,
        heads: int = 2,
        top_k: int = 16,
        tokens_per_block: int | None = None,
        max_seq_len: int = 1024,
        batch_sizes: tuple[int, ...] = (1, 2, 4, 6),
        max_pages: int = 0,
        overlap: bool = True,
        reuse: bool = True,
        indexer_k_dtype: str = "fp8",
        longest_prompt: int = 600,
        transfers: bool | None = None,  # disaggregated imports and exports (V2 managers)
        config: dict[str, Any] | None = None,
    ) -> None:
        self.double, self.rng = double, random.Random(seed)
        self.model, self.manager_kind = model, manager
        self.ratio = 4 if model == "v4" else 1
        self.draft_len, self.heads, self.top_k = draft_len, heads, top_k
        self.batch_sizes, self.overlap = batch_sizes, overlap
        self.max_seq_len, self.longest_prompt = max_seq_len, longest_prompt
        self.llm = double.module("tensorrt_llm._torch.pyexecutor.llm_request")
        self.runner_module = double.module("tensorrt_llm._torch.pyexecutor.cuda_graph_runner")
        self.kv_params = double.module("tensorrt_llm._torch.metadata").KVCacheParams
        self._build(layers, tokens_per_block, max_pages, reuse, indexer_k_dtype, config or {})
        self.transfers = manager == "v2" if transfers is None else transfers
        self.exporting: list[tuple[int, Any]] = []
        self.requests: dict[int, Any] = {}
        self.suspended: set[int] = set()
        self.lives: dict[int, int] = {}
        self.pending_events: dict[int, list[str]] = {}
        self.stale: dict[int, int] = {}  # host lengths that are too long by this many tokens
        self.live_tokens: dict[int, list[int]] = {}
        self.next_id = max(batch_sizes)  # warm-up uses the ids below
        self.prefixes = [self._tokens(300) for _ in range(3)]
        self.before_prepare: Callable[[Any], None] | None = None
        self.index = 0

    def _build(self, layers, tokens_per_block, max_pages, reuse, k_dtype, config) -> None:
        args = self.double.module("tensorrt_llm.llmapi.llm_args")
        v4 = self.model == "v4"
        common = {
            "index_n_heads": self.heads,
            "index_topk": self.top_k,
            "indexer_k_dtype": k_dtype,
        } | config
        if v4:
            ratios = [4 if i % 2 == 0 else 128 for i in range(layers - 1)] + [1]
            self.sparse_config = args.DeepSeekV4SparseAttentionConfig(
                compress_ratios=ratios, **common
            )
            self.layers = [i for i, r in enumerate(ratios) if r == 4]
            module, name = "deepseek_v4.cache_manager", "DeepseekV4CacheManager"
        else:
            self.sparse_config = args.DeepSeekSparseAttentionConfig(**common)
            self.layers = list(range(layers))
            module = "dsa.cache_manager"
            name = "DSACacheManager" if self.manager_kind == "v1" else "DSACacheManagerV2"
        key = "sparse_attn_config" if v4 else "sparse_attention_config"
        self.kv = getattr(self.double.module(module), name)(
            args.KvCacheConfig(
                dtype="fp8_ds_mla" if v4 and self.double.config.sm_version == 90 else "auto",
                enable_block_reuse=reuse and self.manager_kind == "v2",
                max_pages=max_pages,
            ),
            num_layers=layers,
            tokens_per_block=tokens_per_block or (128 if v4 else 32),
            max_seq_len=self.max_seq_len,
            max_batch_size=max(self.batch_sizes),
            num_extra_kv_tokens=0,
            **{key: self.sparse_config},
            **({} if v4 else {"max_draft_len": self.draft_len}),
        )
        params = self.sparse_config.to_sparse_params()
        owner = "deepseek_v4.backend" if v4 else "dsa.backend"
        backend = getattr(
            self.double.module(owner), "DeepseekV4TrtllmAttention" if v4 else "DSATrtllmAttention"
        )
        self.indexers = {layer: backend(layer, params).indexer for layer in self.layers}
        for indexer in self.indexers.values():
            indexer.projection = self._project
            if v4:
                indexer.compressor.key_of = self.key_of
        self.eager_metadata = backend.Metadata(
            max_num_requests=max(self.batch_sizes),
            max_num_tokens=max(self.batch_sizes) * (1 + self.draft_len) + self.longest_prompt * 2,
            kv_cache_manager=self.kv,
            sparse_metadata_params=self.sparse_config.to_sparse_metadata_params(),
            max_draft_tokens=self.draft_len,
        )
        self.runner = self.runner_module.CUDAGraphRunner(
            list(self.batch_sizes), self.eager_metadata, self.draft_len
        )

    # ---- content ----

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(2, content.TOKENS) for _ in range(count)]

    def _project(self, indexer: Any, hidden: torch.Tensor, positions: torch.Tensor) -> tuple:
        tokens = hidden[:, 0].long()
        q, w = content.queries(indexer.layer_idx, self.heads, tokens, positions)
        if self.ratio > 1:
            return q, w
        k = [
            content.key(indexer.layer_idx, self.heads, int(p), [int(t)])
            for t, p in zip(tokens, positions, strict=True)
        ]
        return q, w, torch.stack(k)

    def key_of(self, layer: int, request_id: int, slot: int) -> torch.Tensor:
        history = self.live_tokens[request_id]
        return self.raw_key(layer, history, slot)

    def raw_key(self, layer: int, history: list[int], slot: int) -> torch.Tensor:
        covered = history[slot * self.ratio : (slot + 1) * self.ratio]
        return content.key(layer, self.heads, slot, covered)

    def visible(self, sequence: SequenceStep, j: int) -> int:
        return (sequence.position + j + 1) // self.ratio

    def dense_scores(self, layer: int, sequence: SequenceStep, j: int) -> torch.Tensor:
        """Scores of every visible slot of one query row, straight from the raw keys"""
        count = self.visible(sequence, j)
        if count == 0:
            return torch.zeros(0, dtype=torch.float64)
        keys = torch.stack([self.raw_key(layer, sequence.history, s) for s in range(count)])
        token = torch.tensor([sequence.tokens[j]])
        q, w = content.queries(layer, self.heads, token, torch.tensor([sequence.position + j]))
        quantize = self.double.module("tensorrt_llm._double_quant").quantize_fp8
        return content.scores(quantize, q[0], w[0], keys)

    # ---- request lifecycle ----

    def _join(self) -> None:
        prompt = self._tokens(self.rng.randint(1, self.longest_prompt))
        if self.rng.random() < 0.5:
            prompt = (self.rng.choice(self.prefixes) + prompt)[: self.longest_prompt]
        request = self.llm.LlmRequest(self.next_id, prompt, max_new_tokens=self.rng.randint(1, 30))
        self.pending_events[self.next_id] = ["new"]
        self.next_id += 1
        if self.transfers and self.rng.random() < 0.2 and not self._import(request):
            return
        self.requests[request.request_id] = request

    def _free(self, request: Any, step: Step) -> None:
        self.kv.free_resources(request)
        self.stale.pop(request.request_id, None)
        self.suspended.discard(request.request_id)
        step.freed.append(request.request_id)

    def _is_generation(self, request: Any) -> bool:
        return request.state == self.llm.LlmRequestState.GENERATION_IN_PROGRESS

    def _random_events(self, step: Step) -> None:
        rng = self.rng
        for due, request in [e for e in self.exporting if e[0] <= self.index]:
            self.kv.free_resources(request)
            self.exporting.remove((due, request))
        if len(self.requests) < max(self.batch_sizes) and rng.random() < 0.35:
            self._join()
        running = [r for r in self.requests.values() if self._is_generation(r)]
        if self.manager_kind == "v2" and running and rng.random() < 0.1:
            victim = rng.choice(running)
            if victim.request_id not in self.suspended:
                self.kv.suspend_request(victim)
                self.suspended.add(victim.request_id)
        elif self.suspended and rng.random() < 0.3:
            self.suspended.discard(rng.choice(sorted(self.suspended)))  # try_allocate resumes it
        if running and rng.random() < 0.03:  # paused for recomputation: same id, new cache
            victim = rng.choice(running)
            self._free(victim, step)
            victim.prompt_len = len(victim.tokens)
            victim.set_prepopulated_prompt_len(0, self.kv.tokens_per_block)
            victim.state = self.llm.LlmRequestState.CONTEXT_INIT
            self.pending_events[victim.request_id] = ["restarted"]
        if running and rng.random() < 0.03:  # cancelled
            victim = rng.choice(running)
            self._free(victim, step)
            self.requests.pop(victim.request_id, None)

    def _admit_context(self, request: Any, batch: Any, budget: int) -> int:
        first = request.is_first_context_chunk
        fresh = first and not self._has_cache(request)
        if self.manager_kind == "v2":
            if not self.kv.prepare_context(request):
                return 0
            if fresh and request.context_current_position > 0:
                self.pending_events[request.request_id].append("prefix_hit")
        if fresh:
            self.lives[request.request_id] = self.lives.get(request.request_id, 0) + 1
        left = request.context_remaining_length
        chunk = left if self.rng.random() < 0.5 else self.rng.randint(1, left)
        chunk = min(chunk, budget)
        if self.manager_kind == "v2" and not self.kv.resize_context(request, chunk):
            return 0
        request.context_chunk_size = chunk
        batch.context_requests.append(request)
        return chunk

    def _has_cache(self, request: Any) -> bool:
        known = self.kv._sequences if self.manager_kind == "v1" else self.kv.kv_cache_map
        return request.request_id in known

    def _schedule(self, step: Step) -> Any:
        batch = self.runner_module.ScheduledRequests()
        budget = self.longest_prompt
        for request in list(self.requests.values()):
            if self._is_generation(request) or batch.batch_size >= max(self.batch_sizes):
                continue
            if budget > 0 and len(batch.context_requests) < 2 and self.rng.random() < 0.7:
                budget -= self._admit_context(request, batch, budget)
        running = [r for r in self.requests.values() if self._is_generation(r)]
        self.rng.shuffle(running)
        for request in running:
            if request.request_id in self.suspended or batch.batch_size >= max(self.batch_sizes):
                continue
            request.py_draft_tokens = self._tokens(self.draft_len)
            if self.manager_kind == "v2":
                waited = not self.kv.is_request_active(request.request_id)
                if not self.kv.try_allocate_generation(request):
                    self.kv.suspend_request(request)
                    self.suspended.add(request.request_id)
                    continue
                if waited:
                    self.pending_events.setdefault(request.request_id, []).append("resumed")
            batch.generation_requests.append(request)
        if self.manager_kind == "v1":
            self.kv.prepare_resources(batch)
        step.suspended = sorted(self.suspended)
        return batch

    # ---- one step ----

    def _fill(self, metadata: Any, sequences: list[SequenceStep]) -> None:
        host_cached = []
        for s in sequences:
            late = self.stale.get(s.request_id, 0) if self.overlap and not s.is_context else 0
            host_cached.append(s.position + late)
        metadata.seq_lens = torch.tensor([len(s.tokens) for s in sequences], dtype=torch.int32)
        metadata.num_contexts = sum(s.is_context for s in sequences)
        metadata.request_ids = [s.request_id for s in sequences]
        metadata.prompt_lens = [len(s.history) for s in sequences]
        metadata.kv_cache_params = self.kv_params(True, host_cached)
        if self.before_prepare is not None:
            self.before_prepare(metadata)
        metadata.prepare()
        truth = torch.tensor([s.kv_len for s in sequences], dtype=torch.int32)
        metadata.kv_lens_cuda[: len(sequences)].copy_(truth)  # model_engine._preprocess_inputs
        metadata.on_update_kv_lens()

    def forward(self, step: Step) -> None:
        sequences, metadata = step.sequences, step.metadata
        self.live_tokens = {s.request_id: s.history for s in sequences}
        self._fill(metadata, sequences)
        tokens = [t for s in sequences for t in s.tokens]
        positions = [s.position + j for s in sequences for j in range(len(s.tokens))]
        hidden = torch.tensor(tokens, dtype=torch.float32)[:, None]
        place = torch.tensor(positions)
        for layer, indexer in self.indexers.items():
            if self.model == "v4":
                result = indexer(None, hidden, metadata, place)
            else:
                result = self._forward_v32(indexer, hidden, metadata, place)
            step.outputs[layer] = result.clone()
            indexer_join = getattr(indexer, "maybe_join_prev_topk_copy", None)
            if indexer_join is not None:
                indexer_join()

    def _forward_v32(self, indexer, hidden, metadata, place) -> torch.Tensor:
        """dsa/module.py: keys first, then one call per phase"""
        parts = list(indexer.pre_indexer_proj(None, hidden, place))
        indexer._update_k_cache(parts[1], parts[2], metadata)
        if not hasattr(indexer, "forward_from_projected"):
            return indexer.sparse_attn_indexer(metadata, hidden, *parts)
        results = []
        split = metadata.num_ctx_tokens
        for phase, rows in ((False, hidden[:split]), (True, hidden[split:])):
            if rows.shape[0] > 0:
                results.append(
                    indexer.forward_from_projected(metadata, rows, parts, is_generation=phase)
                )
        return torch.cat([r.clone() for r in results])

    def _sequence(self, request: Any, is_context: bool) -> SequenceStep:
        if is_context:
            start = request.context_current_position
            tokens = request.tokens[start : start + request.context_chunk_size]
            history = request.tokens[: start + len(tokens)]
        else:
            start = len(request.tokens) - 1
            tokens = [request.tokens[-1], *request.py_draft_tokens]
            history = request.tokens + list(request.py_draft_tokens)
        events = tuple(self.pending_events.pop(request.request_id, []))
        if is_context and start + len(tokens) < request.prompt_len:
            events += ("chunk",)
        return SequenceStep(
            request.request_id,
            self.lives.get(request.request_id, 0),
            request.is_dummy,
            is_context,
            start,
            tokens,
            history,
            events,
        )

    def _idle(self, batch: Any) -> Any:
        """An attention-DP rank without work: one dummy generation row"""
        made = self.kv.add_dummy_requests(
            [self.llm.ATTENTION_DP_DUMMY_REQUEST_ID],
            is_gen=True,
            max_num_draft_tokens=self.draft_len,
        )
        batch.generation_requests.extend(made or [])
        return made[0] if made else None

    def step(self) -> Step:
        step = Step(self.index, None, False, [])
        self.index += 1
        self._random_events(step)
        batch = self._schedule(step)
        idle = self._idle(batch) if batch.batch_size == 0 else None
        real = list(batch.generation_requests)
        self.runner.pad_batch(batch, self.kv)
        step.graph = batch.can_run_cuda_graph and batch.batch_size in self.batch_sizes
        step.metadata = (
            self.runner.metadata_for(batch.batch_size) if step.graph else self.eager_metadata
        )
        step.sequences = [self._sequence(r, True) for r in batch.context_requests]
        step.sequences += [self._sequence(r, False) for r in batch.generation_requests]
        if not step.sequences:
            return step
        self.forward(step)
        self._finish(step, batch, [] if idle else real)
        if idle is not None:
            self.kv.free_resources(idle)
        return step

    def _finish(self, step: Step, batch: Any, real: list[Any]) -> None:
        exported: list[Any] = []
        for request in batch.context_requests:
            request.context_current_position += request.context_chunk_size
            if request.context_remaining_length == 0:
                request.state = self.llm.LlmRequestState.GENERATION_IN_PROGRESS
                request.tokens = request.tokens + self._tokens(1)
                if self.transfers and self.rng.random() < 0.1:
                    exported.append(request)
        by_id = {s.request_id: s for s in step.generations}
        for request in real:
            accepted = self.rng.randint(0, self.draft_len)
            by_id[request.request_id].accepted = accepted
            request.py_num_accepted_draft_tokens = accepted
            request.py_rewind_len = self.draft_len - accepted
            self.stale[request.request_id] = self.draft_len - accepted
            request.tokens = request.tokens + request.py_draft_tokens[:accepted] + self._tokens(1)
        if self.manager_kind == "v2":
            self.kv.update_context_resources(batch)
        batch.generation_requests = real
        self.kv.update_resources(batch)
        for request in exported:
            self._export(request, step)
        room = self.max_seq_len - 2 * (1 + self.draft_len) - 2
        for request in real:
            made = len(request.tokens) - len(request.input_tokens)
            if made > request.max_new_tokens or len(request.tokens) > room:
                request.state = self.llm.LlmRequestState.GENERATION_COMPLETE
                self._free(request, step)
                self.requests.pop(request.request_id, None)

    def warm_up(self) -> Iterator[Step]:
        """Capture-time steps: small dummy ids, largest batch first, two runs per shape"""
        for size in self.runner.capture_order():
            made = self.kv.add_dummy_requests(
                list(range(size)), is_gen=True, max_num_draft_tokens=self.draft_len
            )
            metadata = self.runner.metadata_for(size)
            for _ in range(2):
                step = Step(-1, metadata, True, [self._sequence(r, False) for r in made or []])
                if step.sequences:
                    self.forward(step)
                    yield step
            for request in made or []:
                self.kv.free_resources(request)

    def run(self, steps: int, warm_up: bool = True) -> Iterator[Step]:
        if warm_up:
            yield from self.warm_up()
        for _ in range(steps):
            step = self.step()
            if step.sequences:
                yield step
