# SPDX-License-Identifier: Apache-2.0
"""Mirrors tensorrt_llm/_torch/pyexecutor/llm_request.py @002f3cc3."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

# llm_request.py ATTENTION_DP_DUMMY_REQUEST_ID: the request of an idle attention-DP rank
ATTENTION_DP_DUMMY_REQUEST_ID = 0
# cuda_graph_runner.py CUDA_GRAPH_DUMMY_REQUEST_ID @7b437aaa (shared by all padding rows)
CUDA_GRAPH_DUMMY_REQUEST_ID = (1 << 64) - 1


def cuda_graph_dummy_request_id(
    draft_len: int = 0, *, variant: int = 0, max_draft_len: int = 0
) -> int:
    """One id per runtime draft length (thread of pull request 13151). The low/high blocks of
    the newest helper were not read: `variant` only offsets by whole draft ranges here."""
    return CUDA_GRAPH_DUMMY_REQUEST_ID - draft_len - variant * (max_draft_len + 1)


class LlmRequestState(IntEnum):
    """bindings LlmRequestState, the values that llm_request.py lists"""

    UNKNOWN = 0
    ENCODER_INIT = 1
    CONTEXT_INIT = 2
    GENERATION_IN_PROGRESS = 3
    GENERATION_TO_COMPLETE = 4
    GENERATION_COMPLETE = 5


@dataclass
class LlmRequest:
    """llm_request.py LlmRequest: what the managers and the scheduler read"""

    request_id: int
    input_tokens: list[int]
    max_new_tokens: int = 1
    state: LlmRequestState = LlmRequestState.CONTEXT_INIT
    is_dummy_request: bool = False
    is_cuda_graph_dummy: bool = False
    context_current_position: int = 0
    context_chunk_size: int = 0
    py_draft_tokens: list[int] = field(default_factory=list)
    py_num_accepted_draft_tokens: int = 0
    py_rewind_len: int = 0
    py_ctx_pre_resize_cap: int | None = None
    cache_salt: str | None = None
    lora_task_id: int | None = None
    prompt_len: int = 0
    tokens: list[int] = field(default_factory=list)
    # LlmRequest C++ "first chunk" bookkeeping: position at which this prefill began
    first_chunk_start: int = 0

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.input_tokens)
        self.tokens = self.tokens or list(self.input_tokens)

    @property
    def py_request_id(self) -> int:
        """llm_request.py LlmRequest.py_request_id"""
        return self.request_id

    @property
    def is_dummy(self) -> bool:
        """llm_request.py LlmRequest.is_dummy"""
        return self.is_dummy_request or self.is_cuda_graph_dummy

    @property
    def is_first_context_chunk(self) -> bool:
        """LlmRequest.is_first_context_chunk: true until the first chunk has run"""
        return self.context_current_position == self.first_chunk_start

    @property
    def context_remaining_length(self) -> int:
        """LlmRequest.context_remaining_length"""
        return self.prompt_len - self.context_current_position

    @property
    def max_beam_num_tokens(self) -> int:
        """LlmRequest.max_beam_num_tokens"""
        return len(self.tokens)

    def get_tokens(self, beam: int = 0) -> list[int]:
        """LlmRequest.get_tokens"""
        return self.tokens

    def set_prepopulated_prompt_len(self, length: int, tokens_per_block: int) -> None:
        """LlmRequest.set_prepopulated_prompt_len: the prefix that needs no local forward"""
        self.context_current_position = length
        self.first_chunk_start = length


def get_draft_token_length(request: LlmRequest) -> int:
    """llm_request.py get_draft_token_length"""
    return len(request.py_draft_tokens) if request.py_draft_tokens is not None else 0
