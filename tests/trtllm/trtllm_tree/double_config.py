# SPDX-License-Identifier: Apache-2.0
"""Knobs of the double. Served as `tensorrt_llm._double`; nothing upstream has this module."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DoubleConfig:
    tree: str = "new"
    body: str = "split"  # "split": TopK module; "inlined": ops called in sparse_attn_indexer
    top_k_api: str = "aux"  # "aux": radix_aux_* passed by the indexer; "workspace": TopK owns them
    version: str = "1.4.0rc4"
    sm_version: int = 90
    num_sms: int = 4
    cutlass_dsl: bool = False
    device: str = "cpu"
    poison_free_pages: bool = True
    compressor_none: bool = False  # the branch of DeepseekV4Indexer.forward for k_fp8 is None
    calls: list[tuple[str, dict[str, object]]] = field(default_factory=list)

    def record(self, name: str, **facts: object) -> None:
        """Kernel launches in order, for tests of call order. Cleared by the test."""
        self.calls.append((name, facts))


CONFIG = DoubleConfig()
