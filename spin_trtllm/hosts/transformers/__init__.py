# SPDX-License-Identifier: Apache-2.0
"""The embedded host: SPIN inside Transformers' DeepSeek-V4, on CPU or GPU, with hooks only.

    model, tokenizer = load_model("path/to/checkpoint")
    with enable(model, SpinConfig()) as session:
        ...                                  # any decode with a cache, `model.generate` included
    print(session.stats.realized_sparsity)   # and the model is as it was

It is exact, and it shows what SPIN keeps and misses on a real model. It shows no speed: the host
multiplies all slots in its attention whatever the indexer picks.
"""

from spin_trtllm.hosts.transformers.capture import Capture
from spin_trtllm.hosts.transformers.load import config_of, encode_prompt, load_model
from spin_trtllm.hosts.transformers.session import SpinSession, enable
from spin_trtllm.hosts.transformers.stats import SpinStats

__all__ = [
    "Capture",
    "SpinSession",
    "SpinStats",
    "config_of",
    "enable",
    "encode_prompt",
    "load_model",
]
