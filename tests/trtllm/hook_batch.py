# SPDX-License-Identifier: Apache-2.0
"""A serving engine in miniature: requests that join, decode, draft, wait, move and finish.

`HostBatch` plays the scheduler of the stand-in, and is its own witness: keys, queries and weights
are small integers, so the scores of every slot are known exactly, whatever the hooks leave out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import hook_standin
import numpy as np
import torch
from torch import Tensor

from spin_trtllm.hosts.trtllm.sequences import is_dummy

GRAPH_DUMMY = 2**64 - 1
IDLE_DUMMY = 0
USED_DIMS = 6  # of a key; the rest is zero
SCALES = 2048  # key scales `1 + n / SCALES` leave scores of up to 64 heads exact in fp32


@dataclass
class Request:
    """One sequence: `tokens` of it are decided; keys are `[layers, slots, 128]`."""

    number: int
    tokens: int
    keys: Tensor
    pages: list[int] = field(default_factory=list)


@dataclass
class Step:
    """What a step was, and what came out of it.

    Attributes:
        rows: request ids of the generation rows; starts: their first positions.
        scores: fp32 `[layers, G, next_n, slots]`, of all slots.
        selected: int32 `[layers, G, next_n, K]`, what the indexers returned.
    """

    rows: list[int]
    starts: list[int]
    next_n: int
    contexts: list[int]
    scores: np.ndarray
    selected: Tensor


class HostBatch:
    """Runs steps of a stand-in model with one indexer in each of `layers`."""

    def __init__(
        self,
        seed: int,
        *,
        layers: tuple[int, ...] = (2, 4),
        ratio: int = 4,
        tokens_per_block: int = 16,
        max_seq_len: int = 640,
        max_batch_size: int = 5,
        top_k: int = 8,
        drafts: int = 0,
        phases: bool = False,
        heads: int = 2,
        scaled: bool = False,
        device: torch.device | str = "cpu",
        kernels: hook_standin.Kernels | None = None,
    ) -> None:
        self.rng, self.layers, self.ratio, self.drafts = random.Random(seed), layers, ratio, drafts
        self.generator = torch.Generator().manual_seed(seed)
        self.top_k, self.phases, self.heads, self.kernels = top_k, phases, heads, kernels
        self.blocks = -(-max_seq_len // tokens_per_block)
        self.manager = hook_standin.Manager(
            layers,
            pages=1 + self.blocks * (max_batch_size + 4),
            tokens_per_block=tokens_per_block,
            ratio=ratio,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            device=device,
        )
        self.device = self.manager.device
        self.indexers = [hook_standin.Indexer(n, top_k, ratio, kernels) for n in layers]
        self.metadata = self.new_metadata({})
        self.free_pages = list(range(1, self.manager.keys[layers[0]].shape[0]))
        self.requests: dict[int, Request] = {}
        self.slots = self.blocks * self.manager.page_slots
        self.scales = torch.ones(self.slots)
        if scaled:
            self.scales += torch.arange(self.slots) % SCALES / SCALES
        self.fresh = max_batch_size

    def new_metadata(self, buffers: dict[Any, Tensor]) -> hook_standin.Metadata:
        """Metadata of this batch's manager; those with the same `buffers` alias by name."""
        return hook_standin.Metadata(
            self.manager,
            ratio=self.ratio,
            top_k=self.top_k,
            drafts=self.drafts,
            buffers=buffers,
            kernels=self.kernels,
        )

    # ---- requests ----

    def join(self, tokens: int, number: int | None = None) -> int:
        """A request whose keys are there already: prefilled here, elsewhere, or found cached."""
        number = self.fresh if number is None else number
        self.fresh = max(self.fresh, number) + 1
        keys = torch.zeros(len(self.layers), self.slots, 128)
        request = self.requests[number] = Request(number, tokens, keys)
        self._grow(request, 0, tokens)
        return number

    def finish(self, number: int) -> None:
        """Its pages are free for others, with its keys still in them."""
        self.free_pages += self.requests.pop(number).pages

    def move(self, number: int) -> None:
        """Suspend and resume: same keys, other pages."""
        request = self.requests[number]
        self.free_pages += request.pages
        self.rng.shuffle(self.free_pages)
        request.pages = []
        self._place(request, 0, request.tokens // self.ratio)

    def _grow(self, request: Request, tokens: int, until: int) -> None:
        """New keys for the slots that tokens `tokens .. until - 1` complete."""
        first, last = tokens // self.ratio, until // self.ratio
        shape = (len(self.layers), last - first, USED_DIMS)
        new = torch.randint(-2, 3, shape, generator=self.generator).float()
        request.keys[:, first:last, :USED_DIMS] = new
        self._place(request, first, last)

    def _place(self, request: Request, first: int, last: int) -> None:
        size = self.manager.page_slots
        while len(request.pages) * size < last:
            request.pages.append(self.free_pages.pop())
        for page in range(first // size, -(-last // size)):
            slots = slice(max(first, page * size), min(last, (page + 1) * size))
            for n, layer in enumerate(self.layers):
                self.manager.write(
                    layer,
                    request.pages[page],
                    slots.start % size,
                    request.keys[n, slots],
                    self.scales[slots],
                )

    # ---- steps ----

    def step(
        self,
        rows: list[int],
        *,
        next_n: int = 1,
        contexts: list[int] | None = None,
        accepted: dict[int, int] | None = None,
        hidden: float = 0.0,
    ) -> Step:
        """One forward of all layers: `contexts` prefill three tokens, `rows` decode `next_n`.

        Args:
            rows: generation requests, dummies included; contexts: requests that only prefill.
            accepted: drafts accepted of each request, by default none.
            hidden: what the hidden states hold.
        """
        contexts = contexts or []
        requests = [self.requests.get(number) for number in rows]
        starts = [0 if request is None else request.tokens for request in requests]
        for request in requests:
            if request is not None:
                self._grow(request, request.tokens, request.tokens + next_n)
        for number in contexts:
            request = self.requests[number]
            self._grow(request, request.tokens, request.tokens + 3)
            request.tokens += 3
        lengths = [self.requests[n].tokens for n in contexts] + [n + next_n for n in starts]
        tables = [self.requests[n].pages for n in contexts]
        tables += [[] if request is None else request.pages for request in requests]
        self.metadata.prepare(
            contexts + rows, lengths, tables, contexts=[3] * len(contexts), next_n=next_n
        )
        scores, selected = self._forward(requests, next_n, 3 * len(contexts), hidden)
        for number, request in zip(rows, requests, strict=True):
            if request is not None:
                request.tokens += 1 + (accepted or {}).get(number, 0)
        return Step(rows, starts, next_n, contexts, scores, selected)

    def _forward(
        self, requests: list[Request | None], next_n: int, context_tokens: int, hidden: float
    ) -> tuple[np.ndarray, Tensor]:
        count = len(requests)
        inputs = [self._inputs(context_tokens + count * next_n) for _ in self.layers]
        moved = [(q.to(self.device), w.to(self.device)) for q, w in inputs]
        selected = self._run(moved, context_tokens, hidden).unflatten(1, (count, next_n))
        scores = []
        for n, (query, weights) in enumerate(inputs):
            own = query[context_tokens:, :, :USED_DIMS].float().unflatten(0, (count, next_n))
            empty = torch.zeros(self.slots, USED_DIMS)
            keys = torch.stack([empty if r is None else r.keys[n, :, :USED_DIMS] for r in requests])
            dots = torch.einsum("srhd,snd->srhn", own, keys).relu_() * self.scales
            mixed = weights[context_tokens:].unflatten(0, (count, next_n))
            scores.append(torch.einsum("srh,srhn->srn", mixed, dots))
        return torch.stack(scores).numpy(), selected.cpu()

    def _inputs(self, tokens: int) -> tuple[Tensor, Tensor]:
        """A query e4m3 `[tokens, heads, 128]` and its weights fp32 `[tokens, heads]`."""
        query = torch.zeros(tokens, self.heads, 128)
        query[..., :USED_DIMS] = self._draw(-2, 3, tokens, self.heads, USED_DIMS)
        return query.to(torch.float8_e4m3fn), self._draw(-1, 3, tokens, self.heads)

    def _run(
        self, inputs: list[tuple[Tensor, Tensor]], context_tokens: int, hidden: float
    ) -> Tensor:
        """What the model's forward does: int32 `[layers, generation rows, K]`."""
        self.metadata.on_update_kv_lens()
        selected = []
        for indexer, (query, weights) in zip(self.indexers, inputs, strict=True):
            out = self._call(indexer, query, weights, context_tokens, hidden)
            selected.append(out.clone())
        return torch.stack(selected)

    def _call(
        self, indexer: Any, query: Tensor, weights: Tensor, context_tokens: int, hidden: float
    ) -> Tensor:
        """`sparse_attn_indexer` as V4 calls it, or phase by phase as V3.2 does."""
        state = torch.full((len(query), 8), hidden, device=self.device)
        none = torch.empty(0)
        if not self.phases:
            out = indexer.sparse_attn_indexer(self.metadata, state, query, none, none, weights)
            return out[context_tokens:]
        if context_tokens:
            part = (x[:context_tokens] for x in (state, query))
            indexer.sparse_attn_indexer(
                self.metadata, *part, none, none, weights[:context_tokens], is_generation=False
            )
        part = (x[context_tokens:] for x in (state, query))
        return indexer.sparse_attn_indexer(
            self.metadata, *part, none, none, weights[context_tokens:], None, is_generation=True
        )

    def _draw(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).float()

    # ---- a random life ----

    def random_step(self) -> Step:
        """Some event, then a step of whoever is there, in any order, padded by dummies."""
        rng = self.rng
        room = self.manager.max_seq_len - 3 * (self.drafts + 2)
        for number, request in list(self.requests.items()):
            if request.tokens > room or rng.random() < 0.02:
                self.finish(number)
            elif rng.random() < 0.03:
                self.move(number)
        new = []
        while len(self.requests) < 2 or (len(self.requests) < 7 and rng.random() < 0.15):
            new.append(self.join(rng.randrange(1, room)))
        able = [n for n in self.requests if rng.random() < 0.93]
        contexts = [n for n in able if (n in new and rng.random() < 0.7) or rng.random() < 0.01]
        limit = self.manager.max_batch_size
        rows = [n for n in able if n not in contexts][:limit]
        rows += rng.choices([GRAPH_DUMMY, IDLE_DUMMY], k=rng.randrange(3))
        rows = rows[:limit] or [GRAPH_DUMMY]
        rng.shuffle(rows)
        next_n = 1 + self.drafts if rng.random() < 0.8 else rng.randint(1, 1 + self.drafts)
        accepted = {n: rng.randrange(next_n) for n in rows}
        return self.step(rows, next_n=next_n, contexts=contexts, accepted=accepted)


def model_ids(rows: list[int]) -> list[int | None]:
    """Rows as `SequenceModel` names them."""
    return [None if is_dummy(number) else number for number in rows]
