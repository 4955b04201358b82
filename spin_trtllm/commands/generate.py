# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm generate`: a prompt on the embedded host, with SPIN and, for comparison, dense."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from spin_trtllm.build.engine import Engine, load_engine
from spin_trtllm.errors import refuse
from spin_trtllm.generate import Generation, check_length, decode, prefill, read_prompt
from spin_trtllm.hosts.transformers import SpinStats, enable, encode_prompt, load_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# JSON key: label, in the order of the table
_LABELS = {
    "prompt_tokens": "prompt tokens",
    "steps": "decode steps",
    "cold_steps": "cold steps",
    "realized_sparsity": "realized sparsity",
    "spin_slots_scored": "slots scored",
    "dense_slots_scored": "slots scored, dense",
    "mean_miss": "mean miss",
    "p99_miss": "p99 miss",
    "token_agreement": "token agreement with dense",
    "first_divergence": "first differing token",
    "seconds_per_token_spin": "seconds a token, median",
    "seconds_per_token_dense": "seconds a token, dense",
}


# what only --compare-dense measures
NOT_COMPARED: dict[str, Any] = dict.fromkeys(
    (
        "mean_miss",
        "p99_miss",
        "p99_miss_layer_mean",
        "token_agreement",
        "first_divergence",
        "seconds_per_token_dense",
        "text_dense",
    )
)


@dataclass(frozen=True)
class Prompt:
    """A prefilled prompt that can be decoded many times."""

    model: torch.nn.Module
    cache: Any
    logits: Tensor
    max_new_tokens: int

    def dense(self) -> Generation:
        """Decode on the untouched model."""
        return decode(self.model, copy.deepcopy(self.cache), self.logits, self.max_new_tokens)

    def spin(
        self,
        engine: Engine,
        *,
        on_token: Callable[[int], None] | None = None,
        forced_tokens: Sequence[int] | None = None,
    ) -> tuple[Generation, SpinStats]:
        """Decode with an engine's SPIN; on forced tokens it is also measured what SPIN misses."""
        session = enable(
            self.model,
            engine.config,
            max_sequences=1,
            max_tokens=engine.max_seq_len,
            probe=forced_tokens is not None,
        )
        with session:
            generation = decode(
                self.model,
                copy.deepcopy(self.cache),
                self.logits,
                self.max_new_tokens if forced_tokens is None else len(forced_tokens),
                session=session,
                on_token=on_token,
                forced_tokens=forced_tokens,
            )
        return generation, session.stats


@click.command("generate")
@click.option(
    "--engine", "engine_dir", type=click.Path(), required=True, help="What trtllm-build wrote."
)
@click.option(
    "--checkpoint", type=click.Path(), required=True, help="The checkpoint it was built for."
)
@click.option("--prompt-file", type=click.Path(), required=True, help="Text file, UTF-8.")
@click.option(
    "--max-new-tokens", type=int, default=64, show_default=True, help="Tokens to generate."
)
@click.option(
    "--compare-dense",
    is_flag=True,
    help="Also decode without SPIN, and then with SPIN along dense's text.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    engine_dir: str,
    checkpoint: str,
    prompt_file: str,
    max_new_tokens: int,
    compare_dense: bool,
    as_json: bool,
) -> None:
    """Decode a prompt greedily with SPIN, streaming the text, then say what SPIN did.

    It runs on Transformers and shows what SPIN keeps and misses, not how fast it is: this host
    multiplies all slots in its attention, whatever the indexer picks.
    """
    if max_new_tokens < 1:
        refuse("--max-new-tokens", max_new_tokens, "an integer >= 1")
    text = read_prompt(prompt_file)
    engine = load_engine(engine_dir)
    engine.check_checkpoint(checkpoint)
    model, tokenizer = load_model(checkpoint)
    ids = encode_prompt(tokenizer, text, model)
    check_length(model, len(ids), max_new_tokens)
    if len(ids) + max_new_tokens > engine.max_seq_len:
        allowed = f"{engine.max_seq_len} tokens, the engine's max_seq_len"
        refuse("prompt", f"{len(ids)} tokens with {max_new_tokens} to come", allowed)

    with Console(stderr=True).status(f"prefill of {len(ids)} tokens"):  # on a terminal only
        prompt = Prompt(model, *prefill(model, ids), max_new_tokens)
    generation, stats = prompt.spin(engine, on_token=None if as_json else _streamer(tokenizer))
    report = {
        "layers": list(engine.geometry.layers),
        "prompt_tokens": len(ids),
        **stats.to_dict(),
        "seconds_per_token_spin": generation.median_seconds,
        "text": tokenizer.decode(generation.tokens),
    }
    report |= compare(prompt, engine, tokenizer, generation) if compare_dense else NOT_COMPARED
    if as_json:
        click.echo(json.dumps(report))
    else:
        click.echo()
        _print_table(report)


def compare(
    prompt: Prompt, engine: Engine, tokenizer: Tokenizer, free: Generation
) -> dict[str, Any]:
    """Decode dense, then with SPIN along dense's tokens: the same context at every step.

    Args:
        free: what SPIN said by itself, for `first_divergence`.

    Returns:
        The keys of `NOT_COMPARED`.
    """
    dense = prompt.dense()
    forced, stats = prompt.spin(engine, forced_tokens=dense.tokens)
    # The first token comes from the prefill, which SPIN does not touch.
    same = [a == b for a, b in zip(dense.tokens[1:], forced.tokens[1:], strict=True)]
    return {
        "mean_miss": stats.mean_miss,
        "p99_miss": stats.p99_miss,
        "p99_miss_layer_mean": stats.p99_miss_layer_mean,
        "token_agreement": sum(same) / len(same) if same else None,
        "first_divergence": first_divergence(dense.tokens, free.tokens),
        "seconds_per_token_dense": dense.median_seconds,
        "text_dense": tokenizer.decode(dense.tokens),
    }


def first_divergence(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that two generations do not share; None if they are equal."""
    shared = min(len(ours), len(theirs))
    differing = (i for i in range(shared) if ours[i] != theirs[i])
    return next(differing, None if len(ours) == len(theirs) else shared)


def _streamer(tokenizer: Tokenizer) -> Callable[[int], None]:
    """Prints tokens as text, as soon as they are whole characters."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)

    def put(token: int) -> None:
        click.echo(stream.step(tokenizer, token) or "", nl=False)

    return put


def _print_table(report: dict[str, Any]) -> None:
    compared = report["text_dense"] is not None
    table = Table(
        title="SPIN on the embedded host",
        caption="misses and agreement: SPIN fed with dense's tokens" if compared else None,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("figure")
    table.add_column("value", justify="right")
    for key, label in _LABELS.items():
        table.add_row(label, _show(key, report))
    for reason, steps in report["fallbacks"].items():
        table.add_row(f"steps run dense: {reason}", str(steps))
    Console().print(table)


def _show(key: str, report: dict[str, Any]) -> str:
    value = report[key]
    if value is None:
        compared = report["text_dense"] is not None
        return "none" if key == "first_divergence" and compared else "not measured"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
