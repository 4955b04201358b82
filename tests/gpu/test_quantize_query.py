# SPDX-License-Identifier: Apache-2.0
"""quantize_query on a GPU, bit for bit: all values of both 16-bit types, and all scales."""

from __future__ import annotations

import pytest
import torch
from cases import same_bits

from spin_trtllm import ops, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_bit_pattern_beside_every_other(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    shuffled = [bits] + [bits[torch.randperm(2**16, generator=generator)] for _ in range(3)]
    query = torch.cat(shuffled).view(dtype).view(-1, 1, 32, 128)
    weights = torch.randn(query.shape[:3], generator=generator)
    got = ops.quantize_query(query.cuda(), weights.cuda())
    want = reference.quantize_query(query, weights)
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])


@pytest.mark.parametrize("shape", [(0, 1, 64), (1, 1, 32), (3, 5, 64), (300, 2, 64)])
def test_shapes_and_magnitudes(shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    spread = torch.exp2(torch.rand(*shape, 1, generator=generator) * 200 - 100)
    query = (torch.randn(*shape, 128, generator=generator) * spread).bfloat16()
    weights = torch.randn(shape, generator=generator)
    got = ops.quantize_query(query.cuda(), weights.cuda())
    want = reference.quantize_query(query, weights)
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])
