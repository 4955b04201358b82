# SPDX-License-Identifier: Apache-2.0
"""`GpuStep` against `SpinStep`: the same decisions, state and top-k through whole batch lives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import capturing, first_difference, put_scores, same_bits, scores_of
from serving_batches import Batch

from spin_trtllm.config import SpinConfig
from spin_trtllm.gpu_state import GpuState, GrowingState
from spin_trtllm.gpu_step import GpuStep
from spin_trtllm.state import SpinState
from spin_trtllm.step import SpinStep, StepPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LAYERS = (2, 5, 60)
BASE = SpinConfig(top_k=8, block_size=16, state_dtype="bf16", seed=3)
CASES = [
    ("plain", BASE, 4, 1, 700, None),
    ("drafts", BASE, 4, 4, 700, None),
    ("fp32", replace(BASE, state_dtype="fp32", block_size=8), 1, 8, 300, None),
    ("tiles", replace(BASE, block_size=64), 1, 3, 6300, 64),
    ("half_pages", replace(BASE, block_size=64), 2, 2, 4200, 32),
    ("row0", replace(BASE, mask_policy="row0", update_policy="row0"), 4, 3, 500, None),
    ("dense", replace(BASE, target_sparsity=0.0), 4, 2, 500, None),
    ("sparse", replace(BASE, target_sparsity=0.9, exploration=0.3), 1, 2, 3000, None),
    ("frozen", replace(BASE, exploration_policy="none", ema_decay=0.0), 2, 8, 400, None),
    ("small", replace(BASE, block_size=8), 1, 8, 4130, None),
    ("wide", replace(BASE, block_size=128), 1, 5, 4130, 64),
    ("layers", replace(BASE, layer_sparsity={2: 0.8, 60: 0.0}), 4, 4, 700, None),
    ("all_layers", replace(BASE, layer_sparsity={2: 0.0, 5: 0.2, 60: 0.95}), 1, 1, 3000, None),
    ("layers_paged", replace(BASE, block_size=64, layer_sparsity={5: 0.9}), 1, 3, 6300, 64),
]


def same_plan(step: GpuStep, plan: StepPlan, positions: torch.Tensor, table: torch.Tensor) -> None:
    live, b = positions.shape[0], step.config.block_size
    for layer in range(step.layers):
        view = step.layer(layer)
        for s in range(live):
            kept = plan.selection.blocks[layer * live + s].nonzero().squeeze(-1)
            listed = view.block_list[s].cpu().long()
            assert listed[: len(kept)].tolist() == kept.tolist(), f"layer {layer} sequence {s}"
            assert bool((listed[len(kept) :] == -1).all())
            assert int(view.block_count[s]) == len(kept)
            for r in range(step.rows):
                visible = max(0, (int(positions[s, r]) + 1) // step.ratio)
                slots = (kept.unsqueeze(1) * b + torch.arange(b)).flatten()
                assert int(view.row_slots[s, r]) == int((slots < visible).sum())
            if view.pages is not None:
                pages = [
                    table[s, k * (b // step.page_slots) + h].item()
                    if (k * (b // step.page_slots) + h) * step.page_slots
                    < visible_of(positions[s], step.ratio)
                    else 0
                    for k in kept.tolist()
                    for h in range(b // step.page_slots)
                ]
                assert view.pages[s, : len(pages)].tolist() == pages
    assert torch.equal(step.warm[: step.layers * live].cpu(), plan.warm)


def visible_of(positions: torch.Tensor, ratio: int) -> int:
    return max(0, (int(positions.max()) + 1) // ratio)


def same_state(gpu: GpuState, want: SpinState) -> None:
    for sequence_id, lane in want._lane_of.items():
        exported = gpu.export(sequence_id)
        assert exported is not None
        for name in ("v", "d"):
            a, b = exported[name], getattr(want, name)[:, lane]
            assert same_bits(a, b), f"{name}: {first_difference(a, b)}"
    assert torch.equal(gpu.warm.cpu()[:, :-1], want.warm[:, :-1])
    assert torch.equal(gpu.next_tokens.cpu()[:, :-1], want.next_tokens[:, :-1])


@pytest.mark.parametrize("case", CASES, ids=[c[0] for c in CASES])
@pytest.mark.parametrize(("kind", "seed"), [(GpuState, 0), (GpuState, 1), (GrowingState, 0)])
def test_whole_lives_equal_the_reference(case: tuple, seed: int, kind: type[GpuState]) -> None:
    _, config, ratio, rows, slots, page_slots = case
    generator = torch.Generator().manual_seed(seed)
    want_state = SpinState(LAYERS, sequences=5, slots=slots, dtype=config.storage_dtype)
    state = kind(LAYERS, sequences=5, slots=slots, dtype=config.storage_dtype)
    want = SpinStep(config, want_state, ratio=ratio)
    step = GpuStep(config, state, ratio=ratio, sequences=9, rows=rows, page_slots=page_slots)
    batch = Batch(seed, rows, slots, ratio)
    families = ("gaussian", "relu", "integer", "nan", "infinite", "signed_zero")
    for t in range(40):
        batch.events(want_state, state)
        ids, positions = batch.step()
        live = len(ids)
        plan = want.plan(LAYERS, ids, positions)
        lanes = torch.tensor(state.device_lanes(ids), dtype=torch.int64).cuda()
        numbers = torch.tensor([i or 0 for i in ids], dtype=torch.int64).cuda()
        table = torch.arange(live * 200, dtype=torch.int32).view(live, 200) + 5
        if isinstance(state, GrowingState):
            for i, row in zip(ids, positions, strict=True):
                assert (
                    i is None
                    or i not in state._lane_of
                    or state.grow(i, visible_of(row, ratio) + 1)
                )
        step.begin(lanes, numbers, positions.cuda(), table.cuda() if page_slots else None)
        same_plan(step, plan, positions, table)
        same_state(state, want_state)
        scores = scores_of(
            families[(t + seed) % len(families)], (live * len(LAYERS), rows, slots), generator
        )
        best = want.top_k(plan, scores)
        for layer in range(len(LAYERS)):
            part = slice(layer * live, (layer + 1) * live)
            view = step.layer(layer)
            poison = (float("nan"), float("inf"), -1.0)[t % 3]
            put_scores(view, scores[part].cuda(), config.block_size, poison)
            got = step.top_k(layer).cpu().sort(-1).values
            assert torch.equal(got, best[part].sort(-1).values), f"step {t} layer {layer}"
        want.defer(plan, scores)


@pytest.mark.parametrize("own", [{}, {2: 0.8, 5: 0.0}], ids=["one_target", "layers"])
def test_a_graph_captured_at_small_lengths_replays_at_any(own: dict[int, float]) -> None:
    config = replace(BASE, block_size=64, top_k=64, layer_sparsity=own)
    slots, sequences, rows, steps = 9000, 4, 2, 30
    generator = torch.Generator().manual_seed(5)
    full = scores_of("gaussian", (sequences * len(LAYERS), rows, slots), generator).cuda()

    def build() -> tuple[GpuStep, list[torch.Tensor]]:
        state = GpuState(LAYERS, sequences=sequences, slots=slots)
        step = GpuStep(config, state, ratio=1, sequences=sequences, rows=rows)
        lanes = torch.arange(sequences).cuda()
        ids = lanes + 50
        positions = torch.full((sequences, rows), -1).cuda()
        return step, [lanes, ids, positions]

    def run(step: GpuStep, inputs: list[torch.Tensor]) -> None:
        step.begin(*inputs)
        for layer in range(len(LAYERS)):
            view = step.layer(layer)
            part = full[layer * sequences : (layer + 1) * sequences]
            put_scores(view, part, 64, 0.0)
            step.top_k(layer)

    eager, eager_inputs = build()
    captured, inputs = build()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(captured, inputs)
    with capturing() as graph:
        run(captured, inputs)
    explored = set()
    first = torch.tensor([3, 100, 4000, 8000]).cuda()
    for t in range(steps):
        positions = torch.stack([first, first + 1], 1)
        junk = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(3)]
        del junk
        for target in (eager_inputs, inputs):
            target[2].copy_(positions)
        run(eager, eager_inputs)
        graph.replay()
        for name in ("block_list", "row_slots", "slots_out", "warm", "observed_rows"):
            a, b = getattr(eager, name), getattr(captured, name)
            assert torch.equal(a, b), f"step {t} {name}: {first_difference(a, b)}"
        assert same_bits(eager.state.v, captured.state.v)
        assert same_bits(eager.state.d, captured.state.d)
        explored.add(tuple(captured.block_list[3].tolist()))
        first = first + 1 + t % 2
        if t == 15:
            first = torch.tensor([7000, 1, 2, 8900]).cuda()
    assert len(explored) > steps // 2  # exploration moves on in replays
    kept = captured.block_count.view(len(LAYERS), sequences)[:, 3].tolist()
    blocks = -(-int(captured.visible_slots[3]) // 64)
    assert kept[2] < blocks
    assert [kept[0] < 0.45 * blocks, kept[1] == blocks] == [bool(own)] * 2  # 20 % of two rows


def test_targets_out_of_range_count_as_the_nearest() -> None:
    found = []
    for targets in ([-(2**31), 2**31 - 1, 1_000_000], [0, 999_999, 999_999]):
        state = GpuState(LAYERS, sequences=1, slots=3000)
        step = GpuStep(BASE, state, ratio=1, sequences=1)
        step.layer_sparsity_ppm.copy_(torch.tensor(targets))
        lanes = torch.tensor(state.device_lanes([7])).cuda()
        lists = []
        for t in range(4):
            step.begin(lanes, lanes + 7, torch.tensor([[2000 + t]]).cuda())
            lists.append(step.block_list.clone())
            for layer in range(len(LAYERS)):
                scores = torch.arange(3000.0).sin().expand(1, 1, -1).cuda()
                put_scores(step.layer(layer), scores, BASE.block_size, 0.0)
        found.append(torch.stack(lists))
        assert step.block_count.tolist() == [126, 2, 2]  # of 126
    assert torch.equal(*found)


def test_decisions_do_not_depend_on_the_place_in_the_batch() -> None:
    config = replace(BASE, block_size=32, top_k=32)
    generator = torch.Generator().manual_seed(9)
    full = scores_of("relu", (6, 1, 3000), generator).cuda()

    def run(order: list[int]) -> list[list[list[int]]]:
        state = GpuState((0,), sequences=6, slots=3000)
        step = GpuStep(config, state, ratio=1, sequences=6)
        index = torch.tensor(order).cuda()
        found = []
        for t in range(6):
            positions = (2000 + 100 * index + t).unsqueeze(1)
            step.begin(index, index + 10, positions)
            view = step.layer(0)
            put_scores(view, full[index], 32, 0.0)
            best = step.top_k(0)
            rows = torch.cat([view.block_list, best[:, 0]], 1)
            found.append([rows[order.index(i)].tolist() for i in range(6)])
        return found

    assert run([0, 1, 2, 3, 4, 5]) == run([4, 2, 0, 5, 1, 3])


def test_a_sequence_past_its_memory_runs_dense_and_comes_back_cold() -> None:
    config = replace(BASE, block_size=64, top_k=64)
    state = GrowingState(LAYERS, sequences=2, slots=1 << 20)
    step = GpuStep(config, state, ratio=1, sequences=2)
    lanes = torch.tensor(state.device_lanes([7, 8])).cuda()
    ids = torch.tensor([7, 8]).cuda()
    assert state.grow(7, 1)
    assert state.grow(8, 1 << 20)
    room = int(state.lane_slots[0])
    assert 0 < room < 1 << 20
    reserved = 2 * len(LAYERS) * 2 * (1 << 20) * 2
    assert state.state_bytes < 0.7 * reserved
    for t, first in enumerate((room - 2, room - 1, room, room + 1, room - 1, room, room + 1)):
        if t == 5:
            assert state.grow(7, room + 100)
        step.begin(lanes, ids, torch.tensor([[first], [400_000 + t]]).cuda())
        warm = step.warm.view(len(LAYERS), 2)
        assert warm[:, 1].all() == (t > 0)
        assert warm[:, 0].tolist() == [t in (1, 5, 6)] * len(LAYERS), t
        for layer in range(len(LAYERS)):
            view = step.layer(layer)
            assert view.block_count[0] == (first + 64) // 64 or warm[layer, 0]
            view.put_scores(torch.ones_like(view.get_scores()))
            assert step.top_k(layer)[0, 0].max() < first + 1
    torch.cuda.synchronize()
    state.release(7)
    state.trim()
    assert state.state_bytes < 0.6 * reserved
    assert state.device_lanes([9]) == [0]
    step.begin(lanes, torch.tensor([9, 8]).cuda(), torch.tensor([[5], [400_007]]).cuda())
    assert step.warm.view(-1, 2)[:, 0].tolist() == [False] * len(LAYERS)
    assert int(step.places[0]) == len(LAYERS) * 3  # behind the lanes


def test_a_step_past_its_memory_voids_the_drafts_that_wait() -> None:
    config = replace(BASE, block_size=64, top_k=64)
    state = GrowingState(LAYERS, sequences=1, slots=1 << 20)
    step = GpuStep(config, state, ratio=1, sequences=1, rows=4)
    lanes, ids = torch.tensor(state.device_lanes([7])).cuda(), torch.tensor([7]).cuda()
    assert state.grow(7, 1)
    room = int(state.lane_slots[0])

    def begin(first: int) -> list[tuple[bool, int]]:
        step.begin(lanes, ids, torch.arange(first, first + 4).view(1, 4).cuda())
        for layer in range(len(LAYERS)):
            view = step.layer(layer)
            view.put_scores(torch.ones_like(view.get_scores()))
        return list(zip(step.warm.tolist(), step.observed_rows.tolist(), strict=True))

    assert begin(room - 5) == [(False, 0)] * len(LAYERS)
    assert begin(room - 4) == [(True, 1)] * len(LAYERS)
    assert begin(room - 3) == [(False, 0)] * len(LAYERS)  # its last row has no memory
    assert state.grow(7, room + 8)
    # Two drafts of the step before that would seem accepted.
    assert begin(room - 2) == [(False, 0)] * len(LAYERS)
    assert begin(room - 1) == [(True, 1)] * len(LAYERS)


def test_another_tenant_of_a_lane_starts_cold() -> None:
    state = GpuState(LAYERS, sequences=2, slots=3000)
    step = GpuStep(BASE, state, ratio=1, sequences=2)
    lanes = torch.tensor([1, 0]).cuda()
    found = []
    for t, tenants in enumerate(([5, 6], [5, 6], [8, 6], [8, 6], [5, 6])):
        positions = torch.tensor([[1000 + t], [2000 + t]]).cuda()
        step.begin(lanes, lanes + 9, positions, tenants=torch.tensor(tenants).cuda())
        found.append(step.warm.view(len(LAYERS), 2).tolist())
        assert state.lane_tenant[:, :2].tolist() == [tenants[::-1]] * len(LAYERS)
        for layer in range(len(LAYERS)):
            view = step.layer(layer)
            view.put_scores(torch.ones_like(view.get_scores()))
    wanted = ([False, False], [True, True], [False, True], [True, True], [False, True])
    assert found == [[row] * len(LAYERS) for row in wanted]


@pytest.mark.parametrize("wild", [3, 4, 8, 9, 2**32, 2**62])
@pytest.mark.parametrize(
    ("kind", "pooling"), [(GpuState, "max"), (GpuState, "mean"), (GrowingState, "max")]
)
def test_a_lane_out_of_range_is_none(wild: int, kind: type[GpuState], pooling: str) -> None:
    """Neither a lane of the next layer, which the number would be, nor one past them all."""
    found = []
    for other in (-1, wild):
        state = kind(LAYERS, sequences=2, slots=3000)  # a layer has three lanes
        step = GpuStep(replace(BASE, pooling=pooling), state, ratio=1, sequences=2)
        assert state.device_lanes([7, 8]) == [0, 1]
        if isinstance(state, GrowingState):
            assert state.grow(7, 3000)
            assert state.grow(8, 3000)
        lanes, ids = torch.tensor([other, 1]).cuda(), torch.tensor([7, 8]).cuda()
        seen = []
        for t in range(4):
            step.begin(lanes, ids, torch.tensor([[900 + t], [2000 + t]]).cuda(), tenants=ids)
            for layer in range(len(LAYERS)):
                view = step.layer(layer)
                scores = torch.arange(3000.0).sin().expand(2, 1, -1).cuda()
                put_scores(view, scores, BASE.block_size, 0.0)
                seen += [view.block_list.clone(), view.places.clone(), step.top_k(layer).clone()]
            seen += [step.warm.clone(), *(t.clone() for t in state._books())]
        seen += [t for i in (7, 8) for t in state.export(i).values()]
        found.append(seen)
        assert step.warm.view(-1, 2).tolist() == [[False, True]] * len(LAYERS)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b), first_difference(a, b)


def test_a_migrated_sequence_is_the_same_in_a_growing_state() -> None:
    config = replace(BASE, block_size=64, top_k=64)
    source = GpuState(LAYERS, sequences=1, slots=70_000)
    step = GpuStep(config, source, ratio=1, sequences=1)
    lanes, ids = torch.tensor(source.device_lanes([7])).cuda(), torch.tensor([7]).cuda()
    for t in range(3):
        step.begin(lanes, ids, torch.tensor([[50_000 + t]]).cuda())
        for layer in range(len(LAYERS)):
            view = step.layer(layer)
            view.put_scores(torch.rand_like(view.get_scores()))
    exported = source.export(7)
    target = GrowingState(LAYERS, sequences=2, slots=70_000)
    target.device_lanes([1])
    target.adopt(7, exported)
    moved = target.export(7)
    assert exported is not None
    assert moved is not None
    assert exported["v"].any()
    assert all(torch.equal(exported[name], moved[name]) for name in exported)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 40 << 30, reason="needs 40 GB"
)
def test_offsets_past_two_billion_elements() -> None:
    config = replace(BASE, block_size=64, top_k=512)
    slots, layers = 1 << 20, tuple(range(8))
    found = []
    for sequences, lane in ((1, 0), (300, 299)):
        state = GpuState(layers, sequences=sequences, slots=slots)
        step = GpuStep(config, state, ratio=1, sequences=1)
        generator = torch.Generator("cuda").manual_seed(4)
        decisions = []
        for t in range(3):
            positions = torch.tensor([[slots - 10 + t]]).cuda()
            step.begin(torch.tensor([lane]).cuda(), torch.tensor([7]).cuda(), positions)
            for layer in layers:
                view = step.layer(layer)
                scores = torch.randn(1, 1, slots, device="cuda", generator=generator)
                put_scores(view, scores, 64, float("nan"))
                decisions += [view.block_list.clone(), step.top_k(layer).clone()]
        assert step.warm.all()
        found.append((decisions, state.v[:, lane].clone(), state.d[:, lane].clone()))
        if sequences > 1:
            assert state.v.untyped_storage().nbytes() > 2**32
            assert step.scores.numel() > 2**31
        del state, step, view
    for a, b in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(a, b)
    assert same_bits(found[0][1], found[1][1])
    assert same_bits(found[0][2], found[1][2])
