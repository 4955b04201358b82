# SPDX-License-Identifier: Apache-2.0
"""The committed tiny checkpoint is the one the model card describes, and it can recall."""

import hashlib
from pathlib import Path

import pytest
import torch

from spin_trtllm import tiny
from spin_trtllm.errors import SpinError
from spin_trtllm.recall import recall_document

CARD = Path(__file__).parent.parent / "benchmarks" / "tiny_model" / "README.md"
BOS = 256


@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers")
    path = tiny.checkpoint_path()
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint-seed-1"])
def test_weights_are_those_of_the_card(name):
    weights = (CARD.parent / name / "model.safetensors").read_bytes()
    digest = hashlib.sha256(weights).hexdigest()
    assert f"| `{name}/model.safetensors` | `{digest}` |" in CARD.read_text(encoding="utf-8")


def test_the_second_checkpoint_differs_in_its_weights_alone():
    for name in ("config.json", "tokenizer.json"):
        first, second = (CARD.parent / of / name for of in ("checkpoint", "checkpoint-seed-1"))
        assert first.read_bytes() == second.read_bytes()


def test_architecture(model):
    config = model.config
    indexed = [i for i, t in enumerate(config.layer_types) if t == "compressed_sparse_attention"]
    assert indexed == [1, 3, 4, 6]
    assert config.num_hidden_layers == 7
    assert config.compress_rates["compressed_sparse_attention"] == 4
    assert (config.index_n_heads, config.index_head_dim, config.index_topk) == (16, 64, 64)
    assert config.sliding_window == 64
    assert config.max_position_embeddings == 32_768
    assert config.vocab_size == 272
    assert sum(p.numel() for p in model.parameters()) == 7_617_575


def test_tokenizer_is_byte_level():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tiny.checkpoint_path() / "tokenizer.json")
    )
    text = "Hello,  w\n\u00e9"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.convert_tokens_to_ids("<bos>") == BOS


def test_dense_recall(model):
    filler = (Path(__file__).parent.parent / "LICENSE").read_bytes()
    document = recall_document(0, context_bytes=1_500, queries=8, filler=filler)
    with torch.no_grad():
        logits = model(torch.tensor([[BOS, *document.context, *document.asked[:-1]]])).logits[0]
    # The logits after a byte predict the next one.
    picked = logits[len(document.context) :].argmax(-1).tolist()
    assert document.share_right(picked) >= 7 / 8


def test_environment_names_another_checkpoint(tmp_path, monkeypatch):
    for name in tiny.FILES:
        (tmp_path / name).touch()
    monkeypatch.setenv(tiny.ENVIRONMENT_VARIABLE, str(tmp_path))
    assert tiny.checkpoint_path() == tmp_path


def test_environment_naming_no_checkpoint_is_refused(tmp_path, monkeypatch):
    (tmp_path / "config.json").touch()
    monkeypatch.setenv(tiny.ENVIRONMENT_VARIABLE, str(tmp_path))
    with pytest.raises(SpinError, match=r"SPIN_TINY_CHECKPOINT: got .*model\.safetensors"):
        tiny.checkpoint_path()


def test_an_install_without_the_repository_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv(tiny.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(tiny, "_IN_CLONE", tmp_path)
    with pytest.raises(SpinError, match="clone the repository and set SPIN_TINY_CHECKPOINT"):
        tiny.checkpoint_path()
