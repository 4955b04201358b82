# SPDX-License-Identifier: Apache-2.0
"""Every method is dense where it may keep all, and its cost is what literal counts say."""

import copy

import pytest
import torch

from benchmarks.study.decoding import answer, read_documents
from benchmarks.study.documents import documents_of
from benchmarks.study.methods import METHODS, Cost, HookedRun, Misses, Rule, model_geometry
from benchmarks.study.methods.hisa import block_means
from benchmarks.study.methods.layers import layer_targets
from benchmarks.study.methods.streaming import Streaming
from benchmarks.study.methods.tisa import Tisa
from spin_trtllm.errors import SpinError
from spin_trtllm.generate import forward
from spin_trtllm.hosts.transformers.hooks import find_indexers

HALF = {"index_cache": 2, "head_subset": 2}  # settings at which half of something is left out
NOTHING = {"index_cache": 1, "head_subset": 16}  # and nothing; sparsities are 0.5 and 0
ALWAYS_SKIPS = "previous_picks"
# These documents have two or three of their blocks: all of them stay.
TOO_SHORT = ("spin_64", "spin_64_unexplored")


class NoMethod:
    """The untouched model."""

    def reading(self):
        return torch.no_grad()

    def commit(self, accepted):
        pass


def read(model, task, filler, **sizes):
    return read_documents(model, list(documents_of(task, filler=filler, **sizes)))


@pytest.fixture(scope="module")
def recall(model, filler):
    """Three documents; the longest takes more than 100 decode steps."""
    return read(model, "recall", filler, documents=3, context_bytes=768, queries=2)


@pytest.fixture(scope="module")
def dialogue(model, filler):
    return read(model, "dialogue", filler, documents=2, context_bytes=1_600, queries=4)


@pytest.fixture(scope="module")
def two_steps(model, filler):
    """512 tokens read, then two decode steps that see 128 slots, eight blocks, in two layers."""
    return read(model, "text", filler, documents=1, context_bytes=511, queries=3)


def run(model, batch, name, setting, **options):
    with METHODS[name].on(model, range(len(batch.documents)), setting, **options) as found:
        return answer(model, batch, found), found.cost


@pytest.mark.parametrize("name", [name for name in METHODS if name != ALWAYS_SKIPS])
def test_a_method_that_keeps_all_is_dense_bit_for_bit(name, model, recall):
    answers, cost = run(model, recall, name, NOTHING.get(name, 0))
    assert answers == answer(model, recall, NoMethod())
    assert cost.keys == cost.dense_keys > 0


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("dense", *TOO_SHORT)])
def test_a_method_that_skips_is_not_dense(name, model, recall):
    """Else the test above would show nothing."""
    answers, cost = run(model, recall, name, HALF.get(name, 0.5))
    assert answers != answer(model, recall, NoMethod())
    assert cost.products < 0.7 * cost.dense_products


@pytest.mark.parametrize("name", ["spin", "spin_query", "spin_layers"])
@pytest.mark.parametrize("documents", ["recall", "dialogue"])
def test_spin_as_a_rule_is_spin_of_the_session(name, documents, model, request):
    batch = request.getfixturevalue(documents)
    with METHODS[name].on(model, range(len(batch.documents)), 0.5) as session:
        expected = answer(model, batch, session)
    with METHODS[name].on(model, range(len(batch.documents)), 0.5, drafts=True) as rule:
        assert answer(model, batch, rule) == expected
    assert rule.cost == session.cost
    assert rule.misses.rates == session.misses.rates
    assert any(rate > 0 for rates in rule.misses.rates.values() for rate in rates)
    assert rule.misses.entries == session.misses.entries > 0
    assert rule.misses.skipped == pytest.approx(session.misses.skipped)


def test_settings_of_spin_change_what_they_name(model):
    def config(name):
        with METHODS[name].on(model, [0], 0.5) as found:
            return found._session.config.to_dict()

    def changed(name, other="spin"):
        before = config(other)
        return {key: value for key, value in config(name).items() if value != before[key]}

    assert changed("spin_unexplored") == {"exploration_policy": "none"}
    assert changed("spin_64_unexplored", "spin_64") == {"exploration_policy": "none"}
    assert changed("spin_query_30") == {"query_share": 0.3}
    assert changed("spin_row0_mask") == {"mask_policy": "row0"}
    assert changed("spin_row0_update") == {"update_policy": "row0"}


def test_misses_of_several_runs_are_those_of_one():
    first = Misses(2, 0.5, {1: [0.0, 0.5], 3: [0.25, 0.25]})
    total = Misses()
    assert total.to_dict() == {}
    total.add(first)
    total.add(Misses(2, 1.5, {3: [1.0], 5: [0.0]}))
    assert first.rates[3] == [0.25, 0.25]
    assert total.to_dict() == {
        "realized_sparsity": 0.5,
        "mean_miss": pytest.approx(1 / 3),
        "p99_miss": pytest.approx(0.975),
        "p99_miss_layer_mean": pytest.approx((0.495 + 0.985 + 0) / 3),
    }


def test_the_session_takes_one_row_a_step(model):
    with (
        METHODS["spin"].on(model, [0], 0.5) as found,
        pytest.raises(SpinError, match="rows: got 2, allowed: one row a step"),
    ):
        found.again(2)


# Of 512 slots that dense reads in two steps of two layers. Methods that learn read the first step's
# 256 and half of the second's; the others half of either.
LITERAL = {
    "dense": Cost(512, 512, 0, 0, 8_192, 8_192),
    # Two averages of two bytes, of 512 slots to predict and 384 to update.
    "spin": Cost(512, 384, 0, 3_584, 8_192, 6_144),
    # Of eight blocks the oldest and the newest are kept unseen: six pooled keys four times.
    "spin_query": Cost(512, 384, 24, 3_584, 8_192, 6_528),
    "spin_unexplored": Cost(512, 384, 0, 3_584, 8_192, 6_144),
    "spin_query_30": Cost(512, 384, 24, 3_584, 8_192, 6_528),
    "spin_layers": Cost(512, 384, 0, 3_584, 8_192, 6_144),  # two blocks and six: as many as SPIN's
    "streaming": Cost(512, 256, 0, 0, 8_192, 4_096),
    "tisa": Cost(512, 384, 0, 128 * 2, 8_192, 6_144),  # 128 cached scores of two bytes
    "hisa": Cost(512, 256, 24, 0, 8_192, 4_480),
    "heavy_hitters": Cost(512, 384, 0, 896 * 4, 8_192, 6_144),
    "index_cache": Cost(512, 256, 0, 2 * 16 * 4, 8_192, 4_096),  # 16 picks of four bytes
    "head_subset": Cost(512, 512, 0, 0, 8_192, 1_024),  # two heads of sixteen
}


@pytest.mark.parametrize("name", LITERAL)
def test_costs_are_literal_counts(name, model, two_steps):
    _, cost = run(model, two_steps, name, HALF.get(name, 0.5))
    assert cost == LITERAL[name]
    geometry = model_geometry(model)
    assert geometry.key_bytes == 20
    expected = LITERAL[name]
    bytes_read = (expected.keys + expected.pooled_keys) * 20 + expected.state_bytes
    assert cost.bytes_read(geometry) == bytes_read
    assert cost.bytes_share(geometry) == bytes_read / 10_240


def test_previous_picks_reads_their_blocks_and_no_other(model, two_steps):
    kept = {}

    class Watched(Rule):
        def picked(self, step, picks):
            blocks = {0, 7, *(picks.flatten() // 16).tolist()}
            kept.setdefault(step.layer, len(blocks))

    with HookedRun(model, Watched()) as found:
        answer(model, two_steps, found)
    _, cost = run(model, two_steps, ALWAYS_SKIPS, 0)
    assert cost.keys == 256 + 16 * sum(kept.values())
    assert cost.state_bytes == 2 * 16 * 4


def test_rows_of_a_step_share_what_they_read(model, two_steps):
    cache = copy.deepcopy(two_steps.cache)
    with HookedRun(model, Streaming(500_000)) as found:
        forward(model, torch.tensor([[65, 66, 67, 68]]), cache)
        # Positions 512 .. 515: the last row sees 129 slots, nine blocks, the newest of one slot.
        assert found.cost == Cost(258, 130, 0, 0, 258 * 16 * 4, 130 * 16 * 4)


def test_a_step_run_again_has_the_picks_it_had(model, two_steps):
    seen = []
    with HookedRun(model, Streaming(500_000)) as found:
        indexer = find_indexers(model)[3]
        behind = indexer.register_forward_hook(lambda _, args, picks: seen.append(picks))
        forward(model, torch.tensor([[65, 66, 67]]), copy.deepcopy(two_steps.cache))
        cost = copy.deepcopy(found.cost)
        with found.again(2):
            forward(model, torch.tensor([[65, 66]]), copy.deepcopy(two_steps.cache))
        assert found.cost == cost
        forward(model, torch.tensor([[65, 66]]), copy.deepcopy(two_steps.cache))
        behind.remove()
    assert torch.equal(seen[1], seen[0][:, :2])
    blocks = set((seen[1] // 16).flatten().tolist())
    assert blocks <= {-1, 0, 5, 6, 7}  # of eight; nothing but what was kept
    assert found.cost != cost  # the last call was a step of its own


def test_hooks_leave_with_the_block(model, recall):
    before = answer(model, recall, NoMethod())
    run(model, recall, "streaming", 0.5)
    assert answer(model, recall, NoMethod()) == before
    for indexer in find_indexers(model).values():
        assert not indexer._forward_hooks
        assert not indexer._forward_pre_hooks
        assert not indexer.scorer._forward_hooks
        assert not indexer.scorer._forward_pre_hooks


@pytest.mark.parametrize("name", ["tisa", "heavy_hitters", "previous_picks"])
def test_each_turn_starts_anew(name, model, dialogue):
    """Of every turn, the first step scores everything."""
    given, left = [], []

    def watch(found):
        def note(_, args):
            if args[0].shape[1] == 1:
                found.append(args[1].shape[1])

        return find_indexers(model)[1].scorer.register_forward_pre_hook(note)

    before = watch(given)
    with METHODS[name].on(model, [0, 1], 0.5) as found:
        behind = watch(left)
        answer(model, dialogue, found)
    before.remove()
    behind.remove()
    full = {step for step, slots in enumerate(given) if left[step] == slots}
    turns = zip(*dialogue.documents, strict=True)
    steps = [max(len(one.asked) for one in turn) - 1 for turn in turns]
    assert full >= {sum(steps[:turn]) for turn in range(4)}
    assert len(full) < 8  # early on, picks may lie in all of the few blocks


def test_tisa_comes_to_every_block(model, filler):
    batch = read(model, "text", filler, documents=1, context_bytes=479, queries=9)
    seen = []

    class Watched(Tisa):
        def keep(self, step):
            kept = super().keep(step)
            if step.number == 0 and kept is not None:
                seen.append(kept[0].nonzero()[:, 0].tolist())
            return kept

    with HookedRun(model, Watched(500_000)) as found:
        answer(model, batch, found)
    # Eight blocks, four of them kept: the oldest, the newest, and two of the six between in turn.
    assert seen[:4] == [[0, 3, 4, 7], [0, 5, 6, 7], [0, 1, 2, 7], [0, 3, 4, 7]]


def test_block_means_divide_by_what_a_block_holds():
    keys = torch.arange(10.0).view(1, 5, 2)
    expected = torch.tensor([[[1.0, 2.0], [5.0, 6.0], [8.0, 9.0]]])
    assert torch.equal(block_means(keys, 2), expected)


def test_layers_have_targets_of_their_own(model, recall):
    assert layer_targets(model, 0.5) == {1: 0.75, 3: 0.25}
    assert run(model, recall, "spin_layers", 0.5)[0] != run(model, recall, "spin", 0.5)[0]
    with pytest.raises(SpinError, match=r"^setting: got 0.3, allowed: one of 0, 0.5, as calib"):
        layer_targets(model, 0.3)


def test_targets_must_lie_beside_the_weights(tmp_path):
    elsewhere = torch.nn.Module()
    elsewhere.name_or_path = str(tmp_path)
    with pytest.raises(SpinError, match=r"no targets of layers at .*layer_sparsity.json"):
        layer_targets(elsewhere, 0.5)


def test_blocks_of_64(model, filler):
    """Of the five that a kilobyte fills, SPIN at 0.5 may keep three."""
    batch = read(model, "text", filler, documents=1, context_bytes=1_180, queries=3)
    _, cost = run(model, batch, "spin_64", 0.5)
    assert cost.dense_keys == 2 * 2 * 295
    assert cost.keys == 2 * (295 + 3 * 64 - 25)  # the first step is cold; the newest is not full
