# SPDX-License-Identifier: Apache-2.0
"""Which SPIN configuration an engine gets: a preset or a file, single options, the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spin_trtllm.build.checkpoint import DEEPSEEK_V4, Checkpoint, IndexerGeometry
from spin_trtllm.config import SpinConfig, preset
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.step import SpinStep

_TINY = (320, 64)  # hidden size and top-k of the embedded model
_FLASH_TOP_K = 512


def preset_for(checkpoint: Checkpoint) -> str:
    """Name of the preset that fits a checkpoint best."""
    if checkpoint.architecture != DEEPSEEK_V4:
        return "deepseek-v3.2"
    if (checkpoint.hidden_size, checkpoint.geometry.top_k) == _TINY:
        return "tiny-deepseek-v4"
    is_flash = checkpoint.geometry.top_k <= _FLASH_TOP_K
    return "deepseek-v4-flash" if is_flash else "deepseek-v4-pro"


def settle_spin(
    checkpoint: Checkpoint,
    *,
    file: str | None,
    preset_name: str | None,
    overrides: Mapping[str, Any],
) -> tuple[SpinConfig, str]:
    """The configuration of an engine and where it comes from.

    A file changes the checkpoint's preset, and single fields change either: what nobody gives is
    the preset's.

    Args:
        file: YAML file of SPIN fields; excludes `preset_name`.
        preset_name: name of a preset; None: the checkpoint's.
        overrides: single fields by name; None is "not given".

    Raises:
        SpinError: both sources given, an invalid value, a variant that is for study only, a target
            of a layer without an indexer, or a `top_k` that is not the checkpoint's.
    """
    if file is not None and preset_name is not None:
        raise SpinError("--spin_preset: got one next to --spin_config, allowed: only one of them")
    name = preset_name or preset_for(checkpoint)
    base, source = preset(name), f"preset {name}"
    if file is not None:
        base, source = base.with_yaml(file), f"{file!r} over preset {name}"
    given = {name: value for name, value in overrides.items() if value is not None}
    return _for_engine(replace(base, **given), checkpoint.geometry), source


def _for_engine(config: SpinConfig, geometry: IndexerGeometry) -> SpinConfig:
    """Refuse what a serving host does not run, and settle `top_k` on the model's."""
    if config.reduction not in SpinStep.reductions:
        refuse("reduction", config.reduction, ", ".join(SpinStep.reductions))
    if config.exploration_policy not in SpinStep.exploration_policies:
        allowed = ", ".join(SpinStep.exploration_policies)
        refuse("exploration_policy", config.exploration_policy, allowed)
    config.check_layers(geometry.layers)
    if config.top_k not in (None, geometry.top_k):
        allowed = f"{geometry.top_k}, the checkpoint's index_topk, or none given"
        refuse("top_k", config.top_k, allowed)
    return config.with_top_k(geometry.top_k)
