# SPDX-License-Identifier: Apache-2.0
"""Averages as they are stored: fp32, bf16, or logarithms of 8 bits (SPEC 5).

The dtype says which: int8 holds codes of `log8`. Codes are in the order of the averages that they
stand for, and 0 stands for 0, so that a cleared tensor is a cold state in any storage.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

LOG8 = torch.int8

_ONE = 89  # the code of 1.0
_STEPS = 8  # codes an octave
_LARGEST = 127


def read_averages(stored: Tensor) -> Tensor:
    """Stored averages in fp32; nothing is lost."""
    return decode_log8(stored) if stored.dtype == LOG8 else stored.float()


def store_averages(averages: Tensor, dtype: torch.dtype) -> Tensor:
    """Averages in fp32 rounded to what is stored."""
    return encode_log8(averages) if dtype == LOG8 else averages.to(dtype)


def decode_log8(codes: Tensor) -> Tensor:
    """The averages that codes stand for.

    Args:
        codes: int8.

    Returns:
        fp32 of the same shape: 0, or the nearest to `sign(c) * 2**((|c| - 89) / 8)`.
    """
    return _AVERAGES.to(codes.device)[codes.long()]


def encode_log8(averages: Tensor) -> Tensor:
    """The codes with the nearest logarithms: 0 below the smallest magnitude, 127 above the largest.

    Args:
        averages: fp32, not NaN.

    Returns:
        int8 of the same shape, -127 .. 127.
    """
    midpoints = _MIDPOINTS.to(averages.device)
    magnitudes = torch.bucketize(averages.abs().double().contiguous(), midpoints)
    return torch.where(averages < 0, -magnitudes, magnitudes).to(LOG8)


def _power(code: float) -> float:
    return 2.0 ** ((code - _ONE) / _STEPS)


def _table(numbers: Iterable[float]) -> Tensor:
    return torch.tensor([*numbers], dtype=torch.float64)


_UP, _DOWN = range(1, _LARGEST + 1), range(_LARGEST + 1, 0, -1)
# Looked up by the code itself: -1 is the last entry, and -128, which is never written, the middle.
_AVERAGES = _table([0.0, *(_power(n) for n in _UP), *(-_power(n) for n in _DOWN)]).float()
# Irrational: no fp32 lies on one, nor so near that it matters how they are rounded here.
_MIDPOINTS = _table(_power(n - 0.5) for n in _UP)
