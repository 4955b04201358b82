# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for small score traces and SPIN parameters.

A trace is a dict: scores float32 [steps, layers, rows, slots], positions int64 [steps, rows],
accepted int64 [steps], ratio, top_k, layers (decoder-layer indices), sequence_id. Shapes and
positions are drawn by hypothesis; the bulk of the scores comes from a generator with a drawn seed.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save_file

Trace = dict[str, Any]
Params = dict[str, Any]

BLOCK_SIZES = (8, 16, 32, 64, 128)
RATIOS = (1, 4, 2)
MAX_BLOCKS = 12
MAX_TAIL = 63
SCORE_FAMILIES = (
    "gaussian",
    "relu",
    "equal",
    "zero",
    "negative",
    "integer",
    "neg_inf",
    "all_neg_inf",
    "denormal",
    "huge",
    "signed_zero",
    "local",
)


def family_scores(family: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Scores of one family, every entry filled (visibility is applied later)."""
    gaussian = rng.standard_normal(shape).astype(np.float32)
    if family == "gaussian":
        return gaussian
    if family == "relu":  # about 90% exact zeros
        return np.where(rng.random(shape) < 0.9, np.float32(0.0), np.abs(gaussian))
    if family == "equal":
        return np.full(shape, rng.standard_normal(), dtype=np.float32)
    if family == "zero":
        return np.zeros(shape, dtype=np.float32)
    if family == "negative":
        return -np.abs(gaussian) - np.float32(0.125)
    if family == "integer":
        return rng.integers(-2, 3, shape).astype(np.float32)
    if family == "neg_inf":
        density = rng.choice([0.1, 0.5, 0.95])
        return np.where(rng.random(shape) < density, np.float32(-np.inf), gaussian)
    if family == "all_neg_inf":
        return np.full(shape, -np.inf, dtype=np.float32)
    if family == "denormal":  # small odd multiples of the smallest denormal: EMA halves round
        bits = rng.integers(1, 64, shape).astype(np.uint32)
        bits |= rng.integers(0, 2, shape).astype(np.uint32) << np.uint32(31)
        return bits.view(np.float32)
    if family == "huge":
        return gaussian * np.float32(1e30)
    if family == "signed_zero":
        signed = np.where(rng.random(shape) < 0.5, np.float32(-0.0), np.float32(0.0))
        return np.where(rng.random(shape) < 0.8, signed, rng.integers(-1, 2, shape)).astype(
            np.float32
        )
    if family == "local":  # the same few slots stand out at every step
        stripe = rng.standard_normal(shape[-1]).astype(np.float32)
        return (np.float32(4.0) * stripe + gaussian).astype(np.float32)
    raise ValueError(f"unknown family {family!r}")


@st.composite
def traces(
    draw: st.DrawFn,
    block_size: int | None = None,
    ratio: int | None = None,
    max_cells: int = 24_000,
    resets: bool = True,
    families: tuple[str, ...] = SCORE_FAMILIES,
) -> Trace:
    """A small trace, with contexts shaped for `block_size`.

    max_cells bounds steps * layers * rows * context, and so what a plain-Python referee costs.
    """
    if block_size is None:
        block_size = draw(st.sampled_from(BLOCK_SIZES))
    if ratio is None:
        ratio = draw(st.sampled_from(RATIOS))
    n_steps = draw(st.integers(1, 8))
    n_layers = draw(st.integers(1, 3))
    n_rows = draw(st.integers(1, 4))
    layers = sorted(draw(st.sets(st.integers(0, 60), min_size=n_layers, max_size=n_layers)))

    # The first row of the first step sees full_blocks * block_size + tail slots.
    most_blocks = min(MAX_BLOCKS - 1, max_cells // (n_steps * n_layers * n_rows * block_size))
    fewest_blocks = min(draw(st.sampled_from((0, 2, 2, 4))), most_blocks)
    full_blocks = draw(st.integers(fewest_blocks, most_blocks))
    tail = draw(st.integers(0, min(MAX_TAIL, block_size)))
    first_slots = full_blocks * block_size + tail
    phase = draw(st.integers(0, ratio - 1))
    position = max(0, first_slots * ratio - 1 + phase)  # N is first_slots (1 if r = 1)

    starts, accepted = [], []
    for _ in range(n_steps):
        starts.append(position)
        accepted.append(draw(st.integers(0, n_rows - 1)))
        position += accepted[-1] + 1
        jump = draw(st.sampled_from((None,) * 8 + ("gap", "back"))) if resets else None
        if jump == "gap":
            position += draw(st.integers(1, 9))
        elif jump == "back":
            position = max(0, position - draw(st.integers(1, 9)))
    positions = np.array(starts, dtype=np.int64)[:, None] + np.arange(n_rows, dtype=np.int64)

    visible = (positions + 1) // ratio  # [steps, rows]
    unused_slots = draw(st.sampled_from((0, 0, 1, 5)))
    n_slots = max(1, int(visible.max()) + unused_slots)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = np.empty((n_steps, n_layers, n_rows, n_slots), dtype=np.float32)
    for layer_index in range(n_layers):
        family = draw(st.sampled_from(families))
        scores[:, layer_index] = family_scores(family, rng, (n_steps, n_rows, n_slots))
    seen = np.arange(n_slots) < visible[:, None, :, None]
    scores = np.where(seen, scores, np.float32(np.nan))  # NaN exactly where not visible

    top_k = draw(
        st.one_of(
            st.integers(1, 8),
            st.integers(1, n_slots + 10),
            st.sampled_from((block_size, 2 * block_size, 2 * block_size + 1)),
        )
    )
    return {
        "scores": scores,
        "positions": positions,
        "accepted": np.array(accepted, dtype=np.int64),
        "ratio": ratio,
        "top_k": top_k,
        "layers": layers,
        "sequence_id": draw(
            st.one_of(st.integers(0, 9), st.integers(0, 2**64 - 1), st.just(2**64 - 1))
        ),
    }


@st.composite
def spin_params(
    draw: st.DrawFn,
    block_size: int | None = None,
    poolings: tuple[str, ...] = ("max", "top4", "mean"),
    reductions: tuple[str, ...] = ("A1", "A1", "A0", "A2"),
    state_dtypes: tuple[str, ...] = ("fp32", "bf16", "log8"),
) -> Params:
    """SPIN parameters, by the oracle's keyword names."""
    return {
        "block_size": block_size or draw(st.sampled_from(BLOCK_SIZES)),
        "sparsity": draw(
            st.one_of(
                st.sampled_from((0.5, 0.4, 0.0, 0.99, 0.8)),
                st.floats(0.0, 0.999, allow_nan=False),
            )
        ),
        "ema_decay": draw(st.sampled_from((0.5, 0.0, 0.9))),
        "exploration": draw(st.sampled_from((0.05, 0.5, 0.0, 0.05, 0.5, 1.0))),
        "pooling": draw(st.sampled_from(poolings)),
        "reduction": draw(st.sampled_from(reductions)),
        "exploration_policy": draw(st.sampled_from(("random", "random", "none"))),
        "mask_policy": draw(st.sampled_from(("union", "row0"))),
        "update_policy": draw(st.sampled_from(("prefix", "row0"))),
        "seed": draw(st.one_of(st.integers(0, 9), st.integers(0, 2**63), st.just(2**63))),
        "state_dtype": draw(st.sampled_from(state_dtypes)),
    }


@st.composite
def cases(
    draw: st.DrawFn,
    max_cells: int = 24_000,
    poolings: tuple[str, ...] = ("max", "top4", "mean"),
    reductions: tuple[str, ...] = ("A1", "A1", "A0", "A2"),
    state_dtypes: tuple[str, ...] = ("fp32", "bf16", "log8"),
) -> tuple[Trace, Params]:
    """A trace and parameters that share one block size."""
    params = draw(spin_params(None, poolings, reductions, state_dtypes))
    trace = draw(traces(block_size=params["block_size"], max_cells=max_cells))
    return trace, params


def write_trace(path: str | os.PathLike[str], trace: Trace, source: str | None = None) -> None:
    """Writes a `spin-trace/1` file; scores may be float32 or float16."""
    metadata = {
        "format": "spin-trace/1",
        "ratio": str(trace["ratio"]),
        "top_k": str(trace["top_k"]),
        "layers": ",".join(str(layer) for layer in trace["layers"]),
        "sequence_id": str(trace["sequence_id"]),
    }
    if source is not None:
        metadata["source"] = source
    tensors = {name: np.ascontiguousarray(trace[name]) for name in ("scores", "positions")}
    tensors["accepted"] = np.ascontiguousarray(trace["accepted"])
    if tensors["scores"].dtype not in (np.float32, np.float16):
        raise ValueError("scores must be float32 or float16")
    save_file(tensors, os.fspath(path), metadata=metadata)
