# SPDX-License-Identifier: Apache-2.0
"""A 16-bit query as the scorer of paged fp8 keys wants it (`spin::quantize_query`)."""

from __future__ import annotations

import torch
from torch import Tensor

from spin_trtllm import native, reference
from spin_trtllm.ops.checks import check_devices, check_tensor, on_cuda


def quantize_query(query: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 query and scaled weights; see `spin_trtllm.reference.quantize_query`."""
    check_tensor(
        "query", query, tuple(native.QUERY_DTYPES), ("sequences", "rows", "heads", native.KEY_DIM)
    )
    check_tensor("weights", weights, (torch.float32,), tuple(query.shape[:3]))
    check_devices({"query": query, "weights": weights})
    return _quantize(query, weights)


@torch.library.custom_op("spin::quantize_query", mutates_args=())
def _quantize(query: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    run = _launch if on_cuda(query) else reference.quantize_query
    return run(query.contiguous(), weights.contiguous())  # dense results, as the fake says


@_quantize.register_fake
def _(query: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape, dtype=torch.float8_e4m3fn), weights.new_empty(weights.shape)


def _launch(query: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:  # pragma: no cover - GPU
    quantized = torch.empty_like(query, dtype=torch.float8_e4m3fn)
    scaled = torch.empty_like(weights)
    native.call(
        "quantize_query",
        native.stream_of(query),
        query=query,
        weights=weights,
        query_out=quantized,
        weights_out=scaled,
        heads_total=weights.numel(),
        query_dtype=native.QUERY_DTYPES[query.dtype],
    )
    return quantized, scaled
