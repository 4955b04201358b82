# SPDX-License-Identifier: Apache-2.0
"""`trtllm-build --use_spin --tensorrt`: the indexer's layers as TensorRT networks and engines.

    tensorrt/
        layer_02.onnx               one network for each layer with an indexer, weights included
        layer_02.engine             the same, built; where a builder was there
        libspin_trt_plugin.so       what both need
        build_engines.sh            builds the engines where only TensorRT is
        manifest.json               what was made by what for what, and how to bind it

Engines take minutes each, so they are made in a work folder beside the output, which an interrupted
build leaves behind and the next one goes on with.
"""

from __future__ import annotations

import ctypes.util
import hashlib
import importlib.util
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from spin_trtllm.build.checkpoint import CONFIG_FILE, DEEPSEEK_V4, Checkpoint
from spin_trtllm.build.engine import make_executable
from spin_trtllm.build.fields import integer, read_json_object
from spin_trtllm.build.memory import human_bytes
from spin_trtllm.build.target import PAGE_SLOTS, Target
from spin_trtllm.build.trtexec_script import Shapes, trtexec_script_text
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_file
from spin_trtllm.geometry import count_blocks
from spin_trtllm.hosts.tensorrt.builder import BuiltEngine, EngineJob, build_engines
from spin_trtllm.hosts.tensorrt.flavours import FLAVOURS, import_flavour, installed_flavours
from spin_trtllm.hosts.tensorrt.indexer import (
    PRECISIONS,
    IndexerSizes,
    indexer_network,
    state_shapes,
)
from spin_trtllm.hosts.tensorrt.plugin import PLUGIN_NAME, plugin_path
from spin_trtllm.hosts.tensorrt.rope import indexer_rope
from spin_trtllm.hosts.tensorrt.weights import read_indexer_weights

FOLDER = "tensorrt"
MANIFEST_FILE = "manifest.json"
SCRIPT_FILE = "build_engines.sh"
FORMAT = "spin-tensorrt"
SCHEMA_VERSION = 1
ROTATIONS = ("hadamard", "none")

_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "int32": 4, "int64": 8}

_RTX = "tensorrt_rtx"
_RTX_SMS = (75, 80, 86, 89, 120)
_RTX_LIBRARY = "libtensorrt_rtx.so"


@dataclass(frozen=True)
class TensorrtOptions:
    """What the command line asks for.

    Attributes:
        precision: of the projections, one of `indexer.PRECISIONS`.
        key_rotation: what the cached keys went through, one of `ROTATIONS`.
        max_draft_len: draft tokens a step.
    """

    precision: str
    key_rotation: str
    max_draft_len: int


@dataclass(frozen=True)
class Network:
    """One layer's network.

    Attributes:
        layer: decoder-layer index.
        path: where it lies, if it was written.
        size_bytes: of the file.
        shapes: of its inputs with named dimensions.
    """

    layer: int
    path: Path
    size_bytes: int
    shapes: Shapes = field(hash=False)

    @property
    def engine(self) -> Path:
        """Where its engine goes."""
        return self.path.with_suffix(".engine")


@dataclass(frozen=True)
class Builder:
    """What builds engines: its module, version, and the GPU architecture it builds for."""

    name: str
    version: str
    sm: int
    note: str = ""


@dataclass(frozen=True)
class Engines:
    """What became of the engines.

    Attributes:
        builder: what built them; None if none could be built.
        reason: why not, one line; empty if they were.
        built: those built now; the others were there from an earlier, interrupted build.
        count: engines there are now.
    """

    builder: Builder | None
    reason: str
    built: tuple[BuiltEngine, ...] = ()
    count: int = 0


def size_networks(
    checkpoint: Checkpoint, options: TensorrtOptions, *, max_batch_size: int, max_seq_len: int
) -> IndexerSizes:
    """Check the options and size the networks.

    Raises:
        SpinError: an option out of range, or a model whose indexer is another one.
    """
    if options.precision not in PRECISIONS:
        refuse("precision", options.precision, ", ".join(PRECISIONS))
    if options.key_rotation not in ROTATIONS:
        refuse("key_rotation", options.key_rotation, ", ".join(ROTATIONS))
    if checkpoint.architecture != DEEPSEEK_V4:
        refuse("architecture with --tensorrt", checkpoint.architecture, DEEPSEEK_V4)
    drafts = integer({"max_draft_len": options.max_draft_len}, "max_draft_len", 0, 7)
    pages = count_blocks(max_seq_len, PAGE_SLOTS * checkpoint.geometry.ratio)
    return IndexerSizes(max_batch_size, 1 + drafts, pages * PAGE_SLOTS, PAGE_SLOTS)


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
    networks = []
    for layer in checkpoint.geometry.layers:
        model = indexer_network(
            read_indexer_weights(checkpoint, layer),
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
            with atomic_file(path) as temporary:
                temporary.write_bytes(content)
        networks.append(Network(layer, path, len(content), _named_shapes(model)))
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
    return (
        f"{len(networks)} networks, {size}, projections in {options.precision}, "
        f"to be bound to a state of {human_bytes(len(networks) * layer_bytes)}"
    )


def choose_builder(target: Target) -> Builder | str:
    """The best builder here that builds for a target, or why there is none, one line."""
    reasons = []
    for flavour in installed_flavours():
        if not flavour.builds:
            continue
        reason = _why_not(flavour.name, target.sm)
        if reason is None:
            try:
                version = str(import_flavour(flavour.name, builds=True).__version__)
                return Builder(flavour.name, version, target.sm, flavour.note)
            except SpinError as error:
                reason = str(error)
        reasons.append(reason)
    names = " or ".join(flavour.name for flavour in FLAVOURS if flavour.builds)
    return "; ".join(reasons) or f"no TensorRT with a builder is installed ({names})"


def _why_not(name: str, sm: int) -> str | None:
    """Why a builder cannot build for an architecture; None if it can."""
    if name == _RTX:
        return _why_not_rtx(sm)
    if not torch.cuda.is_available():
        return f"{name} builds on the kind of GPU that it builds for, and there is no GPU here"
    major, minor = torch.cuda.get_device_capability()
    here = 10 * major + minor
    return None if here == sm else f"{name} would build for this sm_{here}, not sm_{sm}"


def _why_not_rtx(sm: int) -> str | None:
    if sm not in _RTX_SMS:
        allowed = ", ".join(f"sm_{known}" for known in _RTX_SMS)
        return f"{_RTX} builds for {allowed}, not sm_{sm}"
    # its parser loads this name, which its wheel lacks, and ends the process without it
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    folders = [*(spec.submodule_search_locations or ())] if spec else []
    folders += filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    if any((Path(folder) / _RTX_LIBRARY).exists() for folder in folders):
        return None
    if ctypes.util.find_library("tensorrt_rtx"):
        return None
    return (
        f"{_RTX} needs {_RTX_LIBRARY} to read networks, which its wheel lacks: "
        f"put a link of that name to {_RTX_LIBRARY}.1 on LD_LIBRARY_PATH"
    )


def make_engines(
    networks: Sequence[Network], sizes: IndexerSizes, target: Target, work: Path | None
) -> Engines:
    """Build the engines that are not there yet, if anything here can.

    Args:
        work: the folder with the networks; None on a dry run, which builds nothing.

    Raises:
        SpinError: a builder refused a network; engines that were built before it stay.
    """
    if work is None:
        return Engines(None, "a dry run")
    builder = choose_builder(target)
    if isinstance(builder, str):
        return Engines(None, builder)
    plugin = plugin_path()
    if plugin is None:
        return Engines(None, f"{PLUGIN_NAME} is not built")
    keys = {network: _key(network, plugin, builder, sizes) for network in networks}
    missing = [network for network, key in keys.items() if _read_key(network) != key]
    for network in missing:  # an engine is written whole, so from here on it is there or is right
        network.engine.unlink(missing_ok=True)
        _key_file(network).write_text(keys[network], encoding="utf-8")
    built = build_engines(
        [EngineJob(str(network.path), str(network.engine)) for network in missing],
        builder=builder.name,
        plugin=plugin,
        ranges=sizes.ranges,
        target_sm=builder.sm if builder.name == _RTX else None,
    )
    return Engines(builder, "", tuple(built), len(networks))


def describe_engines(engines: Engines) -> str:
    """One line for the build's report."""
    builder = engines.builder
    if builder is None:
        return f"none, only ONNX: {engines.reason}"
    kept = engines.count - len(engines.built)
    taken = sum(engine.seconds for engine in engines.built)
    size = human_bytes(sum(engine.size_bytes for engine in engines.built))
    return (
        f"{len(engines.built)} engines for sm_{builder.sm} by {builder.name} {builder.version}"
        + (f" ({builder.note})" if builder.note else "")
        + f" in {taken:.1f} s, {size}"
        + (f"; {kept} kept from an interrupted build" if kept else "")
    )


def folder_texts(
    networks: Sequence[Network],
    engines: Engines,
    config: SpinConfig,
    sizes: IndexerSizes,
    options: TensorrtOptions,
) -> dict[str, str]:
    """The text files of the folder by name: the manifest has all it takes to bind the networks."""
    script = trtexec_script_text(PLUGIN_NAME, networks[0].shapes, sizes.ranges)
    manifest = _manifest_text(networks, engines, config, sizes, options)
    return {SCRIPT_FILE: script, MANIFEST_FILE: manifest}


def _manifest_text(
    networks: Sequence[Network],
    engines: Engines,
    config: SpinConfig,
    sizes: IndexerSizes,
    options: TensorrtOptions,
) -> str:
    plugin = plugin_path()
    has_engines = engines.builder is not None
    values = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "layers": {
            str(network.layer): {"network": network.path.name}
            | ({"engine": network.engine.name} if has_engines else {})
            for network in networks
        },
        "builder": asdict(engines.builder) if engines.builder else None,
        "why_no_engines": engines.reason or None,
        "plugin": {"file": PLUGIN_NAME, "sha256": _sha256(plugin)} if plugin else None,
        "options": asdict(options),
        "sizes": asdict(sizes),
        "ranges": {name: list(values) for name, values in sizes.ranges.items()},
        "state": _state(config, sizes),
    }
    return json.dumps(values, indent=2) + "\n"


def _state(config: SpinConfig, sizes: IndexerSizes) -> dict[str, Any]:
    dtypes = dict.fromkeys(("v", "d"), config.state_dtype)
    dtypes |= {"scores": "fp32", "compact_of_block": "int32", "books": "int64"}
    shapes = state_shapes(config, sizes)
    return {name: {"dtype": dtypes[name], "shape": list(shapes[name])} for name in shapes}


def move_into(work: Path, texts: Mapping[str, str], directory: Path) -> None:
    """Move a work folder's networks and engines into a new engine directory, and complete them.

    Args:
        work: what `work_folder` gave.
        texts: what `folder_texts` returned.
        directory: the engine's.
    """
    folder = directory / FOLDER
    folder.mkdir()
    for path in sorted(work.iterdir()):
        if path.suffix in (".onnx", ".engine"):
            os.replace(path, folder / path.name)
    plugin = plugin_path()
    if plugin is not None:
        shutil.copy(plugin, folder / PLUGIN_NAME)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    make_executable(folder / SCRIPT_FILE)


def is_ours(folder: Path) -> bool:
    """Whether a folder holds what this module writes, and nothing else."""
    try:
        values = read_json_object(folder / MANIFEST_FILE, "output_dir")
        names = set(os.listdir(folder))
    except (SpinError, OSError):
        return False
    layers = values.get("layers")
    if values.get("format") != FORMAT or not isinstance(layers, Mapping):
        return False
    files = {file for layer in layers.values() for file in dict(layer).values()}
    return names <= files | {MANIFEST_FILE, SCRIPT_FILE, PLUGIN_NAME}


@contextmanager
def work_folder(output: Path) -> Iterator[Path]:
    """The folder beside an output in which its engines are made.

    It vanishes with success, and with a failure unless engines would be lost.

    Raises:
        SpinError: it cannot be made.
    """
    name = hashlib.sha256(os.fsencode(output)).hexdigest()[:12]
    folder = output.parent / f".spin.tensorrt.{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpinError(f"output_dir: cannot make {str(folder)!r}: {error.strerror}") from error
    try:
        yield folder
    except BaseException:
        if not any(folder.glob("*.engine")):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


# ---- knowing an engine again ----


def _key(network: Network, plugin: Path, builder: Builder, sizes: IndexerSizes) -> str:
    """What an engine depends on."""
    parts = (_sha256(network.path), _sha256(plugin), asdict(builder), sizes.ranges)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _key_file(network: Network) -> Path:
    return network.path.with_suffix(".key")


def _read_key(network: Network) -> str | None:
    """The key that an engine was built with; None where there is no such engine."""
    try:
        return _key_file(network).read_text(encoding="utf-8") if network.engine.exists() else None
    except (OSError, UnicodeDecodeError):
        return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()  # hashlib.file_digest came with Python 3.11
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
