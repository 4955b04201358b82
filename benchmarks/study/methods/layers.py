# SPDX-License-Identifier: Apache-2.0
"""Targets of layers, which lie beside the weights that they were calibrated on.

`layer_sparsity.json` has a mapping of decoder layers to target sparsities for each mean sparsity:
what `spin-trtllm calibrate` found on the traces of `benchmarks.study.beyond`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from spin_trtllm.errors import SpinError, refuse

NAME = "layer_sparsity.json"


def layer_targets(model: torch.nn.Module, target_sparsity: float) -> dict[int, float]:
    """Target sparsity of each layer that has one of its own.

    Args:
        model: of Transformers, loaded from a directory with `layer_sparsity.json`.
        target_sparsity: the mean of the layers, one of the file's.

    Raises:
        SpinError: no such file, or not that sparsity.
    """
    path = Path(str(getattr(model, "name_or_path", ""))) / NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpinError(f"study: no targets of layers at {str(path)!r}: {error}") from error
    if f"{target_sparsity:g}" not in found:
        refuse("setting", target_sparsity, f"one of {', '.join(found)}, as calibrated")
    return {int(layer): target for layer, target in found[f"{target_sparsity:g}"].items()}
