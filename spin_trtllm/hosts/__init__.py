# SPDX-License-Identifier: Apache-2.0
"""Thin adapters from a host's tensors to `spin_trtllm.step`; nothing below knows a host."""
