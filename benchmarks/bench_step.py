# SPDX-License-Identifier: Apache-2.0
"""A whole decode step of the indexer, SPIN against what people would use instead.

One CUDA graph holds a step of all layers, each with its own key cache and state. Figures are
microseconds a layer (step / layers), the median over replays; `spread` is (max - min) / median of
SPIN's. Between replays the sequences move on by a token and the queries drift, outside the timing.

- `spin`: observe, predict and select once, then score and top-k in each layer.
- `spin_fp8`: the same with the less exact fp8 tensor cores, which DeepGEMM uses, too.
- `dense`: the same kernels on every block, without SPIN's state.
- `peers`: DeepGEMM's fp8 scoring (its schedule once a step) and FlashInfer's top-k.
- `spin_by_deep_gemm`: SPIN's step with DeepGEMM scoring the page table that SPIN compacted;
  `ratio_score` compares what the two scorers take within it. Alone and back to back, `score_us`,
  the exact one draws more power than an H200 may take for long, and slows down.
- `torch_topk`: DeepGEMM's scoring and torch.topk.

`bytes_layer` is what a SPIN step has to move in a layer, `roof_fraction` the share of the memory's
rate that this needs in the measured time; likewise for `dense`.

DeepGEMM takes two rows at most on this generation; more rows become sequences of their own.
FlashInfer compiles its top-k at first use; FLASHINFER_TOPK may name a built `topk.so` of it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spin_trtllm import native
from spin_trtllm.config import SpinConfig
from spin_trtllm.gpu_step import GpuState, GpuStep

LAYERS, HEADS, KEY_DIM, PAGE, RATIO, TOP_K = 21, 64, 128, 64, 4, 512
SPARSITY = 0.4
ROOF_BYTES_PER_S = 4.8e12  # HBM3e of an H200, data sheet
CELLS = [
    (1, 32_768, 1),
    (1, 131_072, 1),
    (1, 262_144, 1),
    (8, 131_072, 1),
    (16, 131_072, 1),
    (32, 131_072, 1),
    (96, 131_072, 1),
    (16, 131_072, 4),
    (96, 131_072, 4),
]
RESULTS = Path(__file__).parent / "results" / "h200-step.json"

try:
    import deep_gemm
except ImportError:
    deep_gemm = None


def load_flashinfer_topk() -> Callable[..., None] | None:
    """FlashInfer's radix top-k for SM90, as `flashinfer.top_k` calls it; None if not there."""
    built = os.environ.get("FLASHINFER_TOPK")
    try:
        if built:
            import tvm_ffi

            return tvm_ffi.load_module(built).radix_topk
        from flashinfer.topk import gen_topk_module

        return gen_topk_module().build_and_load().radix_topk
    except ImportError:
        return None


class Cell:
    """Caches, states and inputs of one line of the table."""

    def __init__(self, batch: int, slots: int, rows: int) -> None:
        self.batch, self.slots, self.rows = batch, slots, rows
        config = SpinConfig(target_sparsity=SPARSITY, top_k=TOP_K, state_dtype="bf16")
        self.state = GpuState(range(LAYERS), sequences=batch, slots=slots)
        self.step = GpuStep(
            config, self.state, ratio=RATIO, sequences=batch, rows=rows, page_slots=PAGE
        )
        self.lanes = torch.arange(batch, device="cuda")
        self.ids = self.lanes + 1000
        first = RATIO * (slots - 64) - 1
        self.positions = (first + torch.arange(rows, device="cuda")).repeat(batch, 1)
        width = slots // PAGE
        pages = batch * width
        self.table = torch.randperm(pages, device="cuda").int().view(batch, width)
        self.caches = [
            torch.empty(pages, PAGE * native.KEY_BYTES, dtype=torch.uint8, device="cuda")
            for _ in range(LAYERS)
        ]
        for part in self.caches[0].split(1 << 15):
            keys = torch.randn(len(part), PAGE * KEY_DIM, device="cuda", dtype=torch.float16)
            part[:, : PAGE * KEY_DIM] = keys.to(torch.float8_e4m3fn).view(torch.uint8)
            scales = torch.rand(len(part), PAGE, device="cuda") + 0.5
            part[:, PAGE * KEY_DIM :] = scales.view(torch.uint8)
        for n in range(1, LAYERS):  # other pages behind the same table: other keys to a sequence
            self.caches[n].copy_(self.caches[0].roll(n * 7919, 0))
        shape = (LAYERS, batch, rows, HEADS, KEY_DIM)
        self.drifting = torch.randn(shape, device="cuda", dtype=torch.float16)
        self.query = self.drifting.to(torch.float8_e4m3fn)
        self.weights = torch.rand(LAYERS, batch, rows, HEADS, device="cuda")
        self.visible = torch.empty(batch, dtype=torch.int32, device="cuda")
        self.row_slots = torch.empty(batch, rows, dtype=torch.int32, device="cuda")
        self.best = torch.empty(batch, rows, TOP_K, dtype=torch.int32, device="cuda")
        self.logits = torch.empty(batch * rows, slots, device="cuda")
        next_n = rows if rows <= 2 else 1
        self.repeats, self.next_n = rows // next_n, next_n
        self.lengths = torch.empty(batch * self.repeats, next_n, dtype=torch.int32, device="cuda")
        self.peer_table = self.table.repeat_interleave(self.repeats, 0)
        self.row_states = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
        self.values = torch.empty(batch * rows, TOP_K, device="cuda")
        self.indices = torch.empty(batch * rows, TOP_K, dtype=torch.int32, device="cuda")
        self.move()

    def move(self) -> None:
        """A token further, and queries that resemble the last ones."""
        self.positions += 1
        self.drifting.mul_(0.95).add_(torch.randn_like(self.drifting), alpha=0.3)
        self.query.copy_(self.drifting)
        seen = (self.positions + 1) // RATIO
        self.visible.copy_(seen[:, -1])
        self.row_slots.copy_(seen)
        self.lengths.copy_(self.visible.repeat_interleave(self.repeats).unsqueeze(1))

    # ---- what is timed ----

    def begin(self) -> None:
        self.step.begin(self.lanes, self.ids, self.positions, self.table)

    def score(self) -> None:
        for n in range(LAYERS):
            self.step.score(n, self.query[n], self.weights[n], self.caches[n], self.table)

    def top_k(self) -> None:
        for n in range(LAYERS):
            self.step.top_k(n)

    def spin(self, exact: bool = True) -> None:
        self.begin()
        for n in range(LAYERS):
            inputs = (self.query[n], self.weights[n], self.caches[n], self.table)
            self.step.score(n, *inputs, exact=exact)
            self.step.top_k(n)

    def dense(self) -> None:
        stream = native.stream_of(self.logits)
        for n in range(LAYERS):
            native.call(
                "score_slots",
                stream,
                query=self.query[n],
                weights=self.weights[n],
                pages=self.caches[n],
                page_table=self.table,
                visible_slots=self.visible,
                scores=self.logits,
                num_pages=len(self.caches[n]),
                page_table_stride=self.table.shape[1],
                page_table_width=self.table.shape[1],
                score_stride=self.slots,
                sequences=self.batch,
                rows=self.rows,
                heads=HEADS,
                page_slots=PAGE,
                block_size=PAGE,
            )
            native.call(
                "topk_slots",
                stream,
                scores=self.logits,
                row_slots=self.row_slots,
                slots_out=self.best,
                score_stride=self.slots,
                entries=self.batch,
                rows=self.rows,
                blocks=self.slots // PAGE,
                block_size=PAGE,
                top_k=TOP_K,
            )

    def deep_gemm_scores(self, n: int, lengths: Tensor, table: Tensor, schedule: Tensor) -> Tensor:
        query = self.query[n].view(-1, self.next_n, HEADS, KEY_DIM)
        cache = self.caches[n].view(-1, PAGE, 1, native.KEY_BYTES)
        return deep_gemm.fp8_paged_mqa_logits(
            query,
            cache,
            self.weights[n].view(-1, HEADS),
            lengths,
            table,
            schedule,
            self.slots,
            clean_logits=False,
        )

    def schedule(self, lengths: Tensor) -> Tensor:
        return deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, deep_gemm.get_num_sms())

    def peers(self, radix_topk: Callable[..., None] | None) -> None:
        schedule = self.schedule(self.lengths)
        for n in range(LAYERS):
            logits = self.deep_gemm_scores(n, self.lengths, self.peer_table, schedule)
            if radix_topk is None:
                torch.topk(logits, TOP_K, sorted=False)
            else:
                radix_topk(
                    logits,
                    self.indices,
                    self.values,
                    self.row_states,
                    TOP_K,
                    False,
                    False,
                    0,
                    False,
                )

    def spin_by_deep_gemm(self) -> None:
        """SPIN's step with DeepGEMM in the place of `score_slots`; nothing is learned from it."""
        self.begin()
        for n in range(LAYERS):
            view = self.step.layer(n)
            kept = view.kept_slots.unsqueeze(1)
            scores = self.deep_gemm_scores(n, kept, view.pages, self.schedule(kept))
            native.call(
                "topk_slots",
                native.stream_of(scores),
                scores=scores,
                block_list=view.block_list,
                row_slots=view.row_slots,
                slots_out=self.best,
                score_stride=scores.stride(0),
                entries=self.batch,
                rows=1,
                blocks=self.step.blocks,
                block_size=PAGE,
                top_k=TOP_K,
            )


def captured(cell: Cell, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of a step that has run twice before, as its sequences went on."""
    for _ in range(2):
        cell.move()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def microseconds(cell: Cell, run: Callable[[], None], replays: int) -> tuple[float, float]:
    """Median time a layer and its relative spread."""
    graph = captured(cell, run)
    times = []
    for _ in range(replays + 2):
        cell.move()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / LAYERS)
    times = times[2:]
    middle = statistics.median(times)
    return middle, (max(times) - min(times)) / middle


def measure(batch: int, slots: int, rows: int, replays: int, radix: Any) -> dict[str, Any]:
    cell = Cell(batch, slots, rows)
    for _ in range(3):
        cell.spin()
        cell.move()
    spin, spread = microseconds(cell, cell.spin, replays)
    warm = bool(cell.step.warm[: LAYERS * batch].all())
    kept = cell.step.kept_slots[: LAYERS * batch].float().mean().item() / slots
    row: dict[str, Any] = {
        "batch": batch,
        "slots": slots,
        "rows": rows,
        "sparsity": SPARSITY,
        "spin_us": spin,
        "spread": spread,
        "warm": warm,
        "kept": kept,
    }
    others: dict[str, Callable[[], None]] = {"dense_us": cell.dense}
    if deep_gemm is not None:
        others["peers_us"] = lambda: cell.peers(radix)
        others["torch_topk_us"] = lambda: cell.peers(None)
    others |= {"begin_us": cell.begin, "score_us": cell.score, "topk_us": cell.top_k}
    others["spin_fp8_us"] = lambda: cell.spin(exact=False)
    if deep_gemm is not None and rows == 1:
        others["spin_by_deep_gemm_us"] = cell.spin_by_deep_gemm
    for name, run in others.items():
        row[name] = microseconds(cell, run, replays)[0]
    row["ratio_dense"] = row["dense_us"] / spin
    if "spin_by_deep_gemm_us" in row:  # each scorer's share of the step that it runs in
        rest = row["begin_us"] + row["topk_us"]
        row["ratio_score"] = (row["spin_by_deep_gemm_us"] - rest) / (spin - rest)
    row["ratio_peers"] = row["peers_us"] / spin if "peers_us" in row else None
    for name, moved in (("spin", spin_bytes(row)), ("dense", dense_bytes(row))):
        row[f"{name}_bytes_layer"] = moved
        row[f"{name}_roof_fraction"] = moved / (row[f"{name}_us"] * 1e-6) / ROOF_BYTES_PER_S
    row["state_bytes_slot"] = cell.state.state_bytes / (LAYERS * (batch + 1) * slots)
    row["step_buffer_bytes"] = cell.step.buffer_bytes
    return row


def spin_bytes(row: dict[str, Any]) -> int:
    """Keys of the kept slots; V and D read, and written back; scores written, and read twice."""
    slots, rows = row["batch"] * row["slots"], row["rows"]
    kept = slots * row["kept"]
    return int(kept * (native.KEY_BYTES + 3 * 4 * rows) + slots * 2 * 2 * 2)


def dense_bytes(row: dict[str, Any]) -> int:
    """All keys; scores written, and read once."""
    return int(row["batch"] * row["slots"] * (native.KEY_BYTES + 2 * 4 * row["rows"]))


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument("--cells", help="batch,slots,rows;... instead of the whole table")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "bench_step: no CUDA device, allowed: a machine with one\n")
    torch.manual_seed(0)
    cells = CELLS
    if args.cells:
        cells = [tuple(int(n) for n in cell.split(",")) for cell in args.cells.split(";")]
    radix = load_flashinfer_topk()
    rows = []
    for batch, slots, draft_rows in cells:
        row = measure(batch, slots, draft_rows, args.replays, radix)
        rows.append(row)
        shown = {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}
        print(json.dumps(shown), flush=True)
        torch.cuda.empty_cache()
    report = {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "roof_bytes_per_s": ROOF_BYTES_PER_S,
        "layers": LAYERS,
        "top_k": TOP_K,
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "spin": native.load().spin_version(),
            "deep_gemm": version("sgl-deep-gemm"),
            "flashinfer": os.environ.get("FLASHINFER_VERSION") or version("flashinfer-python"),
        },
        "rows": rows,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
