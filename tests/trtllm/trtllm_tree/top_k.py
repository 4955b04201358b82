# SPDX-License-Identifier: Apache-2.0
"""Mirrors _torch/modules/top_k.py @099929cb.

dsa/indexer.py @0b228a79 is newer: it passes radix_aux_indices / radix_aux_logits and
gvr_self_sampling, which that TopK does not take. Both sets are accepted here.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import nn

from ..memory_buffer_utils import get_memory_buffers


class TopKImplementation(str, Enum):
    """top_k.py TopKImplementation"""

    TORCH = "torch"
    CUDA_RADIX = "cuda_radix"
    CUTE_DSL_RADIX = "cute_dsl_radix"
    CUDA_GVR = "cuda_gvr"
    CUTE_DSL_GVR = "cute_dsl_gvr"
    CUTE_DSL_GVR_V2 = "cute_dsl_gvr_v2"


_TEMPORAL_GVR_IMPLEMENTATIONS = {TopKImplementation.CUDA_GVR, TopKImplementation.CUTE_DSL_GVR}
_MAX_RADIX_BLOCKS_PER_ROW = 10  # top_k.py _MAX_RADIX_BLOCKS_PER_ROW


class TopK(nn.Module):
    """top_k.py TopK: GVR variants are not modelled, only the flag that announces them"""

    def __init__(
        self,
        top_k: int,
        *,
        prefill_implementation: TopKImplementation | None = None,
        decode_implementation: TopKImplementation | None = None,
        compress_ratio: int = 1,
        gvr_self_sampling: bool = False,
    ) -> None:
        super().__init__()
        default = TopKImplementation.CUDA_RADIX
        self.top_k = top_k
        self.prefill_implementation = TopKImplementation(prefill_implementation or default)
        self.decode_implementation = TopKImplementation(decode_implementation or default)
        self.compress_ratio = compress_ratio
        self.gvr_self_sampling = gvr_self_sampling

    @property
    def needs_gvr_prior(self) -> bool:
        """top_k.py TopK.needs_gvr_prior"""
        return (
            self.decode_implementation in _TEMPORAL_GVR_IMPLEMENTATIONS
            and not self.gvr_self_sampling
        )

    def forward(
        self,
        scores: torch.Tensor,
        output_indices: torch.Tensor,
        *,
        is_prefill: bool,
        row_starts: torch.Tensor | None = None,
        row_ends: torch.Tensor | None = None,
        sequence_lengths: torch.Tensor | None = None,
        scan_lengths: torch.Tensor | None = None,
        next_n: int = 1,
        max_seq_len: int | None = None,
        gvr_ext_kwargs: dict | None = None,
        radix_aux_indices: torch.Tensor | None = None,
        radix_aux_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """top_k.py TopK.forward: writes `output_indices` and returns it"""
        if is_prefill:
            assert row_starts is not None
            assert row_ends is not None
            torch.ops.trtllm.indexer_topk_prefill(
                scores, row_starts, row_ends, output_indices, self.top_k
            )
            return output_indices
        assert sequence_lengths is not None
        assert scan_lengths is not None
        if self.decode_implementation == TopKImplementation.TORCH:
            return self._forward_decode_torch(scores, scan_lengths, output_indices, next_n)
        if self.decode_implementation in (
            TopKImplementation.CUDA_RADIX,
            TopKImplementation.CUTE_DSL_RADIX,
        ):
            return self._forward_decode_radix(
                scores,
                sequence_lengths,
                scan_lengths,
                output_indices,
                next_n,
                (radix_aux_indices, radix_aux_logits),
            )
        raise NotImplementedError("GVR selection is outside the double")

    def _forward_decode_radix(
        self, scores, sequence_lengths, scan_lengths, output_indices, next_n, aux
    ) -> torch.Tensor:
        """top_k.py TopK._forward_decode_radix: CuTe DSL only without compressed drafts"""
        cute = self.decode_implementation == TopKImplementation.CUTE_DSL_RADIX
        if cute and not (self.compress_ratio > 1 and next_n > 1):
            torch.ops.trtllm.cute_dsl_indexer_topk_decode(
                scores, scan_lengths, output_indices, self.top_k, next_n
            )
            return output_indices
        if aux[0] is None:
            aux = self._get_radix_workspace(scores)
        torch.ops.trtllm.indexer_topk_decode(
            scores,
            sequence_lengths,
            output_indices,
            next_n,
            self.top_k,
            pre_idx=None,
            heuristic_scratch=None,
            compress_ratio=self.compress_ratio,
            radix_aux_indices=aux[0],
            radix_aux_logits=aux[1],
        )
        return output_indices

    def _get_radix_workspace(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """top_k.py TopK._get_radix_workspace"""
        shape = (scores.shape[0], _MAX_RADIX_BLOCKS_PER_ROW, self.top_k)
        pool = get_memory_buffers()
        return (
            pool.get_buffer(shape, torch.int32, "top_k_radix_indices_workspace", False),
            pool.get_buffer(shape, torch.float32, "top_k_radix_values_workspace", False),
        )

    def _forward_decode_torch(self, scores, scan_lengths, output_indices, next_n) -> torch.Tensor:
        """top_k.py TopK._forward_decode_torch: causality in score columns, ratio ignored"""
        output_indices.fill_(-1)
        count = min(self.top_k, scores.shape[1])
        rows = torch.arange(scores.shape[0], device=scores.device)
        ends = scan_lengths[rows // next_n] - next_n + rows % next_n + 1
        valid = torch.arange(scores.shape[1], device=scores.device) < ends[:, None]
        picked = scores.masked_fill(~valid, float("-inf")).topk(count, dim=-1).indices
        picked = picked.masked_fill(~valid.gather(1, picked), -1)
        output_indices[:, :count].copy_(picked.to(torch.int32))
        return output_indices

    def update_gvr_prior_from_prefill(
        self, output_indices, request_lengths, gvr_prior_indices, *, request_offset: int = 0
    ) -> None:
        """top_k.py TopK.update_gvr_prior_from_prefill: nothing without a prior"""
        if self.needs_gvr_prior:
            raise NotImplementedError("GVR priors are outside the double")
