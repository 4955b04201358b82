# SPDX-License-Identifier: Apache-2.0
"""Which rank this process is, by the host or by whatever started it."""

from __future__ import annotations

import os
from typing import Any

# Open MPI, PMIx, MPICH, Slurm, torchrun.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "RANK")


def rank_of_process() -> str:
    """The rank as text; empty where nothing says so."""
    return next((os.environ[name] for name in RANK_VARIABLES if os.environ.get(name)), "")


def rank_of(metadata: Any) -> str:
    """The rank of a metadata's KV-cache manager as text; 0 where nothing says so."""
    mappings = (getattr(each, "mapping", None) for each in (metadata.kv_cache_manager, metadata))
    ranks = (getattr(mapping, "rank", None) for mapping in mappings)
    return next((str(rank) for rank in ranks if rank is not None), rank_of_process() or "0")
