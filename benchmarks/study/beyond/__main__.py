# SPDX-License-Identifier: Apache-2.0
"""Run the sweep: capture what is missing, replay what is missing, write JSON and a table.

    python -m benchmarks.study.beyond --output build/beyond --corpus build/tiny_model/corpus.zip

An interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.study.beyond.arms import ARMS, Arm
from benchmarks.study.beyond.capture import TASKS, capture, trace_path
from benchmarks.study.beyond.findings import ByTarget, find, layer_targets
from benchmarks.study.beyond.measure import Document, Figures, load, measure, save
from benchmarks.study.beyond.table import write_table
from benchmarks.tiny_model.corpus import load_corpus
from spin_trtllm import __version__, tiny
from spin_trtllm.demo import environment
from spin_trtllm.errors import SpinError
from spin_trtllm.files import atomic_file
from spin_trtllm.hosts.transformers import load_model
from spin_trtllm.replay.trace import Trace

VERSION = 1  # of what figures mean: raise it when they change
DOCUMENTS = 4  # of each task
CONTEXT_BYTES = 8_192
KEY_BYTES = 132  # of DeepSeek-V4's fp8 key; the tiny model's has 68


@dataclass(frozen=True)
class Sweep:
    """All replays of an output directory.

    Attributes:
        documents: task and number of each.
    """

    output: Path
    documents: Sequence[tuple[str, int]]
    key_bytes: int

    @property
    def traces(self) -> Path:
        """Folder of the traces."""
        return self.output / "traces"

    def figures(self, name: str, truths: Sequence[Document], known: ByTarget) -> ByTarget:
        """An arm's figures by target, measured now unless they are there.

        Args:
            truths: of the documents; known: figures of the arm that it is calibrated on, if any.
        """
        return [self._at(name, target, truths, known) for target in ARMS[name].targets]

    def _at(
        self, name: str, target: float, truths: Sequence[Document], known: ByTarget
    ) -> list[Figures]:
        arm, path = ARMS[name], self.path(name, target)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            numbers = range(len(truths))
            save(path, [self._measure(arm, n, truths, known, target) for n in numbers])
        return load(path, len(truths))

    def _measure(
        self,
        arm: Arm,
        number: int,
        truths: Sequence[Document],
        known: ByTarget,
        target: float,
    ) -> Figures:
        trace = Trace(trace_path(self.traces, *self.documents[number], arm.view))
        config = arm.config(target)
        if arm.by_layer is not None:  # from the documents of the other parity
            others = range((number + 1) % 2, len(truths), 2)
            targets = layer_targets(known, others, target, ARMS[arm.by_layer].targets)
            by_layer = tuple(zip(trace.layers, targets, strict=True))
            config = replace(config, layer_sparsity=by_layer)
        policy = arm.make(config, trace)
        return measure(policy, trace, truths[number], arm, self.key_bytes)

    def path(self, name: str, target: float) -> Path:
        """Where the figures of an arm at a target are, by all that decides them."""
        arm = ARMS[name]
        facts = [VERSION, __version__, name, asdict(arm.config(target)), arm.bytes_a_slot]
        facts += [arm.by_layer and (arm.by_layer, ARMS[arm.by_layer].targets), self.key_bytes]
        for document in self.documents:
            path = trace_path(self.traces, *document, arm.view)
            facts.append((path.name, path.stat().st_size, path.stat().st_mtime_ns))
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return self.output / "figures" / f"{digest[:32]}.npz"


def run(sweep: Sweep) -> dict:
    """Every arm's figures."""
    paths = [trace_path(sweep.traces, *document) for document in sweep.documents]
    truths = [Document(Trace(path)) for path in paths]
    figures: dict[str, ByTarget] = {}
    for number, name in enumerate(ARMS, 1):
        started = time.perf_counter()
        figures[name] = sweep.figures(name, truths, figures.get(ARMS[name].by_layer or "", []))
        seconds = time.perf_counter() - started
        print(f"[{number}/{len(ARMS)}] {name}: {seconds:.0f} s", flush=True)
    return find(figures, [task for task, _ in sweep.documents])


def main() -> None:
    """Capture, replay, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory, made if need be")
    parser.add_argument("--corpus", type=Path, required=True, help="whose held-out text is read")
    parser.add_argument("--checkpoint", type=Path, help="default: the tiny model's")
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="of each task")
    parser.add_argument("--context-bytes", type=int, default=CONTEXT_BYTES)
    parser.add_argument("--key-bytes", type=int, default=KEY_BYTES, help="of an indexer key")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a decode step is many small operations
    documents = [(task, n) for task in TASKS for n in range(arguments.documents)]
    sweep = Sweep(arguments.output, documents, arguments.key_bytes)
    try:
        checkpoint = arguments.checkpoint or tiny.checkpoint_path()
        model, _ = load_model(checkpoint, device="cpu")
        filler = load_corpus(arguments.corpus).held_out.tobytes()
        sweep.traces.mkdir(parents=True, exist_ok=True)
        for task in TASKS:
            for path in capture(
                model,
                sweep.traces,
                task=task,
                documents=arguments.documents,
                context_bytes=arguments.context_bytes,
                filler=filler,
            ):
                print(path, flush=True)
        result = {
            "documents": arguments.documents,
            "context_bytes": arguments.context_bytes,
            "key_bytes": arguments.key_bytes,
            "found": run(sweep),
            "environment": environment(model),
        }
        for name, content in (
            ("beyond.json", json.dumps(result) + "\n"),
            ("beyond.md", write_table(result)),
        ):
            with atomic_file(arguments.output / name) as path:
                path.write_text(content, encoding="utf-8")
            print(arguments.output / name)
    except SpinError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
