# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm trace`: indexer scores of a real model, decoding with SPIN, as a trace file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from spin_trtllm import __version__
from spin_trtllm.build.checkpoint import read_checkpoint
from spin_trtllm.commands.common import check_is_no_input, say_preset, spin_config, spin_options
from spin_trtllm.errors import refuse
from spin_trtllm.files import atomic_file
from spin_trtllm.generate import generate, read_prompt
from spin_trtllm.hosts.transformers import enable, encode_prompt, load_model
from spin_trtllm.replay.settings import preset_of


@click.command("trace")
@click.option(
    "--checkpoint", type=click.Path(), required=True, help="Hugging Face DeepSeek-V4 directory."
)
@click.option("--prompt", type=click.Path(), required=True, help="Text file, UTF-8.")
@click.option("--out", type=click.Path(), required=True, help="Trace to write, spin-trace/1.")
@click.option(
    "--max-new-tokens", type=int, default=64, show_default=True, help="Decode steps to record."
)
@click.option(
    "--sequence-id", type=int, help="What exploration depends on; default: made from the prompt."
)
@click.option(
    "--dump",
    type=click.Path(),
    help="Also write what the host decided, as `spin-trtllm replay --dump` does.",
)
@spin_options
def command(
    checkpoint: str,
    prompt: str,
    out: str,
    max_new_tokens: int,
    sequence_id: int | None,
    dump: str | None,
    **options: Any,
) -> None:
    """Prefill a prompt, decode greedily with SPIN, and write all scores of every step.

    A replay of the trace with the same SPIN options repeats the host's decisions exactly; compare
    the two dumps.
    """
    inputs = (prompt, checkpoint, options["spin_config"])
    if max_new_tokens < 1:
        refuse("--max-new-tokens", max_new_tokens, "an integer >= 1")
    for option, target in (("--out", out), ("--dump", dump)):
        check_is_no_input(option, target, inputs)
    _check_targets(out, dump)
    geometry = read_checkpoint(checkpoint).geometry
    preset_name = preset_of(geometry.ratio, geometry.top_k)
    config, _ = spin_config(options, preset_name)
    text = read_prompt(prompt)
    model, tokenizer = load_model(checkpoint)
    ids = encode_prompt(tokenizer, text, model)
    if sequence_id is None:
        sequence_id = prompt_id(ids)
    status = Console(stderr=True).status(f"{max_new_tokens} steps after {len(ids)} tokens")
    session = enable(model, config, max_sequences=1, sequence_ids=[sequence_id], capture=True)
    with status, session:
        # The first token comes from the prefill, without a decode step.
        generation = generate(model, ids, max_new_tokens + 1)
    assert session.capture is not None
    source = (
        f"spin-trtllm {__version__} trace: {Path(checkpoint).resolve().name}, "
        f"{Path(prompt).name}, {len(ids)} prompt tokens, "
        f"sparsity {config.sparsity_text}, blocks of {config.block_size}"
    )
    session.capture.save_trace(out, sequence_id, source=source, model=session.indexer_digest)
    if dump is not None:
        session.capture.save_dump(dump, sequence_id)
    say_preset(preset_name, options["spin_config"])
    stats = session.stats
    click.echo(
        f"{out}: {len(generation.tokens) - 1} steps of layers {', '.join(map(str, session.layers))}"
        f" after {len(ids)} tokens, blocks of {config.block_size} slots, "
        f"realized sparsity {stats.realized_sparsity or 0:.3f}"
    )
    for reason, steps in stats.fallbacks.items():
        click.echo(f"{steps} steps ran dense: {reason}", err=True)


def prompt_id(ids: Sequence[int]) -> int:
    """A sequence id made from a prompt's tokens: different prompts explore different blocks."""
    digest = hashlib.sha256(" ".join(map(str, ids)).encode())
    return int.from_bytes(digest.digest()[:8], "big")


def _check_targets(out: str, dump: str | None) -> None:
    """Find out that a file cannot be written before the work is done, not after."""
    if dump is not None and Path(dump).resolve() == Path(out).resolve():
        refuse("--dump", dump, "another file than --out")
    for option, target in (("--out", out), ("--dump", dump)):
        if target is not None:
            with suppress(_Unwritten), atomic_file(target, argument=option):
                raise _Unwritten


class _Unwritten(Exception):
    """Leaves `atomic_file` without writing."""
