# SPDX-License-Identifier: Apache-2.0
"""What `trtllm-build` reads and computes before it writes: checkpoints, sizes, targets, presets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    FLASH,
    PRO,
    TINY,
    TYPES,
    V32,
    checkpoint_dir,
    fuzz,
    json_values,
    spelled_by_type,
)
from hypothesis import example, given
from hypothesis import strategies as st

from spin_trtllm.build.checkpoint import IndexerGeometry, read_checkpoint
from spin_trtllm.build.memory import human_bytes, spin_memory
from spin_trtllm.build.target import choose_target, indexer_key_bytes, parse_sm
from spin_trtllm.config import SpinConfig, preset
from spin_trtllm.errors import SpinError
from spin_trtllm.gpu_state import GpuState
from spin_trtllm.gpu_step import GpuStep


@pytest.mark.parametrize("spelled", [dict, spelled_by_type])
@pytest.mark.parametrize(
    ("config", "layers", "top_k"),
    [(FLASH, range(2, 43, 2), 512), (PRO, range(2, 61, 2), 1024)],
    ids=["flash", "pro"],
)
def test_deepseek_v4_is_read_in_both_spellings(
    tmp_path: Path, spelled: Any, config: dict[str, Any], layers: range, top_k: int
) -> None:
    found = read_checkpoint(checkpoint_dir(tmp_path, spelled(config)))
    assert found.geometry == IndexerGeometry(tuple(layers), 4, 64, 128, top_k)
    assert found.architecture == "DeepseekV4ForCausalLM"
    assert found.compress_ratios == tuple(config["compress_ratios"][:-1])


def test_deepseek_v32_has_an_indexer_in_every_layer(tmp_path: Path) -> None:
    found = read_checkpoint(checkpoint_dir(tmp_path, V32))
    assert found.geometry == IndexerGeometry(tuple(range(61)), 1, 64, 128, 2048)
    assert (found.model_type, found.compress_ratios) == ("deepseek_v32", ())


@pytest.mark.parametrize("layers", [2, 3, 4, 43])
def test_a_missing_schedule_is_the_one_of_transformers(tmp_path: Path, layers: int) -> None:
    transformers = pytest.importorskip("transformers")
    expected = transformers.DeepseekV4Config(num_hidden_layers=layers).layer_types
    indexed = [i for i, name in enumerate(expected) if name == TYPES[4]]
    plain = {"model_type": "deepseek_v4", "num_hidden_layers": layers}
    if not indexed:
        with pytest.raises(SpinError, match="indexer in at least one layer"):
            read_checkpoint(checkpoint_dir(tmp_path, plain))
        return
    assert list(read_checkpoint(checkpoint_dir(tmp_path, plain)).geometry.layers) == indexed


def test_entries_past_the_decoder_layers_are_ignored(tmp_path: Path) -> None:
    more = FLASH | {"compress_ratios": [*FLASH["compress_ratios"], 4, 4, 4]}
    assert read_checkpoint(checkpoint_dir(tmp_path, more)).geometry.layers[-1] == 42


def test_the_embedded_model_is_a_checkpoint() -> None:
    found = read_checkpoint(TINY)
    assert found.geometry == IndexerGeometry((1, 3, 4, 6), 4, 16, 64, 64)
    assert (found.hidden_size, found.max_position_tokens, found.weight_files) == (320, 32768, 1)


def test_the_fingerprint_survives_moving_and_reformatting(tmp_path: Path) -> None:
    first = checkpoint_dir(tmp_path, FLASH | {"_name_or_path": "/a"}, "first")
    second = checkpoint_dir(tmp_path, FLASH | {"_name_or_path": "/b"}, "second")
    shuffled = dict(sorted(FLASH.items(), reverse=True))
    (second / "config.json").write_text(json.dumps(shuffled, indent=8))
    (second / "README.md").write_text("not a weight")
    assert read_checkpoint(first).fingerprint == read_checkpoint(second).fingerprint


@pytest.mark.parametrize(
    "change",
    [
        lambda path: checkpoint_dir(path.parent, FLASH | {"rope_theta": 1.0}),
        lambda path: (path / "model.safetensors").write_bytes(bytes(101)),
        lambda path: (path / "model.safetensors").rename(path / "other.safetensors"),
        lambda path: (path / "more.safetensors").write_bytes(b""),
    ],
    ids=["config", "size", "name", "file"],
)
def test_the_fingerprint_tells_models_apart(tmp_path: Path, change: Any) -> None:
    path = checkpoint_dir(tmp_path)
    before = read_checkpoint(path).fingerprint
    change(path)
    assert read_checkpoint(path).fingerprint != before


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architecture: got 'LlamaForCausalLM', allowed:"),
        ({"architectures": ["DeepseekV41ForCausalLM"]}, "got 'DeepseekV41ForCausalLM'"),
        ({"architectures": []}, "architecture: got []"),
        ({"architectures": None, "model_type": "llama"}, "model_type: got 'llama'"),
        ({"model_type": "deepseek_v3"}, "model_type of DeepseekV4ForCausalLM: got 'deepseek_v3'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: got 0, allowed: an integer in 1 .. 1024"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers: got 1000"),
        ({"num_hidden_layers": 60}, "compress_ratios: got '44 entries'"),
        ({"index_topk": True}, "index_topk: got True"),
        ({"index_n_heads": -1}, "index_n_heads: got -1"),
        ({"index_head_dim": 128.0}, "index_head_dim: got 128.0"),
        ({"hidden_size": None}, "hidden_size: got None"),
        ({"max_position_embeddings": "1M"}, "max_position_embeddings: got '1M'"),
        ({"compress_ratios": 4}, "compress_ratios: got 4, allowed: a list"),
        ({"compress_ratios": [4, 8] * 30}, "compress_ratios[1]: got 8, allowed: 0, 4, 128"),
        ({"compress_ratios": [0, 128] * 30}, "allowed: a model with an indexer in at least one"),
        ({"compress_rates": {TYPES[4]: 8}}, "compress_rates[compressed_sparse_attention]: got 8"),
        ({"compress_rate_csa": 8}, "compress_rate_csa: got 8, allowed: 4"),
        ({"compress_rates": []}, "compress_rates: got [], allowed: a JSON object"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types[0]: got 'full_attention'"),
        ({"layer_types": [TYPES[4]] * 43}, "compress_ratios[0]: got 0, allowed: 4"),
    ],
)
def test_a_config_is_refused_by_the_field(
    tmp_path: Path, change: dict[str, Any], line: str
) -> None:
    with pytest.raises(SpinError) as refused:
        read_checkpoint(checkpoint_dir(tmp_path, FLASH | change))
    assert line in str(refused.value)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe\xfa", "is not valid JSON"),
        (b"[]", "config.json: got 'list', allowed: a JSON object"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"[" * 10**5, "is not valid JSON"),
        (b'{"a": ' + b"[" * 80 + b"]" * 80 + b"}", "got 'deeper nesting', allowed: up to 64"),
        (b" " * (16 * 2**20 + 1), "got 'a larger file'"),
    ],
    ids=["empty", "cut", "bytes", "list", "number", "nested", "deep", "large"],
)
def test_a_damaged_config_is_one_line(tmp_path: Path, content: bytes, line: str) -> None:
    path = checkpoint_dir(tmp_path)
    (path / "config.json").write_bytes(content)
    with pytest.raises(SpinError) as refused:
        read_checkpoint(path)
    assert line in str(refused.value)


def test_a_missing_checkpoint_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpinError, match="allowed: a directory with"):
        read_checkpoint(tmp_path / ("x" * 5000))
    with pytest.raises(SpinError, match=r"cannot read '.*config.json': No such file"):
        read_checkpoint(tmp_path)
    (checkpoint_dir(tmp_path) / "lost.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SpinError, match=r"cannot read '.*lost.safetensors'"):
        read_checkpoint(tmp_path / "model")


field_names = st.sampled_from(
    [*FLASH, "layer_types", "compress_rates", "compress_rate_csa", "quantization_config"]
)


@fuzz
@given(changes=st.dictionaries(field_names, json_values, max_size=4))
@example(changes={"layer_types": [[]] * 43})
def test_whatever_a_config_says_it_is_read_or_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = checkpoint_dir(tmp_path, FLASH | changes)
    try:
        found = read_checkpoint(path)
    except SpinError:
        return
    assert set(found.geometry.layers) <= set(range(found.num_layers))


@fuzz
@given(content=st.binary(max_size=60))
def test_whatever_bytes_a_config_has_it_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = checkpoint_dir(tmp_path)
    (path / "config.json").write_bytes(content)
    with pytest.raises(SpinError):
        read_checkpoint(path)


def test_memory_of_flash_at_a_million_tokens() -> None:
    geometry = IndexerGeometry(tuple(range(2, 43, 2)), 4, 64, 128, 512)
    config = SpinConfig(top_k=512, state_dtype="bf16")
    sizes = {"max_batch_size": 3, "max_seq_len": 2**20}
    found = spin_memory(geometry, config, key_dtype="fp8", **sizes)
    # 21 layers x (V and D of 262208 in bf16, each on lines of its own, and a few bytes of books)
    lane = 21 * 2 * 262208 * 2
    assert lane < found.per_sequence_bytes < lane + 21 * 64
    assert found.state_bytes == 4 * found.per_sequence_bytes  # one lane more for padding rows
    assert found.total_bytes == found.state_bytes + found.buffer_bytes
    scores = (21 * 4 + 3) * 262144 * 4  # of every lane, and of three rows that have none
    assert scores < found.draft_bytes < found.buffer_bytes < 2 * scores
    assert found.share_of_indexer_cache == 0.0303  # 4 of 132 bytes a slot
    assert spin_memory(geometry, config, key_dtype="fp4", **sizes).share_of_indexer_cache == 0.0588


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("tokens", [1024, 1025])
def test_memory_is_what_a_step_allocates(tokens: int, drafts: int) -> None:
    """The classes that TensorRT-LLM's hooks make, for a page table as wide as its sequences."""
    geometry = IndexerGeometry((2, 4, 6), 4, 64, 128, 512)
    config = SpinConfig(top_k=512, state_dtype="bf16")
    found = spin_memory(geometry, config, max_batch_size=5, max_seq_len=tokens, key_dtype="fp8")
    slots = 64 * -(-tokens // 256)
    state = GpuState((2, 4, 6), sequences=5, slots=slots, device="cpu")
    rows = 1 + drafts
    step = GpuStep(config, state, ratio=4, sequences=5, rows=rows, page_slots=64)
    assert found.state_bytes == state.state_bytes
    wanted = state.state_bytes + step.buffer_bytes
    assert found.total_bytes + drafts * found.draft_bytes == wanted


def test_a_sequence_shorter_than_a_slot_is_refused() -> None:
    geometry = IndexerGeometry((0,), 4, 64, 128, 512)
    with pytest.raises(SpinError, match="max_seq_len: got 3, allowed: at least 4"):
        spin_memory(
            geometry, SpinConfig(top_k=512), max_batch_size=1, max_seq_len=3, key_dtype="fp8"
        )


def test_small_conversions() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1536, 3 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
    ]
    assert (indexer_key_bytes(128, "fp8"), indexer_key_bytes(128, "fp4")) == (132, 68)
    assert [parse_sm(text) for text in ("90", "sm_90", "90a", "SM100f")] == [90, 90, 90, 100]


@pytest.mark.parametrize("text", ["", "80", "sm", "90 ", "9" * 5000, "sm__90", "-90", "90aa"])
def test_an_unknown_target_is_refused(text: str) -> None:
    with pytest.raises(SpinError, match="allowed: 90, 100, 103, 120"):
        parse_sm(text)


def test_the_target_defaults_to_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 3))
    assert choose_target(None).sm == 103
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert choose_target(None).sm == 90


@pytest.mark.parametrize(
    ("name", "block_size", "state_dtype"),
    [
        ("deepseek-v4-flash", 64, "bf16"),
        ("deepseek-v4-pro", 64, "bf16"),
        ("deepseek-v3.2", 64, "bf16"),
        ("tiny-deepseek-v4", 16, "fp32"),
    ],
)
def test_presets(name: str, block_size: int, state_dtype: str) -> None:
    expected = SpinConfig(
        block_size=block_size, target_sparsity=0.4, exploration=0.05, state_dtype=state_dtype
    )
    assert preset(name) == expected
