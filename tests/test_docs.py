# SPDX-License-Identifier: Apache-2.0
"""What the documents say is so: their Python runs, their links lead somewhere."""

import json
import re
from pathlib import Path

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
    cells = {}
    for row in json.loads(HOOK_RESULT.read_text(encoding="utf-8"))["rows"]:
        cells.setdefault((row["batch"], row["slots"]), {})[row["backend"]] = row
    for (batch, slots), by in cells.items():
        auto = ", ".join(f"`{name}`" for name, row in by.items() if row["auto"])
        figures = " | ".join(f"{r['spin_us']:.1f} | {r['ratio_dense']:.2f}" for r in by.values())
        line = f"| {batch} | {slots:,} | {by['host']['dense_us']:.1f} | {figures} | {auto} |"
        assert f"\n{line}\n" in text


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
