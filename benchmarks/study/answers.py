# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint answers on its own, without SPIN: which tasks a comparison can be made on.

    python -m benchmarks.study.answers --checkpoint benchmarks/tiny_model/checkpoint \\
        --corpus build/tiny_model/corpus.zip --output build/answers.json

Each document is read in one forward pass of the training code, in float32, the attention reading
the indexer's top-k slots as in use. Answers are picked with the true text before them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.study.about import digests_of
from benchmarks.study.documents import DIALOGUE, documents_of
from benchmarks.study.intervals import share_interval
from benchmarks.study.tasks import TASKS
from benchmarks.tiny_model.corpus import load_corpus
from benchmarks.tiny_model.forward import Forward
from benchmarks.tiny_model.model import BOS
from spin_trtllm.environment import environment
from spin_trtllm.errors import SpinError
from spin_trtllm.files import atomic_file
from spin_trtllm.recall import RecallDocument


def right_answers(forward: Forward, turns: list[RecallDocument]) -> list[bool]:
    """Whether each question of a document is answered exactly."""
    text = b"".join(turn.context + turn.asked for turn in turns)
    picked = _picked(forward, text)
    right: list[bool] = []
    end = 0
    for turn in turns:
        end += len(turn.context)
        answers = picked[end : end + len(turn.asked)]
        right += [turn.is_right(number, answers) for number in range(len(turn.questions))]
        end += len(turn.asked)
    return right


@torch.no_grad()
def _picked(forward: Forward, text: bytes) -> list[int]:
    """The likeliest token for each byte of a text, given all bytes before it."""
    window = forward.model.config.sliding_window
    padding = -len(text) % window  # behind the text, where no position of it looks
    device = next(forward.model.parameters()).device
    tokens = torch.tensor([[BOS, *text[:-1], *[0] * padding]], device=device)
    picked: list[int] = forward(tokens, sparse=True).logits[0].argmax(-1).tolist()
    return picked[: len(text)]


def answer_all(
    forward: Forward, *, documents: int, context_bytes: int, queries: int, filler: bytes
) -> dict[str, Any]:
    """Right answers, answers, and the interval of their share, by task."""
    result: dict[str, Any] = {}
    for task in (*TASKS, DIALOGUE):
        by_document = [
            right_answers(forward, turns)
            for turns in documents_of(
                task,
                documents=documents,
                context_bytes=context_bytes,
                queries=queries,
                filler=filler,
            )
        ]
        right = [one for answers in by_document for one in answers]
        of_answer = [number for number, answers in enumerate(by_document) for _ in answers]
        interval = share_interval(right, of_answer)
        result[task] = {
            "right": sum(right),
            "answers": len(right),
            "documents": len(by_document),
            "interval": interval and [round(end, 3) for end in interval],
        }
        print(task, result[task], flush=True)
    return result


def main() -> None:
    """Answer every task and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="whose held-out text fills")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--context-bytes", type=int, nargs="+", default=[4_096])
    parser.add_argument("--documents", type=int, default=6, help="of each task")
    parser.add_argument("--queries", type=int, default=8, help="answers a document")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    try:
        filler = load_corpus(arguments.corpus).held_out.tobytes()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            arguments.checkpoint, dtype=torch.float32
        )
        forward = Forward(model.eval().to("cuda" if on_gpu else "cpu"), torch.float32)
        tasks = {
            str(context_bytes): answer_all(
                forward,
                documents=arguments.documents,
                context_bytes=context_bytes,
                queries=arguments.queries,
                filler=filler,
            )
            for context_bytes in arguments.context_bytes
        }
        figures = {
            "checkpoint": str(arguments.checkpoint),
            "sha256": digests_of(arguments.checkpoint),
            "environment": environment(model),
            "documents": arguments.documents,
            "context_bytes": tasks,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(arguments.output) as path:
            path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except SpinError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
