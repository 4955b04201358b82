# SPDX-License-Identifier: Apache-2.0
"""What `trtllm_scheduler.Serving` yields, and how requests arrive from or leave for elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class SequenceStep:
    """One sequence of a batch, in batch order: all a dictionary model needs."""

    request_id: int
    life: int  # counts caches made for this id: a restart under the same id is a new life
    is_dummy: bool
    is_context: bool
    position: int  # position of the first query token
    tokens: list[int]  # query tokens of this step (with drafts)
    history: list[int]  # all tokens up to and including `tokens`
    events: tuple[str, ...]  # "new", "prefix_hit", "chunk", "resumed", "restarted", "imported"
    accepted: int = 0  # drafts accepted after this step; contexts: 0

    @property
    def kv_len(self) -> int:
        return self.position + len(self.tokens)


@dataclass
class Step:
    index: int
    metadata: Any
    graph: bool  # metadata object of a captured batch size: buffers alias by name
    sequences: list[SequenceStep]
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> copy of the result
    freed: list[int] = field(default_factory=list)  # ids whose cache ended before this step
    suspended: list[int] = field(default_factory=list)

    @property
    def generations(self) -> list[SequenceStep]:
        return [s for s in self.sequences if not s.is_context]

    def rows(self) -> Iterator[tuple[int, SequenceStep, int]]:
        """(output row, sequence, index of its query token)"""
        row = 0
        for sequence in self.sequences:
            for j in range(len(sequence.tokens)):
                yield row, sequence, j
                row += 1


class Transfers:
    """Disaggregated serving: the parts of `Serving` that import and export requests."""

    def _import(self, request: Any) -> bool:
        """A disaggregated generation worker: pages arrive filled, nothing is prefilled here"""
        if not self.kv.prepare_disagg_gen_init(request):
            self.kv.free_resources(request)
            return False
        cache = self.kv.kv_cache_map[request.request_id]
        write = self.double.module("tensorrt_llm._double_quant").write_slots
        count = request.prompt_len // self.ratio
        for layer in self.layers if count else ():
            pool = self.kv.get_indexer_k_cache_buffers(layer)
            slots = pool.shape[1]
            pages = [cache.pages[i // slots] * self.kv.impl.scale for i in range(count)]
            keys = torch.stack([self.raw_key(layer, request.tokens, i) for i in range(count)])
            write(pool, pages, [i % slots for i in range(count)], keys, self.kv.use_fp4)
        request.set_prepopulated_prompt_len(request.prompt_len, self.kv.tokens_per_block)
        request.state = self.llm.LlmRequestState.GENERATION_IN_PROGRESS
        request.tokens = request.tokens + self._tokens(1)
        self.lives[request.request_id] = self.lives.get(request.request_id, 0) + 1
        self.pending_events[request.request_id].append("imported")
        return True

    def _export(self, request: Any, step: Step) -> None:
        """A disaggregated context worker: the index goes now, the pages a few steps later"""
        self.kv.release_index_slot(request.request_id)
        self.requests.pop(request.request_id)
        self.exporting.append((self.index + self.rng.randint(1, 4), request))
        step.freed.append(request.request_id)


def assert_dense(serving: Any, step: Step, every_context_row: bool = False) -> int:
    """Checks a step that ran without hooks against scores computed from raw keys.

    Returns the number of rows compared. Rows of the dense early exit and dummies are skipped.
    """
    metadata, checked = step.metadata, 0
    for row, sequence, j in step.rows():
        last = j == len(sequence.tokens) - 1
        if sequence.is_dummy or (sequence.is_context and not (last or every_context_row)):
            continue
        if sequence.is_context and metadata.skip_indexer_for_ctx_reqs:
            continue
        if not sequence.is_context and metadata.skip_indexer_for_gen_reqs:
            continue
        for layer in serving.layers:
            truth = serving.dense_scores(layer, sequence, j)
            result = step.outputs[layer][row]
            got = result[result >= 0].tolist()
            count = min(serving.top_k, truth.numel())
            assert len(got) == len(set(got)) == count, (step.index, sequence, j)
            assert (result[count:] == -1).all()
            if 0 < count < truth.numel():
                bar = truth.sort(descending=True).values[count - 1]
                assert all(truth[i] >= bar - 1e-4 for i in got), (step.index, sequence, j)
            checked += 1
    return checked
