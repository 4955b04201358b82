# SPDX-License-Identifier: Apache-2.0
"""A decode step of TensorRT-LLM's indexer, hooked by SPIN or dense, with the same host kernels.

TensorRT-LLM is not needed: the tests' stand-in (`tests/trtllm/hook_standin.py`) runs its decode
flow, `Indexer.prepare` outside graphs, `on_update_kv_lens` and one `sparse_attn_indexer` a layer in
one CUDA graph. The host's kernels are DeepGEMM's for scores, as in TensorRT-LLM, and FlashInfer's
radix top-k for lengths (`radix_topk_ragged_transform`). **TensorRT-LLM's own top-k, the custom op
`indexer_topk_decode`, comes with TensorRT-LLM alone and is not measured here.** Without a built
FlashInfer (`FLASHINFER_TOPK=.../topk.so`) torch.topk selects.

- `spin_us`: a step under SPIN; `dense_us`, `peers_us`: the same stand-in without hooks. All are
  microseconds a layer (step / layers), the median over replays; `spread` is (max - min) / median
  of SPIN's.
- `backend`: `host` scores and selects with the host's kernels on the kept blocks, `fused` with this
  package's. `auto` says whether `TLLM_SPIN_BACKEND=auto` runs SPIN in this cell, with this backend.
- `stages_us`: parts of a step in graphs of their own, microseconds a layer.

Between replays the sequences move on by a token and the queries drift, outside the timing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / folder) for folder in ("", "gpu", "trtllm")]
import hook_standin  # noqa: E402
from hook_witness import engine_behind  # noqa: E402
from host_kernels import OwnKernels, best_kernels, capture, flashinfer_topk  # noqa: E402

from spin_trtllm import native  # noqa: E402
from spin_trtllm.config import SpinConfig  # noqa: E402
from spin_trtllm.hosts.trtllm import indexer as hooks  # noqa: E402
from spin_trtllm.hosts.trtllm.backend import DecodeEngine  # noqa: E402
from spin_trtllm.hosts.trtllm.counters import Counters  # noqa: E402

LAYERS = tuple(range(2, 43, 2))  # of V4-Flash
HEADS, KEY_DIM, PAGE, RATIO, TOP_K = 64, 128, 64, 4, 512
SPARSITY = 0.4
CELLS = [(batch, slots) for slots in (32_768, 131_072) for batch in (1, 16, 96)]
BACKENDS = ("host", "fused")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOF_GB_S = 4800  # H200's memory
SCORE_BYTES, STATE_BYTES = 4, 2 * 2  # fp32; V and D in bf16
RESULTS = Path(__file__).parent / "results" / "h200-trtllm-step.json"


class Cell:
    """Keys and queries of one line of the table, for every host that is measured."""

    def __init__(self, batch: int, slots: int, kernels: OwnKernels) -> None:
        self.batch, self.slots, self.kernels = batch, slots, kernels
        width = slots // PAGE
        self.tables = torch.randperm(batch * width).int().view(batch, width)
        shape = (batch * width, PAGE, 1, native.KEY_BYTES)
        keys = [torch.empty(shape, dtype=torch.uint8, device=DEVICE) for _ in LAYERS]
        for part in keys[0].view(len(keys[0]), -1).split(1 << 15):
            values = torch.randn(len(part), PAGE * KEY_DIM, device=DEVICE, dtype=torch.float16)
            part[:, : PAGE * KEY_DIM] = values.to(torch.float8_e4m3fn).view(torch.uint8)
            scales = torch.rand(len(part), PAGE, device=DEVICE) + 0.5
            part[:, PAGE * KEY_DIM :] = scales.view(torch.uint8)
        for n in range(1, len(LAYERS)):  # other pages behind the same table
            keys[n].copy_(keys[0].roll(n * 7919, 0))
        self.keys = dict(zip(LAYERS, keys, strict=True))
        shape = (len(LAYERS), batch, HEADS, KEY_DIM)
        self.drifting = torch.randn(shape, device=DEVICE, dtype=torch.float16)
        self.query = self.drifting.to(torch.float8_e4m3fn)
        self.weights = torch.rand(len(LAYERS), batch, HEADS, device=DEVICE)


class Model:
    """The stand-in's indexers over a cell's keys, with sequences almost as long as it allows."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.manager = hook_standin.Manager(
            LAYERS,
            pages=0,
            tokens_per_block=PAGE * RATIO,
            ratio=RATIO,
            max_batch_size=cell.batch,
            max_seq_len=cell.slots * RATIO,
            device=DEVICE,
        )
        self.manager.keys = cell.keys
        kernels = cell.kernels
        self.metadata = hook_standin.Metadata(
            self.manager, ratio=RATIO, top_k=TOP_K, drafts=0, kernels=kernels
        )
        self.metadata.is_cuda_graph = True
        self.indexers = [hook_standin.Indexer(n, TOP_K, RATIO, kernels) for n in LAYERS]
        self.hidden = torch.zeros(cell.batch, 1, device=DEVICE)
        self.ids = list(range(1000, 1000 + cell.batch))
        self.tokens = RATIO * (cell.slots - PAGE)
        self.move()

    def move(self) -> None:
        """A token further, with queries that resemble the last ones."""
        cell = self.cell
        self.tokens += 1
        cell.drifting.mul_(0.95).add_(torch.randn_like(cell.drifting), alpha=0.3)
        cell.query.copy_(cell.drifting)
        self.metadata.prepare(
            self.ids,
            [self.tokens] * cell.batch,
            list(cell.tables),  # type: ignore[arg-type]  # rows of a tensor do as well
            contexts=[],
            next_n=1,
        )

    def forward(self) -> None:
        """What TensorRT-LLM captures of a step, as far as the indexer goes."""
        cell, none = self.cell, self.hidden
        self.metadata.on_update_kv_lens()
        for n, indexer in enumerate(self.indexers):
            indexer.sparse_attn_indexer(
                self.metadata, self.hidden, cell.query[n], none, none, cell.weights[n]
            )

    def engine(self) -> DecodeEngine:
        """SPIN's part."""
        return engine_behind(hook_standin.Indexer, self.metadata)


def timed(
    run: Callable[[], object], replays: int, move: Callable[[], object] = lambda: None
) -> tuple[float, float]:
    """Median microseconds of a graph's replay, and their relative spread."""
    for _ in range(3):  # cold, then warm; and everything that is made once has been made
        move()
        run()
    replay = capture(run, DEVICE)
    times = []
    for _ in range(replays + 2):
        move()
        times.append(_once(replay))
    middle = statistics.median(times[2:])
    return middle, (max(times[2:]) - min(times[2:])) / middle


def show_kernels(title: str, model: Model) -> None:
    """Kernels of a step on the terminal: how many a layer, and their microseconds a layer."""
    replay = capture(model.forward, DEVICE)
    model.move()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        replay()
        torch.cuda.synchronize()
    found = [e for e in seen.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    total = sum(e.count for e in found) / len(LAYERS)
    print(f"# {title}: {total:.1f} launches a layer")
    for event in sorted(found, key=lambda e: -e.self_device_time_total):
        each, spent = event.count / len(LAYERS), event.self_device_time_total / len(LAYERS)
        print(f"#   {spent:8.2f} us {each:5.1f} x {event.key[:90]}")


def _once(replay: Callable[[], object]) -> float:
    if DEVICE == "cpu":
        start = time.perf_counter()
        replay()
        return (time.perf_counter() - start) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000


def hook(backend: str) -> Counters:
    """Hook the stand-in."""
    counters = Counters()
    config = SpinConfig(target_sparsity=SPARSITY, top_k=TOP_K, state_dtype="bf16")
    hooks.unpatch()
    hooks.patch(hook_standin.module(), config, backend, counters)
    return counters


def choice_of_auto(cell: Cell) -> str | None:
    """The backend with which `auto` runs SPIN in a cell, None if it leaves the host dense."""
    counters = hook("auto")
    model = Model(cell)
    for _ in range(2):
        model.forward()
        model.move()
    counts = counters.snapshot()
    if counts.dense_rows or not counts.steps:
        return None
    return "fused" if model.engine().fused else "host"


# ---- parts of a step ----


def each_layer(run: Callable[[int], object]) -> Callable[[], None]:
    """`run` for all layers."""

    def run_all() -> None:
        for n in range(len(LAYERS)):
            run(n)

    return run_all


def select_stages(model: Model, lengths: Tensor, table: Callable[[int], Tensor]) -> dict[str, Any]:
    """The host's scoring and top-k on `lengths[n]` slots, int32 `[layers, G]`, of a page table."""
    cell, kernels = model.cell, model.cell.kernels
    schedules = [kernels.schedule(one.unsqueeze(1)) for one in lengths]
    tokens = lengths * RATIO
    chosen = torch.zeros(cell.batch, TOP_K, dtype=torch.int32, device=DEVICE)

    def score(n: int) -> Tensor:
        return kernels.logits(
            cell.query[n].unsqueeze(1),
            cell.keys[LAYERS[n]],
            cell.weights[n].unsqueeze(1),
            lengths[n].unsqueeze(1),
            table(n),
            schedules[n],
            cell.slots,
        )

    logits = score(0).clone()

    def top_k(n: int) -> object:
        return model.indexers[n].top_k(
            logits,
            chosen,
            is_prefill=False,
            sequence_lengths=tokens[n],
            scan_lengths=lengths[n],
        )

    return {"scoring": score, "top_k": top_k, "logits": logits, "columns": chosen}


def dense_stages(model: Model) -> dict[str, Callable[[], object]]:
    """Parts of the dense step; its schedule is made once a step, not once a layer."""
    metadata = model.metadata
    lengths = metadata.gen_indexer_kv_lens_cuda_runtime.repeat(len(LAYERS), 1)
    table = metadata.indexer_k_cache_block_offsets[: model.cell.batch]
    parts = select_stages(model, lengths, lambda n: table)
    return {
        "dense_schedule_once": metadata.on_update_kv_lens,
        "dense_scoring": each_layer(parts["scoring"]),
        "dense_top_k": each_layer(parts["top_k"]),
    }


def host_stages(model: Model) -> dict[str, Callable[[], object]]:
    """Parts of a step with the host's kernels on the kept blocks."""
    step, metadata = model.engine().step, model.metadata
    views = [step.layer(n) for n in range(len(LAYERS))]
    lengths = torch.stack([view.kept_slots for view in views])
    parts = select_stages(model, lengths, lambda n: views[n].pages)  # type: ignore[arg-type, return-value]
    stages = {
        "schedule": each_layer(lambda n: hook_standin.Indexer.prepare_scheduler_metadata(metadata)),
        "scoring": each_layer(parts["scoring"]),
        "top_k": each_layer(parts["top_k"]),
    }
    if hasattr(step, "adopt"):  # on a GPU: the scores' copy and the map back to slots at once
        stages["adopt"] = each_layer(lambda n: step.adopt(n, parts["logits"], parts["columns"]))
    return stages


def fused_stages(model: Model) -> dict[str, Callable[[], object]]:
    """Parts of a step with this package's kernels."""
    cell, step = model.cell, model.engine().step
    table = model.metadata.indexer_k_cache_block_offsets[: cell.batch]

    def score(n: int) -> None:
        keys = cell.keys[LAYERS[n]]
        query, weights = cell.query[n].unsqueeze(1), cell.weights[n].unsqueeze(1)
        step.score(n, query, weights, keys.view(len(keys), -1), table)

    return {"scoring": each_layer(score), "top_k": each_layer(step.top_k)}


STAGES = {"host": host_stages, "fused": fused_stages}


def stage_times(
    stages: dict[str, Callable[[], object]], replays: int, model: Model | None = None
) -> dict[str, float]:
    """Microseconds a layer of each part; `begin`, of a hooked model, needs tokens that move on."""
    times = {name: timed(run, replays)[0] / len(LAYERS) for name, run in stages.items()}
    if model is not None:
        engine = model.engine()
        begin = timed(lambda: engine.begin(model.metadata, 1), replays, model.move)[0]
        times = {"begin": begin / len(LAYERS), **times}
    return times


# ---- the table ----


def measure(
    batch: int, slots: int, backends: list[str], replays: int, with_kernels: bool
) -> list[dict[str, Any]]:
    """One row for each backend."""
    cell = Cell(batch, slots, best_kernels(DEVICE))
    hooks.unpatch()
    dense = Model(cell)
    dense_us, dense_spread = timed(dense.forward, replays, dense.move)
    if with_kernels:
        show_kernels("dense", dense)
    shared = stage_times(dense_stages(dense), replays)
    auto = choice_of_auto(cell)
    rows = []
    for backend in backends:
        hook(backend)
        model = Model(cell)
        spin_us, spread = timed(model.forward, replays, model.move)
        if with_kernels:
            show_kernels(backend, model)
        engine = model.engine()
        entries = slice(len(LAYERS) * batch)
        visible = engine.step.visible_slots[entries].float().mean().item()
        kept = engine.step.kept_slots[entries].float().mean().item()
        state_bytes, buffer_bytes = engine.bytes
        rows.append(
            {
                "backend": backend,
                "auto": auto == backend,
                "batch": batch,
                "slots": slots,
                "rows": 1,
                "sparsity": SPARSITY,
                "kept": kept / visible,
                "spin_us": spin_us / len(LAYERS),
                "dense_us": dense_us / len(LAYERS),
                "peers_us": dense_us / len(LAYERS),
                "ratio_dense": dense_us / spin_us,
                "ratio_peers": dense_us / spin_us,
                "spread": spread,
                "dense_spread": dense_spread,
                "step_us": spin_us,
                "dense_step_us": dense_us,
                "state_bytes": state_bytes,
                "buffer_bytes": buffer_bytes,
                **_bandwidth(backend, batch, visible, kept, spin_us, dense_us),
                "stages_us": shared | stage_times(STAGES[backend](model), replays, model),
            }
        )
    hooks.unpatch()
    return rows


def _bandwidth(
    backend: str, batch: int, visible: float, kept: float, spin_us: float, dense_us: float
) -> dict[str, float]:
    """Bytes that a step has to move, and what they come to in GB/s and of the memory's roof.

    Keys are read, scores written and read once by the top-k. SPIN reads the averages of every slot,
    and of a kept one reads the score again and writes them; `host` copies the scores once more.
    """
    slot = native.KEY_BYTES + 2 * SCORE_BYTES
    copies = 2 * SCORE_BYTES if backend == "host" else 0
    dense = len(LAYERS) * batch * visible * slot
    spin = kept * (slot + SCORE_BYTES + STATE_BYTES + copies) + visible * STATE_BYTES
    spin *= len(LAYERS) * batch
    return {
        "spin_bytes": spin,
        "dense_bytes": dense,
        "spin_gb_s": spin / spin_us / 1000,
        "dense_gb_s": dense / dense_us / 1000,
        "spin_of_roof": spin / spin_us / 1000 / ROOF_GB_S,
        "dense_of_roof": dense / dense_us / 1000 / ROOF_GB_S,
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The file that is kept."""
    own_top_k = "torch.topk" if flashinfer_topk() is None else "FlashInfer's radix top-k"
    return {
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else None,
        "layers": len(LAYERS),
        "top_k": TOP_K,
        "host": "stand-in of TensorRT-LLM's indexer, not TensorRT-LLM",
        "host_scores": best_kernels(DEVICE).name,
        "host_top_k": f"{own_top_k}, in place of TensorRT-LLM's indexer_topk_decode",
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "spin": native.load().spin_version() if native.has_library() else None,
            "deep_gemm": version("sgl-deep-gemm"),
            "flashinfer": os.environ.get("FLASHINFER_VERSION"),
        },
        "rows": rows,
    }


def show(row: dict[str, Any]) -> None:
    """A row on the terminal, rounded."""
    numbers = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
    numbers["stages_us"] = {k: round(v, 2) for k, v in row["stages_us"].items()}
    print(json.dumps(numbers), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help=f"default on a GPU: {RESULTS.name}")
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument("--cells", help="batch,slots;... instead of the whole table")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--kernels", action="store_true", help="print each step's kernels, too")
    args = parser.parse_args()
    if args.kernels and DEVICE == "cpu":
        parser.error("--kernels needs a GPU")
    torch.manual_seed(0)
    cells = CELLS
    if args.cells:
        cells = [tuple(int(n) for n in cell.split(",")) for cell in args.cells.split(";")]
    rows: list[dict[str, Any]] = []
    for batch, slots in cells:
        start = time.perf_counter()
        found = measure(batch, slots, args.backends.split(","), args.replays, args.kernels)
        for row in found:
            show(row)
        print(f"# {batch} x {slots}: {time.perf_counter() - start:.1f} s", flush=True)
        rows += found
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    output = args.output or (RESULTS if DEVICE == "cuda" else None)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report(rows), indent=2) + "\n")


if __name__ == "__main__":
    main()
