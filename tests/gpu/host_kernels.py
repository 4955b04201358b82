# SPDX-License-Identifier: Apache-2.0
"""Kernels for the stand-in of TensorRT-LLM's indexer, and CUDA graphs around a decode step.

Scoring is what TensorRT-LLM calls on Hopper: DeepGEMM's `get_paged_mqa_logits_metadata` and
`fp8_paged_mqa_logits`. Its own top-k, the custom op `indexer_topk_decode`, comes with TensorRT-LLM
alone; FlashInfer's radix top-k, which takes a length a row as that one does, stands in for it where
`FLASHINFER_TOPK` names a built `topk.so`, and torch.topk where it does not.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import hook_standin
import torch
from cases import capturing
from torch import Tensor

from spin_trtllm.ops import score_pages

try:
    import deep_gemm
except ImportError:
    deep_gemm = None

PAGE_SLOTS = 64  # of DeepGEMM's paged kernel on Hopper
ROW_STATE_BYTES = 1 << 20  # FlashInfer's workspace, zero before its first use


@functools.cache
def flashinfer_topk() -> Any:
    """FlashInfer's built top-k module, None if there is none."""
    built = os.environ.get("FLASHINFER_TOPK")
    if not built:
        return None
    import tvm_ffi

    return tvm_ffi.load_module(built)


class OwnKernels(hook_standin.Kernels):
    """This package's scoring in the host's place, and torch.topk; on any device."""

    name = "spin"
    is_lower_first = False  # torch.topk: equal scores may go either way

    def schedule(self, lengths: Tensor) -> Tensor:
        """Nothing that `logits` would need."""
        return lengths.new_zeros(self.num_sms + 1, 2)

    def logits(
        self,
        query: Tensor,
        keys: Tensor,
        weights: Tensor,
        lengths: Tensor,
        table: Tensor,
        schedule: Tensor,
        width: int,
    ) -> Tensor:
        """Scores fp32 `[rows, width]` of every page; arguments as DeepGEMM takes them."""
        first = torch.arange(-(-width // PAGE_SLOTS), device=query.device) * PAGE_SLOTS
        visible = lengths[:, 0].contiguous()
        pages = torch.where(first < visible.unsqueeze(1), first // PAGE_SLOTS, -1).int()
        scores = score_pages(
            query,
            weights,
            keys.view(keys.shape[0], -1),
            table,
            visible,
            pages,
            block_size_slots=PAGE_SLOTS,
        )
        return scores.flatten(0, 1)[:, :width]

    def top_k(self, top_k: int, ratio: int) -> hook_standin.TopK:
        """torch.topk of the columns that each row sees."""
        return TorchTopK(top_k, compress_ratio=ratio)


class DeepGemmKernels(OwnKernels):
    """DeepGEMM's scoring, and FlashInfer's top-k where it is there.

    Args:
        is_lower_first: whether FlashInfer shall prefer lower columns among equal scores, which
            takes it some time.
    """

    name = "deep_gemm"

    def __init__(self, *, is_lower_first: bool = False) -> None:
        self.num_sms = deep_gemm.get_num_sms()
        self.is_lower_first = is_lower_first and flashinfer_topk() is not None

    def schedule(self, lengths: Tensor) -> Tensor:
        """Work of `logits` for lengths int32 `[G, next_n]`."""
        return deep_gemm.get_paged_mqa_logits_metadata(
            lengths.contiguous(), PAGE_SLOTS, self.num_sms
        )

    def logits(
        self,
        query: Tensor,
        keys: Tensor,
        weights: Tensor,
        lengths: Tensor,
        table: Tensor,
        schedule: Tensor,
        width: int,
    ) -> Tensor:
        """Scores fp32 `[rows, width]`, uninitialised past each row's length."""
        return deep_gemm.fp8_paged_mqa_logits(
            query.contiguous(),
            keys,
            weights.flatten(0, 1),
            lengths[:, : query.shape[1]].contiguous(),
            table,
            schedule,
            width,
            clean_logits=False,
        )

    def top_k(self, top_k: int, ratio: int) -> hook_standin.TopK:
        """The fastest top-k that is there."""
        if flashinfer_topk() is None:
            return TorchTopK(top_k, compress_ratio=ratio)
        return FlashInferTopK(top_k, ratio, is_lower_first=self.is_lower_first)


class TorchTopK(hook_standin.TopK):
    """torch.topk behind the interface of `modules/top_k.py`."""

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
        if not is_prefill:
            seen = columns_of_rows(sequence_lengths, scan_lengths, next_n, self.compress_ratio)
            outside = torch.arange(scores.shape[1], device=scores.device) >= seen.unsqueeze(1)
            count = min(self.top_k, scores.shape[1])
            best = scores.masked_fill(outside, float("-inf")).topk(count, sorted=False).indices
            output_indices[:, :count] = torch.where(best < seen.unsqueeze(1), best, -1)
        return output_indices


class FlashInferTopK(hook_standin.TopK):
    """FlashInfer's `top_k_ragged_transform` behind the interface of `modules/top_k.py`."""

    def __init__(self, top_k: int, ratio: int, *, is_lower_first: bool) -> None:
        super().__init__(top_k, compress_ratio=ratio)
        self.tie_break = int(is_lower_first)
        self._offsets = torch.zeros(0, dtype=torch.int32, device="cuda")
        self._row_states = torch.zeros(ROW_STATE_BYTES, dtype=torch.uint8, device="cuda")

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
        if is_prefill:
            return output_indices.fill_(-1)
        if len(self._offsets) < len(scores):  # before any graph is captured: it is run once first
            self._offsets = scores.new_zeros(len(scores), dtype=torch.int32)
        flashinfer_topk().radix_topk_ragged_transform(
            scores.contiguous(),
            output_indices,
            self._offsets[: len(scores)],
            columns_of_rows(sequence_lengths, scan_lengths, next_n, self.compress_ratio),
            self._row_states,
            self.top_k,
            False,  # deterministic order
            self.tie_break,
            False,  # dsa_graph_safe: its other kernels read nothing on the host either
            None,  # row_starts
        )
        return output_indices


def columns_of_rows(
    sequence_lengths: Tensor | None, scan_lengths: Tensor | None, next_n: int, ratio: int
) -> Tensor:
    """Columns that each row sees, int32 `[G * next_n]`.

    Row `j` of a request of `length` raw tokens sees `(length - next_n + j + 1) // ratio`.
    """
    assert sequence_lengths is not None
    assert scan_lengths is not None
    if next_n == 1:
        return scan_lengths
    ends = torch.arange(1 - next_n, 1, device=sequence_lengths.device) + sequence_lengths[:, None]
    return (ends // ratio).clamp_(min=0).int().flatten()


def best_kernels(device: str, *, is_lower_first: bool = False) -> OwnKernels:
    """DeepGEMM's kernels on a GPU where it is installed, else this package's."""
    if device == "cpu" or deep_gemm is None:
        return OwnKernels()
    return DeepGemmKernels(is_lower_first=is_lower_first)


def capture(run: Callable[[], object], device: str) -> Callable[[], object]:
    """A CUDA graph of `run`, as a function that replays it; on a CPU `run` itself.

    `run` must have run before: memory that it keeps may not come from the graph's pool.
    """
    if device == "cpu":
        return run
    with capturing() as graph:
        run()
    return graph.replay
