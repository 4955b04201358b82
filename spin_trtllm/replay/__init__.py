# SPDX-License-Identifier: Apache-2.0
"""Replaying traces of indexer scores: what a policy keeps, what it misses, what it would cost."""
