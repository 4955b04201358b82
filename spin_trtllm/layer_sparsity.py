# SPDX-License-Identifier: Apache-2.0
"""A target sparsity for some decoder layers: what may be given, and its one stored form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spin_trtllm.errors import refuse
from spin_trtllm.geometry import PPM, to_ppm
from spin_trtllm.state import MAX_LAYER

FIELD = "layer_sparsity"
ALLOWED = "decoder layers with a number in [0, 1) each, such as {1: 0.5, 3: 0.3} or '1:0.5,3:0.3'"

LayerSparsity = tuple[tuple[int, float], ...]  # layer and rho, by ascending layer: it can be hashed


def read_layer_sparsity(given: Any) -> LayerSparsity:
    """Any way to write it down, in the stored form.

    Args:
        given: a mapping, as YAML has it; one whose keys are decimal text, as JSON has it; pairs, as
            they are stored; or text, as environments and command lines have it.

    Raises:
        SpinError: anything else, a layer that is named twice or is no index, or a sparsity outside
            [0, 1).
    """
    found: dict[int, float] = {}
    for key, value in _pairs(given):
        layer = _layer(key)
        if layer in found:
            refuse(FIELD, f"layer {layer} twice", "each layer once")
        found[layer] = _sparsity(layer, value)
    return tuple(sorted(found.items()))


def write_layer_sparsity(targets: LayerSparsity) -> str:
    """Text that `read_layer_sparsity` reads back to the same; empty for no layer."""
    return ",".join(f"{layer}:{sparsity!r}" for layer, sparsity in targets)


def _pairs(given: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(given, Mapping):
        return given.items()
    if isinstance(given, str):
        return [_split(part) for part in given.split(",")] if given.strip() else []
    if isinstance(given, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in given):
        return given
    refuse(FIELD, given, ALLOWED)


def _split(part: str) -> tuple[str, float]:
    layer, colon, sparsity = part.partition(":")
    try:
        return layer.strip(), float(sparsity)
    except ValueError:
        refuse(FIELD, part.strip(), ALLOWED if not colon else f"a number after {layer.strip()}:")


def _layer(key: Any) -> int:
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 7:
        key = int(key)
    if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key <= MAX_LAYER:
        refuse(f"{FIELD}: layer", key, f"a decoder-layer index in 0 .. {MAX_LAYER}")
    return key


def _sparsity(layer: int, value: Any) -> float:
    name = f"{FIELD}: layer {layer}"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        refuse(name, value, "a number in [0, 1)")  # also refuses NaN
    if to_ppm(value) >= PPM:
        refuse(name, value, "a number in [0, 1) in steps of 1e-6")
    return float(value)
