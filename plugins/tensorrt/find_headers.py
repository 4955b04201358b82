#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print the folder of TensorRT's headers, or nothing and exit with 1.

Looked for in `TENSORRT_INCLUDE_DIR`, where systems keep them, and in the wheel of
requirements/plugin.txt, which carries them under their own licence (Apache-2.0). Headers are all it
takes: the plugin links none of TensorRT's libraries.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

HEADER = "NvInferRuntime.h"
WHEEL = "kernel-lens"


def places() -> Iterator[Path]:
    chosen = os.environ.get("TENSORRT_INCLUDE_DIR")
    if chosen:
        yield Path(chosen)
        return
    yield from (Path("/usr/include/x86_64-linux-gnu"), Path("/usr/include/aarch64-linux-gnu"))
    yield from (Path("/usr/include"), Path("/usr/local/tensorrt/include"))
    # `make` installs the wheel beside the environment's packages, others may among them.
    paths = [*sys.path, str(Path(sys.prefix) / "tensorrt-headers")]
    for wheel in metadata.distributions(name=WHEEL, path=paths):
        for file in wheel.files or []:
            if file.name == HEADER:
                yield Path(str(wheel.locate_file(file))).parent


def find_headers() -> Path | None:
    """The folder, or None."""
    return next((place for place in places() if (place / HEADER).is_file()), None)


if __name__ == "__main__":
    found = find_headers()
    if found is None:
        sys.exit(1)
    print(found)
