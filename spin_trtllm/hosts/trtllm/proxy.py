# SPDX-License-Identifier: Apache-2.0
"""The kept blocks as a shorter context, in TensorRT-LLM's own terms.

`Indexer.sparse_attn_indexer` (`dsa/indexer.py`) scores what a block table and a length name, and
takes the best columns. Shown the pages of the kept blocks, in order, and a length that is shorter
by what was left out, it does all of that on the kept slots alone, with whichever kernel it likes.

Why the length works for every draft row: row `j` of `n` sees `(length - n + j + 1) // ratio`
columns. All slots between what the first and what the last row see lie in kept blocks (the newest
block of each row is forced), so each row loses the same whole number of slots, and taking
`ratio * skipped` raw tokens off the length takes exactly that many columns off each row.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

# Buffers that `Indexer.prepare_scheduler_metadata` writes; each gets a twin of the same shape.
SCHEDULES = (
    "scheduler_metadata_buffer",
    "scheduler_metadata_buffer_full_next_n",
    "scheduler_metadata_buffer_expanded",
)
TWINS = ("kv_lens_cuda_2d", *SCHEDULES)
MAKER = "get_paged_mqa_logits_metadata"
SCHEDULE_BLOCK_SLOTS = 64  # `_DG_SCHEDULE_BLOCK_KV` of `dsa/indexer.py`


class Twins:
    """Buffers that stand in for the metadata's own, made before any graph needs them.

    Metadata objects of several captured graphs alias their buffers by name; so do the twins, by
    name and shape. None is ever freed: a captured graph may hold its address.
    """

    def __init__(self) -> None:
        self._twins: dict[tuple[str, torch.Size], Tensor] = {}

    def make(self, metadata: Any) -> None:
        """Make what is missing for this metadata; eager, once a step."""
        for name in TWINS:
            self.of(metadata, name)

    def of(self, metadata: Any, name: str) -> Tensor:
        """The twin of one buffer."""
        original: Tensor = getattr(metadata, name)
        key = (name, original.shape)
        if key not in self._twins:
            self._twins[key] = torch.zeros_like(original)
        return self._twins[key]


class ShorterContext:
    """Attention metadata in which the generation requests have only their kept blocks.

    Reads fall through to the metadata behind it, but for the names it was given; its methods see
    the shorter context, too. Writes to those names stay here; others go through, since upstream
    may keep something for a later layer.
    """

    def __init__(self, metadata: Any, changed: dict[str, Any]) -> None:
        object.__setattr__(self, "_spin_metadata", metadata)
        object.__setattr__(self, "_spin_changed", changed)

    def __getattr__(self, name: str) -> Any:
        changed = object.__getattribute__(self, "_spin_changed")
        if name in changed:
            return changed[name]
        metadata = object.__getattribute__(self, "_spin_metadata")
        value = getattr(metadata, name)
        if getattr(value, "__self__", None) is metadata:
            return MethodType(value.__func__, self)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._spin_changed:
            self._spin_changed[name] = value
        else:
            setattr(self._spin_metadata, name, value)


def shorter_context(
    metadata: Any, twins: Twins, lengths: Tensor, pages: Tensor, next_n: int
) -> ShorterContext:
    """Metadata for one layer's call; `schedule` completes it.

    Args:
        metadata: `DSAtrtllmAttentionMetadata` of the step.
        lengths: int32 `[G]`, raw tokens of each generation request, shortened.
        pages: int32 `[G, pages]`, compacted `indexer_k_cache_block_offsets`, pool scale included.
        next_n: rows of each generation request.
    """
    contexts = metadata.num_contexts
    changed: dict[str, Any] = {name: twins.of(metadata, name) for name in TWINS}
    changed |= {
        "kv_lens_cuda_runtime": _after(contexts, lengths),
        "indexer_k_cache_block_offsets": _after(contexts, pages),
        "gen_indexer_kv_lens_cuda_runtime": metadata.get_indexer_kv_lens(lengths),
        # A single row reads the plain schedule, which upstream's function skips when expanding.
        "use_expanded_buffers_for_mtp": metadata.use_expanded_buffers_for_mtp and next_n > 1,
    }
    copies = expansion(metadata, next_n)
    if copies > 1:
        slots = changed["gen_indexer_kv_lens_cuda_runtime"]
        changed["kv_lens_expanded_cuda"] = slots.repeat_interleave(copies)
        changed["block_table_expanded"] = pages.repeat_interleave(copies, dim=0)
    return ShorterContext(metadata, changed)


def expansion(metadata: Any, next_n: int) -> int:
    """Table rows a request when upstream splits its draft rows; 1 when it does not.

    `use_expanded_buffers_for_mtp` (SM90, more than one draft) gives every row its own; the CuTe DSL
    kernels split by `dsl_expand_factor` where `next_n` is that many atoms.
    """
    if next_n > 1 and metadata.use_expanded_buffers_for_mtp:
        return next_n
    factor = int(getattr(metadata, "dsl_expand_factor", 1))
    if factor > 1 and next_n == factor * metadata.dsl_atom:
        return factor
    return 1


def schedule(
    maker: Callable[..., Tensor] | None, indexer: Any, context: ShorterContext, next_n: int
) -> None:
    """Rebuild the kernels' schedules for the shorter lengths with upstream's own functions.

    `Indexer.prepare_scheduler_metadata` covers all but the split of the CuTe DSL kernels, which
    `on_update_kv_lens` builds inline with the `maker`.
    """
    type(indexer).prepare_scheduler_metadata(context)
    if needs_maker(context, next_n):
        assert maker is not None
        lengths = context.kv_lens_expanded_cuda.view(-1, 1)
        made = maker(lengths, SCHEDULE_BLOCK_SLOTS, context.num_sms)
        context.scheduler_metadata_buffer_expanded.copy_(made, non_blocking=True)


def needs_maker(metadata: Any, next_n: int) -> bool:
    """Whether a step needs a schedule that no function of `Indexer` builds."""
    return expansion(metadata, next_n) > 1 and not metadata.use_expanded_buffers_for_mtp


def find_maker(module: ModuleType, metadata: Any) -> Callable[..., Tensor] | None:
    """`get_paged_mqa_logits_metadata`, where `dsa/indexer.py` or `dsa/metadata.py` imported it."""
    modules = [module, *(sys.modules.get(c.__module__) for c in type(metadata).__mro__)]
    makers = (getattr(each, MAKER, None) for each in modules)
    return next((maker for maker in makers if maker is not None), None)


@contextmanager
def intercepted(top_k: Any, choose: Callable[[Tensor, Tensor], bool]) -> Iterator[None]:
    """Let `choose` see, and maybe make, the choice of a `TopK` module (`modules/top_k.py`).

    Args:
        choose: called for decode rows with the scores, fp32 `[rows, columns]`, uninitialised past
            each row's length, and upstream's output buffer; False leaves the choice to upstream.
    """
    original = top_k.forward
    signature = inspect.signature(original)

    def forward(*args: Any, **options: Any) -> Tensor:
        arguments = signature.bind(*args, **options).arguments
        output: Tensor = arguments["output_indices"]
        if arguments["is_prefill"] or not choose(arguments["scores"], output):
            return original(*args, **options)
        return output

    top_k.forward = forward  # on the instance, over its class's
    try:
        yield
    finally:
        del top_k.forward


def scores_in(top_k: Any, run: Callable[[], object]) -> list[Tensor]:
    """What a `TopK` module is given for decode rows while `run` runs, as `intercepted` shows it."""
    seen: list[Tensor] = []

    def look(scores: Tensor, _: Tensor) -> bool:
        seen.append(scores)
        return False

    with intercepted(top_k, look):
        run()
    return seen


def to_sequence_slots(columns: Tensor, block_list: Tensor, block_size: int) -> None:
    """Replace columns of the shorter context by slots of the sequence, in place.

    Args:
        columns: int32 `[G * next_n, K]`, -1 pads.
        block_list: int32 `[G, B]`, kept blocks ascending, then -1.
        block_size: slots a block.

    A column that names no kept block becomes -1: what follows does not check bounds.
    """
    wide = columns.view(block_list.shape[0], -1)
    place = (wide // block_size).clamp(0, block_list.shape[1] - 1)
    block = block_list.gather(1, place.long())
    slots = block * block_size + wide % block_size
    wide.copy_(torch.where((wide < 0) | (block < 0), -1, slots))


def _after(rows: int, values: Tensor) -> Tensor:
    """`values` with `rows` rows of zeros before; the tensor itself where there are none."""
    if not rows:
        return values
    return torch.cat([values.new_zeros(rows, *values.shape[1:]), values])
