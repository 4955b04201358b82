# SPDX-License-Identifier: Apache-2.0
"""Where an engine's settings come from: the checkpoint's preset, a file over it, single fields."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from checkpoints import checkpoint_dir

from spin_trtllm.build.checkpoint import read_checkpoint
from spin_trtllm.build.spin_settings import settle_spin
from spin_trtllm.config import SpinConfig, preset

FLASH = "deepseek-v4-flash"


def test_a_file_of_one_field_leaves_the_preset_the_others(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(checkpoint_dir(tmp_path))
    file = tmp_path / "spin.yaml"
    file.write_text("target_sparsity: 0.5")
    given = {"seed": 6, "exploration": None}
    config, source = settle_spin(checkpoint, file=str(file), preset_name=None, overrides=given)
    assert source == f"'{file}' over preset {FLASH}"
    assert config == replace(preset(FLASH), target_sparsity=0.5, seed=6, top_k=512)
    assert config.state_dtype != SpinConfig().state_dtype
