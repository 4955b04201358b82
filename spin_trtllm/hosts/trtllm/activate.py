# SPDX-License-Identifier: Apache-2.0
"""Switching SPIN on in a TensorRT-LLM process: from the start-up stub, or by a call.

Whatever goes wrong here leaves the host dense and says so in one line: a server that was up before
SPIN was installed must come up after it.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import site
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from spin_trtllm import __version__
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.hosts.trtllm.rank import rank_of_process
from spin_trtllm.hosts.trtllm.settings import SPIN_VARIABLE, HookRefused, Settings, read_settings
from spin_trtllm.hosts.trtllm.stub import load_stub

HOOKS_MODULE = "spin_trtllm.hosts.trtllm.indexer"
STARTUP_FILE = "spin_trtllm_activate.pth"

_logger = logging.getLogger("spin_trtllm")
_outcomes: dict[str, bool] = {}  # of each indexer module: whether it was hooked


def install(module_name: str) -> bool:
    """Hook an indexer module that has been imported, as `TLLM_SPIN` asks; never raises.

    Args:
        module_name: full name of the module. The first answer for a name stays.

    Returns:
        Whether SPIN is on; the log says why not.
    """
    if module_name not in _outcomes:
        # A release that keeps its old names beside the new ones has two modules for one class.
        is_on = any(_outcomes.values())
        # Noted before anything is done: a hook that imports the host's modules may come back here.
        _outcomes[module_name] = is_on
        _outcomes[module_name] = is_on or _install(module_name)
    return _outcomes[module_name]


def enable(config: SpinConfig | str | os.PathLike[str]) -> Path:
    """Switch SPIN on for TensorRT-LLM, in this process and in the ranks that it starts from now on.

        enable("engine")                # before LLM(...) starts its ranks
        llm = LLM(model=..., **yaml.safe_load(Path("engine/llm_args.yaml").read_text()))

    Args:
        config: a spin.yaml, a directory that holds one, or a configuration. A configuration goes
            to a temporary file, which ranks on other machines cannot read.

    Returns:
        The spin.yaml that `TLLM_SPIN` names now.

    Raises:
        SpinError: a file that cannot be read, or settings in the environment that say nonsense.
    """
    path = _write(config) if isinstance(config, SpinConfig) else _find(Path(config))
    read_settings({**os.environ, SPIN_VARIABLE: str(path)})
    os.environ[SPIN_VARIABLE] = str(path)
    _make_visible()
    if startup_file() is None:
        _logger.warning(
            "SPIN is on in this process only: no %s in site-packages, so ranks in processes of "
            "their own run dense; install spin-trtllm in this environment",
            STARTUP_FILE,
        )
    load_stub().arm()
    return path


def startup_file() -> Path | None:
    """The `.pth` file through which every Python of this environment starts, None if not there."""
    folders = list(site.getsitepackages())
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    paths = (Path(folder, STARTUP_FILE) for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def has_hooks() -> bool:
    """Whether this version of spin-trtllm brings hooks for TensorRT-LLM."""
    return importlib.util.find_spec(HOOKS_MODULE) is not None


def _install(module_name: str) -> bool:
    _make_visible()
    try:
        settings = read_settings()
        if settings is None:
            return False
        hooked = _patch(module_name, settings)
    except HookRefused as refusal:
        _logger.warning("SPIN is off, %s runs dense: %s", _host(), refusal)
        return False
    except Exception as error:  # the host goes on, whatever it was
        _logger.warning("SPIN is off, %s runs dense: %s: %s", _host(), type(error).__name__, error)
        _logger.debug("where it failed", exc_info=True)
        return False
    _logger.info(
        "SPIN %s hooked %s%s in %s: %s; sparsity %s, blocks of %d slots, from %s",
        __version__,
        _host(),
        _rank(),
        module_name.removeprefix("tensorrt_llm._torch."),
        ", ".join(hooked),
        settings.config.sparsity_text,
        settings.config.block_size,
        settings.path,
    )
    return True


def _patch(module_name: str, settings: Settings) -> list[str]:
    """What was hooked, by name."""
    if not has_hooks():
        raise HookRefused(f"spin-trtllm {__version__} has no hooks for TensorRT-LLM")
    hooks = importlib.import_module(HOOKS_MODULE)
    options: dict[str, Any] = {"probe_every": settings.probe_every}
    if settings.capture is not None:
        options["capture"] = settings.capture
    hooked: list[str] = hooks.patch(sys.modules[module_name], settings.config, **options)
    return hooked


def _find(path: Path) -> Path:
    path = path / "spin.yaml" if path.is_dir() else path
    if not path.is_file():
        refuse("config", str(path), "a spin.yaml, or a directory that trtllm-build wrote")
    return path.resolve()


def _write(config: SpinConfig) -> Path:
    """A configuration as a file for the ranks, gone when this process ends."""
    try:
        handle, name = tempfile.mkstemp(prefix="spin.", suffix=".yaml")
        with open(handle, "w", encoding="utf-8") as file:
            file.write(config.to_yaml())
    except OSError as error:
        raise SpinError(f"config: cannot write a temporary file: {error.strerror}") from error
    path = Path(name)
    atexit.register(path.unlink, missing_ok=True)
    return path


def _make_visible() -> None:
    """Let log lines reach standard error where the process configured no logging at all.

    Python shows only warnings then, and a rank that says nothing looks like one that runs dense.
    """
    if _logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[%(asctime)s] [%(name)s] [%(levelname)s] %(message)s"))
    # When the application sets up its own logging after all, that one is enough.
    handler.addFilter(lambda record: not logging.getLogger().handlers)
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)


def _host() -> str:
    version = getattr(sys.modules.get("tensorrt_llm"), "__version__", None)
    if version is None:  # its own import may not be over yet
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version("tensorrt_llm")
    return f"tensorrt_llm {version or 'of unknown version'}"


def _rank() -> str:
    rank = rank_of_process()
    return f", rank {rank}" if rank else ""
