# SPDX-License-Identifier: Apache-2.0
"""Mirrors tensorrt_llm/_torch/cute_dsl_utils.py IS_CUTLASS_DSL_AVAILABLE."""

from tensorrt_llm._double import CONFIG

IS_CUTLASS_DSL_AVAILABLE = CONFIG.cutlass_dsl
