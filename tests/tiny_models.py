# SPDX-License-Identifier: Apache-2.0
"""Small random DeepSeek-V4 models for tests of the embedded host: built in a second, from a seed.

They have 16 index heads: with few, many scores are exactly zero and the host's top-k orders such
ties by chance. Two of the four layers have an indexer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

VOCABULARY = 96
CSA_LAYERS = (1, 3)
TOP_K = 16
RATIO = 4
MAX_TOKENS = 2048


def tiny_model(seed: int = 0, **overrides: Any) -> DeepseekV4ForCausalLM:
    """A random model in eval mode, fp32, on the CPU.

    Args:
        seed: of the weights.
        overrides: configuration fields.
    """
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "q_lora_rank": 32,
        "num_experts_per_tok": 2,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "max_position_embeddings": MAX_TOKENS,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["moe"] * 4,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "sliding_window": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": TOP_K,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 0.25,
        "initializer_range": 0.2,  # wide enough that scores differ from slot to slot
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    return DeepseekV4ForCausalLM(DeepseekV4Config(**(fields | overrides))).eval()


def save_checkpoint(directory: Path, model: DeepseekV4ForCausalLM) -> Path:
    """Write a model and a tokenizer of one token a character (ASCII from space on)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    model.save_pretrained(directory)
    vocabulary = {chr(32 + i): i for i in range(VOCABULARY - 1)} | {"\n": VOCABULARY - 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def random_ids(length: int, *, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Token ids int64 `[rows, length]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator)
