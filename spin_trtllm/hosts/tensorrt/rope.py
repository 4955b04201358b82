# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding of DeepSeek-V4's indexer, as numbers that a network holds as constants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spin_trtllm.errors import refuse

# Transformers' defaults of DeepSeek-V4, for fields that a configuration leaves out.
_HEAD_DIM, _ROPE_DIM, _THETA = 512, 64, 160_000.0
_PLAIN, _YARN = "default", "yarn"

# Far beyond every model, and what all that is made of them stays finite in fp32.
_SMALL, _LARGE = 1e-6, 1e12
_MAX_DIM = 1024


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotation of the trailing `2 * len(inverse_frequencies)` dimensions, in interleaved pairs.

    Attributes:
        inverse_frequencies: fp32 `[rope_dim / 2]`, radians a token.
        scaling: factor of both cosine and sine.
    """

    inverse_frequencies: Tensor
    scaling: float = 1.0

    @property
    def dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return 2 * len(self.inverse_frequencies)


def indexer_rope(config: Mapping[str, Any]) -> Rope:
    """The rotary embedding that a `config.json` gives to layers with compressed keys.

    Either spelling is read: Transformers' `rope_parameters` with a `compress` entry, or the
    original `compress_rope_theta` and `rope_scaling`. YaRN changes the frequencies only: the
    original code, other than YaRN's own, leaves cosine and sine unscaled.

    Raises:
        SpinError: a kind of scaling that the model was not released with, or a value out of range.
    """
    parameters = _parameters(config)
    kind = parameters.get("rope_type", parameters.get("type", _PLAIN))
    if kind not in (_PLAIN, _YARN):
        refuse("rope_type", kind, f"{_PLAIN}, {_YARN}")
    dim = _rope_dim(config, parameters)
    theta = config.get("compress_rope_theta", _THETA)
    theta = _number(parameters, "rope_theta", theta, least=2)  # at 1 all pairs turn alike
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind == _PLAIN:
        return Rope(plain)
    scaling = _number(parameters, "attention_factor", 1.0)
    return Rope(_yarn(plain, theta, dim, parameters), scaling)


def _yarn(plain: Tensor, theta: float, dim: int, parameters: Mapping[str, Any]) -> Tensor:
    """Slow rotations are stretched by `factor`, fast ones are not, with a ramp in between."""
    factor = _number(parameters, "factor", least=1)
    trained = _number(parameters, "original_max_position_embeddings")
    low = _turning(_number(parameters, "beta_fast", 32.0), trained, theta, dim)
    high = _turning(_number(parameters, "beta_slow", 1.0), trained, theta, dim)
    start, end = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    width = end - start or 0.001  # a step instead of a ramp
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - start) / width).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


def _turning(rotations: float, length_tokens: float, theta: float, dim: int) -> float:
    """The dimension pair that turns `rotations` times within a length."""
    return dim * math.log(length_tokens / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def _parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("rope_parameters", "rope_scaling"):
        found = config.get(name)
        if found is not None and _section(name, found):
            if "compress" in found:
                return _section(f"{name}.compress", found["compress"])
            # without nesting, a theta beside it belongs to layers without compression
            return {k: v for k, v in found.items() if k != "rope_theta"}
    return {}


def _section(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        refuse(name, value, "a JSON object")
    return value


def _rope_dim(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> int:
    name = "partial_rotary_factor"
    share = parameters.get(name, config.get(name))
    if share is None:
        dim = config.get("qk_rope_head_dim", _ROPE_DIM)
    else:
        dim = int(_number(config, "head_dim", _HEAD_DIM) * _number({name: share}, name, most=1))
    if not isinstance(dim, int) or not 2 <= dim <= _MAX_DIM or dim % 2:
        refuse("qk_rope_head_dim", dim, f"an even number in 2 .. {_MAX_DIM}")
    return dim


def _number(
    values: Mapping[str, Any],
    name: str,
    default: float | None = None,
    *,
    least: float = _SMALL,
    most: float = _LARGE,
) -> float:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        refuse(name, value, f"a number in {least:g} .. {most:g}")
    return float(value)
