# SPDX-License-Identifier: Apache-2.0
"""Results of a study in one file that can be committed: their tables can be made again from it.

    python -m benchmarks.study.pack build/study benchmarks/study/results/h200-shipped.tar.xz

What reads results takes the directory or the file. The same results make the same bytes.
"""

from __future__ import annotations

import argparse
import io
import lzma
import tarfile
from collections.abc import Iterator
from pathlib import Path

from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_file

SUFFIX = ".tar.xz"
_PATTERN = "*.json"
_MEBIBYTE = 2**20


def read_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of every JSON file of a directory or a packed file, by name.

    Raises:
        SpinError: neither of the two, or a damaged one.
    """
    if path.is_dir():
        for file in sorted(path.glob(_PATTERN)):
            yield file.name, file.read_bytes()
        return
    if not (path.is_file() and path.name.endswith(SUFFIX)):
        refuse("results", str(path), f"a directory with results, or one packed as {SUFFIX}")
    try:
        with tarfile.open(path, "r:xz") as packed:
            for member in packed:
                content = packed.extractfile(member)
                if content is not None:
                    yield member.name, content.read()
    except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as error:
        raise SpinError(f"results: cannot read {str(path)!r}: {error}") from error


def pack(folder: Path, target: Path) -> int:
    """Write all results of a directory to one file.

    Returns:
        How many files are in it.

    Raises:
        SpinError: no results there, or a target that cannot be written.
    """
    files = list(read_files(folder)) if folder.is_dir() else []
    if not files:
        refuse("folder", str(folder), "a directory with results")
    if not target.name.endswith(SUFFIX):
        refuse("target", str(target), f"a file name that ends in {SUFFIX}")
    with atomic_file(target, argument="target") as path:
        preset = 9 | lzma.PRESET_EXTREME
        with tarfile.open(path, "w:xz", format=tarfile.USTAR_FORMAT, preset=preset) as packed:
            for name, content in files:
                member = tarfile.TarInfo(name)  # of nobody, and of no time
                member.size = len(content)
                packed.addfile(member, io.BytesIO(content))
    return len(files)


def main() -> None:
    """Pack a directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the study's output directory")
    parser.add_argument("target", type=Path, help=f"file to write, {SUFFIX}")
    arguments = parser.parse_args()
    try:
        count = pack(arguments.folder, arguments.target)
        size = arguments.target.stat().st_size
        print(f"{arguments.target}: {count} files, {size / _MEBIBYTE:.1f} MiB")
    except SpinError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
