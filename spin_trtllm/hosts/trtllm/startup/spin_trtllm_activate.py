# SPDX-License-Identifier: Apache-2.0
"""Start-up stub: where `TLLM_SPIN` names a spin.yaml, SPIN hooks TensorRT-LLM's indexer.

`spin_trtllm_activate.pth` lies beside the installed copy of this file. Every Python that starts in
that environment reads it: servers, ranks spawned by MPI, Ray workers, Triton. Without `TLLM_SPIN`
that is one look into the environment, and this module is not even imported. With it, a finder
waits for the indexer's module; torch and spin_trtllm are imported only when the host imports that.

It stands alone at top level because importing anything inside a package imports the package first.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # `typing` costs more than all of this file; type checkers know the name
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

INDEXER_MODULES = (
    "tensorrt_llm._torch.attention.backends.sparse.dsa.indexer",
    "tensorrt_llm._torch.attention_backend.sparse.dsa.indexer",  # before 1.3.0rc27 or so
)

_waiting: dict[str, list[Callable[[str], object]]] = {}


def arm() -> None:
    """Have SPIN installed as soon as the indexer has been imported, in either of its places."""
    for name in INDEXER_MODULES:
        when_imported(name, _install)


def when_imported(name: str, callback: Callable[[str], object]) -> None:
    """Call back once with a module's name: right after its import, or now if that is over.

    A callback that fails is logged, and the import goes on as if nothing had been there.

    Args:
        name: full name of the module. Whoever needs a module that an import in progress has not
            reached yet waits for it here, too; importing it instead could close a circle.
        callback: asked for twice before it ran, it still runs once.
    """
    if _is_imported(name):
        _run(callback, name)
        return
    callbacks = _waiting.setdefault(name, [])
    if callback not in callbacks:
        callbacks.append(callback)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder:
    """Finds what the other finders find, and wraps the loader of a module that is waited for."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        for finder in list(sys.meta_path):
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    wrapped: Any = _Loader(spec.loader)
                    spec.loader = wrapped
                return spec
        return None


class _Loader:
    """A module's own loader, followed by the callbacks that wait for the module."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        # From here on the module looks as if it had been found without us.
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for callback in _waiting.pop(module.__name__, ()):
            _run(callback, module.__name__)


_FINDER: Any = _Finder()


def _is_imported(name: str) -> bool:
    module = sys.modules.get(name)
    # `_initializing` is how the import system itself tells a module that is still being run.
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def _install(name: str) -> None:
    from spin_trtllm.hosts.trtllm import install

    install(name)


def _run(callback: Callable[[str], object], name: str) -> None:
    try:
        callback(name)
    except Exception as error:
        import logging

        logger = logging.getLogger("spin_trtllm")
        logger.warning("SPIN is off, %s runs dense: %s: %s", name, type(error).__name__, error)
        logger.debug("where it failed", exc_info=True)
