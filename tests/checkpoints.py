# SPDX-License-Identifier: Apache-2.0
"""Checkpoint directories to build from: real shapes, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

TINY = Path(__file__).parent.parent / "benchmarks" / "tiny_model" / "checkpoint"

# DeepSeek-V4-Flash and -Pro as released: one ratio a layer, then one for multi-token prediction.
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "hidden_size": 4096,
    "max_position_embeddings": 1048576,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
}
PRO: dict[str, Any] = FLASH | {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "index_topk": 1024,
}
V32: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "max_position_embeddings": 163840,
}
TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention"}
TYPES |= {128: "heavily_compressed_attention"}

fuzz = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def checkpoint_dir(folder: Path, config: object = FLASH, name: str = "model") -> Path:
    """A checkpoint with one small weight file."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(bytes(100))
    return path


def spelled_by_type(config: dict[str, Any]) -> dict[str, Any]:
    """The same model as Transformers spells it."""
    layers = config["num_hidden_layers"]
    types = [TYPES[ratio] for ratio in config["compress_ratios"][:layers]]
    rates = {TYPES[4]: 4, TYPES[128]: 128}
    rest = {name: value for name, value in config.items() if name != "compress_ratios"}
    return rest | {"layer_types": types, "compress_rates": rates}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
