# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs of the model: the names, types and shapes of TensorRT-LLM's `llmapi` model.

Those that begin with `spin_`, and `return_spin_statistics`, are this package's own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of `config.pbtxt`.

    Attributes:
        name: as clients spell it.
        data_type: Triton's name of the type, without `TYPE_`.
        size: elements of its only dimension, -1 for any number.
        optional: a request may leave it out.
    """

    name: str
    data_type: str
    size: int = 1
    optional: bool = True


INPUTS = (
    TensorSpec("text_input", "STRING", -1, optional=False),
    TensorSpec("streaming", "BOOL"),
    TensorSpec("sampling_param_best_of", "INT32"),
    TensorSpec("sampling_param_temperature", "FP32"),
    TensorSpec("sampling_param_top_k", "INT32"),
    TensorSpec("sampling_param_top_p", "FP32"),
    TensorSpec("sampling_param_frequency_penalty", "FP32"),
    TensorSpec("sampling_param_presence_penalty", "FP32"),
    TensorSpec("sampling_param_max_tokens", "INT32"),
    TensorSpec("sampling_param_stop", "STRING", -1),
    TensorSpec("sampling_param_seed", "UINT64"),
    TensorSpec("sampling_param_exclude_input_from_output", "BOOL"),
    TensorSpec("sampling_param_return_perf_metrics", "BOOL"),
    TensorSpec("return_finish_reason", "BOOL"),
    TensorSpec("return_stop_reason", "BOOL"),
    TensorSpec("return_cumulative_logprob", "BOOL"),
    TensorSpec("return_spin_statistics", "BOOL"),
    TensorSpec("stop", "BOOL"),
)

# What `sampling_param_return_perf_metrics` asks for; an engine sends those that it knows.
PERF_METRICS = (
    TensorSpec("kv_cache_reused_block", "INT32", -1),
    TensorSpec("kv_cache_missed_block", "INT32", -1),
    TensorSpec("kv_cache_alloc_new_blocks", "INT32", -1),
    TensorSpec("kv_cache_alloc_total_blocks", "INT32", -1),
    TensorSpec("kv_cache_hit_rate", "FP32", -1),
    TensorSpec("arrival_time_ns", "INT64"),
    TensorSpec("first_scheduled_time_ns", "INT64"),
    TensorSpec("first_token_time_ns", "INT64"),
    TensorSpec("last_token_time_ns", "INT64"),
    TensorSpec("acceptance_rate", "FP32"),
    TensorSpec("total_accepted_draft_tokens", "INT32"),
    TensorSpec("total_draft_tokens", "INT32"),
)

SPARSITY = TensorSpec("spin_realized_sparsity", "FP32")

OUTPUTS = (
    TensorSpec("text_output", "STRING", -1),
    TensorSpec("finish_reason", "STRING", -1),
    TensorSpec("stop_reason", "STRING", -1),
    TensorSpec("cumulative_logprob", "FP32", -1),
    *PERF_METRICS,
    SPARSITY,
)
