# SPDX-License-Identifier: Apache-2.0
"""Claims about answers, which traces do not have: two ways to skip on the same documents.

    python -m benchmarks.study.pairs --output build/orderings/shipped/answers.json \\
        --corpus build/tiny_model/corpus.zip

`benchmarks.study.orderings` reads the result.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.study.cells import Question
from benchmarks.study.decoding import Batch, answer, read_documents
from benchmarks.study.documents import documents_of
from benchmarks.study.methods.spin import SpinRun
from benchmarks.tiny_model.corpus import load_corpus
from spin_trtllm import tiny
from spin_trtllm.config import SpinConfig, preset
from spin_trtllm.demo import environment
from spin_trtllm.errors import SpinError
from spin_trtllm.files import atomic_file
from spin_trtllm.hosts.transformers import load_model

CONTEXT_BYTES, QUERIES = 8_192, 4
DOCUMENTS = 16
SIDE_BY_SIDE = 8  # documents; each takes a third of a GiB

_USUAL = replace(preset("tiny-deepseek-v4"), state_dtype="bf16")


@dataclass(frozen=True)
class Pair:
    """A claim: `now` answers at least as well as `before`.

    Attributes:
        claim: one line.
    """

    claim: str
    before: SpinConfig
    now: SpinConfig


def _explored(sparsity: float) -> Pair:
    explored = _USUAL.at_sparsity(sparsity)
    return Pair(
        f"random exploration answers as many as none, at {sparsity:.0%} sparsity",
        replace(explored, exploration_policy="none"),
        explored,
    )


PAIRS = (
    _explored(0.4),
    _explored(0.5),
    Pair(
        "blocks of 16, half ranked by the query, at 74% answer as many as blocks of 64 at 40%",
        replace(_USUAL.at_sparsity(0.4), block_size=64),
        replace(_USUAL.at_sparsity(0.74), query_share=0.5),
    ),
)


def right_answers(
    model: torch.nn.Module, batches: Iterable[Batch], configs: Sequence[SpinConfig]
) -> dict[SpinConfig, list[list[bool]]]:
    """Whether each answer is exact, the true text fed: of every way to skip, by document.

    Args:
        batches: read one at a time, since a cache is large.
    """
    found: dict[SpinConfig, list[list[bool]]] = {config: [] for config in configs}
    for number, batch in enumerate(batches, 1):
        for config, right in found.items():
            ids = range(len(right), len(right) + len(batch.documents))
            with SpinRun(model, config, ids) as run:
                right += [[one.right for one in of] for of in answer(model, batch, run)]
        print(f"{number}: {[_right(right) for right in found.values()]}", flush=True)
    return found


def answer_pairs(model: torch.nn.Module, question: Question, filler: bytes) -> dict[str, Any]:
    """Answers of both sides of each of `PAIRS`, and what was asked.

    Args:
        question: without drafts; filler: text around the facts.
    """
    documents = list(
        documents_of(
            question.task,
            documents=question.documents,
            context_bytes=question.context_bytes,
            queries=question.queries,
            filler=filler,
        )
    )
    batches = (
        read_documents(model, documents[start : start + SIDE_BY_SIDE])
        for start in range(0, len(documents), SIDE_BY_SIDE)
    )
    configs = dict.fromkeys(config for pair in PAIRS for config in (pair.before, pair.now))
    found = right_answers(model, batches, list(configs))
    return {
        "question": asdict(question),
        "pairs": [
            {"claim": pair.claim, "before": found[pair.before], "now": found[pair.now]}
            for pair in PAIRS
        ],
        "environment": environment(model),
    }


def _right(answers: list[list[bool]]) -> int:
    return sum(map(sum, answers))


def main() -> None:
    """Answer and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--corpus", type=Path, required=True, help="whose held-out text is filler")
    parser.add_argument("--checkpoint", type=Path, help="default: the tiny model's")
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="of four questions each")
    parser.add_argument("--device", default="cpu", help="such as cuda")
    arguments = parser.parse_args()
    question = Question("recall", CONTEXT_BYTES, arguments.documents, QUERIES)
    torch.set_num_threads(1)  # a decode step is many small operations
    try:
        model, _ = load_model(
            arguments.checkpoint or tiny.checkpoint_path(), device=arguments.device
        )
        filler = load_corpus(arguments.corpus).held_out.tobytes()
        found = answer_pairs(model, question, filler)
        with atomic_file(arguments.output) as path:
            path.write_text(json.dumps(found) + "\n", encoding="utf-8")
        print(arguments.output)
    except SpinError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
