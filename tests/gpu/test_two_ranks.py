# SPDX-License-Identifier: Apache-2.0
"""Two ranks with the same inputs decide the same, whatever order they launch their work in."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from cases import put_scores

from spin_trtllm.config import SpinConfig
from spin_trtllm.gpu_step import GpuState, GpuStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

STEPS, LAYERS, SEQUENCES, SLOTS, BLOCK = 500, 3, 5, 3000, 64


def same_everywhere(tensor: torch.Tensor) -> bool:
    both = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(both, tensor.contiguous())
    return all(torch.equal(both[0], other) for other in both)


def run_rank(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    config = SpinConfig(top_k=64, block_size=BLOCK, state_dtype="bf16")
    state = GpuState(range(LAYERS), sequences=SEQUENCES, slots=SLOTS)
    step = GpuStep(config, state, ratio=1, sequences=SEQUENCES)
    order = torch.arange(SEQUENCES, device="cuda")
    layers = list(range(LAYERS))
    if rank == 1:  # another place in the batch, and the layers the other way round
        order, layers = order.flip(0), layers[::-1]
    back = order.argsort()
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(LAYERS, SEQUENCES, 1, SLOTS, generator=generator).cuda()
    for t in range(STEPS):
        positions = (1500 + 200 * order + t).unsqueeze(1)
        step.begin(order, order + 7, positions)
        found = []
        full.mul_(0.9).add_(torch.randn(full.shape, generator=generator).cuda(), alpha=0.3)
        for layer in layers:
            view = step.layer(layer)
            put_scores(view, full[layer, order], BLOCK, 0.0)
            if rank == 1:
                torch.cuda._sleep(1000)
        for layer in range(LAYERS):
            best = step.top_k(layer)[back, 0]
            found.append(torch.cat([step.layer(layer).block_list[back], best], 1))
        assert same_everywhere(torch.stack(found)), f"rank {rank} step {t}"
    bits = torch.cat([state.v[:, :-1].reshape(-1), state.d[:, :-1].reshape(-1)]).view(torch.uint8)
    assert same_everywhere(bits)
    dist.destroy_process_group()


def test_two_ranks_stay_bit_identical() -> None:
    torch.multiprocessing.spawn(run_rank, args=(29517,), nprocs=2, join=True)
