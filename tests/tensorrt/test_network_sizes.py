# SPDX-License-Identifier: Apache-2.0
"""What an indexer network cannot be made of: models, weights, sizes."""

from __future__ import annotations

import math
from typing import Any

import onnx
import pytest
import torch
from checkpoints import TINY

from spin_trtllm.build.checkpoint import IndexerGeometry, read_checkpoint
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.tensorrt import (
    IndexerSizes,
    IndexerWeights,
    Rope,
    indexer_network,
    read_indexer_weights,
)
from spin_trtllm.hosts.tensorrt.rope import indexer_rope

CONFIG = SpinConfig(top_k=64, block_size=16)
SMALL = IndexerSizes(2, 1, 128)


def network(
    geometry: IndexerGeometry,
    config: SpinConfig = CONFIG,
    *,
    weights: IndexerWeights | None = None,
    sizes: IndexerSizes = SMALL,
    **options: Any,
) -> Any:
    heads, head_dim = geometry.index_heads, geometry.index_head_dim
    weights = weights or IndexerWeights(3, torch.zeros(heads, head_dim, 8), torch.zeros(heads, 8))
    return indexer_network(weights, Rope(torch.ones(8)), geometry, config, sizes, **options)


@pytest.mark.parametrize(
    ("geometry", "options", "line"),
    [
        ((65, 128, 64), {}, "index_n_heads: got 65, allowed: at most 64"),
        ((64, 129, 64), {}, "index_head_dim: got 129, allowed: 16 .. 128"),
        ((64, 8, 64), {}, "index_head_dim: got 8, allowed: 16 .. 128"),
        ((64, 96, 64), {}, "index_head_dim: got 96, allowed: a power of two"),
        ((64, 128, 32), {}, "config.top_k: got 64, allowed: 32, the model's index_topk"),
        ((64, 128, 64), {"precision": "int4"}, "precision: got 'int4', allowed: fp32, fp16,"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    geometry: tuple[int, int, int], options: dict[str, Any], line: str
) -> None:
    with pytest.raises(SpinError) as error:
        network(IndexerGeometry((3,), 4, *geometry), **options)
    assert str(error.value).startswith(line)


def test_ninety_six_dimensions_do_without_rotation() -> None:
    onnx.checker.check_model(network(IndexerGeometry((3,), 4, 64, 96, 64), rotate=False))


@pytest.mark.parametrize(
    ("name", "value", "precision", "line"),
    [
        ("query", math.nan, "bf16", "query projection of layer 3: got nan, allowed: finite"),
        ("heads", math.nan, "fp8", "head weights of layer 3: got nan, allowed: finite numbers"),
        ("query", -math.inf, "fp32", "query projection of layer 3: got inf"),
        ("query", 70000.0, "fp16", "query projection of layer 3: got 70000.0, allowed: finite num"),
        ("heads", -70000.0, "fp16", "head weights of layer 3: got 70000.0"),
        ("query", 3.4e38, "bf16", "query projection of layer 3: got 3.3999"),
        ("query", 3.4e38, "fp8", "query projection of layer 3: got 3.3999"),
    ],
)
def test_weights_that_a_precision_cannot_hold_are_refused(
    name: str, value: float, precision: str, line: str
) -> None:
    weights = IndexerWeights(3, torch.zeros(64, 128, 8), torch.zeros(64, 8))
    getattr(weights, name)[..., 1, 3] = value
    with pytest.raises(SpinError) as error:
        network(IndexerGeometry((3,), 4, 64, 128, 64), weights=weights, precision=precision)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize(
    ("query", "heads", "line"),
    [
        ((32, 128, 8), (64, 8), "query projection of layer 3: got [32, 128, 8], allowed: [64, 1"),
        ((64, 128, 0), (64, 8), "query projection of layer 3: got [64, 128, 0]"),
        ((64, 128), (64, 8), "query projection of layer 3: got [64, 128]"),
        ((64, 128, 8), (63, 8), "head weights of layer 3: got [63, 8], allowed: [64, hidden]"),
        ((64, 128, 8), (64, 0), "head weights of layer 3: got [64, 0]"),
    ],
)
def test_weights_of_another_shape_are_refused(
    query: tuple[int, ...], heads: tuple[int, ...], line: str
) -> None:
    weights = IndexerWeights(3, torch.zeros(query), torch.zeros(heads))
    with pytest.raises(SpinError) as error:
        network(IndexerGeometry((3,), 4, 64, 128, 64), weights=weights)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((4096, 8, 262_144), "elements of scores: got 17179869184, allowed: at most 2147483647"),
        ((4096, 1, 262_144), "elements of scores: got 2147483648"),
        ((65536, 8, 64), "elements of query: got 4294967296"),
    ],
)
def test_tensors_that_tensorrt_cannot_have_are_refused(sizes: tuple[int, ...], line: str) -> None:
    with pytest.raises(SpinError) as error:
        network(IndexerGeometry((3,), 4, 64, 128, 64), sizes=IndexerSizes(*sizes))
    assert str(error.value).startswith(line)


def test_the_largest_tensors_are_made() -> None:
    onnx.checker.check_model(
        network(IndexerGeometry((3,), 4, 64, 128, 64), sizes=IndexerSizes(4095, 1, 262_144))
    )


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((0, 1, 64), "max_sequences: got 0"),
        ((1, 9, 64), "rows: got 9, allowed: an integer in 1 .. 8"),
        ((1, 1, 96), "slots: got 96, allowed: a multiple of 64"),
        ((1, 1, 32), "slots: got 32"),
        ((1, 1, 64, 128), "page_slots: got 128, allowed: 32, 64"),
    ],
)
def test_wrong_sizes_are_refused(sizes: tuple[int, ...], line: str) -> None:
    with pytest.raises(SpinError) as error:
        IndexerSizes(*sizes)
    assert str(error.value).startswith(line)


def test_a_layer_without_an_indexer_is_refused() -> None:
    with pytest.raises(SpinError, match="layer: got 2, allowed: 1, 3, 4, 6"):
        read_indexer_weights(read_checkpoint(TINY), 2)


def test_a_layer_type_may_have_no_rope_fields() -> None:
    assert indexer_rope({}).dim == 64
