# SPDX-License-Identifier: Apache-2.0
"""Greedy generation with an explicit cache: prefill in chunks, then one token a step.

SPIN is no part of it: a session that is enabled on the model takes effect by itself.
"""

from __future__ import annotations

import inspect
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.hosts.transformers import SpinSession, config_of


@dataclass(frozen=True)
class Generation:
    """What a model said, greedily.

    Attributes:
        tokens: the most likely token after the prompt, and after each token fed since.
        seconds_per_token: wall time of each decode step, without probing; one less than `tokens`.
    """

    tokens: list[int]
    seconds_per_token: list[float]

    @property
    def median_seconds(self) -> float | None:
        """Median time of a decode step; None when there was none."""
        return statistics.median(self.seconds_per_token) if self.seconds_per_token else None


@torch.no_grad()
def forward(model: torch.nn.Module, tokens: Tensor, cache: Any) -> Tensor:
    """Run `[S, T]` tokens into a cache: logits `[S, vocabulary]` after the last of them."""
    # Transformers 5.24 renamed the argument, and warns about the old name.
    known = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in known else "past_key_values"
    output = model(input_ids=tokens, use_cache=True, logits_to_keep=1, **{name: cache})
    logits: Tensor = output.logits[:, -1]
    return logits


@torch.no_grad()
def prefill(
    model: torch.nn.Module, ids: Sequence[int] | Tensor, *, chunk_tokens: int = 512
) -> tuple[Any, Tensor]:
    """Run a prompt through a model, a chunk at a time to bound the memory.

    Args:
        model: a causal language model of Transformers.
        ids: token ids `[T]` or, for sequences of equal length, int64 `[S, T]`.
        chunk_tokens: most tokens in one call, at least 2 (then 3, so that none is left alone).

    Returns:
        The cache, and the logits `[S, vocabulary]` after the last token.

    Raises:
        SpinError: no token, more than `max_position_embeddings`, or chunks below two tokens.
    """
    from transformers import DynamicCache

    if chunk_tokens < 2:
        refuse("chunk_tokens", chunk_tokens, "an integer >= 2")
    device = next(model.parameters()).device
    tokens = torch.atleast_2d(torch.as_tensor(ids, dtype=torch.int64, device=device))
    check_length(model, tokens.shape[1])
    cache = DynamicCache(config=config_of(model))
    for chunk in split_prompt(tokens, chunk_tokens):
        logits = forward(model, chunk, cache)
    return cache, logits


@torch.no_grad()
def decode(
    model: torch.nn.Module,
    cache: Any,
    logits: Tensor,
    max_new_tokens: int,
    *,
    session: SpinSession | None = None,
    on_token: Callable[[int], None] | None = None,
    forced_tokens: Sequence[int] | None = None,
) -> Generation:
    """Continue one prefilled sequence; the cache grows by all tokens but the last.

    Args:
        cache, logits: from `prefill`; logits `[1, vocabulary]`.
        max_new_tokens: tokens to pick; the model's end-of-sequence token stops earlier.
        session: whose probing time is taken off the timing.
        on_token: called with each picked token at once.
        forced_tokens: teacher forcing: fed in place of the picked ones, which are still recorded.
            At least `max_new_tokens - 1`; nothing stops earlier.

    Raises:
        SpinError: fewer than one token, several sequences, or too few forced tokens.
    """
    if max_new_tokens < 1:
        refuse("max_new_tokens", max_new_tokens, "an integer >= 1")
    if logits.shape[0] != 1:
        refuse("logits", list(logits.shape), "[1, vocabulary]: one sequence")
    if forced_tokens is not None and len(forced_tokens) < max_new_tokens - 1:
        refuse("forced_tokens", f"{len(forced_tokens)} tokens", f"{max_new_tokens - 1} or more")
    stops = _stop_tokens(model) if forced_tokens is None else set()
    tokens: list[int] = []
    seconds: list[float] = []

    def pick(token: int) -> None:
        tokens.append(token)
        if on_token is not None:
            on_token(token)

    pick(int(logits.argmax(-1)))
    while len(tokens) < max_new_tokens and tokens[-1] not in stops:
        fed = tokens[-1] if forced_tokens is None else forced_tokens[len(tokens) - 1]
        probed, started = _probe_seconds(session), time.perf_counter()
        logits = forward(model, torch.tensor([[fed]], device=logits.device), cache)
        token = int(logits.argmax(-1))  # waits for the device
        probed = _probe_seconds(session) - probed
        seconds.append(time.perf_counter() - started - probed)
        pick(token)
    return Generation(tokens, seconds)


def generate(
    model: torch.nn.Module,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    session: SpinSession | None = None,
    on_token: Callable[[int], None] | None = None,
    forced_tokens: Sequence[int] | None = None,
) -> Generation:
    """`prefill`, then `decode`, of one prompt.

    Raises:
        SpinError: as those two, or a prompt that leaves no room for the new tokens.
    """
    check_length(model, len(prompt_ids), max_new_tokens)
    cache, logits = prefill(model, prompt_ids)
    return decode(
        model,
        cache,
        logits,
        max_new_tokens,
        session=session,
        on_token=on_token,
        forced_tokens=forced_tokens,
    )


def read_prompt(path: str | os.PathLike[str]) -> str:
    """The text of a prompt file, every character of it.

    Raises:
        SpinError: a file that cannot be read, is empty, or is not UTF-8.
    """
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise SpinError(f"prompt: cannot read {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        where = f"{str(path)!r}, byte {error.start}"
        raise SpinError(f"prompt: {where} is not UTF-8 text, which the tokenizer needs") from error
    if not text:
        refuse("prompt", str(path), "a file with at least one character")
    return text


def check_length(model: torch.nn.Module, prompt_tokens: int, new_tokens: int = 0) -> None:
    """Refuse an empty prompt, and one that leaves no room for the tokens to come.

    Raises:
        SpinError: outside `1 .. max_position_embeddings - new_tokens` tokens.
    """
    limit = config_of(model).max_position_embeddings
    if not 0 <= new_tokens < limit:
        refuse("max_new_tokens", new_tokens, f"up to {limit - 1}, the model's context less one")
    if not 1 <= prompt_tokens <= limit - new_tokens:
        room = f" with {new_tokens} to come" if new_tokens else ""
        refuse("prompt", f"{prompt_tokens} tokens", f"1 .. {limit - new_tokens} tokens{room}")


def split_prompt(tokens: Tensor, chunk_tokens: int) -> list[Tensor]:
    """Cut `[S, T]` into pieces of up to `chunk_tokens >= 2` tokens.

    No piece of a longer prompt is a single token: that would look like a decode step.
    """
    sizes = [chunk_tokens] * (tokens.shape[1] // chunk_tokens)
    rest = tokens.shape[1] % chunk_tokens
    if rest == 1 and sizes:
        # Two pieces share the last chunk_tokens + 1 tokens, except that 2 + 1 stay together.
        sizes[-1:] = [chunk_tokens - 1, 2] if chunk_tokens > 2 else [3]
    elif rest:
        sizes.append(rest)
    return list(tokens.split(sizes, dim=1))


def _stop_tokens(model: torch.nn.Module) -> set[int]:
    stop = config_of(model).eos_token_id
    return set() if stop is None else {stop} if isinstance(stop, int) else set(stop)


def _probe_seconds(session: SpinSession | None) -> float:
    return 0.0 if session is None else session.stats.probe_seconds
