# SPDX-License-Identifier: Apache-2.0
"""Writes down what the results of a directory were made from, having checked that it is so.

    python -m benchmarks.study.about build/study --corpus build/tiny_model/corpus.zip \\
        --checkpoint benchmarks/tiny_model/checkpoint

Each result holds one digest of weights, text, SPIN's preset and versions. The checkpoint and the
text that are given must have it; their names and own digests then go to `about.json` beside the
results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.study.questions import ABOUT, load_results
from benchmarks.study.study import Study
from benchmarks.tiny_model.corpus import load_corpus
from spin_trtllm.demo import license_text
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_file

_FILES = ("model.safetensors", "config.json")


def digests_of(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of the weights and the configuration, by file name.

    Raises:
        SpinError: no checkpoint.
    """
    try:
        return {n: hashlib.sha256((checkpoint / n).read_bytes()).hexdigest() for n in _FILES}
    except OSError as error:
        raise SpinError(f"checkpoint: cannot read {str(checkpoint)!r}: {error}") from error


def describe(folder: Path, checkpoint: Path, corpus: Path | None) -> dict[str, Any]:
    """What `about.json` holds.

    Args:
        folder: directory with results, or a packed file.
        checkpoint: the model's directory.
        corpus: whose held-out text was the filler; None: the clone's Apache License.

    Raises:
        SpinError: the results were made from something else, or by another version.
    """
    results = load_results(folder)
    digests = digests_of(checkpoint)
    text = license_text() if corpus is None else load_corpus(corpus).held_out.tobytes()
    source = Study(torch.nn.Module(), " ".join(digests.values()), text, folder).source
    if source != next(iter(results.values()))[0]["source"]:
        refuse("checkpoint, corpus", f"{checkpoint}, {corpus}", "those that the results are of")
    return {
        "checkpoint": checkpoint.as_posix(),
        "sha256": digests,
        "text": "the Apache License" if corpus is None else f"held-out text of {corpus.name}",
        "text_bytes": len(text),
        "text_sha256": hashlib.sha256(text).hexdigest(),
        "source": source,
    }


def main() -> None:
    """Check and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the study's output directory")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, help="held-out text; default: the Apache License")
    arguments = parser.parse_args()
    try:
        found = describe(arguments.folder, arguments.checkpoint, arguments.corpus)
        with atomic_file(arguments.folder / ABOUT) as path:
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(arguments.folder / ABOUT)
    except SpinError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
