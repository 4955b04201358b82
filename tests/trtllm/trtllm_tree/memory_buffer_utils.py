# SPDX-License-Identifier: Apache-2.0
"""Mirrors tensorrt_llm/_torch/memory_buffer_utils.py @0c27136c."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensorrt_llm._double import CONFIG


@dataclass
class BufferBlock:
    """BufferBlock: raw bytes plus "a captured graph holds this address"."""

    buffer: torch.Tensor
    is_reserved: bool = False


class Buffers:
    """Buffers: named raw byte blocks; a reserved request takes the smallest block that fits.

    Two metadata objects that ask for one name therefore share bytes from offset 0, and a
    request that is larger than every block of that name gets a new block.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, list[BufferBlock]] = {}

    def get_buffer(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        buffer_name: str,
        reserve_buffer: bool,
    ) -> torch.Tensor:
        """Buffers.get_buffer: unreserved blocks are dropped whenever nothing is reused."""
        need = math.prod(tensor_shape) * dtype.itemsize
        blocks = self.buffers.setdefault(buffer_name, [])
        if reserve_buffer:
            fits = [block for block in blocks if block.buffer.numel() >= need]
            if fits:
                best = min(fits, key=lambda b: (not b.is_reserved, b.buffer.numel()))
                best.is_reserved = True
                return self._view_as(best.buffer, tensor_shape, dtype)
        blocks[:] = [block for block in blocks if block.is_reserved]
        fresh = torch.zeros(need, dtype=torch.uint8, device=CONFIG.device)
        blocks.append(BufferBlock(fresh, reserve_buffer))
        return self._view_as(fresh, tensor_shape, dtype)

    @staticmethod
    def _view_as(buffer: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Buffers._view_as: the first bytes of the block, reinterpreted"""
        need = math.prod(shape) * dtype.itemsize
        return buffer[:need].view(dtype).view(tuple(shape))


_buffer = Buffers()


def get_memory_buffers() -> Buffers:
    """get_memory_buffers: one process-wide pool, passed to every graph metadata object"""
    return _buffer
