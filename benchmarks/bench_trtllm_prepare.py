# SPDX-License-Identifier: Apache-2.0
"""What SPIN adds on the host to a decode step of TensorRT-LLM: the hook on `Indexer.prepare`.

A captured graph runs without Python, so this is all that a replayed step costs the host. It is
measured around a `prepare` that does nothing, on metadata of DeepSeek-V4-Flash's shape (21 indexer
layers) with tensors on the CPU, in four situations: the rows of the step before; all of them in
another order; one request finished and another joined; the same, and the new one prefills in four
chunks before, while the others decode. Long sequences change nothing here: no figure depends on
them.

    python benchmarks/bench_trtllm_prepare.py [--sequences 96] [--steps 4000]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from spin_trtllm.config import SpinConfig
from spin_trtllm.hosts.trtllm import indexer as hooks
from spin_trtllm.hosts.trtllm.backend import METADATA_ATTRIBUTES
from spin_trtllm.hosts.trtllm.counters import Counters

RESULTS = Path(__file__).parent / "results"
LAYERS = tuple(range(2, 43, 2))
RATIO, TOP_K, PAGE_TOKENS, PAGES = 4, 512, 256, 64
CHUNKS = 4  # steps that a prompt takes to prefill

Step = tuple[list[int], list[int]]  # request ids in prefill, and decoding


class Indexer:
    """What upstream's indexer does in `prepare` is not measured."""

    @staticmethod
    def prepare(metadata: Any) -> None:
        """Nothing."""

    @staticmethod
    def prepare_scheduler_metadata(metadata: Any) -> None:
        """Nothing."""

    def sparse_attn_indexer(
        self,
        metadata: Any,
        hidden_states: Any,
        q_fp8: Any,
        k_fp8: Any,
        k_scale: Any,
        weights: Any,
        q_scale: Any = None,
        is_generation: Any = None,
    ) -> Any:
        """Never called here."""


class Manager:
    """A KV-cache manager: its fields, and an identity to refer to."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class TopK:
    """Only its signature is looked at."""

    def forward(self, scores: Any, output_indices: Any, *, is_prefill: bool) -> Any:
        """Never called here."""


def metadata_of(sequences: int) -> SimpleNamespace:
    """Metadata and manager of a server for `sequences` sequences."""
    manager = Manager(
        pp_layers=list(LAYERS),
        index_head_dim=128,
        tokens_per_block=PAGE_TOKENS,
        max_batch_size=sequences,
        get_indexer_k_cache_buffers=None,
    )
    metadata = SimpleNamespace(**dict.fromkeys(METADATA_ATTRIBUTES))
    metadata.kv_cache_manager, metadata.compress_ratios = manager, [RATIO] * (LAYERS[-1] + 1)
    metadata.max_draft_tokens, metadata.sparse_mla_topk = 0, TOP_K
    metadata.skip_indexer_for_gen_reqs = metadata.use_expanded_buffers_for_mtp = False
    for name, shape in (
        ("kv_lens_cuda_2d", (sequences, 1)),
        ("indexer_k_cache_block_offsets", (sequences, PAGES)),
        ("scheduler_metadata_buffer", (133, 2)),
        ("scheduler_metadata_buffer_full_next_n", (133, 2)),
        ("scheduler_metadata_buffer_expanded", (133, 2)),
    ):
        setattr(metadata, name, torch.zeros(shape, dtype=torch.int32))
    return metadata


def set_step(metadata: SimpleNamespace, step: Step, tokens: int) -> None:
    """What the host has written when it calls `Indexer.prepare`."""
    contexts, rows = step
    metadata.request_ids = contexts + rows
    metadata.num_contexts, metadata.num_ctx_tokens = len(contexts), 64 * len(contexts)
    metadata.num_generations, metadata.num_seqs = len(rows), len(contexts) + len(rows)
    metadata.num_tokens = metadata.num_ctx_tokens + len(rows)
    cached = [tokens + 7 * (n % 11) for n in metadata.request_ids]
    metadata.kv_cache_params = SimpleNamespace(num_cached_tokens_per_seq=cached)


def unchanged(rows: list[int], _: random.Random) -> Iterator[Step]:
    """The same rows for ever."""
    while True:
        yield [], rows


def permuted(rows: list[int], rng: random.Random) -> Iterator[Step]:
    """The same requests, every step in another order."""
    while True:
        rng.shuffle(rows)
        yield [], list(rows)


def replaced(rows: list[int], rng: random.Random) -> Iterator[Step]:
    """Every step one request ends, those after it move up, and a new one joins at the end."""
    while True:
        rows.pop(rng.randrange(len(rows)))
        rows.append(max(rows) + 1)
        yield [], list(rows)


def prefilled(rows: list[int], rng: random.Random) -> Iterator[Step]:
    """One request ends, and the next prefills in `CHUNKS` steps before it joins."""
    while True:
        rows.pop(rng.randrange(len(rows)))
        number = max(rows) + 1
        for _ in range(CHUNKS):
            yield [number], list(rows)
        rows.append(number)
        yield [], list(rows)


CASES: dict[str, Callable[[list[int], random.Random], Iterator[Step]]] = {
    "unchanged": unchanged,
    "permuted": permuted,
    "one_replaced": replaced,
    "one_prefilled": prefilled,
}


def measure(case: str, sequences: int, steps: int) -> dict[str, float]:
    """Microseconds a call of the hooked `prepare`, less a call of the original."""
    module: Any = ModuleType("bench.dsa.indexer")
    module.Indexer, module.TopK = Indexer, TopK
    metadata = metadata_of(sequences)
    lives = CASES[case](list(range(sequences, 2 * sequences)), random.Random(0))
    config = SpinConfig(state_dtype="bf16")
    counters = Counters()
    hooks.patch(module, config, "host", counters)
    try:
        times = [_time_step(metadata, next(lives), t) for t in range(steps)]
    finally:
        hooks.unpatch()
    if not counters.snapshot().sparse_rows:
        raise SystemExit(f"SPIN was not on: {counters.snapshot()}")
    bare = [_time_step(metadata, next(lives), t) for t in range(200)]
    base, kept = statistics.median(bare), times[steps // 10 :]  # the first ones make the engine
    low, middle, high = np.percentile(kept, (5, 50, 95)) - base
    return {"median_us": round(middle, 2), "p5_us": round(low, 2), "p95_us": round(high, 2)}


def _time_step(metadata: SimpleNamespace, step: Step, index: int) -> float:
    set_step(metadata, step, 4096 + index)
    start = time.perf_counter_ns()
    Indexer.prepare(metadata)
    return (time.perf_counter_ns() - start) / 1000


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")


def main() -> None:
    """Measure every case, print it and save the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=96)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--output", type=Path, default=RESULTS / "trtllm-prepare-cpu.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = {name: measure(name, options.sequences, options.steps) for name in CASES}
    for name, found in cases.items():
        print(f"{name:<14} {found['median_us']:6.1f} us ({found['p5_us']} to {found['p95_us']})")
    result = {
        "what": "host time of the hook on Indexer.prepare, beyond upstream's own; 5th, 50th, 95th "
        "percentile of single calls",
        "shape": {"sequences": options.sequences, "layers": len(LAYERS), "steps": options.steps},
        "cases": cases,
        "cpu": _cpu(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "date": date.today().isoformat(),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
