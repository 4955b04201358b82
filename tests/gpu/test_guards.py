# SPDX-License-Identifier: Apache-2.0
"""No kernel writes outside its buffers: every one of a step lies between guards."""

from __future__ import annotations

import random

import pytest
import torch
from cases import put_scores, same_bits, scores_of
from torch import Tensor

from spin_trtllm import ops
from spin_trtllm.config import SpinConfig
from spin_trtllm.gpu_state import GpuState
from spin_trtllm.gpu_step import GpuStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

GUARD = 256  # elements on either side; keeps every alignment
LAYERS = (3, 8)


class Guarded:
    """Tensors in larger storages whose ends hold a pattern."""

    def __init__(self) -> None:
        self.storages: dict[str, Tensor] = {}

    def wrap(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, without gaps, between guards."""
        storage = torch.empty(tensor.numel() + 2 * GUARD, dtype=tensor.dtype, device=tensor.device)
        storage.view(torch.uint8).fill_(0xA5)
        inner = storage[GUARD : GUARD + tensor.numel()].view(tensor.shape)
        inner.copy_(tensor)
        self.storages[name] = storage
        return inner

    def check(self, when: str) -> None:
        """Fail if any guard has changed."""
        for name, storage in self.storages.items():
            ends = torch.cat([storage[:GUARD], storage[-GUARD:]]).view(torch.uint8)
            assert bool((ends == 0xA5).all()), f"{name}: written outside, {when}"


@pytest.mark.parametrize("slots", [1, 7, 255, 256, 257, 1000, 2048])
@pytest.mark.parametrize(("block", "rows", "page_slots"), [(64, 1, 64), (64, 3, 32), (8, 8, None)])
def test_every_buffer_of_a_step_keeps_its_guards(
    slots: int, block: int, rows: int, page_slots: int | None
) -> None:
    config = SpinConfig(top_k=16, block_size=block, state_dtype="bf16", target_sparsity=0.6)
    state = GpuState(LAYERS, sequences=3, slots=slots)
    step = GpuStep(config, state, ratio=1, sequences=4, rows=rows, page_slots=page_slots)
    guards = Guarded()
    for name in ("v", "d"):
        view = getattr(state, name)
        whole = view.as_strided((*view.shape[:2], view.stride(1)), view.stride())
        setattr(state, name, guards.wrap(name, whole)[..., : view.shape[2]])
    for owner in (state, step):
        for name, value in list(vars(owner).items()):
            if isinstance(value, Tensor) and name not in ("v", "d"):
                setattr(owner, name, guards.wrap(name, value))
    generator = torch.Generator().manual_seed(slots)
    lanes = torch.tensor([0, -1, 2, 1]).cuda()
    ids = torch.tensor([5, 0, 6, 7]).cuda()
    table = torch.arange(4 * 64, dtype=torch.int32).view(4, 64).cuda() if page_slots else None
    last = slots - rows  # the last position at which all rows fit
    for t in range(5):
        first = torch.tensor([max(last - 4 + t, 0), 0, max(last // 2 + t, 0), -1])
        positions = first.unsqueeze(1) + torch.arange(rows)
        positions[3] = -1
        positions[positions > slots - 1] = -1
        step.begin(lanes, ids, positions.cuda(), table)
        for layer in range(len(LAYERS)):
            view = step.layer(layer)
            scores = scores_of("gaussian", (4, rows, slots), generator).cuda()
            put_scores(view, scores, block, float("nan"))
            host = torch.randn(4 * rows, max(slots - 1, 1), device="cuda")
            columns = guards.wrap("columns", torch.zeros(4 * rows, 5, dtype=torch.int32).cuda())
            step.adopt(layer, host, columns)
            step.top_k(layer)
            guards.check(f"step {t} layer {layer}")


NOWHERE = (-1, -(2**40), 0, 3, 5_000, 149_999, 150_000, 2**40, 2**62)


@pytest.mark.parametrize("seed", range(6))
def test_positions_that_no_host_sends_lead_nowhere(seed: int) -> None:
    """Rows far apart, in any order and beyond the capacity, of sequences that go on and learn: the
    device survives, and a sequence beside them is what it is alone."""
    slots, ratio, rows = 40_000, 4, 4
    config = SpinConfig(top_k=16, block_size=64, state_dtype="bf16", target_sparsity=0.6)
    states = [GpuState(LAYERS[:1], sequences=3, slots=slots) for _ in range(2)]
    steps = [GpuStep(config, s, ratio=ratio, sequences=3, rows=rows) for s in states]
    lanes = torch.tensor([[0, 1, 2], [-1, -1, 2]]).cuda()
    ids = torch.tensor([5, 6, 7]).cuda()
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for t in range(6):
        sane = 3_000 + 2 * t + torch.arange(rows)
        odd = [[first + 2 * t, *draw.choices(NOWHERE, k=rows - 1)] for first in (9, 149_990)]
        positions = torch.stack([torch.tensor(odd[0]), torch.tensor(odd[1]), sane]).cuda()
        scores = scores_of("gaussian", (3, rows, slots), generator).cuda()
        seen = []
        for step, whose in zip(steps, lanes, strict=True):
            step.begin(whose, ids, positions)
            put_scores(step.layer(0), scores, config.block_size, float("nan"))
            best = step.top_k(0)[2].clone()
            seen.append((step.layer(0).block_list[2].clone(), best))
        torch.cuda.synchronize()
        for got, want in zip(*seen, strict=True):
            assert torch.equal(got, want), t
    for name in ("v", "d"):
        got, want = (getattr(state, name)[0, 2] for state in states)
        assert same_bits(got, want)
        assert bool((want != 0).any())


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_are_no_draft_teach_nobody_else(seed: int) -> None:
    """As above, of the observation alone."""
    slots, rows = 40_000, 4
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    positions = torch.tensor([draw.choices(NOWHERE, k=rows) for _ in range(2)] + [[9, 10, 11, 12]])
    scores = scores_of("gaussian", (3, rows, slots), generator).cuda()
    blocks = torch.ones(3, slots // 64, dtype=torch.bool, device="cuda")
    found = []
    for lanes in ([0, 1, 2], [-1, -1, 2]):
        state = GpuState(LAYERS[:1], sequences=3, slots=slots)
        given = (torch.tensor(lanes).cuda(), scores, blocks, positions.cuda())
        accepted = torch.tensor([rows - 1] * 3).cuda()
        options = {"ratio": 4, "block_size_slots": 64, "ema_decay": 0.9}
        ops.observe_scores(state.v[0], state.d[0], *given, accepted, **options)
        torch.cuda.synchronize()
        found.append((state.v[0, 2], state.d[0, 2]))
    for got, want in zip(*found, strict=True):
        assert same_bits(got, want)
        assert bool((want != 0).any())
