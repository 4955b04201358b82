# SPDX-License-Identifier: Apache-2.0
"""SPIN's TensorRT nodes on a GPU: host time of `enqueue`, and a step against torch's launches.

A step is all layers of DeepSeek-V4 Flash in one captured CUDA graph, one node a layer as in an
engine. Opposite are the same kernels, layer by layer, launched by `GpuStep` (`torch_us`); the
graphs are replayed in turns on the same inputs. `all_layers_us` is `GpuStep` with its first two
kernels run for all layers at once, which a network of nodes cannot do.

A node that is enqueued onto a stream which is not being captured launches a graph of its own.
`uncaptured` has steps of such calls: `SpinIndexer` as it is, and where it was not told its shapes,
so that it makes no graph and launches its kernels one by one (`alone`).

Needs the plugin, and the host that plays TensorRT's part (see tests/plugin_host.py):

    PYTHONPATH=. python benchmarks/bench_tensorrt_plugin.py
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_step import LAYERS, PAGE, RATIO, SPARSITY, TOP_K, Cell, captured
from torch import Tensor

from spin_trtllm import native
from spin_trtllm.config import SpinConfig
from spin_trtllm.gpu_step import GpuState, GpuStep

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from plugin_host import Binding, find_host

CELLS = [(1, 32_768, 1), (1, 131_072, 1), (16, 131_072, 1), (16, 131_072, 4), (96, 131_072, 1)]
RESULTS = Path(__file__).parent / "results" / "h200-tensorrt-plugin.json"
ENQUEUE_BAR_US, STEP_BAR = 15.0, 1.03
# Of enqueue: a step's nodes onto an idle stream, as an engine enqueues them; and many at once, so
# that the device still works at what was launched before.
BURSTS = {"enqueue_us": (LAYERS, 49), "enqueue_busy_us": (100, 10)}  # calls, rounds
NAMES = ("SpinIndexer", "SpinPredictBlocks", "SpinSparseIndexer", "SpinObserve")
MOST = "SpinIndexer, 16-bit query, mean pooling"  # six launches, the most of a node


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


class Nodes:
    """Every node of every layer, bound to the inputs of a cell and to states of its own."""

    def __init__(self, cell: Cell, tell: bool = True) -> None:
        self.cell, self.host, self.tell = cell, find_host(), tell
        if self.host is None:
            raise SystemExit(
                "bench_tensorrt_plugin: no plugin or host; build them with make plugin"
            )
        self.width = -(-cell.slots // PAGE) * PAGE
        self.warm = torch.ones(cell.batch, dtype=torch.bool, device="cuda")
        self.accepted = torch.zeros(cell.batch, dtype=torch.int64, device="cuda")
        self.fused = [self.indexer(n) for n in range(LAYERS)]
        self.split = [self.three(n) for n in range(LAYERS)]
        wide = cell.query[0].to(torch.bfloat16)
        self.most = self.indexer(0, wide, pooling=native.POOLINGS["mean"])

    def node(self, name: str, layer: int, **more: int) -> Any:
        fields = {
            "ratio": RATIO,
            "slots": self.cell.slots,
            "top_k": TOP_K,
            "layer": layer,
            "page_slots": PAGE,
            "sparsity_ppm": round(SPARSITY * 1e6),
            **more,
        }
        known = self.host.field_names(name)
        made = self.host.create(name, **{n: v for n, v in fields.items() if n in known})
        if made is None:
            raise SystemExit(self.host.log())
        return made.reload().attach()

    def averages(self) -> list[Tensor]:
        width = (self.cell.slots + 64) // 64 * 64
        shape = (self.cell.batch, width)
        return [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]

    def head(self, n: int) -> list[Tensor]:
        pages = self.cell.caches[n].view(torch.int32)
        return [self.cell.query[n], self.cell.weights[n], pages, self.cell.table]

    def indexer(self, n: int, query: Tensor | None = None, **fields: int) -> Binding:
        cell, places = self.cell, 2 * self.cell.batch
        state = [
            *self.averages(),
            torch.zeros(places, cell.rows, self.width, device="cuda"),
            torch.zeros(places, self.width // PAGE, dtype=torch.int32, device="cuda"),
            torch.zeros(cell.rows + 3, cell.batch, dtype=torch.int64, device="cuda"),
        ]
        who = [cell.lanes, cell.positions, cell.ids]
        head = self.head(n) if query is None else [query, *self.head(n)[1:]]
        node = self.node("SpinIndexer", n, **fields)
        return Binding(node, [*head, *who, *state], tell=self.tell)

    def three(self, n: int) -> list[Binding]:
        cell, averages = self.cell, self.averages()
        who = [cell.lanes, cell.positions]
        predicted = [*averages, *who, cell.ids, self.warm, cell.table]
        predict = Binding(self.node("SpinPredictBlocks", n), predicted)
        lists, count, compact, row_slots, _, visible, _ = predict.outputs
        chosen = [lists, count, row_slots, visible]
        score = Binding(self.node("SpinSparseIndexer", n), [*self.head(n), *chosen])
        observed = [*averages, *who, self.accepted, score.outputs[1], compact]
        return [predict, score, Binding(self.node("SpinObserve", n), observed)]

    def run(self) -> None:
        for binding in self.fused:
            binding.enqueue(stream())

    def run_split(self) -> None:
        for bindings in self.split:
            for binding in bindings:
                binding.enqueue(stream())

    def enqueue_us(self, calls: int, rounds: int) -> dict[str, dict[str, float]]:
        """Median and 99th percentile of the host time of a call, for each kind of node."""
        found = {}
        bindings = [self.fused[0], *self.split[0], self.most]
        for name, binding in zip((*NAMES, MOST), bindings, strict=True):
            times: list[int] = []
            for _ in range(rounds):
                torch.cuda.synchronize()
                times += binding.time_enqueue(stream(), calls)
            times = sorted(times[calls:])  # the first round warms up
            last = times[int(len(times) * 0.99)]
            found[name] = {"median": statistics.median(times) / 1e3, "p99": last / 1e3}
        return found


class Torch:
    """The kernels of `SpinIndexer`, layer by layer, launched through torch."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        config = SpinConfig(target_sparsity=SPARSITY, top_k=TOP_K, state_dtype="bf16")
        self.steps = [
            GpuStep(
                config,
                GpuState((n,), sequences=cell.batch, slots=cell.slots),
                ratio=RATIO,
                sequences=cell.batch,
                rows=cell.rows,
            )
            for n in range(LAYERS)
        ]

    def run(self) -> None:
        cell = self.cell
        for n, step in enumerate(self.steps):
            step.begin(cell.lanes, cell.ids, cell.positions, tenants=cell.ids)
            step.score(0, cell.query[n], cell.weights[n], cell.caches[n], cell.table)
            step.top_k(0)


def step_us(cell: Cell, runs: dict[str, Callable[[], None]], replays: int) -> dict[str, Any]:
    """Median time a layer of each, replayed in turns so that the clock is the same for all, and
    the relative spreads."""
    graphs = {name: captured(cell, run) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = list(graphs)
    for turn in range(replays + 2):
        cell.move()
        for name in order if turn % 2 == 0 else reversed(order):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            if turn >= 2:
                times[name].append(start.elapsed_time(end) * 1000 / LAYERS)
    middle = {name: statistics.median(values) for name, values in times.items()}
    spread = {name: (max(times[name]) - min(times[name])) / middle[name] for name in times}
    return {**middle, "spread": spread}


def uncaptured_us(cell: Cell, runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, Any]:
    """Median time a layer of steps that are not captured, in turns, from an idle device on."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 2):
        cell.move()
        for name, run in runs.items() if turn % 2 == 0 else reversed(runs.items()):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if turn >= 2:
                times[name].append((time.perf_counter() - start) * 1e6 / LAYERS)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(batch: int, slots: int, rows: int, replays: int) -> dict[str, Any]:
    cell = Cell(batch, slots, rows)
    nodes, alone, opposite = Nodes(cell), Nodes(cell, tell=False), Torch(cell)
    runs = {
        "plugin_us": nodes.run,
        "torch_us": opposite.run,
        "three_nodes_us": nodes.run_split,
        "all_layers_us": cell.spin,
    }
    row: dict[str, Any] = {"batch": batch, "slots": slots, "rows": rows}
    row |= step_us(cell, runs, replays)
    row["ratio_torch"] = row["plugin_us"] / row["torch_us"]
    same = nodes.fused[0].outputs[0] == opposite.steps[0].top_k(0)
    row["same_slots"] = bool(same.all())
    row["warm"] = bool(opposite.steps[0].warm[:batch].all())
    row["uncaptured_us"] = uncaptured_us(cell, {"graph": nodes.run, "alone": alone.run}, replays)
    row |= {name: nodes.enqueue_us(*burst) for name, burst in BURSTS.items()}
    row["enqueue_alone_us"] = alone.enqueue_us(*BURSTS["enqueue_us"])["SpinIndexer"]
    worst = max(times["median"] for times in row["enqueue_us"].values())
    row["within_bars"] = worst <= ENQUEUE_BAR_US and row["ratio_torch"] <= STEP_BAR
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="SPIN's TensorRT nodes against torch's launches")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--replays", type=int, default=21)
    parser.add_argument("--cells", help="batch,slots,rows;... instead of the whole table")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "bench_tensorrt_plugin: no CUDA device, allowed: a machine with one\n")
    torch.manual_seed(0)
    cells = CELLS
    if args.cells:
        cells = [tuple(int(n) for n in cell.split(",")) for cell in args.cells.split(";")]
    rows = []
    for batch, slots, draft_rows in cells:
        rows.append(measure(batch, slots, draft_rows, args.replays))
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    report = {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "layers": LAYERS,
        "top_k": TOP_K,
        "sparsity": SPARSITY,
        "bars": {"enqueue_us": ENQUEUE_BAR_US, "ratio_torch": STEP_BAR},
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "spin": native.load().spin_version(),
        },
        "rows": rows,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
