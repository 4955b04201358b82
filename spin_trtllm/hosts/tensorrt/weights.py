# SPDX-License-Identifier: Apache-2.0
"""The indexer's own weights, read from a layer of a DeepSeek-V4 checkpoint.

Names come in two spellings, the original release's and Transformers', and a checkpoint may be one
file or many. Weights in fp8 have a scale a tile beside them; they are widened here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spin_trtllm.build.checkpoint import Checkpoint, IndexerGeometry
from spin_trtllm.build.fields import read_json_object, section
from spin_trtllm.errors import SpinError, refuse

INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 256 * 2**20  # hundreds of experts a layer: 17 MB and more

# Name of a tensor in a layer: Transformers since 5.10, before it, the original release.
_QUERY = (
    "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.wq_b",
)
_HEADS = (
    "self_attn.compressor.indexer.scorer.weights_proj",
    "self_attn.compressor.indexer.weights_proj",
    "attn.indexer.weights_proj",
)
_PREFIXES = ("model.layers", "layers")
_SCALES = ("scale", "weight_scale_inv", "weight_scale")


@dataclass(frozen=True, eq=False)
class IndexerWeights:
    """The two projections of one layer's indexer, fp32.

    Attributes:
        layer: decoder-layer index.
        query: `[H, D, q_lora_rank]`, from the attention's normalised query latent.
        heads: `[H, hidden]`, from the hidden state; without the factors of the score.
    """

    layer: int
    query: Tensor
    heads: Tensor


def read_indexer_weights(checkpoint: Checkpoint, layer: int) -> IndexerWeights:
    """Read one layer.

    Raises:
        SpinError: a layer without an indexer, a tensor that is missing, unreadable, of another
            shape than `config.json` says or of a dtype that is no weight's.
    """
    geometry = checkpoint.geometry
    if layer not in geometry.layers:
        refuse("layer", layer, ", ".join(map(str, geometry.layers)))
    files = _files_by_name(checkpoint.path)
    query = _projection(files, layer, _QUERY)
    heads = _projection(files, layer, _HEADS)
    _check_rows("query projection", query, layer, geometry.index_heads * geometry.index_head_dim)
    _check_rows("head weights", heads, layer, geometry.index_heads)
    if heads.shape[1] != checkpoint.hidden_size:
        refuse(f"head weights of layer {layer}", list(heads.shape), _shape_of_heads(checkpoint))
    return IndexerWeights(layer, _by_head(query, geometry), heads)


def check_weights(weights: IndexerWeights, geometry: IndexerGeometry, dtype: torch.dtype) -> None:
    """Refuse weights that are not of a model's shape, or not in the range of a dtype.

    Raises:
        SpinError: names the projection, and what is wrong with it.
    """
    heads, head_dim = geometry.index_heads, geometry.index_head_dim
    limit = torch.finfo(dtype).max
    for what, tensor, rows, columns in (
        ("query projection", weights.query, (heads, head_dim), "q_lora_rank"),
        ("head weights", weights.heads, (heads,), "hidden"),
    ):
        name = f"{what} of layer {weights.layer}"
        if tensor.shape[:-1] != rows or tensor.shape[-1] == 0:
            refuse(name, list(tensor.shape), f"[{', '.join(map(str, rows))}, {columns}]")
        largest = float(tensor.abs().max())  # NaN if there is one
        if not largest <= limit:
            refuse(name, largest, f"finite numbers up to {limit:.6g}, the range of {dtype}")


def _by_head(query: Tensor, geometry: IndexerGeometry) -> Tensor:
    return query.unflatten(0, (geometry.index_heads, geometry.index_head_dim))


def _shape_of_heads(checkpoint: Checkpoint) -> str:
    return f"[{checkpoint.geometry.index_heads}, hidden_size={checkpoint.hidden_size}]"


def _check_rows(what: str, tensor: Tensor, layer: int, rows: int) -> None:
    if tensor.dim() != 2 or tensor.shape[0] != rows or tensor.shape[1] == 0:
        allowed = f"a matrix of {rows} rows and at least one column"
        refuse(f"{what} of layer {layer}", list(tensor.shape), allowed)


def _projection(files: dict[str, Path], layer: int, spellings: Iterable[str]) -> Tensor:
    stems = [f"{prefix}.{layer}.{name}" for prefix in _PREFIXES for name in spellings]
    stem = next((stem for stem in stems if f"{stem}.weight" in files), None)
    if stem is None:
        raise SpinError(f"checkpoint_dir: no tensor {stems[0]}.weight, nor {stems[-1]}.weight")
    weight = _read(files, f"{stem}.weight")
    _check_real(f"{stem}.weight", weight)
    if weight.dtype.itemsize > 1:
        return weight.float()
    scale = next((f"{stem}.{name}" for name in _SCALES if f"{stem}.{name}" in files), None)
    if scale is None:
        raise SpinError(f"checkpoint_dir: {stem}.weight is {weight.dtype} and has no scale")
    return _widen(weight, _read(files, scale), stem)


def _widen(weight: Tensor, scale: Tensor, stem: str) -> Tensor:
    """fp8 times its scales, of which each covers a tile of equal size; the last may be partial."""
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2:
        refuse(f"{stem}.weight", str(weight.dtype), "a matrix of float8_e4m3fn, or a wider dtype")
    _check_real(f"scale of {stem}", scale)
    if scale.dim() != 2 or not all(map(_fits, weight.shape, scale.shape)):
        refuse(f"scale of {stem}", list(scale.shape), f"tiles that divide {list(weight.shape)}")
    wide = weight.float()
    tiles = scale.float()
    for axis, (size, count) in enumerate(zip(weight.shape, scale.shape, strict=True)):
        tiles = tiles.repeat_interleave(_tile_size(size, count), axis).narrow(axis, 0, size)
    return wide * tiles


def _fits(size: int, count: int) -> bool:
    """Whether an axis can have `count` tiles."""
    return 0 < count <= size and -(-size // _tile_size(size, count)) == count


def _tile_size(size: int, count: int) -> int:
    """The smallest power of two of which `count` cover `size`."""
    return 1 << (-(-size // count) - 1).bit_length()


def _check_real(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():  # bytes may stand for numbers of a dtype that torch lacks
        refuse(name, str(tensor.dtype), "a floating-point dtype")


def _read(files: dict[str, Path], name: str) -> Tensor:
    path = files[name]
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)
    except (SafetensorError, OSError, AttributeError) as error:
        raise SpinError(f"checkpoint_dir: cannot read {name} in {str(path)!r}: {error}") from error


@functools.lru_cache(maxsize=1)
def _files_by_name(directory: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    index = directory / INDEX_FILE
    try:
        if index.is_file():
            values = read_json_object(index, "checkpoint_dir", max_bytes=MAX_INDEX_BYTES)
            names = section(values, "weight_map")
            return {name: directory / _file_name(name, file) for name, file in names.items()}
        found: dict[str, Path] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                found |= dict.fromkeys(file.keys(), path)
    except (SafetensorError, OSError) as error:
        raise SpinError(f"checkpoint_dir: cannot read its weights: {error}") from error
    return found


def _file_name(tensor: str, file: object) -> str:
    name = Path(file).name if isinstance(file, str) else ""
    if not name or "\0" in name:
        refuse(f"weight_map[{tensor[:100]!r}]", file, "the name of a file")
    return name
