# SPDX-License-Identifier: Apache-2.0
"""quantize_query without a GPU: its rule, its operator, and what its C interface refuses."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spin_trtllm import native, ops, reference
from spin_trtllm.errors import SpinError

NULL, RANGE, ALIGNMENT = 1, 2, 3
SOMEWHERE = 0x7F00_0000_0000  # aligned, never dereferenced
GOOD: dict[str, Any] = {
    **dict.fromkeys(("query", "weights", "query_out", "weights_out"), SOMEWHERE),
    "heads_total": 4,
}


def one_head(*values: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    query = torch.zeros(1, 1, 1, native.KEY_DIM, dtype=dtype)
    query[0, 0, 0, : len(values)] = torch.tensor(values, dtype=dtype)
    return query


def scale_of(query: torch.Tensor) -> float:
    return reference.quantize_query(query, torch.ones(query.shape[:3]))[1].item()


@pytest.mark.parametrize(
    ("largest", "scale"),
    [(448.0, 1.0), (450.0, 2.0), (-896.0, 2.0), (1.0, 2.0**-8), (0.875, 2.0**-9), (0.0, 2.0**-48)],
)
def test_scales_are_powers_of_two_rounded_up(largest: float, scale: float) -> None:
    assert scale_of(one_head(largest / 4, largest)) == scale


def test_what_is_not_finite_does_not_scale() -> None:
    query = one_head(float("inf"), float("nan"), 1.0, float("-inf"))
    quantized, weights = reference.quantize_query(query, torch.ones(1, 1, 1))
    assert weights.item() == 2.0**-8
    assert quantized[0, 0, 0, :4].view(torch.uint8).tolist() == [0x7E, 0x7F, 0x78, 0xFE]


@given(st.lists(st.floats(-60000, 60000, width=16), min_size=1, max_size=128), st.booleans())
def test_products_are_kept_to_the_precision_of_e4m3(values: list[float], half: bool) -> None:
    query = one_head(*values, dtype=torch.float16 if half else torch.bfloat16)
    quantized, weights = reference.quantize_query(query, torch.full((1, 1, 1), 3.0))
    scale = weights.item() / 3
    error = (quantized.float() * scale - query.float()).abs()
    # Half a step of three mantissa bits, or of the subnormals of 2 ** -9.
    assert bool(
        (error <= torch.maximum(query.float().abs() / 16, torch.tensor(scale / 1024))).all()
    )


def test_the_operator_checks_and_equals_the_reference() -> None:
    query, weights = torch.randn(2, 3, 32, 128).half(), torch.rand(2, 3, 32)
    got, want = ops.quantize_query(query, weights), reference.quantize_query(query, weights)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1])
    with pytest.raises(SpinError, match=r"^query: got .torch.float32"):
        ops.quantize_query(query.float(), weights)
    with pytest.raises(SpinError, match=r"^weights: got \[2, 3, 31\]"):
        ops.quantize_query(query, weights[..., 1:])
    with pytest.raises(SpinError, match=r"^query: got \[2, 3, 32, 64\]"):
        ops.quantize_query(query[..., :64], weights)
    torch.library.opcheck(torch.ops.spin.quantize_query, (query, weights))


def test_the_operator_takes_strided_tensors() -> None:
    query = torch.randn(3, 2, 32, 128).half().transpose(0, 1)
    weights = torch.rand(2, 3, 1).expand(2, 3, 32)
    got, want = ops.quantize_query(query, weights), reference.quantize_query(query, weights)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1])
    assert all(t.is_contiguous() for t in got)
    torch.library.opcheck(torch.ops.spin.quantize_query, (query, weights))


@pytest.mark.skipif(native.library_path() is None, reason="the kernel library has not been built")
@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        *((name, None, NULL) for name in ("query", "weights", "query_out", "weights_out")),
        ("query", SOMEWHERE + 4, ALIGNMENT),
        ("query_out", SOMEWHERE + 2, ALIGNMENT),
        ("query_dtype", 2, RANGE),
        ("heads_total", -1, RANGE),
    ],
)
def test_a_bad_argument_is_named(field: str, value: int | None, expected: int) -> None:
    params = native.pack("quantize_query", **{**GOOD, field: value})
    status = native.load().spin_quantize_query(ctypes.byref(params), None)
    assert (status, native.error_string(status).split(":")[0]) == (expected, field)


@pytest.mark.skipif(native.library_path() is None, reason="the kernel library has not been built")
def test_no_heads_are_legal_and_launch_nothing() -> None:
    params = native.pack("quantize_query", heads_total=0)
    assert native.load().spin_quantize_query(ctypes.byref(params), None) == 0
    params.struct_bytes += 8
    assert native.load().spin_quantize_query(ctypes.byref(params), None) == RANGE
