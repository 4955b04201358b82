# SPDX-License-Identifier: Apache-2.0
"""Runs of a small model on the embedded host, with and without SPIN."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_models import CSA_LAYERS
from torch import Tensor

from spin_trtllm import SpinConfig, SpinStep
from spin_trtllm.generate import forward, prefill
from spin_trtllm.hosts.transformers import SpinSession, enable

BLOCK = 8
SPARSE = SpinConfig(block_size=BLOCK, target_sparsity=0.6, exploration=0.1)
DENSE = SpinConfig(block_size=BLOCK, target_sparsity=0.0)
PROMPT_TOKENS = 500
WEIGHTS = "model.safetensors"


def feed(model: torch.nn.Module, cache: Any, tokens: Tensor) -> Tensor:
    """Decode given tokens `[S, T]` one by one: logits `[S, T, vocabulary]`."""
    return torch.stack([forward(model, token, cache) for token in tokens.split(1, 1)], 1)


def run(model: torch.nn.Module, prompt: Tensor, tokens: Tensor) -> Tensor:
    """Prefill and decode given tokens: all logits `[S, 1 + T, vocabulary]`."""
    cache, first = prefill(model, prompt)
    return torch.cat([first.unsqueeze(1), feed(model, cache, tokens)], 1)


def record(model: torch.nn.Module, prompt: Tensor, tokens: Tensor, **options: Any) -> SpinSession:
    """Prefill and decode given tokens with SPIN, recorded; the closed session."""
    config = options.pop("config", SPARSE)
    with enable(model, config, capture=True, strict=True, **options) as session:
        run(model, prompt, tokens)
    return session


def dump_of(session: SpinSession, folder: Path, sequence: int = 0) -> dict[str, Tensor]:
    """What a session did to one sequence, through its dump file."""
    assert session.capture is not None
    path = folder / f"dump-{id(session)}-{sequence}.safetensors"
    session.capture.save_dump(path, sequence)
    return load_file(path)


def same(one: dict[str, Tensor], other: dict[str, Tensor], *names: str) -> bool:
    """Bitwise equality of two dumps, of the named tensors or all."""
    keys = names or tuple(one)
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in keys)


def indexers(model: torch.nn.Module) -> dict[int, Any]:
    return {n: model.model.layers[n].self_attn.compressor.indexer for n in CSA_LAYERS}


def broken(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("made up")


def fail_at(position: int, observe: Callable[..., None]) -> Callable[..., None]:
    """`SpinStep.observe` that breaks in the last layer of one step."""

    def fail(step: SpinStep, plan: Any, *rest: Any) -> None:
        if plan.layers == CSA_LAYERS[-1:] and int(plan.positions_tokens[0, 0]) == position:
            broken()
        observe(step, plan, *rest)

    return fail
