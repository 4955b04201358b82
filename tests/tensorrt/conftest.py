# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that build with TensorRT, or without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import TINY
from tensorrt_build import PlayedBuilder, arguments
from tensorrt_wheels import stub_plugin

from spin_trtllm.build import tensorrt_builder, tensorrt_engines
from spin_trtllm.build.cli import main


@pytest.fixture
def build(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Call `trtllm-build --tensorrt`; returns its exit code and what it printed."""

    def call(*more: object, checkpoint: Path = TINY) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(arguments(tmp_path / "engine", *more, checkpoint=checkpoint))
        return stopped.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No TensorRT here, whatever the machine has, and a plugin."""
    monkeypatch.setattr(tensorrt_builder, "installed_flavours", lambda: ())
    plugin = stub_plugin(tmp_path_factory.mktemp("plugin"))
    monkeypatch.setenv("SPIN_TRT_PLUGIN", str(plugin))


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, alone: None) -> PlayedBuilder:
    """A TensorRT that is here."""
    played = PlayedBuilder()
    builder = tensorrt_builder.Builder("tensorrt", "10.9.0", 90)
    monkeypatch.setattr(tensorrt_engines, "choose_builder", lambda target: builder)
    monkeypatch.setattr(tensorrt_engines, "build_engines", played)
    return played
