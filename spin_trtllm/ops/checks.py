# SPDX-License-Identifier: Apache-2.0
"""Checks of tensor arguments: each refusal names the argument (DESIGN: shape, dtype, range)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spin_trtllm.config import BLOCK_SIZES
from spin_trtllm.errors import refuse
from spin_trtllm.geometry import count_blocks

Shape = Sequence[int | str]


def check_tensor(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: Shape) -> None:
    """Refuse a wrong dtype or shape.

    Args:
        shape: expected sizes; a string stands for a size that may be anything.
    """
    if tensor.dtype not in dtypes:
        refuse(name, str(tensor.dtype), ", ".join(str(d) for d in dtypes))
    fits = len(shape) == tensor.dim() and all(
        isinstance(want, str) or want == size
        for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        refuse(name, list(tensor.shape), f"[{', '.join(str(s) for s in shape)}]")


def check_devices(tensors: dict[str, Tensor]) -> None:
    """Refuse tensors on different devices; the first one is right."""
    first, home = next((n, t.device) for n, t in tensors.items())
    for name, tensor in tensors.items():
        if tensor.device != home:
            refuse(name, str(tensor.device), f"{home}, the device of {first}")


def check_state(v: Tensor, d: Tensor, lanes: Tensor) -> None:
    """Refuse averages that do not belong together."""
    check_tensor("v", v, (torch.float32, torch.bfloat16), ("lanes", "slots"))
    check_tensor("d", d, (v.dtype,), (v.shape[0], v.shape[1] + 1))
    check_tensor("lanes", lanes, (torch.int64,), ("sequences",))


def check_geometry(ratio: int, block_size_slots: int) -> None:
    """Refuse a ratio or block size outside SPEC 1 and 2."""
    if ratio < 1:
        refuse("ratio", ratio, "an integer >= 1")
    if block_size_slots not in BLOCK_SIZES:
        refuse("block_size_slots", block_size_slots, ", ".join(str(b) for b in BLOCK_SIZES))


def check_blocks(name: str, blocks: Tensor, sequences: int, slots: int, block_size: int) -> None:
    """Refuse a block mask that does not cover the slots."""
    check_tensor(name, blocks, (torch.bool,), (sequences, count_blocks(slots, block_size)))


def on_cuda(tensor: Tensor) -> bool:
    """Whether the kernels run here; a CUDA tensor without them falls back to the reference."""
    from spin_trtllm import native

    return tensor.is_cuda and native.supports(tensor.device)


def padded_rows(tensor: Tensor, width: int) -> Tensor:
    """`tensor` `[n, m]` if its rows already fit vector loads, else a zero-padded copy.

    Args:
        width: elements a row must hold; the result's row stride is a multiple of 8 that does, and
            its rows start on 32 bytes.
    """
    width = (width + 7) // 8 * 8
    stride = tensor.stride(0) if tensor.shape[0] > 1 else max(tensor.shape[1], tensor.stride(0))
    fits = tensor.stride(1) == 1 and stride % 8 == 0 and stride >= width
    if fits and tensor.data_ptr() % 32 == 0 and _holds(tensor, stride):
        return tensor
    copy = tensor.new_zeros(tensor.shape[0], width)
    copy[:, : tensor.shape[1]] = tensor
    return copy


def _holds(tensor: Tensor, stride: int) -> bool:
    """Whether the storage reaches to the end of the last padded row."""
    if tensor.shape[0] == 0:
        return True
    end = tensor.storage_offset() + tensor.shape[0] * stride
    return end * tensor.element_size() <= tensor.untyped_storage().nbytes()


def row_stride(tensor: Tensor) -> int:
    """Row stride in elements, also of a tensor with one row or none."""
    return tensor.stride(0) if tensor.shape[0] > 1 else max(tensor.stride(0), tensor.shape[1])
