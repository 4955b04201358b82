# SPDX-License-Identifier: Apache-2.0
"""Scores and columns of a host's own kernels, in SPIN's terms: against loops."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from spin_trtllm.reference import adopt_scores

NEVER_SEEN = -7.5


@given(
    seed=st.integers(0, 2**32 - 1),
    block=st.sampled_from((8, 16, 64)),
    blocks=st.integers(1, 9),
    sequences=st.integers(1, 3),
    rows=st.integers(1, 3),
    data=st.data(),
)
def test_adopting_equals_loops(
    seed: int, block: int, blocks: int, sequences: int, rows: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    host_rows = data.draw(st.integers(1, rows))
    width = max(1, blocks * block + data.draw(st.integers(-5, 5)))
    host = torch.randn(sequences * host_rows, width, generator=generator)
    lists = []
    for _ in range(sequences):
        kept = sorted(data.draw(st.sets(st.integers(0, blocks - 1))))
        lists.append(kept + [-1] * (blocks - len(kept)))
    seen = torch.randint(0, blocks * block + 1, (sequences, rows), generator=generator).int()
    columns = torch.randint(-3, blocks * block + 3, (sequences * host_rows, 6), generator=generator)
    places = torch.randperm(sequences + 2, generator=generator)[:sequences]
    scores = torch.full((sequences + 2, rows, blocks * block), NEVER_SEEN)
    mapped = columns.int()
    adopt_scores(
        host, mapped, torch.tensor(lists).int(), seen, places, scores, block_size_slots=block
    )
    wanted = torch.full_like(scores, NEVER_SEEN)
    for s in range(sequences):
        for r in range(host_rows):
            for c in range(min(int(seen[s, r]), width, blocks * block)):
                wanted[places[s], r, c] = host[s * host_rows + r, c]
            for i, c in enumerate(columns[s * host_rows + r].tolist()):
                home = lists[s][c // block] if 0 <= c < blocks * block else -1
                slot = home * block + c % block if home >= 0 else -1
                assert mapped[s * host_rows + r, i] == slot
    assert torch.equal(scores, wanted)
