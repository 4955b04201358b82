# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm doctor`: what will run on this machine, what will not, and how to fix it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import click

from spin_trtllm.build.memory import human_bytes
from spin_trtllm.hosts.trtllm.activate import STARTUP_FILE
from spin_trtllm.hosts.trtllm.settings import SPIN_VARIABLE
from spin_trtllm.probe import Host, Report, probe
from spin_trtllm.verdicts import Verdict, verdicts

JSON_SCHEMA_VERSION = 1


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(as_json: bool) -> None:
    """Say what will run on this machine, what will not, and how to fix it."""
    report = probe()
    judged = verdicts(report)
    click.echo(_json_text(report, judged) if as_json else "\n".join(_lines(report, judged)))


def _json_text(report: Report, judged: Sequence[Verdict]) -> str:
    values = {
        "schema_version": JSON_SCHEMA_VERSION,
        "versions": report.versions,
        "devices": [asdict(device) for device in report.devices],
        "kernel_library": asdict(report.kernel_library),
        "tensorrt_plugin": asdict(report.tensorrt_plugin),
        "activation": asdict(report.activation),
        "hosts": [asdict(host) | {"matches": host.matches} for host in report.hosts],
        "verdicts": [asdict(verdict) for verdict in judged],
    }
    return json.dumps(values, indent=2)


def _lines(report: Report, judged: Sequence[Verdict]) -> list[str]:
    devices = [
        (f"cuda:{d.index}", f"{d.name}, sm_{d.sm}, {human_bytes(d.memory_bytes)}")
        for d in report.devices
    ]
    hooks = [
        (f"  {hook.name}", f"{'matches' if hook.matches else 'does not match'}: {hook.note}")
        for host in report.hosts
        if host.found
        for hook in host.hooks
    ]
    return [
        *_section("Versions", [(n, v or "not installed") for n, v in report.versions.items()]),
        *_section("CUDA devices", devices or [("none", "")]),
        *_section(
            "Kernel library",
            [
                ("libspin", report.kernel_library.note),
                ("TensorRT plugin", report.tensorrt_plugin.note),
            ],
        ),
        *_section("Activation in TensorRT-LLM", _activation(report)),
        *_section("Hosts", [(host.name, _describe(host)) for host in report.hosts]),
        *_section("Hook points", hooks or [("none", "")]),
        *_verdict_lines(judged),
    ]


def _activation(report: Report) -> list[tuple[str, str]]:
    startup = report.activation.startup_file or f"{STARTUP_FILE} is not in site-packages"
    return [
        ("start-up file", startup),
        (SPIN_VARIABLE, report.activation.spin_file or "not set: whatever starts here runs dense"),
    ]


def _section(title: str, rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [
        click.style(title, bold=True),
        *(f"  {name:<{width}}  {text}".rstrip() for name, text in rows),
        "",
    ]


def _describe(host: Host) -> str:
    if host.found:
        return host.version or "found"
    return "not installed" if host.version is None else f"{host.version}, but its module is missing"


def _verdict_lines(judged: Sequence[Verdict]) -> list[str]:
    width = max(len(verdict.use) for verdict in judged)
    lines = [click.style("What runs", bold=True)]
    for verdict in judged:
        mark = click.style("yes", fg="green") if verdict.runs else click.style("no ", fg="red")
        lines.append(f"  {mark}  {verdict.use:<{width}}  {verdict.why}")
        if verdict.fix:
            lines.append(f"       {'':<{width}}  fix: {verdict.fix}")
    return lines
