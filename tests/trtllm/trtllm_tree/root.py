# SPDX-License-Identifier: Apache-2.0
"""Mirrors tensorrt_llm/__init__.py: the version string only."""

from tensorrt_llm._double import CONFIG

__version__ = CONFIG.version  # tensorrt_llm/version.py
