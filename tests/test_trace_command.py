# SPDX-License-Identifier: Apache-2.0
"""Commands do not write over what they read."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from spin_trtllm.commands import replay, trace
from spin_trtllm.errors import SpinError


@pytest.mark.parametrize("option", ["--out", "--dump"])
@pytest.mark.parametrize("target", ["prompt.txt", "spin.yaml", "model/model.safetensors"])
def test_a_trace_does_not_replace_its_inputs(tmp_path: Path, option: str, target: str) -> None:
    (tmp_path / "model").mkdir()
    for name in ("prompt.txt", "spin.yaml", "model/model.safetensors"):
        (tmp_path / name).write_text("spin: {}\n")
    arguments = {
        "--checkpoint": tmp_path / "model",
        "--prompt": tmp_path / "prompt.txt",
        "--spin-config": tmp_path / "spin.yaml",
        "--out": tmp_path / "model" / "new.safetensors",  # beside the weights is allowed
        option: tmp_path / target,
    }
    line = [str(part) for pair in arguments.items() for part in pair]
    found = CliRunner().invoke(trace.command, line)
    assert isinstance(found.exception, SpinError)
    assert str(found.exception).startswith(f"{option}: got ")
    assert (tmp_path / target).read_text() == "spin: {}\n"


def test_a_replay_does_not_replace_its_settings(tmp_path: Path) -> None:
    settings = tmp_path / "spin.yaml"
    settings.write_text("spin: {}\n")
    line = ["trace", "--spin-config", str(settings), "--dump", str(settings)]
    found = CliRunner().invoke(replay.command, line)
    assert isinstance(found.exception, SpinError)
    assert str(found.exception).startswith("--dump: got ")
