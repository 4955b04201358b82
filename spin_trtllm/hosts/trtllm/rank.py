# SPDX-License-Identifier: Apache-2.0
"""Which rank this process is, by whatever started it."""

from __future__ import annotations

import os

# Open MPI, PMIx, MPICH, Slurm, torchrun.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "RANK")


def rank_of_process() -> str:
    """The rank as text; empty where nothing says so."""
    return next((os.environ[name] for name in RANK_VARIABLES if os.environ.get(name)), "")
