# SPDX-License-Identifier: Apache-2.0
"""The product's replay against the independent loops of `oracle.py`, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from oracle import replay as oracle_replay
from safetensors.numpy import load_file
from strategies import cases, write_trace

from spin_trtllm.config import SpinConfig
from spin_trtllm.replay.run import replay
from spin_trtllm.replay.trace import Trace

relaxed = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def config_of(params: dict[str, Any]) -> SpinConfig:
    renamed = dict(params)
    renamed["target_sparsity"] = renamed.pop("sparsity")
    return SpinConfig(**renamed)


def both(case: tuple[dict[str, Any], dict[str, Any]], folder: Path) -> tuple[Any, Any, Any]:
    """Expected dump with metrics, the product's dump, and its metrics."""
    trace, params = case
    expected = oracle_replay(trace, **params)
    write_trace(folder / "trace", trace)
    metrics = replay(Trace(folder / "trace"), config_of(params), dump=folder / "dump")
    return expected, load_file(folder / "dump"), metrics


def assert_same(expected: Any, dump: Any, metrics: Any) -> None:
    for name in ("blocks", "row_blocks", "explored", "topk", "v", "d"):
        assert dump[name].shape == expected[name].shape, name
        assert dump[name].dtype == expected[name].dtype, name
        np.testing.assert_array_equal(dump[name], expected[name], err_msg=name)
    for name in ("mean_miss", "p99_miss", "p99_miss_layer_mean", "realized_sparsity"):
        assert metrics[name] == pytest.approx(expected["metrics"][name], abs=1e-12), name
    for name in ("steps", "cold_steps"):
        assert metrics[name] == expected["metrics"][name], name


@relaxed
@given(case=cases(poolings=("max",), reductions=("A1",), state_dtypes=("fp32",)))
def test_product_equals_the_oracle_in_fp32(case: Any, tmp_path: Path) -> None:
    assert_same(*both(case, tmp_path))


@relaxed
@given(case=cases(poolings=("max",), reductions=("A0", "A1", "A2")))
def test_every_reduction_and_state_dtype_equals_the_oracle(case: Any, tmp_path: Path) -> None:
    assert_same(*both(case, tmp_path))


def test_mean_pooling_agrees_within_rounding() -> None:
    """The order of a sum is open (SPEC 7), so poolings that add are compared with tolerance."""
    from oracle import pool_values

    from spin_trtllm.reference.predict_blocks import pool_blocks

    values = torch.randn(3, 130, generator=torch.Generator().manual_seed(1))
    for pooling in ("max", "top4", "mean"):
        pooled = pool_blocks(values, 64, pooling)
        for row in range(3):
            for block in range(3):
                slots = [np.float32(x) for x in values[row, block * 64 : block * 64 + 64].tolist()]
                expected = float(pool_values(slots, pooling))
                assert float(pooled[row, block]) == pytest.approx(expected, rel=1e-5)
