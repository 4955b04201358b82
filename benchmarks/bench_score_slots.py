# SPDX-License-Identifier: Apache-2.0
"""score_slots against DeepGEMM's fp8_paged_mqa_logits, dense and on 60% of the blocks.

Every figure is the median over replays of a CUDA graph of 20 calls, per call. `cold` rotates the
calls over distinct pages, more than the L2 cache holds; `hot` repeats one set, as peers' published
tables do. DeepGEMM scores kept blocks through a compacted page table that is made beforehand, and
its schedule is made beforehand too; score_slots reads the block list and plans inside the call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))
from score_slots_cases import EXACT, FAST, KEY_BYTES, KEY_DIM, PORTABLE, Case, load_library

try:
    import deep_gemm
except ImportError:
    deep_gemm = None

CALLS = 20
PAGE = 64
HEADS = 64
COLD_BYTES = 600 << 20
MODES = {"exact": EXACT, "fast": FAST, "portable": PORTABLE}


def microseconds(calls: list[Callable[[], object]], replays: int = 7) -> float:
    """Median time of one call, from graphs that hold all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[2:])


class Pool:
    """Pages of random keys, and page tables over them."""

    def __init__(self, num_pages: int) -> None:
        self.pages = torch.empty(num_pages, PAGE * KEY_BYTES, dtype=torch.uint8, device="cuda")
        for part in self.pages.split(4096):
            keys = torch.randn(len(part), PAGE * KEY_DIM, device="cuda").to(torch.float8_e4m3fn)
            part[:, : PAGE * KEY_DIM] = keys.view(torch.uint8)
            scales = torch.rand(len(part), PAGE, device="cuda") + 0.5
            part[:, PAGE * KEY_DIM :] = scales.view(torch.uint8)

    def tables(self, batch: int, width: int, count: int) -> list[torch.Tensor]:
        order = torch.randperm(len(self.pages), device="cuda").int()
        size = batch * width
        starts = [i * size % (len(order) - size + 1) for i in range(count)]
        return [order[start : start + size].view(batch, width) for start in starts]


def kept_blocks(batch: int, blocks: int, keep: float) -> torch.Tensor:
    """[batch, kept] ascending, the first and the last block among them."""
    priority = torch.rand(batch, blocks, device="cuda")
    priority[:, 0] = priority[:, -1] = 2
    chosen = priority.topk(round(keep * blocks), dim=1).indices
    return chosen.sort(dim=1).values.int()


def bench(
    library, pool: Pool, batch: int, slots: int, rows: int, keep: float, hot: bool, modes: list[str]
) -> dict:
    width = slots // PAGE
    tables = pool.tables(batch, width, 1 if hot else CALLS) * (CALLS if hot else 1)
    query = torch.randn(batch, rows, HEADS, KEY_DIM, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(batch, rows, HEADS, device="cuda")
    visible = torch.full((batch,), slots, dtype=torch.int32, device="cuda")
    blocks = count = None
    kept_slots = slots
    if keep < 1:
        blocks = kept_blocks(batch, width, keep)
        kept_slots = blocks.shape[1] * PAGE
        count = torch.full((batch,), blocks.shape[1], dtype=torch.int32, device="cuda")
    scores = torch.empty(batch * rows, kept_slots, device="cuda")
    result = {
        "batch": batch,
        "slots": slots,
        "rows": rows,
        "keep": keep,
        "cache": "hot" if hot else "cold",
        "mbytes": batch * kept_slots * (KEY_BYTES + 4 * rows) / 1e6,
    }
    for mode in modes:
        cases = [
            Case(
                query, weights, pool.pages, table, visible, blocks, count, scores, PAGE, MODES[mode]
            )
            for table in tables
        ]
        result[mode] = microseconds([lambda case=case: case.run(library) for case in cases])
    if deep_gemm is not None:
        if blocks is not None:
            tables = [table.gather(1, blocks.long()) for table in tables[: 1 if hot else None]]
            tables *= CALLS if hot else 1
        next_n = rows if rows <= 2 else 1  # what it has on SM90; more rows become sequences
        repeats = rows // next_n
        q = query.view(batch * repeats, next_n, HEADS, KEY_DIM)
        tables = [table.repeat_interleave(repeats, 0) for table in tables]
        lengths = torch.full((batch * repeats, next_n), kept_slots, dtype=torch.int32).cuda()
        cache = pool.pages.view(-1, PAGE, 1, KEY_BYTES)
        w = weights.view(-1, HEADS)
        sms = deep_gemm.get_num_sms()
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, sms)
        result["deepgemm"] = microseconds(
            [
                lambda table=table: deep_gemm.fp8_paged_mqa_logits(
                    q, cache, w, lengths, table, schedule, kept_slots, clean_logits=False
                )
                for table in tables
            ]
        )
        out = deep_gemm.fp8_paged_mqa_logits(
            q, cache, w, lengths, tables[-1], schedule, kept_slots, clean_logits=False
        )
        ours = scores.view(batch * rows, kept_slots)
        result["difference"] = ((out - ours).norm() / ours.norm()).item()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows here, one a line")
    parser.add_argument("--modes", default="portable,fast,exact")
    parser.add_argument("--quick", action="store_true", help="a few cells only")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "bench_score_slots: no CUDA device, allowed: a machine with one\n")
    modes = args.modes.split(",")
    library = load_library() or parser.exit(1, "the kernel library has not been built\n")
    torch.manual_seed(0)
    cells = [(1, 32768), (1, 131072), (1, 262144), (8, 131072), (16, 131072), (96, 131072)]
    if args.quick:
        cells = [(1, 131072), (16, 131072), (96, 131072)]
    pool = Pool(96 * 131072 // PAGE)
    runs = [
        (batch, slots, 1, keep, hot)
        for batch, slots in cells
        for keep in (1.0, 0.6)
        for hot in ((True, False) if batch == 1 else (True,))
    ]
    if not args.quick:
        runs += [(16, 131072, 2, 0.6, True), (16, 131072, 4, 0.6, True), (96, 131072, 4, 0.6, True)]
    head = f"{'B':>3} {'slots':>7} {'R':>1} {'keep':>4} {'L2':>4}"
    print(head, *(f"{mode:>9}" for mode in modes), " deepgemm  ratio   GB/s  differ", flush=True)
    for batch, slots, rows, keep, hot in runs:
        row = bench(library, pool, batch, slots, rows, keep, hot, modes)
        best = row[modes[-1]]
        peer = row.get("deepgemm", float("nan"))
        print(
            f"{batch:3} {slots:7} {rows} {keep:4} {row['cache']:>4}",
            *(f"{row[mode]:9.2f}" for mode in modes),
            f"{peer:9.2f} {peer / best:6.3f} {row['mbytes'] / best * 1e3:6.0f}",
            f"{row.get('difference', float('nan')):.1e}",
            flush=True,
        )
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps({"gpu": torch.cuda.get_device_name(), **row}) + "\n")


if __name__ == "__main__":
    main()
