# SPDX-License-Identifier: Apache-2.0
"""The GPU architecture to deploy on, and the cache formats TensorRT-LLM uses there."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from spin_trtllm.build.checkpoint import DEEPSEEK_V4
from spin_trtllm.errors import refuse

TARGET_SMS = (90, 100, 103, 120)
DEFAULT_SM = 90
PAGE_SLOTS = 64  # slots of an indexer page, the largest that TensorRT-LLM has on every GPU

_SPELLING = re.compile(r"(?:sm_?)?(\d+)[af]?", re.IGNORECASE)
_FP4_SMS = (100, 103)  # Datacenter Blackwell: DeepGEMM has its fp4 scoring kernels there
_PACKED_CACHE_SMS_V4 = (90, 120)  # sparse attention reads the main keys as `fp8_ds_mla` there
_PACKED_CACHE_SMS_V32 = (120,)


@dataclass(frozen=True)
class Target:
    """Where a deployment is to run.

    Attributes:
        sm: compute capability, 90 for sm_90.
        source: where `sm` comes from, for the build's report.
    """

    sm: int
    source: str

    @property
    def name(self) -> str:
        """`sm_90` and the like."""
        return f"sm_{self.sm}"


def parse_sm(text: str) -> int:
    """`90`, `90a`, `sm_90` or `sm90a` as 90.

    Raises:
        SpinError: anything that is not one of `TARGET_SMS`.
    """
    match = _SPELLING.fullmatch(text)
    sm = int(match[1]) if match and len(match[1]) < 5 else None
    if sm not in TARGET_SMS:
        refuse("target_sm", text, ", ".join(map(str, TARGET_SMS)))
    return sm


def choose_target(requested: str | None) -> Target:
    """The requested architecture, else this machine's GPU, else `DEFAULT_SM`."""
    if requested is not None:
        return Target(parse_sm(requested), "as asked")
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if 10 * major + minor in TARGET_SMS:
            return Target(10 * major + minor, "this machine's GPU")
    return Target(DEFAULT_SM, "default; no supported GPU here")


def indexer_key_dtype(sm: int, architecture: str, index_head_dim: int) -> str:
    """Storage of the indexer's keys, `fp8` or `fp4`: what TensorRT-LLM would choose itself.

    fp4 needs datacenter Blackwell and 128 dimensions, and only DeepSeek-V4 was trained for it.
    """
    fits = sm in _FP4_SMS and index_head_dim == 128
    return "fp4" if fits and architecture == DEEPSEEK_V4 else "fp8"


def main_cache_dtype(sm: int, architecture: str) -> str:
    """`kv_cache_config.dtype` that the sparse attention needs; `auto` where the host may choose."""
    packed = _PACKED_CACHE_SMS_V4 if architecture == DEEPSEEK_V4 else _PACKED_CACHE_SMS_V32
    return "fp8_ds_mla" if sm in packed else "auto"


def indexer_key_bytes(index_head_dim: int, dtype: str) -> int:
    """Bytes of one slot of the indexer's key cache, with its scales: 132 (fp8) or 68 (fp4) at 128.

    fp8 keeps one fp32 scale per 128 dimensions, fp4 one exponent byte per 32.
    """
    if dtype == "fp4":
        return index_head_dim // 2 + -(-index_head_dim // 32)
    return index_head_dim + 4 * -(-index_head_dim // 128)
