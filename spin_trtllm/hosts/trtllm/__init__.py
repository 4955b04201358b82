# SPDX-License-Identifier: Apache-2.0
"""SPIN inside TensorRT-LLM: hooks on its indexer, put there when the host imports it.

    TLLM_SPIN=DIR/spin.yaml trtllm-serve ...     # the start-up stub does the rest, in every rank
    enable("DIR")                                # the same for users of its LLM API

`docs/tensorrt-llm.md` says how to build, serve, and see whether it is on.
"""

from spin_trtllm.hosts.trtllm.activate import enable, install
from spin_trtllm.hosts.trtllm.settings import HookRefused, Settings, read_settings

__all__ = ["HookRefused", "Settings", "enable", "install", "read_settings"]
