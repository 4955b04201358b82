# SPDX-License-Identifier: Apache-2.0
"""The tiny DeepSeek-V4: its configuration, its first weights, its checkpoint directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from spin_trtllm.errors import SpinError
from spin_trtllm.files import atomic_file, save_tensors

SLIDING, CSA, HCA = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
BYTES = 256
BOS = BYTES  # token of the beginning of a text
VOCABULARY = 272  # a multiple of 16; the tokens after BOS are unused

# Small tensors that steer the rest stay in float32: rounding them costs quality and saves nothing.
_FLOAT32 = (
    "attn_hc",
    "ffn_hc",
    "hc_head",
    "sinks",
    "position_bias",
    "e_score_correction_bias",
    "norm",
)


def configuration(**overrides: Any) -> DeepseekV4Config:
    """Configuration of the tiny model.

    Args:
        overrides: fields to change, for a model that is smaller still.
    """
    layer_types = [SLIDING, CSA, HCA, CSA, CSA, HCA, CSA]
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 320,
        "layer_types": layer_types,
        "num_attention_heads": 6,
        "head_dim": 64,
        "q_lora_rank": 160,
        "o_groups": 2,
        "o_lora_rank": 96,
        "partial_rotary_factor": 0.25,
        "sliding_window": 64,
        "compress_rates": {CSA: 4, HCA: 128},
        "index_n_heads": 16,
        "index_head_dim": 64,
        "index_topk": 64,
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 32_768,
        "bos_token_id": BOS,
        "eos_token_id": None,
        "pad_token_id": None,
    } | overrides
    layers = len(fields["layer_types"])
    fields |= {"num_hidden_layers": layers, "mlp_layer_types": ["moe"] * layers}
    return DeepseekV4Config(**fields)


def new_model(config: DeepseekV4Config, seed: int) -> DeepseekV4ForCausalLM:
    """A model with random float32 weights, the same for the same seed.

    What each layer adds to the residual streams is scaled down by the depth, so that their size
    does not grow with it.
    """
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(config).float()
    scale = (2 * config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in (
                layer.self_attn.o_b_proj.weight,
                layer.mlp.experts.down_proj,
                layer.mlp.shared_experts.down_proj.weight,
            ):
                weight.mul_(scale)
    return model


def load_weights(model: DeepseekV4ForCausalLM, checkpoint: Path) -> None:
    """Take all weights from a checkpoint directory.

    Raises:
        SpinError: no weights there, or those of another model.
    """
    path = checkpoint / "model.safetensors"
    try:
        model.load_state_dict(load_file(path))
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise SpinError(f"checkpoint: cannot load {str(path)!r}: {reason}") from error


def save_checkpoint(directory: Path, model: DeepseekV4ForCausalLM) -> None:
    """Write weights, configuration and tokenizer, as `AutoModelForCausalLM` reads them.

    Matrices are stored in bfloat16. The configuration asks for float32 all the same: Transformers
    5.17 cannot run this model in bfloat16.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with atomic_file(directory / "model.safetensors") as path:
        tensors = {name: _stored(name, value) for name, value in model.state_dict().items()}
        save_tensors(path, tensors, {"format": "pt"}, argument="output")
    config = model.config.to_dict() | {
        "architectures": [type(model).__name__],
        "dtype": "float32",
    }
    config.pop("transformers_version", None)
    with atomic_file(directory / "config.json") as path:
        path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    with atomic_file(directory / "tokenizer.json") as path:
        byte_tokenizer().save(str(path))


def _stored(name: str, value: Tensor) -> Tensor:
    dtype = torch.float32 if any(part in name for part in _FLOAT32) else torch.bfloat16
    return value.detach().to("cpu", dtype)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose token of a byte is the byte's value."""
    vocabulary = {letter: byte for byte, letter in enumerate(_byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<bos>": BOS}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte: printable bytes as they are in
    Latin-1, the others counted up from U+0100.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTES)]
