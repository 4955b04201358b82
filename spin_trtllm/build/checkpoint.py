# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint directory says about its sparse-attention indexer, and which one it is.

Two families are known: DeepSeek-V4 (some layers have an indexer, one key per 4 tokens) and
DeepSeek-V3.2 (every layer has one, one key per token). DeepSeek-V4 comes in two spellings: the
original release lists `compress_ratios`, Transformers writes `layer_types` and `compress_rates`.
A field that is absent has the value that Transformers' configuration class gives it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spin_trtllm.build.fields import integer, items, read_json_object, section
from spin_trtllm.errors import SpinError, refuse

CONFIG_FILE = "config.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin")

DEEPSEEK_V4 = "DeepseekV4ForCausalLM"
DEEPSEEK_V32 = "DeepseekV32ForCausalLM"
_MODEL_TYPES = {DEEPSEEK_V4: "deepseek_v4", DEEPSEEK_V32: "deepseek_v32"}

# DeepSeek-V4: tokens per compressed key of each layer type; 0 is a sliding window without keys.
_INDEXED = "compressed_sparse_attention"
_HEAVY = "heavily_compressed_attention"
_RATIO_OF_TYPE = {"sliding_attention": 0, _INDEXED: 4, _HEAVY: 128}
INDEXER_RATIO = _RATIO_OF_TYPE[_INDEXED]

# Fields that name the file's origin and its writer, not the model.
_NOT_MEANING = ("_name_or_path", "transformers_version")


@dataclass(frozen=True)
class IndexerGeometry:
    """Shape of a model's indexer.

    Attributes:
        layers: decoder-layer indices that have an indexer, ascending.
        ratio: raw tokens a slot.
        index_heads: heads that vote on a slot.
        index_head_dim: dimensions of an indexer key.
        top_k: slots that the attention reads.
    """

    layers: tuple[int, ...]
    ratio: int
    index_heads: int
    index_head_dim: int
    top_k: int

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            refuse("layers", list(self.layers), "ascending decoder-layer indices, at least one")
        bounds = {"ratio": 128, "index_heads": 1024, "index_head_dim": 1024, "top_k": 65536}
        for name, high in bounds.items():
            integer(vars(self), name, 1, high)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory that SPIN can serve.

    Attributes:
        path: the directory, absolute.
        architecture: `DeepseekV4ForCausalLM` or `DeepseekV32ForCausalLM`.
        model_type: Transformers' name of the architecture.
        geometry: its indexer.
        compress_ratios: DeepSeek-V4: tokens a compressed key of each decoder layer, 0 for a
            sliding window; empty on DeepSeek-V3.2.
        hidden_size: width of the residual stream.
        max_position_tokens: longest sequence that the model was made for.
        num_layers: decoder layers, without those for multi-token prediction.
        weight_files: weight files found.
        fingerprint: what `fingerprint` returns.
    """

    path: Path
    architecture: str
    model_type: str
    geometry: IndexerGeometry
    compress_ratios: tuple[int, ...]
    hidden_size: int
    max_position_tokens: int
    num_layers: int
    weight_files: int
    fingerprint: str


def read_checkpoint(directory: str | os.PathLike[str]) -> Checkpoint:
    """Read `config.json` and list the weight files of a checkpoint directory.

    Raises:
        SpinError: no such directory, an unreadable or unsupported `config.json`, a field out of
            range, or no layer with an indexer.
    """
    path = Path(directory)
    if not os.path.isdir(directory):  # Path.is_dir raises on a name that is too long
        refuse("checkpoint_dir", str(directory), "a directory with a config.json")
    config = read_json_object(path / CONFIG_FILE, "checkpoint_dir")
    architecture = _architecture(config)
    num_layers = integer(config, "num_hidden_layers", 1, 1024, default=_layers_of(architecture))
    is_v4 = architecture == DEEPSEEK_V4
    ratios = _compress_ratios(config, num_layers) if is_v4 else ()
    weights = _weight_sizes(path)
    return Checkpoint(
        path=path.resolve(),
        architecture=architecture,
        model_type=_MODEL_TYPES[architecture],
        geometry=_geometry(config, ratios, num_layers),
        compress_ratios=ratios,
        hidden_size=integer(config, "hidden_size", 1, 2**20, default=4096 if is_v4 else 7168),
        max_position_tokens=integer(
            config, "max_position_embeddings", 1, 2**31 - 1, default=2**20 if is_v4 else 163840
        ),
        num_layers=num_layers,
        weight_files=len(weights),
        fingerprint=fingerprint(config, weights),
    )


def fingerprint(config: Mapping[str, Any], weight_sizes: Mapping[str, int]) -> str:
    """Identity of a checkpoint that survives moving, copying and reformatting it.

    It covers every field of `config.json` that describes the model, and the names and sizes of
    the weight files in bytes. The weights themselves are not read: two fine-tunings of one model
    have one fingerprint.
    """
    meaning = {name: value for name, value in config.items() if name not in _NOT_MEANING}
    canonical = json.dumps([meaning, dict(weight_sizes)], sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def _layers_of(architecture: str) -> int:
    return 43 if architecture == DEEPSEEK_V4 else 61


def _architecture(config: Mapping[str, Any]) -> str:
    """The architecture, by name; a configuration without one is known by its `model_type`."""
    model_type = config.get("model_type")
    names = config.get("architectures")
    if names is None:
        by_type = {kind: name for name, kind in _MODEL_TYPES.items()}
        if not isinstance(model_type, str) or model_type not in by_type:
            refuse("model_type", model_type, ", ".join(by_type))
        return by_type[model_type]
    name = names[0] if isinstance(names, list) and names else names
    if not isinstance(name, str) or name not in _MODEL_TYPES:
        refuse("architecture", name, ", ".join(_MODEL_TYPES))
    if model_type not in (None, _MODEL_TYPES[name]):
        refuse(f"model_type of {name}", model_type, _MODEL_TYPES[name])
    return name


def _geometry(
    config: Mapping[str, Any], ratios: tuple[int, ...], num_layers: int
) -> IndexerGeometry:
    is_v4 = bool(ratios)
    return IndexerGeometry(
        layers=_indexed_layers(ratios) if is_v4 else tuple(range(num_layers)),
        ratio=INDEXER_RATIO if is_v4 else 1,
        index_heads=integer(config, "index_n_heads", 1, 1024, default=64),
        index_head_dim=integer(config, "index_head_dim", 1, 1024, default=128),
        top_k=integer(config, "index_topk", 1, 65536, default=512 if is_v4 else 2048),
    )


def _indexed_layers(ratios: tuple[int, ...]) -> tuple[int, ...]:
    layers = tuple(layer for layer, ratio in enumerate(ratios) if ratio == INDEXER_RATIO)
    if not layers:
        none = f"{len(ratios)} layers, none of them {_INDEXED}"
        refuse("checkpoint_dir", none, "a model with an indexer in at least one layer")
    return layers


def _compress_ratios(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """DeepSeek-V4's tokens a compressed key of each decoder layer, in either spelling.

    Lists may go on past the decoder layers: those entries describe layers for multi-token
    prediction, which have no indexer.
    """
    by_ratio = _from_compress_ratios(config, num_layers)
    by_type = _from_layer_types(config, num_layers)
    if by_ratio and by_type and by_ratio != by_type:
        layer = next(i for i in range(num_layers) if by_ratio[i] != by_type[i])
        refuse(
            f"compress_ratios[{layer}]", by_ratio[layer], f"{by_type[layer]}, as layer_types says"
        )
    return by_type or by_ratio or _default_ratios(num_layers)


def _from_compress_ratios(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    if config.get("compress_ratios") is None:
        return ()
    ratios = _layer_entries(config, "compress_ratios", num_layers)
    for layer, ratio in enumerate(ratios):
        # 1 is how TensorRT-LLM writes 0: every token has its own key, none is compressed
        if type(ratio) is not int or ratio not in (1, *_RATIO_OF_TYPE.values()):
            refuse(f"compress_ratios[{layer}]", ratio, "0, 4, 128")
    return tuple(0 if ratio == 1 else ratio for ratio in ratios)


def _from_layer_types(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    _check_compress_rates(config)
    if config.get("layer_types") is None:
        return ()
    types = _layer_entries(config, "layer_types", num_layers)
    for layer, name in enumerate(types):
        if not isinstance(name, str) or name not in _RATIO_OF_TYPE:
            refuse(f"layer_types[{layer}]", name, ", ".join(_RATIO_OF_TYPE))
    return tuple(_RATIO_OF_TYPE[name] for name in types)


def _check_compress_rates(config: Mapping[str, Any]) -> None:
    """Refuse rates that no host implements: TensorRT-LLM has an indexer at 4 only."""
    rates = {} if config.get("compress_rates") is None else section(config, "compress_rates")
    checks = (
        (f"compress_rates[{_INDEXED}]", rates.get(_INDEXED), _INDEXED),
        (f"compress_rates[{_HEAVY}]", rates.get(_HEAVY), _HEAVY),
        ("compress_rate_csa", config.get("compress_rate_csa"), _INDEXED),  # an early spelling
        ("compress_rate_hca", config.get("compress_rate_hca"), _HEAVY),
    )
    for field, rate, name in checks:
        ratio = _RATIO_OF_TYPE[name]
        if rate is not None and (type(rate) is not int or rate != ratio):
            refuse(field, rate, str(ratio))


def _default_ratios(num_layers: int) -> tuple[int, ...]:
    """Transformers' schedule: two heavily compressed layers, then heavily and sparse by turns."""
    names = [_INDEXED if i >= 2 and i % 2 else _HEAVY for i in range(num_layers)]
    return tuple(_RATIO_OF_TYPE[name] for name in names)


def _layer_entries(config: Mapping[str, Any], name: str, num_layers: int) -> list[Any]:
    entries = items(config, name)
    if len(entries) < num_layers:
        refuse(name, f"{len(entries)} entries", f"one for each of num_hidden_layers={num_layers}")
    return entries[:num_layers]


def _weight_sizes(path: Path) -> dict[str, int]:
    """Bytes of each weight file, by name."""
    try:
        files = [file for file in path.iterdir() if file.suffix in WEIGHT_SUFFIXES]
        return {file.name: file.stat().st_size for file in files}
    except OSError as error:
        reason = error.strerror or error
        raise SpinError(f"checkpoint_dir: cannot read {error.filename!r}: {reason}") from error
