# SPDX-License-Identifier: Apache-2.0
"""`trtllm-build --use_spin --triton DIR`: a model for Triton Inference Server in a repository.

    DIR/NAME/config.pbtxt     tensors, as TensorRT-LLM's own `llmapi` model has them
    DIR/NAME/1/model.py       two lines: the model is in `spin_trtllm.hosts.triton.backend`
    DIR/NAME/1/model.yaml     LLM arguments, Triton's settings and SPIN's

It names the checkpoint by path and fingerprint and needs the engine's directory no longer.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import yaml

from spin_trtllm.build.checkpoint import Checkpoint
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_directory
from spin_trtllm.hosts.triton.model_settings import ENGINES, SETTINGS_FILE
from spin_trtllm.hosts.triton.tensors import INPUTS, OUTPUTS, TensorSpec

DEFAULT_NAME = "tensorrt_llm"  # what clients of TensorRT-LLM's model ask for
VERSION = "1"
CONFIG_FILE = "config.pbtxt"
MODEL_FILES = (CONFIG_FILE, f"{VERSION}/model.py", f"{VERSION}/{SETTINGS_FILE}")

_NAME = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_MARK = "# A model with SPIN for Triton's Python backend. Written by trtllm-build --use_spin."

_CONFIG = """\
{mark}
# Batch size and streaming are settled by 1/model.yaml when the server completes this file.
name: {name}
backend: "python"
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
input [
{inputs}
]
output [
{outputs}
]
"""

_MODEL = """\
# SPDX-License-Identifier: Apache-2.0
from spin_trtllm.hosts.triton.backend import TritonPythonModel  # noqa: F401
"""

_SETTINGS = """\
# The checkpoint and the arguments of TensorRT-LLM's LLM. The embedded engine reads model,
# max_batch_size and max_seq_len, and leaves the rest alone.
model: {model}
{llm_args}
# Triton's side. Streaming needs decoupled: true; HTTP's infer and generate need false.
triton_config:
  max_batch_size: 0
  decoupled: {decoupled}
  cancellation_check_period_ms: 100

spin:
  # tensorrt_llm, transformers (the embedded host), or auto: TensorRT-LLM where it is installed.
  engine: {engine}
  # Threads of one operation of the embedded engine on the CPU. More pay for large models, on cores
  # that nobody else uses.
  cpu_threads: 1
  # Of the checkpoint this was built for; the embedded engine refuses any other.
  fingerprint: {fingerprint}
  settings:
{settings}"""


@dataclass(frozen=True)
class TritonOptions:
    """What the command line asks for.

    Attributes:
        repository: directory of the model repository; other models in it stay.
        name: of the model.
        streaming: let requests be streamed, which takes HTTP's `infer` and `generate` away.
        engine: one of `model_settings.ENGINES`.
    """

    repository: str
    name: str = DEFAULT_NAME
    streaming: bool = False
    engine: str = ENGINES[0]

    @property
    def folder(self) -> Path:
        """The model's directory, absolute and without links."""
        return Path(os.path.realpath(self.repository)) / self.name


def check_model_dir(options: TritonOptions, apart_from: Iterable[Path], *, force: bool) -> None:
    """Refuse a model directory whose replacement could cost somebody their files.

    Args:
        options: where the model is to go.
        apart_from: directories that may not overlap with the repository's model, nor lie in the
            repository, where Triton takes each directory for a model.
        force: replace an earlier model of ours.

    Raises:
        SpinError: an impossible name, an overlap, or a directory that may not be replaced.
    """
    if not _NAME.fullmatch(options.name):
        refuse(
            "--triton_name", options.name, "1 .. 128 letters, digits, _, . and -, not . or - first"
        )
    if options.engine not in ENGINES:
        refuse("--triton_engine", options.engine, ", ".join(ENGINES))
    folder = options.folder
    for other in apart_from:
        if folder.parent in (other, *other.parents) or other in folder.parents:
            refuse("--triton", options.repository, f"a directory apart from {str(other)!r}")
    if not os.path.lexists(folder):
        return
    if not force:
        refuse("--triton", str(folder), "a new model, or --force to replace one")
    if not _is_ours(folder):
        refuse("--triton", str(folder), "a model that trtllm-build wrote, to replace by --force")
    if strange := sorted(_found(folder) - set(MODEL_FILES)):
        refuse(f"--triton: {str(folder)!r} holds", strange[0], ", ".join(MODEL_FILES))


def model_files(
    options: TritonOptions, checkpoint: Checkpoint, config: SpinConfig, llm_args: str
) -> dict[str, str]:
    """The text of `MODEL_FILES` by name.

    Args:
        llm_args: text of the engine's `llm_args.yaml`.
    """
    config_text = _CONFIG.format(
        mark=_MARK,
        name=json.dumps(options.name),
        inputs=_tensor_lines(INPUTS, is_input=True),
        outputs=_tensor_lines(OUTPUTS, is_input=False),
    )
    settings_text = _SETTINGS.format(
        model=_yaml_path(checkpoint.path),
        llm_args=llm_args.partition("\n\n")[2],  # without its head, which is about trtllm-serve
        decoupled=json.dumps(options.streaming),
        engine=options.engine,
        fingerprint=json.dumps(checkpoint.fingerprint),
        settings=indent(yaml.safe_dump(config.to_dict(), sort_keys=False), " " * 4),
    )
    return dict(zip(MODEL_FILES, (config_text, _MODEL, settings_text), strict=True))


def write_model(options: TritonOptions, files: Mapping[str, str], *, force: bool) -> None:
    """Write a model all at once: on any error its directory is as it was.

    Raises:
        SpinError: the directory cannot be written.
    """
    try:
        with atomic_directory(options.folder, force=force, argument="--triton") as folder:
            for name, text in files.items():
                path = folder / name
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise SpinError(f"--triton: cannot write {str(options.folder)!r}: {reason}") from error


def _tensor_lines(specs: Iterable[TensorSpec], *, is_input: bool) -> str:
    return ",\n".join(
        f'  {{ name: "{spec.name}" data_type: TYPE_{spec.data_type} dims: [ {spec.size} ]'
        + (" optional: true }" if is_input and spec.optional else " }")
        for spec in specs
    )


def _yaml_path(path: Path) -> str:
    try:
        path.as_posix().encode()
    except UnicodeEncodeError:
        refuse("checkpoint_dir", str(path), "a path of UTF-8 text, for model.yaml")
    return json.dumps(str(path))


def _is_ours(folder: Path) -> bool:
    try:
        with (folder / CONFIG_FILE).open(encoding="utf-8", errors="replace") as file:
            return file.readline().rstrip("\n") == _MARK
    except OSError:
        return False


def _found(folder: Path) -> set[str]:
    """Files below a directory; compiled Python does not count."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if not path.is_dir() and path.parent.name != "__pycache__"
    }
