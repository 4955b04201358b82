# SPDX-License-Identifier: Apache-2.0
"""The figures of the model card: held-out language modelling and recall, dense and sparse.

    python -m benchmarks.tiny_model.evaluate --checkpoint build/tiny_model/seed-1/stage-2 \\
        --corpus build/tiny_model/corpus.zip --output build/tiny_model/seed-1/card.json

"Sparse" is the model as it is used, its attention reading the indexer's top-k slots; "dense" reads
every slot. Answers are picked with the true text before them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.tiny_model.corpus import load_corpus
from benchmarks.tiny_model.episodes import Episode, recall_episode
from benchmarks.tiny_model.forward import Forward
from benchmarks.tiny_model.model import BOS
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_file
from spin_trtllm.recall import Draws

EPISODE_SEED = 4_242
DISTANCES_BYTES = (0, 512, 2_048, 4_096)  # lower ends; the last bucket has no upper end
MODES = {"dense": False, "sparse": True}


def held_out_loss(
    forward: Forward, text: NDArray[np.uint8], *, length: int, windows: int
) -> dict[str, Any]:
    """Mean nats a byte over the first windows of held-out text, each read from a fresh start.

    Args:
        text: uint8 `[bytes]`.
        length: bytes of a window.
        windows: at most so many; windows do not overlap.
    """
    count = min(windows, len(text) // length)
    if not count:
        refuse("length", length, f"at most the held-out text, {len(text)} bytes")
    bytes_of = torch.from_numpy(text[: count * length].astype(np.int64)).view(count, length)
    result: dict[str, Any] = {"windows": count}
    for mode, sparse in MODES.items():
        losses = [
            F.cross_entropy(logits, targets, reduction="mean").item()
            for logits, targets in _predictions(forward, bytes_of, sparse=sparse)
        ]
        result[mode] = round(sum(losses) / count, 4)
    return result


def recall_shares(forward: Forward, filler: bytes, *, length: int, episodes: int) -> dict[str, Any]:
    """Share of questions whose answer is picked exactly, overall and by distance."""
    draws = Draws(EPISODE_SEED)
    made = [recall_episode(draws, length, filler) for _ in range(episodes)]
    bytes_of = torch.tensor([list(episode.text) for episode in made])
    result: dict[str, Any] = {"questions": sum(len(episode.asked) for episode in made)}
    for mode, sparse in MODES.items():
        right: dict[str, list[bool]] = {"all": [], **{_bucket(low): [] for low in DISTANCES_BYTES}}
        predictions = _predictions(forward, bytes_of, sparse=sparse)
        for episode, (logits, targets) in zip(made, predictions, strict=True):
            for bucket, exact in _judged(episode, (logits.argmax(-1) == targets).cpu()):
                right["all"].append(exact)
                right[bucket].append(exact)
        result[mode] = {name: round(float(np.mean(was)), 4) for name, was in right.items() if was}
    return result


def _judged(episode: Episode, picked_right: Tensor) -> Iterator[tuple[str, bool]]:
    """Distance bucket of each question, and whether all bytes of its answer were picked right."""
    for question in episode.asked:
        low = max(end for end in DISTANCES_BYTES if end <= question.distance_bytes)
        yield _bucket(low), bool(picked_right[question.place].all())


def _bucket(low_bytes: int) -> str:
    return f"from {low_bytes} bytes"


@torch.no_grad()
def _predictions(
    forward: Forward, bytes_of: Tensor, *, sparse: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits of each byte `[length, vocabulary]` and the byte itself `[length]`, row by row."""
    device = next(forward.model.parameters()).device
    for targets in bytes_of.to(device):
        tokens = targets.roll(1)
        tokens[0] = BOS
        yield forward(tokens[None], sparse=sparse).logits[0], targets


def evaluate(
    checkpoint: Path, corpus: Path, *, length: int, windows: int, episodes: int
) -> dict[str, Any]:
    """All figures of a checkpoint, computed on a GPU in bfloat16 if there is one.

    Raises:
        SpinError: no corpus, or a length that does not suit it or the model.
    """
    held_out = load_corpus(corpus).held_out
    on_gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = model.eval().to("cuda" if on_gpu else "cpu")
    forward = Forward(model, torch.bfloat16 if on_gpu else torch.float32)
    return {
        "checkpoint": str(checkpoint),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "length_bytes": length,
        "held_out_nats_per_byte": held_out_loss(forward, held_out, length=length, windows=windows),
        "recall": recall_shares(forward, held_out.tobytes(), length=length, episodes=episodes),
    }


def main() -> None:
    """Evaluate a checkpoint and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="built by .corpus")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--length", type=int, default=32_768, help="bytes of a sequence")
    parser.add_argument("--windows", type=int, default=67, help="of held-out text, at most")
    parser.add_argument("--episodes", type=int, default=64)
    arguments = parser.parse_args()
    try:
        figures = evaluate(
            arguments.checkpoint,
            arguments.corpus,
            length=arguments.length,
            windows=arguments.windows,
            episodes=arguments.episodes,
        )
        with atomic_file(arguments.output) as path:
            path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except SpinError as error:
        parser.exit(2, f"{error}\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
