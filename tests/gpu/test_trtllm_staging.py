# SPDX-License-Identifier: Apache-2.0
"""A host that runs ahead of the device does not overwrite what the device has yet to read."""

from __future__ import annotations

import pytest
import torch

from spin_trtllm.hosts.trtllm.staging import DEPTH, StagedTable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_every_step_reads_its_own_table() -> None:
    staged = StagedTable(2, 96, -1, torch.device("cuda"))
    seen = []
    for t in range(5 * DEPTH):
        torch.cuda._sleep(2_000_000)  # a millisecond or so: the host is ahead from the second on
        staged.open()[:] = t
        staged.send()
        seen.append(staged.table.clone())
    assert [int(x.unique()) for x in seen] == list(range(5 * DEPTH))
