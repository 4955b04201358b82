# SPDX-License-Identifier: Apache-2.0
"""Quantisers of the double: block-wise fp8 with power-of-two scales, and MXFP4.

Stand for quantization/utils/fp8_utils.py fp8_quantize_1x128_sf_transpose(use_ue8m0=True) and
torch.ops.trtllm.fused_cat_fp8 / fused_cat_fp4 (call sites in dsa/indexer.py @0b228a79).
"""

from __future__ import annotations

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def quantize_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., 128] -> e4m3 [..., 128], fp32 scale [..., 1], a power of two"""
    peak = values.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(peak / 448.0)))
    return (values / scale).to(torch.float8_e4m3fn), scale


def quantize_fp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., 128] -> int8 [..., 64] (low nibble first), int32 [..., 1] (4 UE8M0 bytes)"""
    blocks = values.unflatten(-1, (4, 32))
    peak = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4)
    exponent = torch.ceil(torch.log2(peak / 6.0)).clamp(-127, 127)
    scaled = (blocks / torch.exp2(exponent)).flatten(-2)
    nearest = (scaled.abs().unsqueeze(-1) - E2M1.to(values.device)).abs().argmin(dim=-1)
    codes = nearest + 8 * (scaled < 0).long()
    packed = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    scales = (exponent.squeeze(-1) + 127).to(torch.uint8)
    return packed.view(torch.int8), scales.contiguous().view(torch.int32)


def write_slots(
    cache: torch.Tensor, pages: list[int], inside: list[int], keys: torch.Tensor, fp4: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises raw keys and stores them in planar pages: all data bytes, then all scales.

    The layout is that of dsa/indexer.py _compute_slot_mappings @0b228a79.
    """
    slots, data = cache.shape[1], cache.shape[3] - 4
    flat = cache.view(cache.shape[0], -1)
    codes, scales = (quantize_fp4 if fp4 else quantize_fp8)(keys.to(cache.device))
    page = torch.tensor(pages, device=cache.device)[:, None]
    slot = torch.tensor(inside, device=cache.device)[:, None]
    lanes = torch.arange(data, device=cache.device)
    flat[page, slot * data + lanes] = codes.view(torch.uint8)
    words = scales.contiguous().view(torch.uint8).view(-1, 4)
    flat[page, slots * data + slot * 4 + lanes[:4]] = words
    return codes, scales
