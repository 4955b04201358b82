# SPDX-License-Identifier: Apache-2.0
"""The engines of a build, and going on where an earlier one was interrupted.

Engines take minutes each, so they are made in a work folder beside the output. Each has a key next
to it, which says what it was made of; one whose key is still right is not built again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from spin_trtllm.build.memory import human_bytes
from spin_trtllm.build.target import Target
from spin_trtllm.build.tensorrt_builder import Builder, choose_builder
from spin_trtllm.build.trtexec_script import Shapes
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.tensorrt.builder import BuiltEngine, EngineJob, build_engines
from spin_trtllm.hosts.tensorrt.plugin import PLUGIN_NAME, plugin_path
from spin_trtllm.hosts.tensorrt.sizes import IndexerSizes


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
        target_sm=builder.asked_sm,
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


@contextmanager
def work_folder(output: Path) -> Iterator[Path]:
    """The folder beside an output in which its engines are made.

    It vanishes with success, and with a failure unless engines would be lost; the folders above
    it that were made for it then vanish, too.

    Raises:
        SpinError: it cannot be made.
    """
    name = hashlib.sha256(os.fsencode(output)).hexdigest()[:12]
    folder = output.parent / f".spin.tensorrt.{name}"
    new = [parent for parent in folder.parents if not os.path.lexists(parent)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _remove_empty(new)
        raise SpinError(f"output_dir: cannot make {str(folder)!r}: {error.strerror}") from error
    try:
        yield folder
    except BaseException:
        if not any(folder.glob("*.engine")):
            shutil.rmtree(folder, ignore_errors=True)
            _remove_empty(new)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # another build may have put something there
            folder.rmdir()


# ---- knowing an engine again ----


def _key(network: Network, plugin: Path, builder: Builder, sizes: IndexerSizes) -> str:
    """What an engine depends on."""
    parts = (file_sha256(network.path), file_sha256(plugin), asdict(builder), sizes.ranges)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _key_file(network: Network) -> Path:
    return network.path.with_suffix(".key")


def _read_key(network: Network) -> str | None:
    """The key that an engine was built with; None where there is no such engine."""
    try:
        return _key_file(network).read_text(encoding="utf-8") if network.engine.exists() else None
    except (OSError, UnicodeDecodeError):
        return None


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()  # hashlib.file_digest came with Python 3.11
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
