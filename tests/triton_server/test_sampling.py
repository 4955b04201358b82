# SPDX-License-Identifier: Apache-2.0
"""Picking tokens: against probabilities worked out by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from spin_trtllm.hosts.triton.request import Sampling
from spin_trtllm.hosts.triton.sampling import Sampler

# Of these four tokens the model says 1/10, 4/10, 3/10 and 2/10.
LOGITS = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log()
DRAWS = 2000
TOLERANCE = 0.05  # of a share; four standard deviations at most


def shares(sampling: Sampling, logits: torch.Tensor = LOGITS) -> dict[int, float]:
    """Share of each token in many draws."""
    sampler = Sampler(replace(sampling, seed=5))
    return {t: n / DRAWS for t, n in Counter(sampler.pick(logits) for _ in range(DRAWS)).items()}


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.0), Sampling(top_p=0.0), Sampling(9, 1.0, 1, 0.5)],
)
def test_greedy(sampling: Sampling) -> None:
    sampler = Sampler(sampling)
    assert [sampler.pick(LOGITS) for _ in range(20)] == [1] * 20


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1.0), {0: 0.1, 1: 0.4, 2: 0.3, 3: 0.2}),
        (Sampling(temperature=0.5), {0: 1 / 30, 1: 16 / 30, 2: 9 / 30, 3: 4 / 30}),
        (Sampling(top_k=2), {1: 4 / 7, 2: 3 / 7}),
        (Sampling(top_k=99), {0: 0.1, 1: 0.4, 2: 0.3, 3: 0.2}),
        (Sampling(top_p=0.3), {1: 1.0}),
        (Sampling(top_p=0.65), {1: 4 / 7, 2: 3 / 7}),
        (Sampling(top_p=1.0), {0: 0.1, 1: 0.4, 2: 0.3, 3: 0.2}),
        (Sampling(top_k=3, top_p=0.4), {1: 1.0}),
        (Sampling(temperature=1e-6), {1: 1.0}),
    ],
)
def test_shares_of_draws(sampling: Sampling, expected: dict[int, float]) -> None:
    assert shares(sampling) == pytest.approx(expected, abs=TOLERANCE)


def test_a_seed_repeats_and_another_does_not() -> None:
    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler.pick(LOGITS) for _ in range(64)]

    assert draw(2**64 - 1) == draw(2**64 - 1)
    assert len({tuple(draw(seed)) for seed in (0, 1, None, None)}) == 4


def test_penalties_take_turns_with_the_best() -> None:
    """The gap of the two best is log(4/3) = 0.29: one pick costs more than that."""
    sampler = Sampler(Sampling(frequency_penalty=0.5))
    assert [sampler.pick(LOGITS) for _ in range(3)] == [1, 2, 1]
    # The second is log(2) = 0.69 ahead of the fourth: presence is paid once, so it stays best.
    sampler = Sampler(Sampling(presence_penalty=0.5))
    assert [sampler.pick(LOGITS) for _ in range(5)] == [1, 2, 1, 1, 1]
    assert LOGITS.exp().tolist()[0] == pytest.approx([0.1, 0.4, 0.3, 0.2])  # not written to


@pytest.mark.parametrize("penalty", [3.4e38, -3.4e38])
@pytest.mark.parametrize("kind", ["frequency_penalty", "presence_penalty"])
def test_the_largest_penalties(kind: str, penalty: float) -> None:
    """Twice the largest fp32 number, and the token after it is still a token."""
    sampler = Sampler(Sampling(temperature=1.0, seed=1, **{kind: penalty}))
    picked = [sampler.pick(LOGITS) for _ in range(4)]
    assert len(set(picked)) == (4 if penalty > 0 else 1)


def test_the_log_probability_is_the_models_own() -> None:
    sampler = Sampler(Sampling(temperature=0.1, top_k=1, frequency_penalty=1), sums_logprob=True)
    assert [sampler.pick(LOGITS), sampler.pick(LOGITS)] == [1, 2]
    assert sampler.cumulative_logprob == pytest.approx(-2.1202635)  # log(0.4 * 0.3)
    assert Sampler(Sampling()).cumulative_logprob is None
