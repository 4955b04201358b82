# SPDX-License-Identifier: Apache-2.0
"""What `model.yaml` says: LLM arguments, `triton_config`, and a section `spin`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError, check_integer, refuse

SETTINGS_FILE = "model.yaml"
FILE_VARIABLE = "LLM_CONFIG_PATH"  # upstream's: another file name, relative to the model's folder

TENSORRT_LLM = "tensorrt_llm"
TRANSFORMERS = "transformers"
AUTO = "auto"
ENGINES = (AUTO, TENSORRT_LLM, TRANSFORMERS)

MAX_BYTES = 2**20
DEFAULT_MAX_ACTIVE = 64
DEFAULT_CANCELLATION_CHECK_MS = 100

_TRITON = "triton_config"
_SPIN = "spin"
_TRITON_KEYS = ("max_batch_size", "decoupled", "cancellation_check_period_ms")
_SPIN_KEYS = ("engine", "cpu_threads", "fingerprint", "settings")


@dataclass(frozen=True)
class ModelSettings:
    """One model of a repository.

    Attributes:
        llm_args: arguments of TensorRT-LLM's `LLM`, the checkpoint in `model` among them.
        decoupled: requests may be streamed; Triton then takes them over gRPC streams and
            `generate_stream` only.
        cancellation_check_ms: how often TensorRT-LLM's requests are looked at for cancellation.
        engine: one of `ENGINES`.
        cpu_threads: of the embedded engine, for one operation; None leaves torch's default.
        fingerprint: of the checkpoint that the model was built for; None takes any.
        spin: SPIN's parameters.
    """

    llm_args: Mapping[str, Any]
    decoupled: bool
    cancellation_check_ms: int
    engine: str
    cpu_threads: int | None
    fingerprint: str | None
    spin: SpinConfig

    @property
    def checkpoint(self) -> str:
        """The checkpoint's directory, or a name that TensorRT-LLM knows."""
        return str(self.llm_args["model"])

    @property
    def max_active(self) -> int:
        """Requests that are served at once."""
        return int(self.llm_args.get("max_batch_size") or DEFAULT_MAX_ACTIVE)

    @property
    def max_seq_len(self) -> int | None:
        """Longest sequence in tokens, prompt and answer; None: the model's own limit."""
        limit = self.llm_args.get("max_seq_len")
        return None if limit is None else int(limit)

    def settled_engine(self) -> str:
        """The engine, `auto` replaced by what is installed."""
        if self.engine != AUTO:
            return self.engine
        return TENSORRT_LLM if importlib.util.find_spec("tensorrt_llm") else TRANSFORMERS


def read_model_settings(folder: str | os.PathLike[str]) -> ModelSettings:
    """Read the settings of a model version.

    Args:
        folder: the version's directory, which holds the file.

    Raises:
        SpinError: no such file, not YAML, or a value that says something else than it may.
    """
    path = Path(folder) / (os.environ.get(FILE_VARIABLE) or SETTINGS_FILE)
    values = _mapping(_load(path), path.name)
    triton = _section(values, _TRITON, _TRITON_KEYS)
    spin = _section(values, _SPIN, _SPIN_KEYS)
    llm_args = {name: value for name, value in values.items() if name not in (_TRITON, _SPIN)}
    _check_llm_args(llm_args)
    if triton.get("max_batch_size", 0) != 0:
        refuse(f"{_TRITON}.max_batch_size", triton["max_batch_size"], "0: one prompt a request")
    threads = spin.get("cpu_threads")
    return ModelSettings(
        llm_args=llm_args,
        decoupled=_one_of(triton, _TRITON, "decoupled", (False, True)),
        cancellation_check_ms=check_integer(
            f"{_TRITON}.cancellation_check_period_ms",
            triton.get("cancellation_check_period_ms", DEFAULT_CANCELLATION_CHECK_MS),
            1,
            60_000,
        ),
        engine=_one_of(spin, _SPIN, "engine", ENGINES),
        cpu_threads=None
        if threads is None
        else check_integer(f"{_SPIN}.cpu_threads", threads, 1, 1024),
        fingerprint=spin.get("fingerprint"),
        spin=SpinConfig.from_dict(
            _mapping(spin.get("settings", {}), f"{_SPIN}.settings"), source=f"{_SPIN}.settings"
        ),
    )


def _check_llm_args(values: Mapping[str, Any]) -> None:
    model = values.get("model")
    if not isinstance(model, str) or not model:
        refuse("model", model, "the checkpoint's directory")
    for name, high in (("max_batch_size", 65536), ("max_seq_len", 2**31 - 1)):
        if values.get(name) is not None:
            check_integer(name, values[name], 1, high)


def _section(values: Mapping[str, Any], name: str, known: tuple[str, ...]) -> dict[str, Any]:
    section = _mapping(values.get(name, {}), name)
    for key in section:
        if key not in known:
            refuse(f"{name}: key", key, ", ".join(known))
    return section


def _one_of(values: Mapping[str, Any], section: str, name: str, allowed: tuple[Any, ...]) -> Any:
    """A value out of a few, by default the first; `1` is not `true`."""
    value = values.get(name, allowed[0])
    if not any(type(value) is type(each) and value == each for each in allowed):
        refuse(f"{section}.{name}", value, ", ".join(str(each).lower() for each in allowed))
    return value


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(name, type(value).__name__, "a YAML mapping")
    return value


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SpinError(f"{path.name}: cannot read {str(path)!r}: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        refuse(path.name, "a larger file", f"up to {MAX_BYTES} bytes")
    try:
        return yaml.safe_load(content)
    except Exception as error:  # PyYAML's constructors raise far more than YAMLError
        where = " ".join(str(error).split()) or type(error).__name__
        raise SpinError(f"{path.name}: {str(path)!r} is not YAML: {where[:200]}") from error
