# SPDX-License-Identifier: Apache-2.0
"""How averages are stored: the coding of `log8` against exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spin_trtllm.reference.averages import (
    decode_log8,
    encode_log8,
    read_averages,
    store_averages,
)

quick = settings(max_examples=300, deadline=None, derandomize=True)
INF = float("inf")
CODES = torch.arange(-127, 128).to(torch.int8)
SMALLEST, LARGEST = 2.0**-11, 2.0**4.75
HALF_STEP = 2.0 ** (1 / 16)

fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
likely = st.floats(-30.0, 30.0, width=32)
lists = st.lists(st.one_of(fp32, likely), min_size=1, max_size=40)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def exact_code(x: float) -> int:
    """`log8` by its definition in rational arithmetic: midpoints are 16th roots of powers of 2."""
    power = Fraction(abs(x)) ** 16
    magnitude = sum(power > Fraction(2) ** (2 * n - 1 - 2 * 89) for n in range(1, 128))
    return -magnitude if x < 0 else magnitude


# ---------------------------------------------------------------- codes
def test_codes_by_hand() -> None:
    values = tensor(0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 0.25, 2.0**-11, 16.0, -16.0)
    codes = encode_log8(values)
    assert codes.dtype == torch.int8
    assert codes.tolist() == [0, 0, 89, -89, 97, 81, 73, 1, 121, -121]
    found = decode_log8(codes)
    assert found.dtype == torch.float32
    assert torch.equal(found, values)  # powers of 2 are exact
    assert not found.signbit()[1]  # there is one zero
    assert decode_log8(tensor(90, 127).to(torch.int8)).tolist() == [
        float(np.float32(2.0 ** (1 / 8))),
        float(np.float32(2.0**4.75)),
    ]


def test_every_code_is_the_nearest_fp32() -> None:
    for code, value in zip(range(1, 128), decode_log8(CODES)[128:].numpy(), strict=True):
        below, above = (Fraction(float(np.nextafter(value, np.float32(x)))) for x in (0, np.inf))
        middle = Fraction(float(value))
        low, high = (below + middle) / 2, (middle + above) / 2
        assert low**8 <= Fraction(2) ** (code - 89) <= high**8, code


def test_both_sides_of_every_midpoint() -> None:
    """The two fp32 next to each point where the code changes, and some beyond them."""
    middles = np.float32(2.0 ** ((np.arange(1, 128) - 0.5 - 89) / 8))
    nearby = (middles.view(np.int32)[:, None] + np.arange(-3, 4, dtype=np.int32)).view(np.float32)
    found = encode_log8(torch.from_numpy(nearby))
    assert found.tolist() == [[exact_code(float(x)) for x in row] for row in nearby]
    assert (found[:, 0] != found[:, -1]).all()


@quick
@given(lists)
def test_the_definition_and_the_oracle(values: list[float]) -> None:
    codes = encode_log8(tensor(*values))
    assert codes.tolist() == [exact_code(x) for x in values]
    wanted = [float(oracle.round_log8(np.float32(x))) for x in values]
    assert decode_log8(codes).tolist() == wanted


@quick
@given(lists)
def test_the_error_of_a_round_trip(values: list[float]) -> None:
    for x, y in zip(values, decode_log8(encode_log8(tensor(*values))).tolist(), strict=True):
        if abs(x) < SMALLEST / HALF_STEP:
            assert y == 0
        elif abs(x) > LARGEST * HALF_STEP:
            assert y == math.copysign(np.float32(LARGEST), x)
        else:
            assert 1 / HALF_STEP - 1e-7 <= y / x <= HALF_STEP + 1e-7


@quick
@given(lists)
def test_order_is_kept(values: list[float]) -> None:
    codes = encode_log8(tensor(*sorted(values)))
    assert (codes.int().diff() >= 0).all()
    assert torch.equal(encode_log8(-tensor(*sorted(values))), -codes)


def test_codes_are_in_the_order_of_their_averages() -> None:
    """So a maximum may be taken of either."""
    assert (decode_log8(CODES).diff() > 0).all()


def test_rounding_again_changes_nothing() -> None:
    assert torch.equal(encode_log8(decode_log8(CODES)), CODES)


def test_what_is_out_of_range() -> None:
    values = tensor(1e-40, -1e-40, 4e-4, -4e-4, 28.1, -28.2, 3e38, -3e38, INF, -INF)
    assert encode_log8(values).tolist() == [0, 0, 0, 0, *[127, -127] * 3]
    # Never written, but a byte like any other: what the next code would be.
    assert float(decode_log8(torch.tensor(-128).to(torch.int8))) == -np.float32(2.0 ** (39 / 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_any_layout(dtype: torch.dtype) -> None:
    values = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
    stored = store_averages(values, dtype)
    assert stored.dtype == dtype
    assert torch.equal(store_averages(values.t()[::2], dtype), stored.t()[::2])
    found = read_averages(stored)
    assert found.dtype == torch.float32
    assert torch.equal(read_averages(stored.t()[::2]), found.t()[::2])
    assert torch.equal(store_averages(found, dtype), stored)
    for shape in ((), (0,), (3, 0, 2)):
        empty = torch.zeros(shape)
        assert torch.equal(read_averages(store_averages(empty, dtype)), empty)
