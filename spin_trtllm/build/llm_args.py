# SPDX-License-Identifier: Apache-2.0
"""The text of `llm_args.yaml`, for `trtllm-serve --config`.

TensorRT-LLM refuses keys that it does not know, so nothing of SPIN is in this file: `run.sh` names
`spin.yaml` in `TLLM_SPIN`. Every key is a field of TensorRT-LLM's `TorchLlmArgs`,
`KvCacheConfig`, `CudaGraphConfig` and `DeepSeek(V4)SparseAttentionConfig` in releases 1.3.0rc27 to
1.4.0rc4. What they leave at their defaults is left alone here, prefix reuse included: SPIN starts a
sequence with a reused prefix cold.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from spin_trtllm.build.checkpoint import DEEPSEEK_V4, Checkpoint
from spin_trtllm.build.memory import SpinMemory, human_bytes
from spin_trtllm.build.target import PAGE_SLOTS, Target, indexer_key_dtype, main_cache_dtype

_COMMENT_WIDTH = 96


@dataclass(frozen=True)
class _Setting:
    """One key of the file, with the comment above it; `value` may be settings of its own."""

    key: str
    value: bool | int | str | list[int] | tuple[_Setting, ...]
    why: str


def llm_args_text(
    checkpoint: Checkpoint,
    target: Target,
    memory: SpinMemory,
    *,
    block_size_slots: int,
    max_batch_size: int,
    max_seq_len: int,
) -> str:
    """The commented YAML text.

    Args:
        block_size_slots: slots of a SPIN block, for the comment on the page size.
        max_batch_size: sequences that decode at once.
        max_seq_len: longest sequence, in tokens.
    """
    room = (
        f"SPIN takes {human_bytes(memory.total_bytes)} next to this cache, "
        f"{human_bytes(memory.state_bytes)} of averages and {human_bytes(memory.buffer_bytes)} of "
        f"buffers, and {human_bytes(memory.draft_bytes)} more for each draft token. TensorRT-LLM "
        "measures a forward pass before it sizes this cache and finds them taken; where it skips "
        "that, under context parallelism, lower free_gpu_memory_fraction (0.9 by default)."
    )
    settings = (
        _Setting(
            "max_batch_size",
            max_batch_size,
            "Sequences that decode at once. SPIN's state is sized for it; more would run dense. "
            "This file wins over the command line.",
        ),
        _Setting("max_seq_len", max_seq_len, "Longest sequence in tokens, prompt and output."),
        _Setting(
            "sparse_attention_config",
            _sparse_attention(checkpoint, target),
            "The indexer, as the checkpoint has it. Written out because some releases prefer their "
            "own defaults to the checkpoint's values once this section exists.",
        ),
        _Setting("kv_cache_config", _kv_cache(checkpoint, target, block_size_slots), room),
        _Setting(
            "cuda_graph_config",
            _cuda_graphs(max_batch_size),
            "Decoding runs from CUDA graphs; SPIN's steps are captured with them.",
        ),
    )
    head = (
        f"trtllm-serve --config: {json.dumps(checkpoint.path.name)}, {checkpoint.architecture}, on "
        f"{target.name}. Written by trtllm-build --use_spin; SPIN's own settings are in spin.yaml. "
        "Without SPIN's hooks (spin-trtllm doctor tells) this file serves the same model dense."
    )
    lines = [*_comment(head, ""), "", *_lines(settings)]
    return "\n".join(lines) + "\n"


def _sparse_attention(checkpoint: Checkpoint, target: Target) -> tuple[_Setting, ...]:
    geometry = checkpoint.geometry
    is_v4 = checkpoint.architecture == DEEPSEEK_V4
    dtype = indexer_key_dtype(target.sm, checkpoint.architecture, geometry.index_head_dim)
    settings = [
        _Setting("algorithm", "deepseek_v4" if is_v4 else "dsa", f"{checkpoint.architecture}'s."),
        _Setting("index_n_heads", geometry.index_heads, "Heads that vote on a slot."),
        _Setting("index_head_dim", geometry.index_head_dim, "Dimensions of an indexer key."),
        _Setting("index_topk", geometry.top_k, "Slots that the attention reads."),
        _Setting(
            "indexer_k_dtype",
            dtype,
            f"Storage of the indexer's keys on {target.name}. fp4 needs sm_100 or sm_103, 128 "
            "dimensions and DeepSeek-V4; everything else takes fp8.",
        ),
        _Setting(
            "use_cute_dsl_paged_mqa_logits",
            False,
            "Dense steps score with the DeepGEMM kernel that SPIN's steps use, so that skipping "
            "nothing gives the same bits.",
        ),
    ]
    if is_v4:
        layout = "Tokens per compressed key of each layer; 0: sliding window, 4: has an indexer."
        settings.append(_Setting("compress_ratios", list(checkpoint.compress_ratios), layout))
    return tuple(settings)


def _kv_cache(
    checkpoint: Checkpoint, target: Target, block_size_slots: int
) -> tuple[_Setting, ...]:
    tokens = PAGE_SLOTS * checkpoint.geometry.ratio
    return (
        _Setting(
            "tokens_per_block",
            tokens,
            f"{tokens} tokens are {PAGE_SLOTS} slots of an indexer page: "
            f"{_blocks_of_page(block_size_slots)}.",
        ),
        _Setting(
            "dtype",
            main_cache_dtype(target.sm, checkpoint.architecture),
            "Storage of the main keys, which SPIN does not touch. DeepSeek-V4 on sm_90 and both "
            "models on sm_120 need fp8_ds_mla; elsewhere auto follows the checkpoint.",
        ),
    )


def _cuda_graphs(max_batch_size: int) -> tuple[_Setting, ...]:
    return (
        _Setting(
            "enable_padding", True, "Round batches up to a captured size; SPIN skips the pad."
        ),
        _Setting("max_batch_size", max_batch_size, "Capture up to the largest batch, not 128."),
    )


def _blocks_of_page(block_size_slots: int) -> str:
    if block_size_slots == PAGE_SLOTS:
        return "one SPIN block"
    if block_size_slots < PAGE_SLOTS:
        return f"{PAGE_SLOTS // block_size_slots} SPIN blocks"
    return f"a SPIN block is {block_size_slots // PAGE_SLOTS} pages"


def _lines(settings: Iterable[_Setting], indent: str = "") -> Iterator[str]:
    for setting in settings:
        yield from _comment(setting.why, indent)
        if isinstance(setting.value, tuple):
            yield f"{indent}{setting.key}:"
            yield from _lines(setting.value, indent + "  ")
        else:
            # JSON scalars and lists are YAML too, and never need a second look at quoting
            yield f"{indent}{setting.key}: {json.dumps(setting.value)}"


def _comment(sentence: str, indent: str) -> list[str]:
    return textwrap.wrap(
        sentence,
        _COMMENT_WIDTH,
        initial_indent=indent + "# ",
        subsequent_indent=indent + "# ",
        break_on_hyphens=False,
        break_long_words=False,
    )
