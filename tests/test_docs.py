# SPDX-License-Identifier: Apache-2.0
"""What the documents say is so: their Python runs, their links lead somewhere."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from spin_trtllm import cli, demo_report
from spin_trtllm.config import SpinConfig
from spin_trtllm.replay.run import replay
from spin_trtllm.replay.trace import Trace

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DEMO_RESULT = ROOT / "benchmarks" / "results" / "demo-cpu.json"
STEP_RESULT = ROOT / "benchmarks" / "results" / "h200-step.json"
HOOK_RESULT = ROOT / "benchmarks" / "results" / "h200-trtllm-step.json"
NODES_RESULT = ROOT / "benchmarks" / "results" / "h200-tensorrt-plugin.json"
TRITON_RESULT = ROOT / "benchmarks" / "results" / "triton-cpu.json"
STUDY = ROOT / "benchmarks" / "study"
MISSES = {"mean_miss": 3, "p99_miss": 2}  # figures of the sweep, and decimals in docs/quality.md
TRACE_FORMAT = ROOT / "docs" / "trace-format.md"
ALGORITHM = ROOT / "docs" / "algorithm.md"
DOCUMENTS = [
    README,
    TRACE_FORMAT,
    ALGORITHM,
    ROOT / "docs/kernels.md",
    ROOT / "docs/quality.md",
    ROOT / "docs/tensorrt-llm.md",
    ROOT / "docs/triton.md",
    ROOT / "docs/tensorrt.md",
    ROOT / "benchmarks/tiny_model/README.md",
    ROOT / "plugins/tensorrt/README.md",
    STUDY / "README.md",
]


def blocks(document: Path, language: str) -> list[str]:
    text = document.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_readme_example(monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.chdir(ROOT)
    (example,) = blocks(README, "python")
    assert len([line for line in example.splitlines() if line and "import" not in line]) <= 10
    exec(compile(example, str(README), "exec"), {})
    sparsity, miss = capsys.readouterr().out.splitlines()[-1].split()
    assert float(sparsity) == pytest.approx(0.375, abs=0.03)  # 6 of 16 blocks
    assert 0 <= float(miss) < 0.5


def test_readme_quotes_the_committed_demo():
    result = json.loads(DEMO_RESULT.read_text(encoding="utf-8"))
    text = README.read_text(encoding="utf-8")
    for key, label in demo_report.LABELS.items():
        recall, continued = (
            demo_report.show_figure(result["parts"][part].get(key)) for part in ("recall", "text")
        )
        assert f"\n| {label} | {recall} | {continued} |\n" in text
    assert result["environment"]["date"] in text
    assert f"transformers {result['environment']['versions']['transformers']}" in text


def test_readme_quotes_the_committed_kernel_results():
    text = README.read_text(encoding="utf-8")
    for row in json.loads(STEP_RESULT.read_text(encoding="utf-8"))["rows"]:
        sizes = f"| {row['batch']} | {row['slots']:,} | {row['rows']} |"
        times = " | ".join(f"{row[name]:.1f}" for name in ("spin_us", "dense_us", "peers_us"))
        shares = ("ratio_peers", "ratio_dense", "spin_roof_fraction")
        assert f"\n{sizes} {times} | {' | '.join(f'{row[n]:.2f}' for n in shares)} |\n" in text
    rows = json.loads(STEP_RESULT.read_text(encoding="utf-8"))["rows"]
    (wide,) = (r for r in rows if (r["batch"], r["slots"], r["rows"]) == (96, 131_072, 1))
    own = [row["ratio_dense"] for row in rows]
    front = " ".join(text.split())
    assert f"{wide['ratio_peers']:.2f} times as fast as the peers' at 96 sequences" in front
    assert f"{min(own):.2f} to {max(own):.2f} times as fast as the same kernels" in front
    cells = {}
    for row in json.loads(HOOK_RESULT.read_text(encoding="utf-8"))["rows"]:
        cells.setdefault((row["batch"], row["slots"]), {})[row["backend"]] = row
    for (batch, slots), by in cells.items():
        auto = ", ".join(f"`{name}`" for name, row in by.items() if row["auto"])
        figures = " | ".join(f"{r['spin_us']:.1f} | {r['ratio_dense']:.2f}" for r in by.values())
        line = f"| {batch} | {slots:,} | {by['host']['dense_us']:.1f} | {figures} | {auto} |"
        assert f"\n{line}\n" in text


def test_readme_quotes_the_committed_nodes():
    text = " ".join(README.read_text(encoding="utf-8").split())
    rows = json.loads(NODES_RESULT.read_text(encoding="utf-8"))["rows"]
    times = [f"{row['plugin_us']:.1f}" for row in rows]
    assert f"takes {', '.join(times[:-1])} and {times[-1]} microseconds a layer" in text
    ratios = sorted(row["ratio_torch"] for row in rows)
    assert f"{ratios[0]:.2f} to {ratios[-1]:.2f} of the same kernels" in text
    first, last = (f"{row['all_layers_us']:.1f}" for row in (rows[0], rows[-1]))
    assert f"takes {first} at the first and {last} at the last" in text
    calls = {
        name: [row["enqueue_us"][name]["median"] for row in rows] for name in rows[0]["enqueue_us"]
    }
    whole, most = calls.pop("SpinIndexer"), calls.pop("SpinIndexer, 16-bit query, mean pooling")
    apart = [time for times in calls.values() for time in times]
    alone = [row["enqueue_alone_us"]["median"] for row in rows]
    for words, times in (
        ("SpinIndexer` costs the host {} microseconds", whole),
        ("most launches that a node can have {}, and", most),
        ("a separate node {}. One by one", apart),
        ("four launches cost {} on the same host", alone),
    ):
        assert words.format(f"{min(times):.1f} to {max(times):.1f}") in text
    other = NODES_RESULT.with_name("h200-tensorrt-plugin-third-run.json")
    rows_of_other = json.loads(other.read_text(encoding="utf-8"))["rows"]
    last = max(row["enqueue_us"]["SpinIndexer"]["median"] for row in rows_of_other)
    assert f"and up to {last:.1f} on [another]" in text
    shares = [row["uncaptured_us"]["graph"] / row["uncaptured_us"]["alone"] for row in rows]
    assert f"takes {min(shares):.2f} to {max(shares):.2f} of the time that it takes with" in text
    assert all(row["within_bars"] and row["same_slots"] for row in rows)


def test_triton_page_quotes_the_committed_figures():
    text = (ROOT / "docs/triton.md").read_text(encoding="utf-8")
    result = json.loads(TRITON_RESULT.read_text(encoding="utf-8"))
    overhead, streams, soak = (result[name] for name in ("overhead", "streams", "soak"))
    for seconds in (
        overhead["direct_seconds"],
        overhead["triton_seconds"],
        streams["sequence_seconds"],
        streams["together_seconds"],
    ):
        assert f"| {seconds:.3f} s |" in text
    assert f"| {streams['tokens_of_slowest_when_first_ends']} |" in text
    answered, refused = (soak["outcomes"][name] for name in ("answered", "refused"))
    assert f"| {answered:,}, {refused:,} |" in text
    assert f"| {100 * soak['growth_after_first_tenth']:.1f} % |" in text


def study_sums() -> dict[tuple[str, float], list[int]]:
    """Right answers of dense, lost and gained, over the cells of SPIN that are neither text nor
    generated."""
    found: dict[tuple[str, float], list[int]] = {}
    for name in ("shipped", "seed-1"):
        whole = (STUDY / f"results/h200-{name}.md").read_text(encoding="utf-8")
        for section in whole.split("\n## ")[1:]:
            rows = {row[0]: row for row in map(cells_of, section.splitlines()) if len(row) == 9}
            for sparsity in (0.2, 0.4, 0.6):
                row = rows.get(f"`spin` {sparsity}")
                if row is None or section.startswith("text"):
                    continue
                right = int(rows["`dense`"][1].split()[0])
                numbers = [right, *map(int, row[3].split(", "))]
                of = found.setdefault((name, sparsity), [0, 0, 0])
                of[:] = [a + b for a, b in zip(of, numbers, strict=True)]
    return found


def test_the_studys_sums_are_those_of_its_tables():
    found = study_sums()
    (right, lost, gained), (right_1, lost_1, gained_1) = (
        found[name, 0.4] for name in ("shipped", "seed-1")
    )
    readme, quality = (
        " ".join(path.read_text(encoding="utf-8").split())
        for path in (STUDY / "README.md", ROOT / "docs/quality.md")
    )
    assert f"{lost} of {right:,} right answers are lost and {gained} gained" in readme
    assert f"{lost_1} of {right_1:,} and {gained_1} on seed-1" in readme
    assert (
        f"{lost} of {right:,} ({gained} come right) and {lost_1} of {right_1:,} ({gained_1})"
        in quality
    )
    at_60 = [f"{of[1]} of {of[0]:,}" for of in (found["shipped", 0.6], found["seed-1", 0.6])]
    assert f"**At 60 % it does not**: {at_60[0]}, and {at_60[1]}." in readme
    assert f"**60 %**: {at_60[0]} and {at_60[1]};" in quality


def test_the_front_page_quotes_the_studys_sums():
    found = study_sums()
    front = " ".join(README.read_text(encoding="utf-8").split())
    at_40, at_60 = (
        [f"{lost} of {right:,}" for right, lost, _ in (found["shipped", at], found["seed-1", at])]
        for at in (0.4, 0.6)
    )
    assert f"{at_40[0]} right answers on the one and {at_40[1]} on the other" in front
    assert f"at 60 %, {at_60[0]} and {at_60[1]}." in front


def cells_of(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def sweeps() -> list[Any]:
    """What the sweep found on the shipped checkpoint, then on the other."""
    files = (STUDY / "results" / f"beyond{name}-cpu.json" for name in ("", "-seed-1"))
    return [json.loads(file.read_text(encoding="utf-8"))["found"]["all"] for file in files]


def with_difference(row: Any, key: str, places: int) -> str:
    """A figure and the interval of its difference from the baseline, unless it is that."""
    shown, change = f"{row[key]['value']:.{places}f}", row[f"{key}_difference"]
    if not (change["low"] or change["high"]):
        return shown
    return f"{shown} ({change['low']:+.{places}f} to {change['high']:+.{places}f})"


def test_the_study_quotes_the_orderings():
    text = (STUDY / "README.md").read_text(encoding="utf-8").split("## The paper's orderings")[1]
    result = json.loads((STUDY / "results/orderings-cpu.json").read_text(encoding="utf-8"))
    claims = [
        [claim for study in report["studies"].values() for claim in study["claims"]]
        for report in result.values()
    ]
    known = [
        (
            both[0]["text"],
            *(
                "{difference:+.3f} ({low:+.3f} to {high:+.3f}): {verdict}".format(**claim)
                for claim in both
            ),
        )
        for both in zip(*claims, strict=True)
    ]
    table = text.split("|---|---|---|---|\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    assert len(rows) == 15
    assert all((row[0], *row[2:]) in known for row in rows)
    page = (STUDY / "results/orderings-cpu.md").read_text(encoding="utf-8")
    answers = page.split("## In answers\n\n")[1].split("\n\n")[0]
    assert answers.count("\n") == 16  # fifteen pairs
    assert f"\n{answers}\n" in text
    correlations = [
        f"{row['pearson']['value']:.2f}"
        for report in result.values()
        for row in report["studies"]["table1"]["rows"]
        if row["predictor"] == "prev_iter"
    ]
    assert "correlate by {1} instead of {0}".format(*correlations) in text
    assert f"All {len(known)} claims" in text
    assert f"**None fails**, of {2 * len(known)}" in text
    assert not any("does not hold" in verdict for _, *verdicts in known for verdict in verdicts)


def test_the_study_quotes_the_sweep():
    text = (STUDY / "README.md").read_text(encoding="utf-8").split("## Beyond the paper")[1]
    table = text.split("|---|---|---|---|---|---|\n")[1].split("\n\n")[0]
    both = sweeps()
    for line in table.splitlines():
        name = line.split("`")[1]
        rows = [sweep[name]["equal_bytes"][2] for sweep in both]  # as the baseline at 0.4
        targets = dict.fromkeys(f"{row['target_sparsity']['value']:.2f}" for row in rows)
        cells = [with_difference(row, key, 3) for row in rows for key in MISSES]
        assert line == f"| `{name}` | {'; '.join(targets)} | {' | '.join(cells)} |"
    layers = json.loads((STUDY / "results/beyond-layers-cpu.json").read_text(encoding="utf-8"))
    for name, words in (
        ("shipped", "{}, {}, {} and {} for layers 1"),
        ("seed-1", "{}, {}, {} and {} of"),
    ):
        (row,) = (row for row in layers[name] if row["target_sparsity"] == 0.4)
        targets = [f"{target:.2f}" for target in row["layers"].values()]
        assert words.format(*targets) in " ".join(text.split())
    for sweep, words in zip(
        both,
        (
            "at a target of {:.2f} on the shipped weights, with {:.0%} of the keys and {:.2f} of",
            "and of {:.2f} on seed-1, with {:.0%} and {:.2f}.",
        ),
        strict=True,
    ):
        row = sweep["query 0.5"]["equal_misses"][2]
        target, read = row["target_sparsity"]["value"], row["read"]["value"]
        shown = words.format(target, 1 - target, read).replace("%", " %")
        assert shown in " ".join(text.split())


_LAYERS = {"budget by layer": "targets of layers"}
_ALL = {**_LAYERS, "query 0.5, log 8 bit, budget by layer": "and `query_share` 0.5, `log8`"}
DEFAULTS = {  # by sparsity: arms of the sweep, and what docs/quality.md calls them
    20: {**_LAYERS, "log 8 bit, budget by layer": "and `log8`"},
    40: _ALL,
    60: _ALL,
    80: {"query 0.5": "`query_share` 0.5"},
}


def default_rows(both: list[Any]) -> Iterator[str]:
    """Of docs/quality.md: what the preset misses and what the defaults do, at the same bytes."""
    for sparsity, arms in DEFAULTS.items():
        for arm, words in {"spin": "preset", **arms}.items():
            rows = [
                next(
                    row
                    for row in sweep[arm]["equal_bytes"]
                    if row["as_baseline_at"] == sparsity / 100
                )
                for sweep in both
            ]
            at = (
                ""
                if arm in ("spin", "budget by layer")
                else f", at {rows[0]['target_sparsity']['value']:.2f}"
            )
            figures = (
                ", ".join(with_difference(row, key, places) for key, places in MISSES.items())
                for row in rows
            )
            yield f"| {sparsity} % | {words}{at} | {' | '.join(figures)} |"


def test_quality_quotes_the_sweep_and_the_calibration():
    text = (ROOT / "docs/quality.md").read_text(encoding="utf-8")
    both = sweeps()
    table = "\n".join(default_rows(both))
    assert f"\n{table}\n\n" in text, table
    logs = [
        next(row for row in sweep["log 8 bit"]["targets"] if row["target_sparsity"] == 0.4)
        for sweep in both
    ]
    shown = "{:.3f} and {:.3f} at 40 %".format(*(row["mean_miss"]["value"] for row in logs))
    assert f"at the same target ({shown})" in " ".join(text.split())
    result = json.loads((STUDY / "results/beyond-layers-cpu.json").read_text(encoding="utf-8"))
    for name, rows in result.items():
        for row in rows:
            figures = (row["before"], row["held_out"])
            misses = " | ".join(f"{f['mean_miss']:.3f}, {f['p99_miss']:.3f}" for f in figures)
            layers = ", ".join(f"{target:.3f}" for target in row["layers"].values())
            sparsity = f"{100 * row['target_sparsity']:.0f} %"
            assert f"\n| {name} | {sparsity} | {misses} | {layers} |\n" in text


def test_readme_lists_every_command():
    text = README.read_text(encoding="utf-8")
    shown = re.findall(
        r"^\| `([\w-]+)", text.split("## Command line")[1].split("\n## ")[0], re.MULTILINE
    )
    commands = cli.cli.list_commands(click.Context(cli.cli))
    assert sorted(shown) == sorted(commands)


def test_trace_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = blocks(TRACE_FORMAT, "python")
    torch.manual_seed(0)  # of other numbers, the p99 of so few steps may be 0.03 off
    exec(compile(example, str(TRACE_FORMAT), "exec"), {})
    metrics = replay(Trace("random.safetensors"), SpinConfig())
    (shown,) = blocks(TRACE_FORMAT, "json")
    assert json.loads(shown) == pytest.approx(metrics, abs=0.03)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(document):
    targets = re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8"))
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_every_section_that_code_refers_to_exists():
    sections = re.findall(r"^## (\d+)\.", ALGORITHM.read_text(encoding="utf-8"), re.MULTILINE)
    assert sections == [str(number) for number in range(1, 10)]
    code = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "spin_trtllm").rglob("*.py"))
    referred = set(re.findall(r"SPEC (\d+)", code))
    assert referred
    assert referred <= set(sections)


def test_defaults_of_the_parameter_table():
    section = ALGORITHM.read_text(encoding="utf-8").split("## 2. ")[1].split("## 3. ")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]+) \|", section, re.MULTILINE)
    shown = {name: value.strip().strip("`") for name, value in rows}
    defaults = {name: str(value) for name, value in SpinConfig().to_dict().items()}
    assert shown.pop("top_k") == "the model's"
    assert shown.items() <= defaults.items()
    assert defaults.keys() - shown.keys() == {"top_k"}
