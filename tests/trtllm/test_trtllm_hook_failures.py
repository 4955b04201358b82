# SPDX-License-Identifier: Apache-2.0
"""A failure of ours, wherever it comes, leaves the host dense answers, and SPIN off for good."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hook_standin
import pytest
from hook_batch import HostBatch
from hook_helpers import SMALL, engine_of, hook

from spin_trtllm.gpu_step import NO_LANE
from spin_trtllm.hosts.trtllm import indexer as hooks
from spin_trtllm.hosts.trtllm.proxy import ShorterContext

LARGE = SMALL | {"block_size": 32}
PAGES = {"tokens_per_block": 128, "max_seq_len": 2048, "max_batch_size": 3}
Inject = Callable[[pytest.MonkeyPatch, HostBatch], None]


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("unforeseen")


def on_call(number: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that fails when it is called for that time."""
    calls = iter(range(1, 1000))

    def counted(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            fail()
        return original(*arguments, **options)

    return counted


def of_engine(name: str) -> Inject:
    return lambda patch, batch: patch.setattr(engine_of(batch), name, fail)


def of_step(name: str) -> Inject:
    return lambda patch, batch: patch.setattr(engine_of(batch).step, name, fail)


def of_hooks(name: str) -> Inject:
    return lambda patch, _: patch.setattr(hooks, name, fail)


def in_upstream(patch: pytest.MonkeyPatch, _: HostBatch) -> None:
    """Upstream's own method stumbles over what it was shown."""
    context = hooks.shorter_context

    def shown(*arguments: Any) -> ShorterContext:
        patch.setattr(hook_standin, "paged_logits", stumble)
        return context(*arguments)

    def stumble(*arguments: Any) -> None:
        patch.setattr(hook_standin, "paged_logits", PAGED)
        fail()

    patch.setattr(hooks, "shorter_context", shown)


def after_upstream(patch: pytest.MonkeyPatch, _: HostBatch) -> None:
    original = hooks.intercepted

    @contextmanager
    def failing(*arguments: Any) -> Iterator[None]:
        with original(*arguments):
            yield
        fail()

    patch.setattr(hooks, "intercepted", failing)


def where_scores_do_not_fit(patch: pytest.MonkeyPatch, batch: HostBatch) -> None:
    """The other way back: columns are mapped without the scores."""
    patch.setattr(hook_standin, "paged_logits", lambda *a: PAGED(*a).double())
    patch.setattr(hooks, "to_sequence_slots", fail)


PAGED = hook_standin.paged_logits
PLACES: dict[str, tuple[str, Inject]] = {
    "prepare": ("host", of_engine("prepare")),
    "lanes": ("host", lambda patch, batch: patch.setattr(engine_of(batch).lanes, "place", fail)),
    "figures": ("host", of_engine("figures")),
    "begin": ("host", of_engine("begin")),
    "view": ("host", of_step("layer")),
    "shorter_context": ("host", of_hooks("shorter_context")),
    "schedule": ("host", of_hooks("schedule")),
    "upstream": ("host", in_upstream),
    "after_upstream": ("host", after_upstream),
    "scores": ("host", of_step("adopt")),
    "top_k": ("host", of_step("top_k")),
    "columns": ("host", where_scores_do_not_fit),
    "fused_scores": ("fused", of_step("score")),
    "fused_top_k": ("fused", of_step("top_k")),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_failure_leaves_the_host_dense_for_good(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend, inject = PLACES[place]
    dense, batch = (HostBatch(5, **PAGES) for _ in range(2))
    for each in (dense, batch):
        each.join(1600)
        each.join(40)
    want = [dense.step(list(dense.requests)).selected for _ in range(5)]
    counters = hook(LARGE, backend)
    for _ in range(2):
        batch.step(list(batch.requests))
    engine = engine_of(batch)
    inject(monkeypatch, batch)
    for selected in want[2:]:
        assert batch.step(list(batch.requests)).selected.equal(selected)
    assert [r.message for r in caplog.records if r.levelno >= logging.ERROR] == [
        "SPIN is off, the indexer runs dense: RuntimeError: unforeseen"
    ]
    counts = counters.snapshot()
    assert counts.dense_rows["failed"] >= 4
    assert counts.steps >= 4
    assert engine.lanes.lanes.tolist() == [NO_LANE] * 3  # graphs find nobody there


def test_a_failure_in_a_later_layer_is_dense_from_there_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse, dense, batch = (HostBatch(5) for _ in range(3))
    numbers = [each.join(600) for each in (sparse, dense, batch)][:1]
    answers = [dense.step(numbers).selected for _ in range(4)]
    hook(SMALL)
    kept = [sparse.step(numbers).selected for _ in range(3)]
    for _ in range(2):
        batch.step(numbers)
    step = engine_of(batch).step
    monkeypatch.setattr(step, "adopt", on_call(2, step.adopt))
    mixed = batch.step(numbers).selected
    assert mixed[0].equal(kept[2][0])
    assert not mixed[0].equal(answers[2][0])
    assert mixed[1].equal(answers[2][1])
    assert batch.step(numbers).selected.equal(answers[3])


def test_prefill_rows_of_the_same_call_are_the_hosts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, batch = HostBatch(5), HostBatch(5)
    for each in (dense, batch):
        each.join(600)
        each.join(30)
    rows, contexts = [next(iter(dense.requests))], [list(dense.requests)[1]]
    want = [dense.step(rows, contexts=contexts).selected for _ in range(3)]
    hook(SMALL)
    for _ in range(2):
        batch.step(rows, contexts=contexts)
    monkeypatch.setattr(engine_of(batch).step, "adopt", fail)
    assert batch.step(rows, contexts=contexts).selected.equal(want[2])


def test_a_failure_of_the_hosts_own_is_raised_and_not_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = HostBatch(5)
    number = batch.join(600)
    hook(SMALL)
    batch.step([number])
    monkeypatch.setattr(hook_standin, "paged_logits", fail)
    with pytest.raises(RuntimeError, match="unforeseen"):
        batch.step([number])
    assert not caplog.records
    monkeypatch.undo()
    batch.step([number])
    assert engine_of(batch).obstacle is None  # and SPIN goes on
