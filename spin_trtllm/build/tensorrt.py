# SPDX-License-Identifier: Apache-2.0
"""`trtllm-build --use_spin --tensorrt`: the indexer's layers as TensorRT networks and engines.

tensorrt/
    layer_02.onnx               one network for each layer with an indexer, weights included
    layer_02.engine             the same, built; where a builder was there
    libspin_trt_plugin.so       what both need
    build_engines.sh            builds the engines where only TensorRT is
    manifest.json               what was made by what for what, and how to bind it
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spin_trtllm.build.checkpoint import CONFIG_FILE, DEEPSEEK_V4, Checkpoint
from spin_trtllm.build.engine import make_executable
from spin_trtllm.build.fields import integer, read_json_object
from spin_trtllm.build.memory import human_bytes
from spin_trtllm.build.target import PAGE_SLOTS
from spin_trtllm.build.tensorrt_engines import Engines, Network, file_sha256
from spin_trtllm.build.trtexec_script import Shapes, trtexec_script_text
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import write_file
from spin_trtllm.geometry import count_blocks
from spin_trtllm.hosts.tensorrt.indexer import PRECISIONS, indexer_network
from spin_trtllm.hosts.tensorrt.plugin import PLUGIN_NAME
from spin_trtllm.hosts.tensorrt.rope import indexer_rope
from spin_trtllm.hosts.tensorrt.sizes import IndexerSizes, state_shapes
from spin_trtllm.hosts.tensorrt.weights import read_indexer_weights

FOLDER = "tensorrt"
MANIFEST_FILE = "manifest.json"
SCRIPT_FILE = "build_engines.sh"
FORMAT = "spin-tensorrt"
SCHEMA_VERSION = 1
ROTATIONS = ("hadamard", "none")

_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "int32": 4, "int64": 8}


@dataclass(frozen=True)
class TensorrtOptions:
    """What the command line asks for.

    Attributes:
        precision: of the projections, one of `indexer.PRECISIONS`.
        key_rotation: what the cached keys went through, one of `ROTATIONS`.
        max_draft_len: draft tokens a step.
        onnx_only: build no engines, whatever is here.
    """

    precision: str
    key_rotation: str
    max_draft_len: int
    onnx_only: bool = False


def size_networks(
    checkpoint: Checkpoint,
    config: SpinConfig,
    options: TensorrtOptions,
    *,
    max_batch_size: int,
    max_seq_len: int,
) -> IndexerSizes:
    """Check the options and size the networks.

    Raises:
        SpinError: an option out of range, a model whose indexer is another one, or a state that
            is too large for TensorRT.
    """
    if options.precision not in PRECISIONS:
        refuse("precision", options.precision, ", ".join(PRECISIONS))
    if options.key_rotation not in ROTATIONS:
        refuse("key_rotation", options.key_rotation, ", ".join(ROTATIONS))
    if checkpoint.architecture != DEEPSEEK_V4:
        refuse("architecture with --tensorrt", checkpoint.architecture, DEEPSEEK_V4)
    drafts = integer({"max_draft_len": options.max_draft_len}, "max_draft_len", 0, 7)
    pages = count_blocks(max_seq_len, PAGE_SLOTS * checkpoint.geometry.ratio)
    sizes = IndexerSizes(max_batch_size, 1 + drafts, pages * PAGE_SLOTS, PAGE_SLOTS)
    state_shapes(config, sizes)  # refuses before weights are read
    return sizes


def export_networks(
    checkpoint: Checkpoint,
    config: SpinConfig,
    sizes: IndexerSizes,
    options: TensorrtOptions,
    folder: Path | None,
) -> list[Network]:
    """Make the networks of all layers, one at a time.

    Args:
        folder: where to write them; None only makes them.

    Raises:
        SpinError: weights that are missing, a model or a configuration that the plugin cannot run.
    """
    rope = indexer_rope(read_json_object(checkpoint.path / CONFIG_FILE, "checkpoint_dir"))
    width = len(str(checkpoint.num_layers - 1))
    networks: list[Network] = []
    first = checkpoint.geometry.layers[0]
    latent = 0
    for layer in checkpoint.geometry.layers:
        started = time.perf_counter()
        weights = read_indexer_weights(checkpoint, layer)
        given = weights.query.shape[2]
        latent = latent or given
        if given != latent:  # all layers share their inputs' shapes, in the script, too
            refuse(f"query_latent width of layer {layer}", given, f"{latent}, as in layer {first}")
        model = indexer_network(
            weights,
            rope,
            checkpoint.geometry,
            config,
            sizes,
            precision=options.precision,
            rotate=options.key_rotation == "hadamard",
        )
        content = model.SerializeToString()
        path = (folder or Path()) / f"layer_{layer:0{width}}.onnx"
        if folder is not None:
            write_file(path, content, argument="output_dir")
        seconds = time.perf_counter() - started
        networks.append(Network(layer, path, len(content), seconds, _named_shapes(model)))
    return networks


def _named_shapes(model: Any) -> Shapes:
    """Shapes of an ONNX model's inputs that have named dimensions."""
    dims = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    shapes = {name: [dim.dim_param or dim.dim_value for dim in d] for name, d in dims.items()}
    return {n: s for n, s in shapes.items() if any(isinstance(size, str) for size in s)}


def describe_networks(
    networks: Sequence[Network],
    config: SpinConfig,
    sizes: IndexerSizes,
    options: TensorrtOptions,
) -> str:
    """One line for the build's report."""
    size = human_bytes(sum(network.size_bytes for network in networks))
    state = _state(config, sizes).values()
    layer_bytes = sum(math.prod(s["shape"]) * _DTYPE_BYTES[s["dtype"]] for s in state)
    seconds = sum(network.seconds for network in networks)
    return (
        f"{len(networks)} networks in {seconds:.1f} s, {size}, projections in {options.precision}, "
        f"to be bound to a state of {human_bytes(len(networks) * layer_bytes)}"
    )


def folder_texts(
    networks: Sequence[Network],
    engines: Engines,
    config: SpinConfig,
    sizes: IndexerSizes,
    options: TensorrtOptions,
    plugin: Path | None,
) -> dict[str, str]:
    """The text files of the folder by name: the manifest has all it takes to bind the networks."""
    script = trtexec_script_text(PLUGIN_NAME, networks[0].shapes, sizes.ranges)
    manifest = _manifest_text(networks, engines, config, sizes, options, plugin)
    return {SCRIPT_FILE: script, MANIFEST_FILE: manifest}


def _manifest_text(
    networks: Sequence[Network],
    engines: Engines,
    config: SpinConfig,
    sizes: IndexerSizes,
    options: TensorrtOptions,
    plugin: Path | None,
) -> str:
    values = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "layers": {str(network.layer): _layer(network, engines) for network in networks},
        "builder": asdict(engines.builder) if engines.builder else None,
        "why_no_engines": engines.reason or None,
        "plugin": {"file": PLUGIN_NAME, "sha256": file_sha256(plugin)} if plugin else None,
        "options": asdict(options),
        "sizes": asdict(sizes),
        "ranges": {name: list(values) for name, values in sizes.ranges.items()},
        "state": _state(config, sizes),
    }
    return json.dumps(values, indent=2) + "\n"


def _layer(network: Network, engines: Engines) -> dict[str, Any]:
    """A layer's files; an engine that was kept from an earlier call has no time."""
    values: dict[str, Any] = {"network": network.path.name}
    if engines.builder is not None:
        values["engine"] = network.engine.name
        values["engine_seconds"] = engines.seconds.get(network.engine.name)
    return values


def _state(config: SpinConfig, sizes: IndexerSizes) -> dict[str, Any]:
    dtypes = dict.fromkeys(("v", "d"), config.state_dtype)
    dtypes |= {"scores": "fp32", "compact_of_block": "int32", "books": "int64"}
    shapes = state_shapes(config, sizes)
    return {name: {"dtype": dtypes[name], "shape": list(shapes[name])} for name in shapes}


def move_into(
    work: Path,
    networks: Sequence[Network],
    engines: Engines,
    texts: Mapping[str, str],
    plugin: Path | None,
    directory: Path,
) -> None:
    """Move a build's networks into a new engine directory, complete them, and add its engines.

    Engines stay in the work folder, too: the directory may not come to stand.

    Args:
        work: what `work_folder` gave.
        networks: in it.
        engines: likewise.
        texts: what `folder_texts` returned.
        plugin: the library to put beside them, if there is one.
        directory: the engine's.
    """
    folder = directory / FOLDER
    folder.mkdir()
    for network in networks:
        os.replace(work / network.path.name, folder / network.path.name)
    if plugin is not None:
        shutil.copy(plugin, folder / PLUGIN_NAME)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    make_executable(folder / SCRIPT_FILE)
    if engines.builder is not None:
        for network in networks:
            _link(work / network.engine.name, folder / network.engine.name)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def is_ours(folder: Path) -> bool:
    """Whether a folder holds what this module and its script write, and nothing else."""
    try:
        values = read_json_object(folder / MANIFEST_FILE, "output_dir")
        names = set(os.listdir(folder))
    except (SpinError, OSError):
        return False
    layers = values.get("layers")
    if values.get("format") != FORMAT or not isinstance(layers, Mapping):
        return False
    networks = {Path(dict(layer).get("network", "")) for layer in layers.values()}
    engines = {str(network.with_suffix(".engine")) for network in networks if network.name}
    parts = {f"{engine}.part" for engine in engines}  # of a trtexec that was stopped
    files = {*map(str, networks), *engines, *parts}
    return names <= files | {MANIFEST_FILE, SCRIPT_FILE, PLUGIN_NAME}
