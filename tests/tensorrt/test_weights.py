# SPDX-License-Identifier: Apache-2.0
"""The indexer's weights: both spellings, fp8 with its scales, one line for what is no weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FLASH, checkpoint_dir
from safetensors.torch import save_file

from spin_trtllm.build.checkpoint import read_checkpoint
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.tensorrt import read_indexer_weights

SMALL = FLASH | {
    "num_hidden_layers": 3,
    "compress_ratios": [0, 128, 4],
    "hidden_size": 256,
    "index_n_heads": 4,
    "index_head_dim": 128,
}


def released(folder: Path, tensors: dict[str, torch.Tensor]) -> Any:
    path = checkpoint_dir(folder, SMALL)
    save_file(tensors, path / "model.safetensors")
    return read_checkpoint(path)


def test_fp8_weights_of_the_original_release_are_widened(tmp_path: Path) -> None:
    wide = torch.randn(512, 192, generator=torch.Generator().manual_seed(0))
    # a power of two for each tile of 128 x 128; the last column of tiles is half one
    scale = 2.0 ** torch.arange(-4, 4).view(4, 2)
    tiles = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :192]
    stem = "layers.2.attn.indexer."
    heads = torch.randn(4, 256).bfloat16()
    checkpoint = released(
        tmp_path,
        {
            f"{stem}wq_b.weight": (wide / tiles).to(torch.float8_e4m3fn),
            f"{stem}wq_b.scale": scale.to(torch.float8_e8m0fnu),
            f"{stem}weights_proj.weight": heads,
        },
    )
    weights = read_indexer_weights(checkpoint, 2)
    assert weights.query.shape == (4, 128, 192)
    torch.testing.assert_close(weights.query.flatten(0, 1), wide, rtol=0.07, atol=2**-9 * 8)
    assert torch.equal(weights.heads, heads.float())


def test_tensors_are_found_through_an_index(tmp_path: Path) -> None:
    stem = "model.layers.2.self_attn.compressor.indexer."
    names = {f"{stem}q_b_proj.weight": (512, 64), f"{stem}scorer.weights_proj.weight": (4, 256)}
    path = checkpoint_dir(tmp_path, SMALL)
    (path / "model.safetensors").unlink()
    tensors = {name: torch.randn(shape) for name, shape in names.items()}
    files = {name: f"model-{number}.safetensors" for number, name in enumerate(names)}
    for name, file in files.items():
        save_file({name: tensors[name]}, path / file)
    index = {"metadata": {}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = read_indexer_weights(read_checkpoint(path), 2)
    assert torch.equal(weights.query.flatten(0, 1), tensors[f"{stem}q_b_proj.weight"])


FP8 = torch.zeros(512, 64).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"wq_b.weight": None}, "checkpoint_dir: no tensor model.layers.2."),
        ({"wq_b.weight": torch.zeros(500, 64)}, "query projection of layer 2: got [500, 64]"),
        ({"wq_b.weight": torch.zeros(512, 0)}, "query projection of layer 2: got [512, 0]"),
        ({"wq_b.weight": torch.zeros(512, 64).cfloat()}, "wq_b.weight: got 'torch.complex64'"),
        ({"wq_b.weight": torch.zeros(512, 64).int()}, "wq_b.weight: got 'torch.int32'"),
        ({"weights_proj.weight": torch.zeros(4, 8)}, "head weights of layer 2: got [4, 8]"),
        ({"wq_b.weight": FP8}, "has no scale"),
        ({"wq_b.weight": FP8, "wq_b.scale": torch.ones(0, 1)}, "wq_b: got [0, 1], allowed: tiles"),
        ({"wq_b.weight": FP8, "wq_b.scale": torch.ones(4, 0)}, "wq_b: got [4, 0], allowed: tiles"),
        ({"wq_b.weight": FP8, "wq_b.scale": torch.ones(3, 1)}, "wq_b: got [3, 1], allowed: tiles"),
        ({"wq_b.weight": FP8, "wq_b.scale": torch.ones(4)}, "wq_b: got [4], allowed: tiles"),
        ({"wq_b.weight": FP8, "wq_b.scale": torch.ones(4, 1).byte()}, "wq_b: got 'torch.uint8'"),
        ({"wq_b.weight": torch.zeros(512, 64).byte()}, "wq_b.weight: got 'torch.uint8'"),
    ],
)
def test_wrong_weights_are_one_line(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    good = {"wq_b.weight": torch.zeros(512, 64), "weights_proj.weight": torch.zeros(4, 256)}
    tensors = {
        f"layers.2.attn.indexer.{name}": tensor
        for name, tensor in (good | changes).items()
        if tensor is not None
    }
    with pytest.raises(SpinError) as error:
        read_indexer_weights(released(tmp_path, tensors), 2)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("index", "line"),
    [
        ("{}", "weight_map: got None, allowed: a JSON object"),
        ('{"weight_map": ["a"]}', "weight_map: got ['a'], allowed: a JSON object"),
        ('{"weight_map": {"a": 1}}', "weight_map['a']: got 1, allowed: the name of a file"),
        ('{"weight_map": {"a": ""}}', "weight_map['a']: got '', allowed: the name of a file"),
        ('{"weight_map": {"a": "/"}}', "weight_map['a']: got '/', allowed: the name of a file"),
        ("[" * 100_000, "checkpoint_dir: "),
        ('{"a":' * 500 + "1" + "}" * 500, "deeper nesting"),
        ("no JSON", "is not valid JSON"),
    ],
)
def test_a_wrong_index_is_one_line(tmp_path: Path, index: str, line: str) -> None:
    path = checkpoint_dir(tmp_path, SMALL)
    (path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(SpinError) as error:
        read_indexer_weights(read_checkpoint(path), 2)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_the_index_of_a_large_model_is_read(tmp_path: Path) -> None:
    """One with hundreds of experts a layer is larger than any other JSON file of a checkpoint."""
    path = checkpoint_dir(tmp_path, SMALL)
    stem = "model.layers.0.mlp.experts"
    names = {f"{stem}.{i}.gate_proj.weight_scale_inv": "a" for i in range(250_000)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(SpinError, match="checkpoint_dir: no tensor"):
        read_indexer_weights(read_checkpoint(path), 2)
