# SPDX-License-Identifier: Apache-2.0
"""Each kernel against the reference, bit for bit, on random and on adversarial inputs."""

from __future__ import annotations

import pytest
import torch
from cases import FAMILIES, first_difference, random_positions, same_bits, scores_of

from spin_trtllm import native, ops, reference
from spin_trtllm.geometry import count_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SLOTS = (1, 7, 33, 64, 65, 129, 2047, 2048, 2049, 4097, 6000)


def draw(seed: int) -> tuple[torch.Generator, int, int, int, int, int]:
    generator = torch.Generator().manual_seed(seed)

    def pick(options: tuple[int, ...]) -> int:
        return options[int(torch.randint(0, len(options), (1,), generator=generator))]

    slots, block = pick(SLOTS), pick((8, 16, 32, 64, 128))
    return generator, slots, block, pick((1, 2, 4)), pick((1, 2, 4, 8)), pick((1, 3, 5))


def random_state(
    family: str, lanes: int, slots: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    v = scores_of(family, (lanes, slots), generator).nan_to_num(0.0, 3e38, -3e38).to(dtype)
    d = scores_of(family, (lanes, slots + 1), generator).nan_to_num(0.0, 3e38, -3e38).to(dtype)
    return v, d


@pytest.mark.parametrize("seed", range(60))
def test_predict_blocks_equals_the_reference(seed: int) -> None:
    generator, slots, block, ratio, rows, sequences = draw(seed)
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    v, d = random_state(FAMILIES[seed % len(FAMILIES)], sequences + 2, slots, dtype, generator)
    lanes = torch.randperm(sequences + 2, generator=generator)[:sequences]
    positions = random_positions(sequences, rows, slots, ratio, generator)
    given = (v, d, lanes, positions)
    for pooling in ("max", "top4", "mean"):
        options = {"ratio": ratio, "block_size_slots": block, "pooling": pooling}
        got = ops.predict_blocks(*(t.cuda() for t in given), **options).cpu()
        want = reference.predict_blocks(*given, **options)
        if pooling == "max":
            assert torch.equal(got, want), first_difference(got, want)
        elif FAMILIES[seed % len(FAMILIES)] not in (
            "huge",
            "infinite",
        ):  # SPEC leaves the order open
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("seed", range(96))
def test_observe_scores_equals_the_reference(seed: int) -> None:
    generator, slots, block, ratio, rows, sequences = draw(seed)
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    v, d = random_state("gaussian", sequences + 2, slots, dtype, generator)
    lanes = torch.randperm(sequences + 2, generator=generator)[:sequences]
    positions = random_positions(sequences, rows, slots, ratio, generator)
    scores = scores_of(FAMILIES[seed % len(FAMILIES)], (sequences, rows, slots), generator)
    blocks = torch.rand(sequences, count_blocks(slots, block), generator=generator) < 0.6
    accepted = torch.randint(-1, rows, (sequences,), generator=generator)
    options = {
        "ratio": ratio,
        "block_size_slots": block,
        "ema_decay": (0.5, 0.0, 0.7)[seed % 3],
        "update_policy": ("prefix", "row0")[seed % 5 == 0],
    }
    given = (lanes, scores, blocks, positions, accepted)
    got_v, got_d = v.cuda(), d.cuda()
    ops.observe_scores(got_v, got_d, *(t.cuda() for t in given), **options)
    reference.observe_scores(v, d, *given, **options)
    assert same_bits(got_v, v), first_difference(got_v, v)
    assert same_bits(got_d, d), first_difference(got_d, d)


@pytest.mark.parametrize("lane", [-1, 3, 4, 2**32, 2**62, -(2**62)])
def test_a_lane_out_of_range_is_none(lane: int) -> None:
    """Its averages read as zero, and it learns nothing; three lanes lie between others."""
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(2, 9, 320, generator=generator).bfloat16()  # rows that need no copy
    want, got = whole.clone(), whole.cuda()
    lanes, positions = torch.tensor([lane, 1]), torch.tensor([[250], [260]])
    options = {"ratio": 1, "block_size_slots": 64}
    v, d = got[0, 3:6, :304], got[1, 3:6, :305]
    for pooling in ("max", "top4", "mean"):
        given = (v, d, lanes.cuda(), positions.cuda())
        predicted = ops.predict_blocks(*given, **options, pooling=pooling).cpu()
        assert predicted[0, 0].tolist() == [0.0] * 4 + [-torch.inf]
        assert bool(predicted[1, 0].any())
    scores, blocks = torch.ones(2, 1, 304), torch.ones(2, 5, dtype=torch.bool)
    learned = (lanes, scores, blocks, positions, torch.zeros(2, dtype=torch.int64))
    ops.observe_scores(v, d, *(t.cuda() for t in learned), **options, ema_decay=0.5)
    alone = (t[1:] for t in learned)
    reference.observe_scores(
        want[0, 3:6, :304], want[1, 3:6, :305], *alone, **options, ema_decay=0.5
    )
    assert not torch.equal(want, whole)
    assert same_bits(got, want), first_difference(got, want)


@pytest.mark.parametrize("seed", range(80))
def test_select_blocks_equals_the_reference(seed: int) -> None:
    generator, slots, block, ratio, rows, sequences = draw(seed)
    family = [f for f in FAMILIES if f != "nan"][seed % (len(FAMILIES) - 1)]
    blocks = count_blocks(slots, block)
    given = (
        scores_of(family, (sequences, rows, blocks), generator),
        random_positions(sequences, rows, slots, ratio, generator),
        torch.rand(sequences, generator=generator) < 0.8,
        torch.randint(-(2**62), 2**62, (sequences,), generator=generator),
        torch.randint(0, 61, (sequences,), generator=generator),
    )
    options = {
        "ratio": ratio,
        "block_size_slots": block,
        "top_k": (8, 64, 512, 2048)[seed % 4],
        "sparsity_ppm": (400_000, 0, 900_000, 999_999)[seed // 4 % 4],
        "exploration_ppm": (50_000, 0, 1_000_000)[seed % 3],
        "seed": (0, 2**64 - 1, 12345)[seed % 3],
        "mask_policy": ("union", "row0")[seed % 2],
    }
    got = ops.select_blocks(*(t.cuda() for t in given), **options)
    want = reference.select_blocks(*given, **options)
    for name in ("row_blocks", "explored_blocks", "blocks"):
        a, b = getattr(got, name), getattr(want, name)
        assert torch.equal(a.cpu(), b), f"{name}: {first_difference(a, b)}"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("entries", "blocks"), [(1, 9), (37, 300), (1100, 129), (5, 8193)])
def test_each_entry_may_have_its_own_target(entries: int, blocks: int, dtype: torch.dtype) -> None:
    """In every size of the kernel, with drafts, cold entries and targets out of range."""
    generator = torch.Generator().manual_seed(entries)
    positions = torch.randint(0, 16 * blocks - 3, (entries, 1), generator=generator)
    targets = torch.tensor([900_000, 0, 400_000, 999_999, -1, 2**31 - 1, 123_456], dtype=dtype)
    given = (
        scores_of("gaussian", (entries, 3, blocks), generator),
        positions + torch.arange(3),
        torch.rand(entries, generator=generator) < 0.9,
        torch.randint(-(2**62), 2**62, (entries,), generator=generator),
        torch.randint(0, 61, (entries,), generator=generator),
    )
    sparsity_ppm = targets[torch.randint(0, len(targets), (entries,), generator=generator)]
    options = {"ratio": 1, "block_size_slots": 16, "top_k": 40, "exploration_ppm": 50_000}
    got = ops.select_blocks(
        *(t.cuda() for t in given), **options, sparsity_ppm=sparsity_ppm.cuda(), seed=7
    )
    want = reference.select_blocks(*given, **options, sparsity_ppm=sparsity_ppm, seed=7)
    for name in ("row_blocks", "explored_blocks", "blocks"):
        a, b = getattr(got, name), getattr(want, name)
        assert torch.equal(a.cpu(), b), f"{name}: {first_difference(a, b)}"


@pytest.mark.parametrize(("blocks", "block"), [(4096, 64), (16384, 16), (16383, 8)])
def test_select_blocks_at_capacity(blocks: int, block: int) -> None:
    generator = torch.Generator().manual_seed(blocks)
    positions = torch.tensor([[blocks * block * 4 - 1], [blocks * block - 5], [3]])
    for family in ("gaussian", "relu", "equal"):
        given = (
            scores_of(family, (3, 1, blocks), generator),
            positions,
            torch.ones(3, dtype=torch.bool),
            torch.tensor([7, 8, 9]),
            torch.tensor([0, 1, 60]),
        )
        options = {
            "ratio": 4,
            "block_size_slots": block,
            "top_k": 512,
            "sparsity_ppm": 400_000,
            "exploration_ppm": 50_000,
            "seed": 1,
        }
        got = ops.select_blocks(*(t.cuda() for t in given), **options)
        want = reference.select_blocks(*given, **options)
        assert torch.equal(got.blocks.cpu(), want.blocks)
        assert torch.equal(got.explored_blocks.cpu(), want.explored_blocks)


@pytest.mark.parametrize("seed", range(96))
def test_topk_slots_equals_the_reference(seed: int) -> None:
    generator, slots, block, ratio, rows, sequences = draw(seed)
    if seed % 4 == 0:
        slots = (9000, 20000, 40001)[seed // 4 % 3]  # past what one block of threads holds
    top_k = (1, 8, 512, 1024, 2048)[seed % 5]
    scores = scores_of(FAMILIES[seed % len(FAMILIES)], (sequences, rows, slots), generator)
    positions = random_positions(sequences, rows, slots, ratio, generator)
    blocks = torch.rand(sequences, count_blocks(slots, block), generator=generator) < 0.6
    scored = reference.topk_slots.__globals__["scored_slots"](
        blocks, positions, slots, ratio=ratio, block_size_slots=block
    )
    poison = torch.where(torch.rand(scores.shape, generator=generator) < 0.5, float("nan"), 3e38)
    given = (torch.where(scored, scores, poison), blocks, positions)
    options = {"top_k": top_k, "ratio": ratio, "block_size_slots": block}
    got = ops.topk_slots(*(t.cuda() for t in given), **options).cpu()
    want = reference.topk_slots(*given, **options)
    assert torch.equal(got.sort(-1).values, want.sort(-1).values)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("rows", "slots", "top_k"),
    [
        (1, 20_000, 512),
        (1, 157_000, 512),
        (40, 78_643, 512),
        (3, 262_144, 2048),
        (2, 2**20, 1024),
        (300, 9001, 512),
    ],
)
def test_topk_of_long_rows(family: str, rows: int, slots: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(slots + rows)
    block = 64
    width = count_blocks(slots, block) * block
    scores = scores_of(family, (rows, 1, width), generator).cuda()
    lengths = torch.randint(slots // 2, slots + 1, (rows, 1), generator=generator).cuda()
    lengths[0] = slots
    best = torch.full((rows, 1, top_k), -7, dtype=torch.int32, device="cuda")

    def run() -> torch.Tensor:
        native.call(
            "topk_slots",
            native.stream_of(scores),
            scores=scores,
            row_slots=lengths.int(),
            slots_out=best,
            score_stride=width,
            entries=rows,
            rows=1,
            blocks=width // block,
            block_size=block,
            top_k=top_k,
        )
        return best.clone()

    want = reference.topk_slots(
        scores,
        torch.ones(rows, width // block, dtype=torch.bool, device="cuda"),
        lengths.long() - 1,
        top_k=top_k,
        ratio=1,
        block_size_slots=block,
    )
    got = run()
    wrong = (got.sort(-1).values != want.sort(-1).values).any(-1).nonzero()
    assert not len(wrong), f"rows {wrong[:4].tolist()}"
    assert all(torch.equal(got, run()) for _ in range(20))  # and in the same order


def test_operators_trace_without_data() -> None:
    generator = torch.Generator().manual_seed(0)
    v, d = random_state("gaussian", 2, 200, torch.bfloat16, generator)
    given = (v.cuda(), d.cuda(), torch.tensor([1]).cuda(), torch.tensor([[500]]).cuda())

    def predict(*tensors: torch.Tensor) -> torch.Tensor:
        return ops.predict_blocks(*tensors, ratio=4, block_size_slots=64) * 2

    compiled = torch.compile(predict, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*given), predict(*given))


@pytest.mark.parametrize("sequences", [0, 1, 33, 96, 256])
def test_batches_whose_rows_see_nothing(sequences: int) -> None:
    positions = torch.arange(3).repeat(sequences)[:sequences].unsqueeze(1).cuda()  # N = 0 at r = 4
    scores = torch.full((sequences, 1, 100), float("nan"), device="cuda")
    blocks = torch.ones(sequences, 2, dtype=torch.bool, device="cuda")
    best = ops.topk_slots(scores, blocks, positions, top_k=8, ratio=4, block_size_slots=64)
    assert best.shape == (sequences, 1, 8)
    assert bool((best == -1).all())
    ids = torch.zeros(sequences, dtype=torch.int64, device="cuda")
    chosen = ops.select_blocks(
        torch.zeros(sequences, 1, 2, device="cuda"),
        positions,
        ids == 0,
        ids,
        ids,
        ratio=4,
        block_size_slots=64,
        top_k=8,
        sparsity_ppm=400_000,
        exploration_ppm=50_000,
        seed=0,
    )
    assert not bool(chosen.blocks.any())


@pytest.mark.parametrize("seed", range(12))
def test_adopted_scores_equal_the_reference(seed: int) -> None:
    """Only visible columns are copied, only to their places, and columns become slots."""
    generator = torch.Generator().manual_seed(seed)
    block, blocks, rows = (8, 16, 32, 64, 128)[seed % 5], 19, 1 + seed % 4
    host_rows, sequences, top_k = 1 + seed % rows if rows > 1 else 1, 1 + seed % 3, 40
    capacity = blocks * block
    width = (capacity, capacity + 3, capacity - 5)[seed % 3]
    stride = width + (0, 5, 8)[seed % 3]  # rows that are no multiple of four apart, too
    storage = torch.randn(sequences * host_rows, stride, generator=generator)
    host = storage[:, :width]
    kept = torch.rand(sequences, blocks, generator=generator) < 0.6
    order = kept.logical_not().int().argsort(dim=1, stable=True)
    block_list = torch.where(torch.arange(blocks) < kept.sum(1, keepdim=True), order, -1).int()
    limit = kept.sum(1) * block
    seen = (torch.rand(sequences, rows, generator=generator) * (limit + 1).unsqueeze(1)).int()
    columns = torch.randint(
        -1, capacity + 9, (sequences * host_rows, top_k), generator=generator, dtype=torch.int32
    )
    places = torch.randperm(7, generator=generator)[:sequences]
    scores = torch.full((7, rows, capacity), -7.5)
    got_scores, got_columns = scores.cuda(), columns.cuda()
    native.call(
        "adopt_scores",
        native.stream_of(got_scores),
        host_scores=storage.cuda()[:, :width],
        block_list=block_list.cuda(),
        row_slots=seen.cuda(),
        places=places.cuda(),
        scores=got_scores,
        columns=got_columns,
        host_stride=stride,
        score_stride=capacity,
        host_columns=width,
        entries=sequences,
        host_rows=host_rows,
        rows=rows,
        blocks=blocks,
        block_size=block,
        top_k=top_k,
    )
    reference.adopt_scores(host, columns, block_list, seen, places, scores, block_size_slots=block)
    assert torch.equal(got_columns.cpu(), columns)
    for s in range(sequences):
        for r in range(host_rows):
            count = min(int(seen[s, r]), width)
            row = got_scores[places[s], r].cpu()
            assert torch.equal(row[:count], host[s * host_rows + r, :count])
    elsewhere = torch.ones(7, dtype=torch.bool).index_fill_(0, places, False)
    assert (got_scores.cpu()[elsewhere] == -7.5).all()
    assert (got_scores.cpu()[:, host_rows:] == -7.5).all()
