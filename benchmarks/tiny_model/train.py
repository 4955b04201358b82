# SPDX-License-Identifier: Apache-2.0
"""Train the tiny model, one stage a command, in as many calls as it takes.

    python -m benchmarks.tiny_model.train --stage 1 --seed 1 --seconds 520 \\
        --corpus build/tiny_model/corpus.zip --output build/tiny_model/seed-1

A call that runs out of `--seconds` saves its state and exits with code 75; the same command then
goes on from there. Of a finished stage OUTPUT/stage-N holds the checkpoint and `log.jsonl`. A later
stage starts from the one before, or from any checkpoint given as `--start`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader

from benchmarks.tiny_model.batches import Batch, Batches
from benchmarks.tiny_model.corpus import Corpus, load_corpus
from benchmarks.tiny_model.model import configuration, load_weights, new_model, save_checkpoint
from benchmarks.tiny_model.stages import STAGES, Stage
from benchmarks.tiny_model.trainer import Measured, Trainer
from spin_trtllm.errors import SpinError

STATE = "state.pt"
LOG = "log.jsonl"
AGAIN = os.EX_TEMPFAIL  # exit code of a call that ran out of time
_LOG_SECONDS = 10.0
_SAVE_SECONDS = 120.0


@dataclass(frozen=True)
class Places:
    """Files of one stage under the output directory."""

    output: Path
    stage: int

    @property
    def folder(self) -> Path:
        """Where the checkpoint, the log and, until the stage is done, the state are."""
        return self.output / f"stage-{self.stage}"

    @property
    def before(self) -> Path | None:
        """Folder of the stage before; None for the first."""
        return self.output / f"stage-{self.stage - 1}" if self.stage > 1 else None

    @property
    def done(self) -> bool:
        """Whether the stage has its checkpoint, which is written last."""
        return (self.folder / "tokenizer.json").exists()

    @property
    def state(self) -> Path:
        """What a call that ran out of time leaves for the next."""
        return self.folder / STATE


class Log:
    """One JSON object a line, to a file and to standard output."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, **figures: Any) -> None:
        """Add a line."""
        line = json.dumps(figures)
        print(line, flush=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def make_trainer(
    model: transformers.DeepseekV4ForCausalLM,
    stage: Stage,
    seed: int,
    corpus: Corpus,
    places: Places,
    start: Path | None = None,
) -> Trainer:
    """A trainer at the place where the last call stopped, or at the start of the stage.

    Args:
        corpus: what it will be trained on; a state that was trained on another is refused.
        start: checkpoint to start from; None: that of the stage before, if there is one.

    Raises:
        SpinError: a later stage without the checkpoint of the one before, or a state that was
            trained from other weights, on another text or of another model.
    """
    start = start or places.before
    if start is not None:  # also to go on: the state shall be of these
        load_weights(model, start)
    trainer = Trainer(model, stage, seed, _inputs(model, corpus))
    if places.state.exists():
        trainer.load_state(places.state)
    return trainer


def _inputs(model: transformers.DeepseekV4ForCausalLM, corpus: Corpus) -> Mapping[str, str]:
    """Digests of what decides a run beside stage and seed, taken before its first step."""
    weights = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        weights.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    settings = model.config.to_diff_dict()
    settings.pop("transformers_version", None)
    written = json.dumps(settings, sort_keys=True, default=str)
    return {
        "first weights": weights.hexdigest(),
        "model settings": hashlib.sha256(written.encode()).hexdigest(),
        "training text": hashlib.sha256(corpus.train.tobytes()).hexdigest(),
    }


def train(
    trainer: Trainer, corpus: Corpus, places: Places, *, deadline: float, workers: int
) -> bool:
    """Take steps until the stage is done or the time is up.

    Args:
        corpus: whose training text is read; the held-out text is not touched.
        deadline: on the clock of `time.monotonic`.
        workers: processes that make batches ahead, in milliseconds each; 0: this one does.

    Returns:
        Whether the stage is done. If so its checkpoint is written, otherwise its state.
    """
    places.folder.mkdir(parents=True, exist_ok=True)
    log = Log(places.folder / LOG)
    log.write(**_environment(trainer))
    device = next(trainer.model.parameters()).device
    figures = _Figures()
    saved = time.monotonic()
    for batch in _batches_from(trainer, corpus, workers):
        now = time.monotonic()
        if now >= deadline:
            break
        if now - saved >= _SAVE_SECONDS:
            trainer.save_state(places.state)
            saved = now
        figures.add(trainer.step(batch.to(device)), batch.targets.numel())
        if figures.seconds >= _LOG_SECONDS or trainer.next_step in (1, trainer.stage.steps):
            log.write(**figures.report(trainer))
            figures = _Figures()
    if trainer.next_step < trainer.stage.steps:
        trainer.save_state(places.state)
        return False
    save_checkpoint(places.folder, trainer.model)
    places.state.unlink(missing_ok=True)
    return True


def _batches_from(trainer: Trainer, corpus: Corpus, workers: int) -> Iterator[Batch]:
    batches = Batches(corpus.train, trainer.stage, trainer.seed)
    loader = DataLoader(
        batches,
        sampler=range(trainer.next_step, trainer.stage.steps),
        batch_size=None,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
    )
    return iter(loader)


class _Figures:
    """Means over the steps since the last line of the log."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._measured: list[Measured] = []
        self._bytes = 0

    @property
    def seconds(self) -> float:
        """Since the last line."""
        return time.monotonic() - self._started

    def add(self, measured: Measured, trained_bytes: int) -> None:
        """Count one step."""
        self._measured.append(measured)
        self._bytes += trained_bytes

    def report(self, trainer: Trainer) -> dict[str, Any]:
        """A line of the log."""
        last = self._measured[-1]
        rate, indexer_rate = trainer.stage.learning_rates_at(trainer.next_step - 1)
        same_phase = [
            m for m in self._measured if len(m.indexer_losses) == len(last.indexer_losses)
        ]
        figures = {
            "step": trainer.next_step,
            "of": trainer.stage.steps,
            "length": trainer.stage.phase_at(trainer.next_step - 1).length,
            "text_loss": _mean([m.text_loss for m in self._measured]),
            "recall": _mean([m.recall for m in self._measured]),
            "indexer_losses": [
                _mean(list(layer))
                for layer in zip(*(m.indexer_losses for m in same_phase), strict=True)
            ],
            "gradient_norm": _mean([last.gradient_norm]),
            "learning_rates": [float(f"{rate:.2e}"), float(f"{indexer_rate:.2e}")],
            "bytes_per_second": round(self._bytes / self.seconds),
        }
        if torch.cuda.is_available():
            figures["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        return figures


def _mean(values: list[torch.Tensor]) -> float | None:
    """Mean of the numbers among the values; None (JSON has no NaN) if there is none."""
    mean = torch.stack(values).nanmean().item() if values else math.nan
    return None if math.isnan(mean) else round(mean, 4)


def _environment(trainer: Trainer) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    return {
        "stage": trainer.stage.number,
        "seed": trainer.seed,
        "from_step": trainer.next_step,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    """Run one call of a stage."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, choices=sorted(STAGES), required=True)
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--corpus", type=Path, required=True, help="built by .corpus")
    parser.add_argument("--output", type=Path, required=True, help="folder of all stages")
    parser.add_argument("--start", type=Path, help="checkpoint; default: the stage before's")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop and save after this")
    parser.add_argument("--workers", type=int, default=2, help="that make batches ahead")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    places = Places(arguments.output, arguments.stage)
    if places.done:
        print(f"{places.folder}: done before")
        return
    try:
        corpus = load_corpus(arguments.corpus)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = new_model(configuration(), arguments.seed).to(device)
        stage = STAGES[arguments.stage]
        trainer = make_trainer(model, stage, arguments.seed, corpus, places, arguments.start)
        deadline = started + arguments.seconds
        done = train(trainer, corpus, places, deadline=deadline, workers=arguments.workers)
    except SpinError as error:
        parser.exit(2, f"{error}\n")
    if not done:
        parser.exit(AGAIN, "out of time, saved: the same command goes on from here\n")
    print(f"{places.folder}: done")


if __name__ == "__main__":
    main()
