# SPDX-License-Identifier: Apache-2.0
"""The engines of a build, and going on where an earlier one was interrupted.

Engines take minutes each, so they are made in a work folder beside the output. Each has a key next
to it, which says what it was made of; one whose key is still right is not built again.
"""

from __future__ import annotations

import fcntl
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
from spin_trtllm.files import write_file
from spin_trtllm.hosts.tensorrt.builder import BuiltEngine, EngineJob, build_engines
from spin_trtllm.hosts.tensorrt.plugin import PLUGIN_NAME
from spin_trtllm.hosts.tensorrt.sizes import IndexerSizes


@dataclass(frozen=True)
class Network:
    """One layer's network.

    Attributes:
        layer: decoder-layer index.
        path: where it lies, if it was written.
        size_bytes: of the file.
        seconds: that it took.
        shapes: of its inputs with named dimensions.
    """

    layer: int
    path: Path
    size_bytes: int
    seconds: float
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
        failed: whether a builder was there and failed; what it had built waits for the next call.
    """

    builder: Builder | None
    reason: str
    built: tuple[BuiltEngine, ...] = ()
    count: int = 0
    failed: bool = False

    @property
    def seconds(self) -> dict[str, float]:
        """What each that was built now took, by file name."""
        return {Path(engine.engine).name: engine.seconds for engine in self.built}


def make_engines(
    networks: Sequence[Network], sizes: IndexerSizes, target: Target, plugin: Path | None
) -> Engines:
    """Build the engines that are not there yet, if anything here can.

    Args:
        networks: as they were written.
        plugin: the library that they need, if there is one.
    """
    builder = choose_builder(target)
    if isinstance(builder, str):
        return Engines(None, builder)
    if plugin is None:
        return Engines(None, f"{PLUGIN_NAME} is not built")
    keys = {network: _key(network, plugin, builder, sizes) for network in networks}
    missing = [network for network, key in keys.items() if _read_key(network) != key]
    for network in missing:  # an engine is written whole, so from here on it is there or is right
        network.engine.unlink(missing_ok=True)
        write_file(_key_file(network), keys[network].encode(), argument="output_dir")
    try:
        built = build_engines(
            [EngineJob(str(network.path), str(network.engine)) for network in missing],
            builder=builder.name,
            plugin=plugin,
            ranges=sizes.ranges,
            target_sm=builder.asked_sm,
        )
    except SpinError as error:
        there = sum(network.engine.exists() for network in networks)
        return Engines(None, str(error), count=there, failed=True)
    return Engines(builder, "", tuple(built), len(networks))


def describe_engines(engines: Engines) -> str:
    """One line for the build's report."""
    builder = engines.builder
    if builder is None:
        waiting = f"; {engines.count} wait for the next call" if engines.count else ""
        return f"none, only ONNX: {engines.reason}{waiting}"
    kept = engines.count - len(engines.built)
    seconds = engines.seconds
    slowest = max(seconds, key=seconds.__getitem__, default="")
    size = human_bytes(sum(engine.size_bytes for engine in engines.built))
    return (
        f"{len(engines.built)} engines for sm_{builder.sm} by {builder.name} {builder.version}"
        + (f" ({builder.note})" if builder.note else "")
        + f" in {sum(seconds.values()):.1f} s"
        + (f", the slowest {slowest} in {seconds[slowest]:.1f} s" if slowest else "")
        + f", {size}"
        + (f"; {kept} kept from an interrupted build" if kept else "")
    )


@contextmanager
def work_folder(output: Path) -> Iterator[Path]:
    """The folder beside an output in which its engines are made, for one build at a time.

    It vanishes at the end, with success or without, unless engines would be lost; the folders above
    it that were made for it then vanish, too.

    Raises:
        SpinError: it cannot be made, or another build is in it.
    """
    name = hashlib.sha256(os.fsencode(output)).hexdigest()[:12]
    folder = output.parent / f".spin.tensorrt.{name}"
    new = [parent for parent in folder.parents if not os.path.lexists(parent)]
    try:
        lock = _lock(folder)
    except BlockingIOError as error:
        raise SpinError(
            f"output_dir: another build of {str(output)!r} is at work in {str(folder)!r}"
        ) from error
    except OSError as error:
        _remove_empty(new)
        raise SpinError(f"output_dir: cannot make {str(folder)!r}: {error.strerror}") from error
    try:
        yield folder
    finally:
        if not any(folder.glob("*.engine")):
            shutil.rmtree(folder, ignore_errors=True)
            _remove_empty(new)
        os.close(lock)


def drop_engines(work: Path, engines: Engines) -> None:
    """Remove the engines of a work folder, once its output stands.

    With them go those that an interrupted build of something else left. Where none could be built,
    all wait for a call that can.
    """
    if engines.builder is not None:
        for engine in work.glob("*.engine"):
            with suppress(OSError):  # the output has it, so one that stays harms nobody
                engine.unlink()


def _lock(folder: Path) -> int:
    """Make a folder and lock a file in it: an open handle, which whoever starts does not inherit.

    Raises:
        BlockingIOError: it is locked already.
        OSError: it cannot be made.
    """
    path = folder / "lock"
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # a build that ended just now took the folder away
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise
        except OSError:  # a file system without locks
            return handle
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)  # taken away, too, between the two


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
