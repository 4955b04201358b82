# SPDX-License-Identifier: Apache-2.0
"""The engine directory: what `trtllm-build --use_spin` writes and the hosts load.

    config.json     everything a host checks before it serves; the schema of this module
    spin.yaml       the SPIN configuration, for `TLLM_SPIN`
    llm_args.yaml   arguments for `trtllm-serve --config`
    run.sh          the command that serves it
    tensorrt/       with --tensorrt, see `build.tensorrt`

But for the last it holds no weights and no compiled code: it names the checkpoint by fingerprint,
so that both directories can be moved.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from spin_trtllm import __version__
from spin_trtllm.build.checkpoint import Checkpoint, IndexerGeometry, read_checkpoint
from spin_trtllm.build.fields import integer, items, read_json_object, section, text
from spin_trtllm.build.memory import SpinMemory
from spin_trtllm.build.target import TARGET_SMS
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError, refuse

FORMAT = "spin-engine"
SCHEMA_VERSION = 1

CONFIG_FILE = "config.json"
SPIN_FILE = "spin.yaml"
LLM_ARGS_FILE = "llm_args.yaml"
RUN_FILE = "run.sh"
ENGINE_FILES = (CONFIG_FILE, SPIN_FILE, LLM_ARGS_FILE, RUN_FILE)


@dataclass(frozen=True)
class CheckpointIdentity:
    """Which checkpoint an engine was built for: its directory's name, architecture, fingerprint."""

    name: str
    architecture: str
    fingerprint: str


@dataclass(frozen=True)
class Engine:
    """A loaded engine directory.

    Attributes:
        path: the directory, absolute.
        config: SPIN parameters, `top_k` settled.
        geometry: the model's indexer.
        max_batch_size: sequences that decode at once.
        max_seq_len: longest sequence, in tokens.
        target_sm: GPU architecture it was written for, 90 for sm_90.
        checkpoint: the checkpoint it belongs to.
        versions: versions of what wrote it, by package.
    """

    path: Path
    config: SpinConfig
    geometry: IndexerGeometry
    max_batch_size: int
    max_seq_len: int
    target_sm: int
    checkpoint: CheckpointIdentity
    versions: Mapping[str, str]

    @property
    def max_slots(self) -> int:
        """Slots of the longest sequence: the capacity of the averages."""
        return self.max_seq_len // self.geometry.ratio

    def check_checkpoint(self, directory: str | os.PathLike[str]) -> Checkpoint:
        """Read the checkpoint that is about to be served and refuse any other than the engine's."""
        found = read_checkpoint(directory)
        if found.fingerprint != self.checkpoint.fingerprint:
            refuse(
                "checkpoint_dir",
                f"{found.path.name} ({found.fingerprint[:14]})",
                f"{self.checkpoint.name} ({self.checkpoint.fingerprint[:14]}), which "
                f"{str(self.path)!r} was built for",
            )
        return found


def engine_config_text(
    *,
    checkpoint: Checkpoint,
    config: SpinConfig,
    memory: SpinMemory,
    max_batch_size: int,
    max_seq_len: int,
    target_sm: int,
) -> str:
    """The text of an engine's `config.json`."""
    values = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "checkpoint": {
            "name": checkpoint.path.name,
            "architecture": checkpoint.architecture,
            "fingerprint": checkpoint.fingerprint,
        },
        "geometry": asdict(checkpoint.geometry),
        "spin": config.to_dict(),
        "max_batch_size": max_batch_size,
        "max_seq_len": max_seq_len,
        "target_sm": target_sm,
        "memory": asdict(memory),
        "versions": {
            "spin_trtllm": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    return json.dumps(values, indent=2) + "\n"


def write_engine(directory: Path, files: Mapping[str, str]) -> None:
    """Write an engine's files into an existing, empty directory.

    Args:
        files: text of each of `ENGINE_FILES`, by name.
    """
    for name in ENGINE_FILES:
        path = directory / name
        # surrogateescape: run.sh names the checkpoint by path, and a path may be any bytes
        path.write_text(files[name], encoding="utf-8", errors="surrogateescape")
        if path.suffix == ".sh":
            make_executable(path)


def make_executable(path: Path) -> None:
    """Whoever may read a file may run it."""
    readable = path.stat().st_mode & 0o444
    path.chmod(path.stat().st_mode | readable >> 2)


def is_engine(directory: Path) -> bool:
    """Whether a directory holds an engine of ours, of whatever schema version."""
    try:
        return read_json_object(directory / CONFIG_FILE, "engine_dir").get("format") == FORMAT
    except SpinError:
        return False


def load_engine(directory: str | os.PathLike[str]) -> Engine:
    """Load and check an engine directory.

    Raises:
        SpinError: not an engine of ours, a schema this version does not know, a damaged file, or
            a `spin.yaml` that says something else than `config.json`.
    """
    path = Path(directory)
    values = read_json_object(path / CONFIG_FILE, "engine_dir")
    if values.get("format") != FORMAT:
        refuse("engine_dir", str(path), "a directory written by trtllm-build --use_spin")
    _check_schema(values)
    config = SpinConfig.from_dict(section(values, "spin"), source="engine_dir: spin")
    engine = Engine(
        path=path.resolve(),
        config=config,
        geometry=_geometry(section(values, "geometry")),
        max_batch_size=integer(values, "max_batch_size", 1, 2**20),
        max_seq_len=integer(values, "max_seq_len", 1, 2**31 - 1),
        target_sm=integer(values, "target_sm", min(TARGET_SMS), max(TARGET_SMS)),
        checkpoint=_identity(section(values, "checkpoint")),
        versions={k: str(v) for k, v in section(values, "versions").items()},
    )
    if config.top_k != engine.geometry.top_k:
        refuse("engine_dir: spin.top_k", config.top_k, f"{engine.geometry.top_k}, as in geometry")
    _check_spin_file(path / SPIN_FILE, config)
    return engine


def _check_schema(values: Mapping[str, Any]) -> None:
    version = values.get("schema_version")
    if type(version) is int and version > SCHEMA_VERSION:
        refuse(
            "engine_dir: schema_version",
            version,
            f"up to {SCHEMA_VERSION}; it needs a newer spin-trtllm than {__version__}",
        )
    if type(version) is not int or version < 1:
        refuse("engine_dir: schema_version", version, f"1 .. {SCHEMA_VERSION}")


def _geometry(values: Mapping[str, Any]) -> IndexerGeometry:
    layers = items(values, "layers")
    for layer in layers:
        integer({"layers": layer}, "layers", 0, 1023)
    names = ("ratio", "index_heads", "index_head_dim", "top_k")
    return IndexerGeometry(tuple(layers), **{name: values.get(name, 0) for name in names})


def _identity(values: Mapping[str, Any]) -> CheckpointIdentity:
    names = ("name", "architecture", "fingerprint")
    return CheckpointIdentity(**{name: text(values, name) for name in names})


def _check_spin_file(path: Path, config: SpinConfig) -> None:
    """`spin.yaml` is what a rank reads, `config.json` what a host checks: they must agree."""
    written = SpinConfig.from_yaml(path).to_dict()
    for name, value in config.to_dict().items():
        found = written[name]
        if found != value:
            refuse(f"{SPIN_FILE}: {name}", found, f"{value!r}, as in config.json; or build anew")
