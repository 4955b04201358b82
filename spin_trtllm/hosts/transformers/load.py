# SPDX-License-Identifier: Apache-2.0
"""Loading a local DeepSeek-V4 checkpoint and its tokenizer; `transformers` is imported here only.

Everything that can be wrong with a directory is found from its JSON files, before the import,
which takes seconds.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spin_trtllm.errors import SpinError, refuse

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MODEL_TYPE = "deepseek_v4"
CSA = "compressed_sparse_attention"  # the only layers with an indexer
OLDEST_TRANSFORMERS = (5, 12)


def load_model(
    checkpoint_dir: str | os.PathLike[str], *, device: str = "auto"
) -> tuple[torch.nn.Module, Tokenizer]:
    """Load a Hugging Face `deepseek_v4` checkpoint directory for inference, without network.

    The weights become float32 whatever the checkpoint holds: the indexer computes its scores in
    fp32, and with lower precision around it a comparison of SPIN with dense would mostly show
    rounding.

    Args:
        checkpoint_dir: directory with `config.json`, `tokenizer.json` and safetensors weights.
        device: a torch device, or `auto`: the first CUDA device where there is one, else the CPU.

    Returns:
        The model in eval mode, and the tokenizer of `tokenizer.json`.

    Raises:
        SpinError: no such directory, not a DeepSeek-V4 with an indexer, an unreadable file, or
            `transformers` missing or too old.
    """
    folder = Path(checkpoint_dir)
    _check_config(folder)
    tokenizer = _load_tokenizer(folder)
    require_transformers()
    from transformers import AutoModelForCausalLM

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with _no_progress_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
        model, report = loaded
        model.to(device).eval()
    except Exception as error:  # whatever the parsers of configuration and weights raise
        raise SpinError(f"checkpoint: cannot load {str(folder)!r}: {error}") from error
    if report["missing_keys"]:  # the library would make them up
        refuse("checkpoint: missing tensors", sorted(report["missing_keys"]), "none")
    return model, tokenizer


def encode_prompt(tokenizer: Tokenizer, text: str, model: torch.nn.Module) -> list[int]:
    """Token ids of a prompt, led by the model's BOS where the tokenizer does not add it itself.

    Raises:
        SpinError: an empty prompt.
    """
    if not text:
        refuse("prompt", text, "at least one character")
    ids: list[int] = tokenizer.encode(text).ids
    bos = config_of(model).bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def config_of(model: torch.nn.Module) -> Any:
    """The host's configuration object of a model."""
    return model.config


def require_transformers() -> None:
    """Refuse a `transformers` that is missing or older than DeepSeek-V4's scorer module.

    Raises:
        SpinError: with the command that installs it.
    """
    wanted = ".".join(map(str, OLDEST_TRANSFORMERS))
    allowed = f">={wanted}: pip install 'spin-trtllm[transformers]'"
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        refuse("transformers", "not installed", allowed)
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_TRANSFORMERS:
        refuse("transformers", version, allowed)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """A few local files need no progress bar, and a command's output has no place for one."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check_config(folder: Path) -> None:
    if not folder.is_dir():
        refuse("checkpoint", str(folder), "a directory")
    path = folder / "config.json"
    if not path.is_file():
        refuse("checkpoint", str(folder), "a directory with a config.json")
    config = _read_json(path)
    model_type = config.get("model_type")
    if model_type != MODEL_TYPE:
        refuse("checkpoint: model_type", model_type, MODEL_TYPE)
    # A configuration without the list has the library's own, which alternates HCA and CSA.
    layer_types = config.get("layer_types")
    if layer_types is not None and CSA not in layer_types:
        refuse("checkpoint: layer_types", sorted(set(layer_types)), f"at least one {CSA}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpinError(f"checkpoint: cannot read {str(path)!r}: {error}") from error
    if not isinstance(loaded, dict):
        refuse(f"checkpoint: {path.name}", type(loaded).__name__, "a JSON object")
    return loaded


def _load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        refuse("checkpoint", str(folder), "a directory with a tokenizer.json")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        refuse("tokenizers", "not installed", "pip install 'spin-trtllm[transformers]'")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise SpinError(f"checkpoint: cannot read {str(path)!r}: {error}") from error
