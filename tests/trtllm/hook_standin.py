# SPDX-License-Identifier: Apache-2.0
"""The least of TensorRT-LLM that the indexer's hooks touch, strict where the real one is silent.

`trtllm_double` mirrors the whole flow; this is small enough to read beside a failing test, and it
checks what a GPU kernel would not say: that the schedule it is given was built for the lengths it
is given. Scores are exact in fp32 for the small integers of `HostBatch`, whatever is left out.
Everything around the kernels runs on any device; `Kernels` is what a GPU's take the place of.

Names and contracts are those of `dsa/indexer.py`, `dsa/metadata.py` and `modules/top_k.py`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from spin_trtllm.ops.score_slots import decode_pages

POISON = (float("nan"), float("inf"))  # what uninitialised logits may hold
_DG_SCHEDULE_BLOCK_KV = 64
NUM_SMS = 4


def get_paged_mqa_logits_metadata(lengths: Tensor, block: int, num_sms: int) -> Tensor:
    """A schedule int32 `[num_sms + 1, 2]` that gives away what it was built for."""
    assert lengths.dim() == 2
    assert block == _DG_SCHEDULE_BLOCK_KV
    seed = (lengths.long() * (1 + torch.arange(lengths.numel()).view_as(lengths))).sum()
    rows = torch.arange(num_sms + 1)
    return torch.stack([rows + seed, rows * 0 + lengths.numel()], 1).int()


class TopK(nn.Module):
    """`modules/top_k.py`: exact, lower columns first among equal scores, -1 pads."""

    needs_gvr_prior = False

    def __init__(self, top_k: int, *, compress_ratio: int = 1) -> None:
        super().__init__()
        self.top_k, self.compress_ratio = top_k, compress_ratio

    def forward(
        self,
        scores: Tensor,
        output_indices: Tensor,
        *,
        is_prefill: bool,
        sequence_lengths: Tensor | None = None,
        scan_lengths: Tensor | None = None,
        next_n: int = 1,
        max_seq_len: int | None = None,
    ) -> Tensor:
        output_indices.fill_(-1)
        if is_prefill:
            return output_indices
        assert sequence_lengths is not None
        assert scan_lengths is not None
        assert torch.equal(scan_lengths, sequence_lengths // self.compress_ratio)
        for row in range(len(scores)):
            length = int(sequence_lengths[row // next_n])
            columns = max(0, (length - next_n + row % next_n + 1) // self.compress_ratio)
            order = torch.sort(scores[row, :columns], descending=True, stable=True).indices
            output_indices[row, : min(self.top_k, columns)] = order[: self.top_k].int()
        return output_indices


class Kernels:
    """What a decode step launches: on a CPU, exact, and checked."""

    num_sms = NUM_SMS

    def schedule(self, lengths: Tensor) -> Tensor:
        """Work of the scoring kernel for lengths int32 `[G, next_n]`: int32 `[num_sms + 1, 2]`."""
        return get_paged_mqa_logits_metadata(lengths, _DG_SCHEDULE_BLOCK_KV, self.num_sms)

    def logits(self, *arguments: Any) -> Tensor:
        """Scores fp32 `[rows, width]`; arguments are those of `paged_logits`."""
        return paged_logits(*arguments)

    def top_k(self, top_k: int, ratio: int) -> TopK:
        """A module that selects."""
        return TopK(top_k, compress_ratio=ratio)


class Indexer(nn.Module):
    """`dsa/indexer.py`: what surrounds the logits and the top-k of decode rows."""

    _enable_heuristic_topk = False
    mtp_index_share = False

    def __init__(
        self, layer_idx: int, top_k: int, ratio: int, kernels: Kernels | None = None
    ) -> None:
        super().__init__()
        self.layer_idx, self.index_topk, self.compress_ratio = layer_idx, top_k, ratio
        self.kernels = kernels or Kernels()
        self.top_k = self.kernels.top_k(top_k, ratio)
        self.use_cute_dsl_paged_mqa_logits = False

    @staticmethod
    def prepare(metadata: Metadata) -> None:
        if metadata.num_generations:
            Indexer.prepare_scheduler_metadata(metadata)

    @staticmethod
    def prepare_scheduler_metadata(metadata: Metadata) -> None:
        first, count = metadata.num_contexts, metadata.num_generations
        slots = metadata.get_indexer_kv_lens(metadata.kv_lens_cuda_runtime[first : first + count])
        metadata.gen_indexer_kv_lens_cuda_runtime = slots
        if metadata.use_expanded_buffers_for_mtp:  # and nothing else
            rows = count * (1 + metadata.max_draft_tokens)
            lengths = metadata.kv_lens_expanded_cuda[:rows].view(-1, 1)
            metadata.scheduler_metadata_buffer_expanded.copy_(metadata.kernels.schedule(lengths))
            return
        kernels, wide = metadata.kernels, metadata.kv_lens_cuda_2d[:count]
        wide[:] = slots.unsqueeze(1)
        metadata.scheduler_metadata_buffer.copy_(kernels.schedule(slots.view(-1, 1)))
        if metadata.max_draft_tokens:
            metadata.scheduler_metadata_buffer_full_next_n.copy_(kernels.schedule(wide))

    def sparse_attn_indexer(
        self,
        metadata: Metadata,
        hidden_states: Tensor,
        q_fp8: Tensor,
        k_fp8: Tensor,
        k_scale: Tensor,
        weights: Tensor,
        q_scale: Tensor | None = None,
        is_generation: bool | None = None,
    ) -> Tensor:
        first, count = metadata.num_contexts, metadata.num_generations
        rows = metadata.num_tokens - metadata.num_ctx_tokens
        start = metadata.num_ctx_tokens if is_generation is None else 0
        out = metadata.get_empty(
            metadata.cuda_graph_buffers,
            (hidden_states.shape[0], self.index_topk),
            cache_name="indexer_topk_out_buffer" + ("" if is_generation is None else "_gen"),
            dtype=torch.int32,
            capture_graph=metadata.is_cuda_graph,
        )
        if first and is_generation is not True:
            self.top_k(hidden_states, out[: metadata.num_ctx_tokens], is_prefill=True)
        if not count or is_generation is False:
            return out
        if metadata.skip_indexer_for_gen_reqs:
            out[start : start + rows] = -7
            return out
        next_n = rows // count
        query = q_fp8[start : start + rows].unflatten(0, (count, next_n))
        expanded = metadata.use_expanded_buffers_for_mtp and next_n > 1
        factor = metadata.dsl_expand_factor
        split = factor > 1 and next_n == factor * metadata.dsl_atom
        if expanded or split:
            copies = next_n if expanded else factor
            query = query.reshape(count * copies, next_n // copies, *query.shape[2:])
            lengths = metadata.kv_lens_expanded_cuda[: count * copies].view(-1, 1)
            table = metadata.block_table_expanded[: count * copies]
            schedule = metadata.scheduler_metadata_buffer_expanded
        else:
            lengths = metadata.kv_lens_cuda_2d[:count, :next_n]
            table = metadata.indexer_k_cache_block_offsets[first : first + count]
            schedule = metadata.scheduler_metadata_buffer
            if next_n > 1:
                schedule = metadata.scheduler_metadata_buffer_full_next_n
                lengths = metadata.kv_lens_cuda_2d[:count]
        logits = self.kernels.logits(
            query,
            metadata.kv_cache_manager.get_indexer_k_cache_buffers(self.layer_idx),
            weights[start : start + rows].view(*query.shape[:2], -1),
            lengths,
            table,
            schedule,
            metadata.get_indexer_max_seq_len(),
        )
        self.top_k(
            logits,
            out[start : start + rows],
            is_prefill=False,
            sequence_lengths=metadata.kv_lens_cuda_runtime[first : first + count],
            scan_lengths=metadata.gen_indexer_kv_lens_cuda_runtime,
            next_n=next_n,
            max_seq_len=metadata.get_indexer_max_seq_len(),
        )
        return out


def paged_logits(
    query: Tensor,
    keys: Tensor,
    weights: Tensor,
    lengths: Tensor,
    table: Tensor,
    schedule: Tensor,
    width: int,
) -> Tensor:
    """DeepGEMM's `fp8_paged_mqa_logits`: fp32 `[rows, width]`, poison past each length."""
    wanted = get_paged_mqa_logits_metadata(lengths, _DG_SCHEDULE_BLOCK_KV, NUM_SMS)
    assert torch.equal(schedule, wanted), "a schedule for other lengths"
    pages = keys.view(keys.shape[0], -1)
    out = torch.empty(query.shape[0] * query.shape[1], width)
    out[:, ::2], out[:, 1::2] = POISON
    for s in range(query.shape[0]):
        count = int(lengths[s, 0])
        used = table[s, : -(-count // keys.shape[1])].long()
        own = decode_pages(pages[used]).flatten(0, 1)[:count]
        dots = torch.einsum("rhd,nd->rhn", query[s].float(), own).relu_()
        rows = slice(s * query.shape[1], (s + 1) * query.shape[1])
        out[rows, :count] = torch.einsum("rh,rhn->rn", weights[s], dots)
    return out


class Manager:
    """A KV-cache manager: an indexer key cache of `pages` pages in every layer."""

    def __init__(
        self,
        layers: tuple[int, ...],
        *,
        pages: int,
        tokens_per_block: int,
        ratio: int,
        max_batch_size: int,
        max_seq_len: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.pp_layers, self.index_head_dim = list(layers), 128
        self.tokens_per_block, self.max_batch_size = tokens_per_block, max_batch_size
        self.max_seq_len, self.page_slots = max_seq_len, tokens_per_block // ratio
        shape = (pages, self.page_slots, 1, 132)
        self.device = torch.device(device)
        self.keys = {n: torch.zeros(shape, dtype=torch.uint8, device=device) for n in layers}
        self.max_blocks_per_seq = -(-max_seq_len // tokens_per_block)

    def get_indexer_k_cache_buffers(self, layer_idx: int) -> Tensor:
        return self.keys[layer_idx]

    def write(self, layer: int, page: int, place: int, keys: Tensor, scales: Tensor) -> None:
        """Slots `[n, 128]` and scales `[n]` into a page, from a place on: all keys come first."""
        flat, count = self.keys[layer][page].flatten(), len(keys)
        flat[place * 128 : (place + count) * 128] = _bytes_of(keys.to(torch.float8_e4m3fn))
        at = self.page_slots * 128 + place * 4
        flat[at : at + 4 * count] = _bytes_of(scales)


class Metadata:
    """`DSAtrtllmAttentionMetadata`; buffers of objects that share `buffers` alias by name."""

    gen_indexer_kv_lens_cuda_runtime: Tensor | None = None  # until there are generations

    def __init__(
        self,
        manager: Manager,
        *,
        ratio: int,
        top_k: int,
        drafts: int,
        buffers: dict[Any, Tensor] | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        self.kernels, self.device = kernels or Kernels(), manager.device
        self.kv_cache_manager, self.sparse_mla_topk = manager, top_k
        self.compress_ratios = [ratio] * (1 + max(manager.pp_layers)) if ratio == 4 else [1]
        self._ratio, self.max_draft_tokens, self.num_sms = ratio, drafts, self.kernels.num_sms
        self.cuda_graph_buffers = {} if buffers is None else buffers
        self.is_cuda_graph = False
        self.skip_indexer_for_gen_reqs = self.in_mtp_draft_loop = False
        self.use_expanded_buffers_for_mtp, self.dsl_expand_factor, self.dsl_atom = False, 1, 1
        batch, rows = manager.max_batch_size + 4, 1 + drafts
        sizes: dict[str, tuple[int, ...]] = {
            "kv_lens_cuda": (batch,),
            "kv_lens_cuda_2d": (batch, rows),
            "indexer_k_cache_block_offsets": (batch, manager.max_blocks_per_seq),
            "kv_lens_expanded_cuda": (batch * rows,),
            "block_table_expanded": (batch * rows, manager.max_blocks_per_seq),
            "scheduler_metadata_buffer": (self.num_sms + 1, 2),
            "scheduler_metadata_buffer_full_next_n": (self.num_sms + 1, 2),
            "scheduler_metadata_buffer_expanded": (self.num_sms + 1, 2),
        }
        for name, shape in sizes.items():
            empty = self.get_empty(
                self.cuda_graph_buffers,
                shape,
                cache_name=name,
                dtype=torch.int32,
                capture_graph=False,
            )
            setattr(self, name, empty)

    def get_empty(
        self,
        buffers: dict[Any, Tensor],
        shape: tuple[int, ...],
        *,
        cache_name: str,
        dtype: torch.dtype,
        capture_graph: bool,
    ) -> Tensor:
        key = (cache_name, tuple(shape))
        if key not in buffers:
            buffers[key] = torch.zeros(shape, dtype=dtype, device=self.device)
        return buffers[key]

    def get_indexer_kv_lens(self, kv_lens: Tensor) -> Tensor:
        return kv_lens // self._ratio

    def get_indexer_max_seq_len(self) -> int:
        return max(1, self.kv_cache_manager.max_seq_len // self._ratio)

    def prepare(
        self,
        request_ids: list[int],
        lengths: list[int],
        tables: list[list[int]],
        *,
        contexts: list[int],
        next_n: int,
    ) -> None:
        """A step: `contexts` are the token counts of the first requests, all in prefill.

        Args:
            request_ids, lengths, tables: of contexts, then generations; a length counts the
                tokens of this step.
        """
        self.request_ids, self.num_seqs = request_ids, len(request_ids)
        self.num_contexts, self.num_ctx_tokens = len(contexts), sum(contexts)
        self.num_generations = self.num_seqs - self.num_contexts
        self.num_tokens = self.num_ctx_tokens + self.num_generations * next_n
        new = contexts + [next_n] * self.num_generations
        cached = [length - n for length, n in zip(lengths, new, strict=True)]
        self.kv_cache_params = type("Params", (), {"num_cached_tokens_per_seq": cached})
        self.kv_lens_cuda[: self.num_seqs] = torch.tensor(lengths, dtype=torch.int32)
        self.kv_lens_cuda_runtime = self.kv_lens_cuda[: self.num_seqs]
        pages = torch.zeros(self.indexer_k_cache_block_offsets.shape, dtype=torch.int32)
        for row, table in enumerate(tables):
            pages[row, : len(table)] = torch.as_tensor(table)
        self.indexer_k_cache_block_offsets.copy_(pages)
        self._expand(next_n)
        Indexer.prepare(metadata=self)

    def on_update_kv_lens(self) -> None:
        """Schedules and row lengths from the device's lengths alone; graphs capture this."""
        if not self.num_generations:
            return
        part = slice(self.num_contexts, self.num_seqs)
        slots = self.get_indexer_kv_lens(self.kv_lens_cuda[part])
        if self._copies > 1:
            wide = slots.repeat_interleave(self._copies)
            self.kv_lens_expanded_cuda[: len(wide)] = wide
        Indexer.prepare_scheduler_metadata(self)
        if self.use_expanded_buffers_for_mtp:
            self.kv_lens_cuda_2d[: len(slots)] = slots.unsqueeze(1)
            self.scheduler_metadata_buffer.copy_(self.kernels.schedule(slots.view(-1, 1)))
        if self.dsl_expand_factor > 1:
            lengths = self.kv_lens_expanded_cuda[: len(wide)].view(-1, 1)
            self.scheduler_metadata_buffer_expanded.copy_(self.kernels.schedule(lengths))

    def _expand(self, next_n: int) -> None:
        """What `prepare_for_spec_decode` does for split draft rows."""
        self._copies = next_n if self.use_expanded_buffers_for_mtp else self.dsl_expand_factor
        part = slice(self.num_contexts, self.num_seqs)
        slots = (self.kv_lens_cuda[part] // self._ratio).repeat_interleave(self._copies)
        self.kv_lens_expanded_cuda[: len(slots)] = slots
        table = self.indexer_k_cache_block_offsets[part].repeat_interleave(self._copies, dim=0)
        self.block_table_expanded[: len(table)] = table


def _bytes_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8).flatten()


def module() -> ModuleType:
    """This module, as `patch` takes it."""
    return sys.modules[__name__]
