# SPDX-License-Identifier: Apache-2.0
"""The text that the tiny model is trained on: English manuals from four Debian packages.

    apt-get download anarchism linux-doc-6.1 postgresql-doc-15 python3.11-doc
    python -m benchmarks.tiny_model.corpus --packages . --output build/tiny_model/corpus.zip

One zip file holds `train.txt`, `held_out.txt` and `about.json` (versions, sizes, digests). Whole
documents are held out, about 4 % of each package. The same packages are always split alike, and as
for the shipped checkpoint: text that is held out here was never trained on there.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import os
import random
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_file

SPLIT_SEED = 7
HELD_OUT_SHARE = 0.04
HELD_OUT_DOCUMENT_BYTES = 120_000  # no single document makes up most of the held-out text
SHORTEST_DOCUMENT = 1_500
BETWEEN_DOCUMENTS = b"\n\n\n"

_TRAIN, _HELD_OUT, _ABOUT = "train.txt", "held_out.txt", "about.json"
_DOCUMENT_NAME = re.compile(r"\.(html?|rst|txt)(\.gz)?$")
_OTHER_FOLDERS = re.compile(r"/(translations|_static|images|output)(/|$)")


@dataclass(frozen=True)
class Source:
    """One Debian package, and which of its files to read.

    Attributes:
        html: whether its HTML files are read; some packages carry the same text as plain sources.
        skip: folders left out, as a pattern of their path inside the package.
        limit_bytes: at most about this much, most prose-like documents first; None: everything.
    """

    package: str
    html: bool = True
    skip: str | None = None
    limit_bytes: int | None = None


SOURCES = (
    Source("anarchism"),
    Source("linux-doc-6.1", skip="/html", limit_bytes=30_000_000),
    Source("postgresql-doc-15"),
    Source("python3.11-doc", html=False),
)


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text, uint8 `[bytes]` each."""

    train: NDArray[np.uint8]
    held_out: NDArray[np.uint8]


def load_corpus(path: Path) -> Corpus:
    """Read a file that `main` wrote.

    Raises:
        SpinError: no such file, or not a corpus.
    """
    try:
        with zipfile.ZipFile(path) as file:
            train, held_out = file.read(_TRAIN), file.read(_HELD_OUT)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise SpinError(f"corpus: cannot read {str(path)!r}: {error}") from error
    return Corpus(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8))


def save_corpus(path: Path, train: bytes, held_out: bytes, about: dict[str, Any]) -> None:
    """Write a corpus file; `about` is completed with sizes and digests of both texts."""
    texts = {_TRAIN: train, _HELD_OUT: held_out}
    digests = {
        name: {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        for name, text in texts.items()
    }
    with (
        atomic_file(path) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_LZMA) as file,
    ):
        for name, text in texts.items():
            file.writestr(name, text)
        file.writestr(_ABOUT, json.dumps(about | {"texts": digests}, indent=1), zipfile.ZIP_STORED)


def split(documents: dict[Source, list[bytes]]) -> tuple[bytes, bytes]:
    """Shuffle documents and hold some of each source out.

    Returns:
        Training text and held-out text; no document is in both.
    """
    order = random.Random(SPLIT_SEED)
    train: list[bytes] = []
    held_out: list[bytes] = []
    for source, found in documents.items():
        chosen = found.copy()
        order.shuffle(chosen)
        if source.limit_bytes is not None:
            chosen = _most_prose(chosen, source.limit_bytes)
            order.shuffle(chosen)
        wanted = HELD_OUT_SHARE * sum(map(len, chosen))
        held = 0
        for document in chosen:
            if held < wanted and len(document) < wanted:
                held_out.append(document[:HELD_OUT_DOCUMENT_BYTES])
                held += len(held_out[-1])
            else:
                train.append(document)
    order.shuffle(train)
    order.shuffle(held_out)
    return BETWEEN_DOCUMENTS.join(train), BETWEEN_DOCUMENTS.join(held_out)


def read_documents(folder: Path, source: Source) -> list[bytes]:
    """The English documents of an unpacked package, each once, in the order of their paths."""
    documents: dict[bytes, bytes] = {}
    for path in _document_files(folder, source):
        text = _plain_text(path)
        if text is not None and len(text) >= SHORTEST_DOCUMENT and _is_english(text.encode()):
            document = text.encode()
            # Copies differ in their heads at most, so the text after it names the document.
            documents.setdefault(hashlib.sha256(document[500:1500]).digest(), document)
    return list(documents.values())


def _document_files(folder: Path, source: Source) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        inside = root[len(str(folder)) :]
        if _OTHER_FOLDERS.search(inside) or (source.skip and source.skip in inside):
            continue
        for name in sorted(names):
            path = Path(root, name)
            if _DOCUMENT_NAME.search(name) and not path.is_symlink() and path.is_file():
                if _is_html(path) and not source.html:
                    continue
                yield path


def _is_html(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith((".htm", ".html"))


def _plain_text(path: Path) -> str | None:
    """Text of a file without markup and runs of blanks; None if it is not UTF-8."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if _is_html(path):
        text = re.sub(r"(?m)^ +", "", re.sub(r" +", " ", _without_tags(text)))
    text = text.replace("\r", "").replace("\t", "    ")
    text = re.sub(r" +\n", "\n", text)
    return re.sub(r"\n\s*\n+", "\n\n", text).strip()


def _without_tags(page: str) -> str:
    """Text of an HTML page: block elements become line ends, navigation goes."""
    for pattern, replacement in (
        (r"(?is)<(script|style|head|nav)\b.*?</\1>", " "),
        (r'(?is)<div[^>]*class="nav(header|footer)".*?</div>', " "),
        (r"(?i)<(p|div|li|tr|h\d|br|pre|dt|dd)\b[^>]*>", "\n"),
        (r"(?s)<[^>]+>", " "),
    ):
        page = re.sub(pattern, replacement, page)
    return html.unescape(page).replace("\xa0", " ")


def _is_english(document: bytes) -> bool:
    """Mostly ASCII letters and spaces: neither another language nor a table of numbers."""
    start = np.frombuffer(document[:20_000], np.uint8)
    lower = start | 32
    letters = ((lower >= ord("a")) & (lower <= ord("z"))) | (start == ord(" "))
    return bool((start > 127).mean() <= 0.01 and letters.mean() >= 0.55)


def _most_prose(documents: list[bytes], limit_bytes: int) -> list[bytes]:
    """The first documents by share of small letters and spaces, until the limit is passed."""

    def prose_share(document: bytes) -> float:
        start = np.frombuffer(document[:8_000], np.uint8)
        small = ((start >= ord("a")) & (start <= ord("z"))) | (start == ord(" "))
        return float(small.mean())

    kept: list[bytes] = []
    size = 0
    for document in sorted(documents, key=prose_share, reverse=True):
        if size > limit_bytes:
            break
        kept.append(document)
        size += len(document)
    return kept


def read_packages(folder: Path) -> tuple[dict[Source, list[bytes]], dict[str, str]]:
    """Unpack each source's `.deb` file and read it.

    Returns:
        Documents of each source, and the version of each package.

    Raises:
        SpinError: not exactly one `.deb` file of a package, or no `dpkg-deb`.
    """
    documents: dict[Source, list[bytes]] = {}
    versions: dict[str, str] = {}
    for source in SOURCES:
        files = sorted(folder.glob(f"{source.package}_*.deb"))
        if len(files) != 1:
            refuse("packages", str(folder), f"a folder with one {source.package}_*.deb")
        with tempfile.TemporaryDirectory() as unpacked:
            try:
                subprocess.run(["dpkg-deb", "-x", files[0], unpacked], check=True)
                field = subprocess.check_output(["dpkg-deb", "-f", files[0], "Version"], text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise SpinError(f"packages: cannot unpack {files[0].name!r}: {error}") from error
            documents[source] = read_documents(Path(unpacked), source)
        versions[source.package] = field.strip()
    return documents, versions


def main() -> None:
    """Build the corpus file from the packages' `.deb` files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packages", type=Path, required=True, help="folder with the .deb files")
    parser.add_argument("--output", type=Path, required=True, help="the zip file to write")
    arguments = parser.parse_args()
    try:
        documents, versions = read_packages(arguments.packages)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        save_corpus(arguments.output, *split(documents), {"packages": versions})
    except SpinError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
