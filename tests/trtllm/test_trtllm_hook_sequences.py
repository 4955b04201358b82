# SPDX-License-Identifier: Apache-2.0
"""Which lane a row gets, and what the counters are told: against a dictionary, row by row."""

from __future__ import annotations

import random

import pytest
import torch

from spin_trtllm.config import SpinConfig
from spin_trtllm.geometry import block_budget
from spin_trtllm.gpu_step import NO_LANE
from spin_trtllm.hosts.trtllm.estimate import StepEstimate
from spin_trtllm.hosts.trtllm.sequences import SequenceLanes, is_dummy

LANES = 4
PADDING = 2**64 - 1


def lanes_of(sequences: int = LANES, *, micro_batches: int = 2) -> SequenceLanes:
    return SequenceLanes(sequences, torch.device("cpu"), micro_batches=micro_batches)


def seats(lanes: SequenceLanes, rows: list[int]) -> list[int]:
    """What the device holds for each row, after its ids were checked."""
    ids = [i % 2**64 for i in lanes.ids[: len(rows)].tolist()]
    assert ids == rows
    return lanes.lanes[: len(rows)].tolist()


@pytest.mark.parametrize(
    ("request_id", "dummy"),
    [
        (0, True),
        (LANES - 1, True),
        (LANES, False),
        (2**63, False),
        (2**64 - 1, True),
        (2**64 - 1 - 2**20, True),
    ],
)
def test_dummies_are_told_by_their_ids(request_id: int, dummy: bool) -> None:
    assert is_dummy(request_id, LANES) is dummy


def test_random_batches_equal_a_dictionary() -> None:
    """Everyone keeps his lane until a newcomer needs it, and then who waited longest gives way."""
    rng, lanes = random.Random(3), lanes_of()
    seated: dict[int, int] = {}  # lane of each id
    used: dict[int, int] = {}  # step in which each id was last in a batch
    rows: list[int] = []
    tenancies: dict[int, int] = {}  # of each id, since it got its lane
    for t in range(3000):
        known = [i for i in seated if rng.random() < 0.6]
        contexts = [i for i in known if rng.random() < 0.03]
        if rng.random() < 0.7:
            fresh = [LANES + t] if rng.random() < 0.5 else []
            rows = [i for i in (*known, *fresh) if i not in contexts][:LANES]
            rows += rng.choices([0, 1, PADDING], k=rng.randrange(LANES + 1 - len(rows)))
            rng.shuffle(rows)
        else:
            contexts = []
        before = {i: lane for i, lane in seated.items() if i not in contexts}
        real = [i for i in rows if not is_dummy(i, LANES)]
        assert lanes.place(contexts, rows)
        assert lanes.is_known.tolist() == [i in before for i in rows]
        assert (lanes.known_rows, lanes.real_rows) == (sum(i in before for i in rows), len(real))
        now = dict(zip(rows, seats(lanes, rows), strict=True))
        assert all(now[i] == NO_LANE for i in rows if is_dummy(i, LANES))
        seated = dict(lanes.lane_of)
        assert len({*seated.values()} - {NO_LANE}) == len(seated)
        assert all(seated[i] == now[i] for i in real)
        gone = before.keys() - seated.keys()
        waiting = seated.keys() - set(real)
        assert all(before[i] == seated[i] for i in waiting | (before.keys() & set(real)))
        assert len(gone) == max(0, len(before.keys() | set(real)) - 2 * LANES)
        assert all(used[i] <= used[j] for i in gone for j in waiting)
        used.update(dict.fromkeys(real, t))
        now = dict(zip(rows, lanes.tenants[: len(rows)].tolist(), strict=True))
        assert all(now[i] == tenancies[i] for i in real if i in before)
        fresh = [now[i] for i in real if i not in before]
        assert all(tenancy > max(tenancies.values(), default=0) for tenancy in fresh)
        assert len(set(fresh)) == len(fresh)
        tenancies.update((i, now[i]) for i in real)


@pytest.mark.parametrize("rows", [[7, 7], [7, PADDING, 7], [4, 5, 6, 7, 8]])
def test_rows_without_a_place_of_their_own_leave_nobody_a_lane(rows: list[int]) -> None:
    lanes = lanes_of()
    assert lanes.place([], [7, 8])
    assert not lanes.place([], rows)
    assert lanes.lanes.tolist() == [NO_LANE] * LANES
    assert lanes.place([], [7, 8])
    assert lanes.is_known.tolist() == [i not in rows for i in (7, 8)]


def test_who_is_missing_is_forgotten_where_nobody_takes_turns() -> None:
    lanes = lanes_of(micro_batches=1)
    lanes.place([], [7, 8])
    before = lanes.tenants[:2].tolist()
    lanes.place([], [8])
    assert lanes.lane_of.keys() == {8}
    lanes.place([], [7, 8])
    assert lanes.is_known.tolist() == [False, True]
    assert lanes.tenants[0] > max(before)
    assert lanes.tenants[1] == before[1]


def test_who_ran_dense_is_forgotten_and_has_no_lane() -> None:
    lanes = lanes_of()
    lanes.place([], [7, 8])
    before = lanes.tenants[:2].tolist()
    lanes.leave([7, 8])
    assert lanes.lanes.tolist() == [NO_LANE] * LANES
    lanes.place([], [7, 8])
    assert lanes.known_rows == 0
    assert min(lanes.tenants[:2].tolist()) > max(before)


def test_a_request_that_prefills_or_is_forgotten_is_unknown_in_the_same_rows() -> None:
    lanes = lanes_of()
    lanes.place([], [7, 8])
    lanes.place([], [7, 8])
    assert lanes.known_rows == 2
    lanes.place([8], [7])
    lanes.place([], [7, 8])
    assert lanes.is_known.tolist() == [True, False]
    before = lanes.tenants[:2].tolist()
    lanes.forget(7)
    lanes.place([], [7, 8])
    assert lanes.is_known.tolist() == [False, True]
    assert lanes.tenants[0] > max(before)
    assert lanes.tenants[1] == before[1]


def test_warm_up_takes_no_lane_from_anybody() -> None:
    """Warm-up forwards count their ids from 0, in the order of rows."""
    lanes = lanes_of()
    lanes.place([], [9, 8])
    assert lanes.place([], list(range(LANES)))
    assert seats(lanes, list(range(LANES))) == [NO_LANE] * LANES
    assert (lanes.known_rows, lanes.real_rows) == (0, 0)
    assert lanes.warm_up_rows == LANES - 1  # 0 is also what idle ranks pad with
    lanes.place([], [8, 9])
    assert seats(lanes, [8, 9]) == [1, 0]
    assert lanes.known_rows == 2


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("ratio", [1, 4])
def test_the_estimate_is_the_budget_of_every_row(ratio: int, next_n: int) -> None:
    config = SpinConfig(block_size=8, top_k=16)
    lanes, rng = lanes_of(64), random.Random(5)
    targets = [600_000, 0, 250_000, 600_000]
    estimate = StepEstimate(config, targets, ratio=ratio, slots=500)
    rows = list(range(64, 128))
    lanes.place([], rows[:50])
    rows[3], rows[20] = PADDING, 0
    lanes.place([], rows)
    cached = [rng.randrange(500 * ratio - next_n) for _ in rows]
    kept = visible = 0
    for place in range(50):
        if place in (3, 20):
            continue
        slots = (cached[place] + next_n) // ratio
        for sparsity_ppm in targets:
            budget = block_budget(
                -(-slots // 8),
                top_k=16,
                block_size_slots=8,
                sparsity_ppm=sparsity_ppm,
                exploration_ppm=config.exploration_ppm,
            )
            assert isinstance(budget.kept_blocks, int)
            kept += next_n * min(slots, 8 * budget.kept_blocks)
        visible += next_n * slots
    assert estimate.figures(cached, next_n, lanes) == {
        "sparse_rows": 48 * next_n,
        "cold_rows": 14 * next_n,
        "kept_slots": kept // 4,
        "visible_slots": visible,
    }


def test_lengths_beyond_the_capacity_are_estimated_as_the_longest() -> None:
    """A figure for a counter must not end a step."""
    estimate = StepEstimate(SpinConfig(block_size=8, top_k=16), [400_000], ratio=1, slots=64)
    lanes = lanes_of()
    lanes.place([], [7])
    lanes.place([], [7])
    assert estimate.figures([1000], 1, lanes)["kept_slots"] == 40


def test_the_table_stays_where_graphs_read_it() -> None:
    lanes = lanes_of()
    where = lanes.lanes.data_ptr(), lanes.ids.data_ptr()
    for rows in ([5], [5, 6], [6, 2**63 + 5]):
        lanes.place([], rows)
        assert (lanes.lanes.data_ptr(), lanes.ids.data_ptr()) == where
        seats(lanes, rows)
    assert lanes.ids.dtype == lanes.lanes.dtype == torch.int64
