# SPDX-License-Identifier: Apache-2.0
"""A 16-bit query as the scorer of paged fp8 keys wants it."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0  # of e4m3
LEAST_MAXIMUM = 1e-12


def quantize_query(query: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 with one power-of-two scale for each row and head, which the weights take over.

    Scales round up, as TensorRT-LLM's and DeepGEMM's indexers do with UE8M0: the largest value of
    a head lands in (224, 448]. NaN and infinities do not count for it.

    Args:
        query: fp16 or bf16 `[S, R, H, 128]`.
        weights: fp32 `[S, R, H]`.

    Returns:
        The query e4m3 `[S, R, H, 128]`; infinities are +-448, NaN stays NaN. The weights fp32
        `[S, R, H]`, multiplied by the scales.
    """
    wide = query.float()
    most = wide.abs().where(wide.isfinite(), 0.0).amax(-1, keepdim=True).clamp(min=LEAST_MAXIMUM)
    mantissa, exponent = torch.frexp(most * (1 / LARGEST))
    exponent = exponent - (mantissa == 0.5).int()  # a power of two is its own
    scale = torch.ldexp(torch.ones_like(most), exponent)
    quantized = (wide / scale).clamp(-LARGEST, LARGEST)
    quantized = quantized.where(quantized == quantized, float("nan"))  # one NaN, without a sign
    return quantized.to(torch.float8_e4m3fn), weights * scale.squeeze(-1)
