# SPDX-License-Identifier: Apache-2.0
"""The start-up stub as a module, wherever it is.

An installation puts `startup/` at the top of site-packages, where Python reads `.pth` files and
finds the stub without importing this package. A clone on `PYTHONPATH` has it here alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

NAME = "spin_trtllm_activate"


def load_stub() -> ModuleType:
    """The one module of that name in this process, which keeps what is armed."""
    try:
        return importlib.import_module(NAME)
    except ModuleNotFoundError:
        path = Path(__file__).parent / "startup" / f"{NAME}.py"
        spec = importlib.util.spec_from_file_location(NAME, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
