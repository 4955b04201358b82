# SPDX-License-Identifier: Apache-2.0
"""`make demo`: SPIN next to dense on the tiny trained model, on any machine.

    python -m spin_trtllm.demo --output build/demo

It builds an engine with `trtllm-build`, then decodes two things both ways on the embedded host:
questions about facts in a long document, where every answer is right or wrong, and a continuation
of a long text. `summary.json` in the output directory holds all figures.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from rich.console import Console
from rich.text import Text

from spin_trtllm import tiny
from spin_trtllm.build import cli as trtllm_build
from spin_trtllm.build.engine import Engine, load_engine
from spin_trtllm.build.progress import Stages
from spin_trtllm.commands.common import run
from spin_trtllm.commands.generate import Prompt, compare
from spin_trtllm.demo_report import QuestionRows, percent, print_table
from spin_trtllm.environment import environment
from spin_trtllm.errors import SpinError
from spin_trtllm.files import atomic_file
from spin_trtllm.generate import Generation, decode, prefill
from spin_trtllm.geometry import block_budget, count_blocks, visible_slots
from spin_trtllm.hosts.transformers import SpinSession, enable, encode_prompt, load_model
from spin_trtllm.recall import STYLES, recall_document

if TYPE_CHECKING:
    from tokenizers import Tokenizer

STAGES = 6
SPARSITY_TOLERANCE = 0.02
DOCUMENT_SEED = 0
DOCUMENT_STYLE = STYLES[2]  # its questions are short enough for one line each

_ABOUT = (
    "Figures at top level are those of parts.text; queries, exact_dense and exact_spin are those "
    "of parts.recall. expected_sparsity is what the block budget allows at the decoded positions."
)
_TEXT_FIGURES = (
    "target_sparsity",
    "expected_sparsity",
    "realized_sparsity",
    "mean_miss",
    "p99_miss",
    "token_agreement",
    "dense_slots_scored",
    "spin_slots_scored",
    "layers",
    "steps",
    "cold_steps",
)
_RECALL_FIGURES = ("queries", "exact_dense", "exact_spin")


@dataclass(frozen=True)
class DemoSize:
    """How much is decoded; a token of the tiny model is a byte.

    Attributes:
        context_bytes: document of the recall part.
        queries: questions about it.
        text_bytes: prompt of the long-text part, from the start of the Apache License.
        new_tokens: tokens that are generated after it.
    """

    context_bytes: int = 7_600
    queries: int = 24
    text_bytes: int = 8_192
    new_tokens: int = 128


@dataclass(frozen=True)
class Host:
    """The loaded model and the engine it runs with."""

    model: torch.nn.Module
    tokenizer: Tokenizer
    engine: Engine

    def read(self, text: bytes, new_tokens: int) -> Prompt:
        """Prefill ASCII text."""
        ids = encode_prompt(self.tokenizer, text.decode("ascii"), self.model)
        return Prompt(self.model, *prefill(self.model, ids), new_tokens)

    def follow(
        self,
        prompt: Prompt,
        tokens: list[int],
        session: SpinSession | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> Generation:
        """Feed given tokens after a prompt; the result holds what was picked for each of them."""
        cache = copy.deepcopy(prompt.cache)
        return decode(
            self.model,
            cache,
            prompt.logits,
            len(tokens),
            session=session,
            on_token=on_token,
            forced_tokens=tokens,
        )

    def session(self) -> SpinSession:
        """SPIN on one sequence, measuring what it misses."""
        config, tokens = self.engine.config, self.engine.max_seq_len
        return enable(self.model, config, max_sequences=1, max_tokens=tokens, probe=True)


def run_demo(output: Path, size: DemoSize | None = None) -> dict[str, Any]:
    """Build, decode both parts, show them on standard output and write `summary.json`.

    Args:
        output: directory for the engine and the summary; made if it does not exist.
        size: how much to decode; default: `DemoSize()`.

    Returns:
        What `summary.json` holds.

    Raises:
        SpinError: no checkpoint, no `transformers`, or an output that cannot be written.
    """
    size = size or DemoSize()
    started = time.perf_counter()
    console = Console(soft_wrap=True, highlight=False, markup=False)
    engine = build_engine(output / "engine", console)

    stages = Stages(STAGES)
    _heading(console, "Recall: questions about facts in a long document")
    checkpoint = tiny.checkpoint_path()
    engine.check_checkpoint(checkpoint)
    model, tokenizer = stages.run(
        "load the model", lambda: load_model(checkpoint), lambda _: str(checkpoint)
    )
    host = Host(model, tokenizer, engine)
    recall = decode_recall(host, size, stages, console)
    _heading(console, "Long text: a continuation, next to dense")
    text = decode_text(host, size, stages, console)

    summary = summarise(recall, text)
    summary["environment"] = environment(model)
    summary["seconds"] = time.perf_counter() - started
    with atomic_file(output / "summary.json") as path:
        path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print_table(console, summary["parts"])
    console.print(f"{output / 'summary.json'} written after {summary['seconds']:.0f} s")
    return summary


def build_engine(directory: Path, console: Console) -> Engine:
    """Run `trtllm-build` on the tiny checkpoint as its command line does."""
    arguments = ["--use_spin", "--checkpoint_dir", str(tiny.checkpoint_path())]
    arguments += ["--output_dir", str(directory), "--force"]
    console.print(Text(" ".join(["$", trtllm_build.PROGRAM, *arguments]), style="bold"))
    trtllm_build.command.main(arguments, trtllm_build.PROGRAM, standalone_mode=False)
    return load_engine(directory)


def decode_recall(host: Host, size: DemoSize, stages: Stages, console: Console) -> dict[str, Any]:
    """Ask every question dense, then with SPIN.

    The true text is fed whatever was answered, so that one wrong byte does not spoil the next.
    """
    document = recall_document(
        DOCUMENT_SEED,
        context_bytes=size.context_bytes,
        queries=size.queries,
        filler=license_text(),
        style=DOCUMENT_STYLE,
    )
    asked = list(document.asked)
    steps = len(asked) - 1
    prompt = stages.run(
        "read the document",
        lambda: host.read(document.context, len(asked)),
        lambda _: f"{size.context_bytes:,} bytes with {2 * size.queries} facts",
    )
    dense = stages.run(
        "answer dense",
        lambda: host.follow(prompt, asked),
        lambda dense: f"{percent(document.share_right(dense.tokens))} right, {steps} steps",
    )
    with host.session() as session:
        rows = QuestionRows(document, dense.tokens, host.tokenizer, session, console)
        spin = host.follow(prompt, asked, session, rows.add_token)
    return {
        "what": f"{size.queries} questions about facts in {size.context_bytes} bytes, true answers "
        "fed; exact: all four bytes of an answer are the likeliest ones",
        "queries": size.queries,
        "exact_dense": document.share_right(dense.tokens),
        "exact_spin": document.share_right(spin.tokens),
        "seconds_per_token_dense": dense.median_seconds,
        "seconds_per_token_spin": spin.median_seconds,
        **_sparsity(host.engine, size.context_bytes + 1, steps),
        **session.stats.to_dict(),
    }


def decode_text(host: Host, size: DemoSize, stages: Stages, console: Console) -> dict[str, Any]:
    """Continue a long text as `spin-trtllm generate --compare-dense` does."""
    read = license_text()[: size.text_bytes]
    prompt = stages.run(
        "read a long text",
        lambda: host.read(read, size.new_tokens),
        lambda _: f"{len(read):,} bytes of the Apache License",
    )
    spin, stats = stages.run(
        "continue with SPIN",
        lambda: prompt.spin(host.engine),
        lambda found: f"{percent(found[1].realized_sparsity)} of the blocks skipped",
    )
    comparison = stages.run(
        "compare with dense",
        lambda: compare(prompt, host.engine, host.tokenizer, spin),
        lambda found: f"{percent(found['token_agreement'])} agree where SPIN is fed dense's tokens",
    )
    text = host.tokenizer.decode(spin.tokens)
    for name, said in (("dense", comparison["text_dense"]), ("SPIN", text)):
        console.print(Text(f"{name:5} {said!r}"))
    return {
        "what": f"{len(spin.tokens)} tokens after {len(read)} bytes of text; token_agreement and "
        "misses: SPIN fed with dense's tokens",
        "text": text,
        "seconds_per_token_spin": spin.median_seconds,
        **_sparsity(host.engine, len(read) + 1, len(spin.tokens) - 1),
        **stats.to_dict(),
        **comparison,
    }


def expected_sparsity(engine: Engine, prompt_tokens: int, steps: int) -> float:
    """Share of blocks that the budget lets the steps after a prompt skip, on average.

    Less than the target by rounding and by forced blocks. The first step is cold and left out.

    Args:
        prompt_tokens: tokens before the first decode step, enough for one slot.
        steps: decode steps, at least 2.
    """
    config, ratio = engine.config, engine.geometry.ratio
    positions_tokens = torch.arange(prompt_tokens + 1, prompt_tokens + steps)
    blocks = count_blocks(visible_slots(positions_tokens, ratio), config.block_size)
    layers = [config.layer_ppm(layer) for layer in engine.geometry.layers]
    budget = block_budget(
        blocks,
        top_k=engine.geometry.top_k,
        block_size_slots=config.block_size,
        sparsity_ppm=torch.tensor(layers).unsqueeze(-1),
        exploration_ppm=config.exploration_ppm,
    )
    return float((1 - torch.as_tensor(budget.kept_blocks).double() / blocks).mean())


def is_on_target(part: dict[str, Any]) -> bool:
    """Whether SPIN skipped as many blocks as its budget says."""
    realized = part["realized_sparsity"]
    if realized is None:  # every step ran dense
        return False
    return bool(abs(realized - part["expected_sparsity"]) <= SPARSITY_TOLERANCE)


def summarise(recall: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """The figures of `summary.json`: the headline ones, then both parts in full."""
    return {
        "about": _ABOUT,
        **{name: text[name] for name in _TEXT_FIGURES},
        **{name: recall[name] for name in _RECALL_FIGURES},
        "parts": {"recall": recall, "text": text},
    }


def license_text() -> bytes:
    """The clone's Apache License: long, fixed, and free to feed to a model.

    Raises:
        SpinError: the package is installed without the repository around it.
    """
    path = Path(__file__).parent.parent / "LICENSE"
    if not path.is_file():
        raise SpinError(f"demo: no {str(path)!r}: run the demo in a clone of the repository")
    return path.read_bytes()


def _sparsity(engine: Engine, prompt_tokens: int, steps: int) -> dict[str, Any]:
    return {
        "layers": list(engine.geometry.layers),
        "prompt_tokens": prompt_tokens,
        "target_sparsity": engine.config.target_sparsity,
        "expected_sparsity": expected_sparsity(engine, prompt_tokens, steps),
    }


def _heading(console: Console, title: str) -> None:
    console.print(Text(f"\n{title}", style="bold"))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--output", type=click.Path(), default="build/demo", show_default=True, help="Directory."
)
def command(output: str) -> int:
    """Show SPIN next to dense on the tiny trained model."""
    # A decode step is many small operations: a second thread gives nothing, and costs a lot where
    # the other core is busy.
    torch.set_num_threads(1)
    summary = run_demo(Path(output))
    off = [name for name, part in summary["parts"].items() if not is_on_target(part)]
    for name in off:
        part = summary["parts"][name]
        click.echo(
            f"error: {name}: realized sparsity {part['realized_sparsity']}, the budget allows "
            f"{part['expected_sparsity']:.4f}",
            err=True,
        )
    return 1 if off else 0


if __name__ == "__main__":
    run(command, None, "python -m spin_trtllm.demo")
