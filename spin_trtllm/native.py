# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel library `libspin.so`: finding it, and calling it through its plain C interface.

One library serves every version of Python and torch: pointers and strides go through `ctypes`, and
each parameter struct carries its own size, so that a library built from other headers is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError, refuse

LIBRARY_VARIABLE = "SPIN_LIBRARY"
LIBRARY_NAME = "libspin.so"
VERSION = 500  # SPIN_VERSION of plugins/include/spin/common.h
MINIMUM_CAPABILITY = (9, 0)  # clusters and programmatic launches; later GPUs run the PTX

_POINTER, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float

# Field order and types equal the structs of plugins/include/spin/<stem>.h.
_FIELDS: dict[str, list[tuple[str, str]]] = {
    "predict_blocks": [
        ("p", "v d lanes positions block_scores"),
        ("l", "slots v_stride d_stride lane_stride"),
        ("i", "entries sequences rows blocks ratio block_size state_dtype pooling"),
    ],
    "select_blocks": [
        ("p", "block_scores positions warm sequence_ids layers layer_sparsity_ppm page_table"),
        ("p", "block_list block_count kept_slots row_slots visible_slots"),
        ("p", "compact_of_block compact_pages block_mask row_masks explored_mask"),
        ("p", "places lane_positions lane_waits lane_warm lane_next"),
        ("p", "lanes tenants lane_tenant"),
        ("u", "seed"),
        ("l", "lane_stride lanes_total page_table_stride compact_pages_stride"),
        ("i", "page_table_width entries sequences layer_entries layer rows blocks"),
        ("i", "tile_blocks tiles ratio block_size top_k sparsity_ppm exploration_ppm"),
        ("i", "row0_mask page_slots"),
    ],
    "quantize_query": [
        ("p", "query weights query_out weights_out"),
        ("l", "heads_total"),
        ("i", "query_dtype"),
    ],
    "score_slots": [
        ("p", "query weights pages page_table visible_slots block_list block_count"),
        ("p", "places scores"),
        ("l", "num_pages page_table_stride block_list_stride score_stride"),
        ("i", "page_table_width blocks sequences rows heads page_slots block_size arithmetic"),
    ],
    "topk_slots": [
        ("p", "scores places block_list row_slots slots_out"),
        ("l", "score_stride"),
        ("i", "entries rows blocks block_size top_k full_rows"),
    ],
    "observe_scores": [
        ("p", "v d lanes positions accepted scores compact_of_block"),
        ("l", "slots v_stride d_stride score_stride lanes_total"),
        ("i", "entries rows blocks ratio block_size state_dtype full_rows row0_update"),
        ("f", "decay gain"),
    ],
    "adopt_scores": [
        ("p", "host_scores block_list row_slots places scores columns"),
        ("l", "host_stride score_stride"),
        ("i", "host_columns entries host_rows rows blocks block_size top_k"),
    ],
    "advance": [
        ("p", "v d lanes positions tenants lane_tenant lane_slots"),
        ("p", "lane_positions lane_waits lane_warm lane_next"),
        ("p", "scores compact_of_block places warm observed_rows block_scores"),
        ("l", "slots v_stride v_layer_stride d_stride d_layer_stride tile_stride"),
        ("l", "score_stride lane_stride lanes_total"),
        ("i", "entries sequences rows blocks tiles ratio block_size"),
        ("i", "state_dtype row0_update"),
        ("f", "decay gain"),
    ],
}
_KINDS: dict[str, Any] = {
    "p": _POINTER,
    "l": _I64,
    "u": ctypes.c_uint64,
    "i": _I32,
    "f": _F32,
}

STATE_DTYPES = {torch.bfloat16: 0, torch.float32: 1}
QUERY_DTYPES = {torch.float16: 0, torch.bfloat16: 1}
POOLINGS = {"max": 0, "top4": 1, "mean": 2}
SCORE_EXACT, SCORE_FAST, SCORE_PORTABLE = 0, 1, 2
KEY_DIM = 128
KEY_BYTES = 132  # of a slot in a page: 128 e4m3 values and one fp32 scale
TILE_SLOTS = 256  # SPIN_ADVANCE_TILE_SLOTS
MAX_ROWS = 8
MAX_TOP_K = 2048
MAX_BLOCKS = 16_384  # of a sequence


def check_config(config: SpinConfig) -> None:
    """Refuse what no kernel does, whoever calls them.

    Raises:
        SpinError: a top-k that is not settled or too large, a variant that exists for study, or an
            extension that only the reference has.
    """
    if config.top_k is None or not 1 <= config.top_k <= MAX_TOP_K:
        refuse("config.top_k", config.top_k, f"an integer in 1 .. {MAX_TOP_K}")
    if config.reduction != "A1":
        refuse("reduction", config.reduction, "A1")
    if config.exploration_policy not in ("none", "random"):
        refuse("exploration_policy", config.exploration_policy, "none, random")
    if config.storage_dtype not in STATE_DTYPES:
        allowed = "fp32, bf16: no kernel reads averages in 8 bits yet"
        refuse("state_dtype", config.state_dtype, allowed)
    if config.query_share_ppm:
        refuse("query_share", config.query_share, "0: no kernel ranks by the current query yet")


def params_struct(stem: str) -> type[ctypes.Structure]:
    """The parameter struct of a stem as a `ctypes` type."""
    return _structs()[stem]


@functools.cache
def _structs() -> dict[str, type[ctypes.Structure]]:
    structs: dict[str, type[ctypes.Structure]] = {}
    for stem, groups in _FIELDS.items():
        fields: list[Any] = [("struct_bytes", _I64)]
        fields += [(name, _KINDS[kind]) for kind, names in groups for name in names.split()]
        structs[stem] = type(f"Spin_{stem}", (ctypes.Structure,), {"_fields_": fields})
    return structs


def search_paths() -> list[Path]:
    """Where the library is looked for, in order. `SPIN_LIBRARY` rules out every other place."""
    chosen = os.environ.get(LIBRARY_VARIABLE)
    if chosen:
        return [Path(chosen)]
    package = Path(__file__).parent
    places = [package / "lib" / LIBRARY_NAME]
    # An editable install leaves the sources where they are and puts the library with its metadata.
    with contextlib.suppress(metadata.PackageNotFoundError):
        installed = metadata.distribution("spin-trtllm").locate_file("spin_trtllm/lib")
        places.append(Path(str(installed)) / LIBRARY_NAME)
    places.append(package.parent / "build" / "kernels" / LIBRARY_NAME)
    return places


def library_path() -> Path | None:
    """The library that `load` would take, or None."""
    return next((path for path in search_paths() if path.is_file()), None)


def load() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        SpinError: none found, not loadable, or of another version.
    """
    chosen = os.environ.get(LIBRARY_VARIABLE)
    library = _found.get(chosen)  # a search takes longer than a launch may
    if library is None:
        path = library_path()
        if path is None:
            places = ", ".join(str(p) for p in search_paths())
            raise SpinError(f"{LIBRARY_NAME}: not found in {places}; build it with `make kernels`")
        library = _found[chosen] = _load(path)
    return library


_found: dict[str | None, ctypes.CDLL] = {}  # by `SPIN_LIBRARY`


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        library.spin_error_string.restype = ctypes.c_char_p
        found = int(library.spin_version())
    except (OSError, AttributeError) as error:
        raise SpinError(f"{path}: not a loadable SPIN library: {error}") from error
    if found != VERSION:
        refuse(str(path), f"version {found}", f"version {VERSION}; rebuild it")
    return library


def has_library() -> bool:
    """Whether a usable library is there; says nothing about a GPU."""
    try:
        load()
    except SpinError:
        return False
    return True


def supports(device: torch.device | str) -> bool:
    """Whether the kernels run on a device: CUDA, compute capability 9.0 or later, library found."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= MINIMUM_CAPABILITY and has_library()


def call(stem: str, stream: int, /, **values: Any) -> None:
    """Enqueue one stem.

    Args:
        stem: name of the operation.
        stream: CUDA stream handle.
        values: fields of the parameter struct; tensors stand for their data pointers, and fields
            that are left out are null or zero.

    Raises:
        SpinError: the library refused; the message names the field.
    """
    library = load()
    params = pack(stem, **values)
    function = getattr(library, f"spin_{stem}")
    status = function(ctypes.byref(params), ctypes.c_void_p(stream))
    if status != 0:
        raise SpinError(f"spin_{stem}: {error_string(status)}")


def pack(stem: str, /, **values: Any) -> ctypes.Structure:
    """A parameter struct with its size filled in."""
    struct = params_struct(stem)
    fields = {
        name: value.data_ptr() if isinstance(value, Tensor) else value
        for name, value in values.items()
    }
    return struct(struct_bytes=ctypes.sizeof(struct), **fields)


def error_string(status: int) -> str:
    """The library's text for a status; right after a failing call it names the field."""
    return bytes(load().spin_error_string(status)).decode()


def stream_of(tensor: Tensor) -> int:  # pragma: no cover - needs a GPU
    """The current stream of a tensor's device."""
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)
