# SPDX-License-Identifier: Apache-2.0
"""The TensorRT plugin over a kernel library that writes down its launches (`cpp/recorder.cpp`)."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from plugin_cases import Sizes
from plugin_host import BF16, BUILT, TORCH_TYPES, Binding, Host, compile_plugin, host_path

from spin_trtllm import native

SIZES = Sizes(slots=1001, spare_places=2, state=BF16, lanes=6, pages=40)
SEED, DECAY = 2**64 - 5, 0.9  # whose gain is another one when formed in 32 bits
OUTPUTS = {
    "SpinIndexer": ("slots", "block_count", "v", "d", "scores", "compact_of_block", "books"),
    "SpinPredictBlocks": (
        *("block_list", "block_count", "compact_of_block", "row_slots", "kept_slots"),
        *("visible_slots", "compact_pages"),
    ),
    "SpinSparseIndexer": ("slots", "scores"),
    "SpinObserve": ("v", "d"),
}

Recorder = tuple[Host, ctypes.CDLL]


def open_recorder() -> Recorder:
    """The host with the recording plugin opened, and the latter; skips where it cannot be built."""
    path, host = BUILT / "libspin_trt_recorder.so", host_path()
    flags = ("-O1", "-shared", "-fPIC", "-fvisibility=hidden")
    missing = compile_plugin(path, ("recorder.cpp",), *flags)
    if missing or host is None:
        pytest.skip(missing or "no host")
    library = ctypes.CDLL(str(path))
    library.recorder_stem.restype = ctypes.c_char_p
    library.recorder_params.restype = ctypes.c_void_p
    for name in ("capture", "end_capture"):
        getattr(library, f"recorder_{name}").argtypes = [ctypes.c_void_p]
    return Host(host, path), library


class Recorded:
    """A node enqueued once, and what it launched."""

    def __init__(self, host: Host, library: ctypes.CDLL, node: str, sizes: Sizes, **fields: Any):
        known = host.field_names(node)
        chosen = {"seed": str(SEED), "ema_decay": DECAY, "row0_update": 1, "row0_mask": 1}
        chosen |= {"layer": 9, "sparsity_ppm": 3, "exploration_ppm": 4, "exact": 0} | fields
        given = {n: v for n, v in {**sizes.fields(node), **chosen}.items() if n in known}
        made = host.create(node, **given)
        assert made is not None, host.log()
        self.node, self.sizes, self.library = node, sizes, library
        self.names = list(sizes.inputs(node))
        descs = sizes.inputs(node).values()
        self.inputs = [
            torch.zeros(tuple(d.dims.d[: d.dims.rank]), dtype=TORCH_TYPES[d.type]) for d in descs
        ]
        self.binding = Binding(made.reload().attach(), self.inputs)
        library.recorder_clear()
        self.binding.enqueue()
        self.launches = [self._launch(i) for i in range(library.recorder_count())]

    def _launch(self, i: int) -> tuple[str, ctypes.Structure]:
        stem = self.library.recorder_stem(i).decode()
        struct = native.params_struct(stem)
        copy = ctypes.string_at(self.library.recorder_params(i), ctypes.sizeof(struct))
        return stem, struct.from_buffer_copy(copy)

    def point(self, address: int | None) -> str | None:
        """What an address points to: an output, or else an input; a row of the books; a piece."""
        if address is None:
            return None
        named = [
            *zip(OUTPUTS[self.node], self.binding.outputs, strict=True),
            *zip(self.names, self.inputs, strict=True),
        ]
        for name, tensor in named:
            offset = address - tensor.data_ptr()
            if name == "books" and 0 <= offset < tensor.nbytes:
                row, rest = divmod(offset, tensor[0].nbytes)
                return f"books row {row}" + (f" + {rest}" if rest else "")
            if offset == 0:
                return name
        offset = address - self.binding.workspace.data_ptr()
        assert 0 <= offset < self.binding.workspace.nbytes
        assert offset % 256 == 0
        return f"piece at {offset}"
