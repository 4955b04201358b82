# SPDX-License-Identifier: Apache-2.0
"""What follows from a sequence's length alone: rotations, and what each position can see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DeepseekV4Config

from benchmarks.tiny_model.model import SLIDING
from spin_trtllm.errors import refuse

SINK_COLUMNS = 8  # the sink needs one; eight keep rows of bfloat16 aligned to 16 bytes


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding of positions, float32 `[positions, pairs]` each."""

    cos: Tensor
    sin: Tensor

    @property
    def inverse(self) -> Rotation:
        """The rotation that undoes this one."""
        return Rotation(self.cos, -self.sin)

    def at(self, positions: Tensor | slice) -> Rotation:
        """Of some of the positions."""
        return Rotation(self.cos[positions], self.sin[positions])


@dataclass(frozen=True)
class View:
    """What the queries of one kind of layer see.

    Its columns are the keys of two windows, then the slots, then the sink.

    Attributes:
        ratio: tokens a slot; 0 where there are no slots.
        visible: bool `[length, slots]`, whether a slot is complete at a position.
        bias: `[1, length, 1, 2 * window + slots + SINK_COLUMNS]`, 0 or -inf.
    """

    ratio: int
    visible: Tensor
    bias: Tensor

    @property
    def slots(self) -> int:
        """Slots of the whole sequence."""
        return self.visible.shape[1]

    def widths(self, window: int) -> tuple[int, int, int]:
        """Columns of windows, slots and sink."""
        return 2 * window, self.slots, SINK_COLUMNS


class Layout:
    """Rotations and views of all sequences of one length.

    Attributes:
        window: tokens of the sliding window, which also is the unit queries are grouped by.
        rotations: by name of the configuration's rotary parameters, `main` and `compress`.
        views: by layer type.
    """

    def __init__(
        self, config: DeepseekV4Config, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.window = config.sliding_window
        if length % self.window:
            refuse("length", length, f"a multiple of the sliding window, {self.window}")
        positions = torch.arange(length, device=device)
        self.rotations = {
            name: _rotation(positions, config.head_dim, config.rope_parameters[name])
            for name in ("main", "compress")
        }
        near = _window_mask(positions, self.window)
        self.views = {
            kind: _view(positions, near, config.compress_rates.get(kind, 0), dtype)
            for kind in set(config.layer_types)
        }

    def rotation_of(self, kind: str) -> Rotation:
        """The rotation that layers of a type use."""
        return self.rotations["main" if kind == SLIDING else "compress"]


def _rotation(positions: Tensor, head_dim: int, parameters: dict[str, float]) -> Rotation:
    dims = int(head_dim * parameters["partial_rotary_factor"])
    exponents = torch.arange(0, dims, 2, device=positions.device) / dims
    angles = positions[:, None] / parameters["rope_theta"] ** exponents
    return Rotation(angles.cos(), angles.sin())


def _window_mask(positions: Tensor, window: int) -> Tensor:
    """Which keys of the own and the previous group a query sees, bool `[length, 2 * window]`."""
    first_key = positions // window * window - window
    keys = first_key[:, None] + torch.arange(2 * window, device=positions.device)
    queries = positions[:, None]
    return (keys >= 0) & (keys <= queries) & (keys > queries - window)


def _view(positions: Tensor, near: Tensor, ratio: int, dtype: torch.dtype) -> View:
    length = len(positions)
    slots = torch.arange(length // ratio if ratio else 0, device=positions.device)
    complete = (positions + 1) // ratio if ratio else positions
    visible = slots < complete[:, None]
    sink = torch.zeros(length, SINK_COLUMNS, dtype=torch.bool, device=positions.device)
    sink[:, 0] = True
    seen = torch.cat((near, visible, sink), dim=1)
    bias = torch.zeros(seen.shape, dtype=dtype, device=positions.device)
    bias.masked_fill_(~seen, float("-inf"))
    return View(ratio, visible, bias[None, :, None])
