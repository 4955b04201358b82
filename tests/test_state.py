# SPDX-License-Identifier: Apache-2.0
"""Whose averages are whose: lanes, scratch, recycling, moving, and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spin_trtllm.errors import SpinError
from spin_trtllm.state import DTYPES, NOWHERE, SpinState

LAYERS = (2, 5)


def make(sequences: int = 3, slots: int = 6, **options: Any) -> SpinState:
    return SpinState(LAYERS, sequences=sequences, slots=slots, **options)


def tensors(state: SpinState) -> dict[str, Tensor]:
    """Every tensor the state holds, found by reflection: a new one joins the tests by itself."""
    return {name: value for name, value in vars(state).items() if isinstance(value, Tensor)}


def poison(state: SpinState, lane: int, value: float = 7.0) -> None:
    for tensor in tensors(state).values():
        tensor[:, lane] = value


def is_cold(state: SpinState, lane: int) -> bool:
    """Exactly what a fresh state holds in that lane."""
    fresh = tensors(SpinState(state.layers, sequences=state.sequences, slots=state.slots))
    return all(
        torch.equal(t[:, lane].float(), fresh[name][:, lane].float())
        for name, t in tensors(state).items()
    )


# ---------------------------------------------------------------- construction
def test_a_fresh_state_is_cold_and_zero() -> None:
    state = make()
    assert set(tensors(state)) == {"v", "d", "warm", "next_tokens"}
    assert state.v.shape == (2, 4, 6)
    assert state.d.shape == (2, 4, 7)
    assert state.warm.shape == state.next_tokens.shape == (2, 4)
    assert not state.v.any()
    assert not state.d.any()
    assert not state.warm.any()
    assert (state.next_tokens == NOWHERE).all()
    assert state.scratch == 3
    assert state.device == torch.device("cpu")
    assert state.layers == LAYERS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("layers", "sequences", "slots"), [(1, 1, 1), (2, 3, 64), (21, 4, 257), (3, 2, 1000)]
)
def test_bytes_are_what_was_estimated(
    dtype: torch.dtype, layers: int, sequences: int, slots: int
) -> None:
    state = SpinState(range(layers), sequences=sequences, slots=slots, dtype=dtype)
    held = sum(t.untyped_storage().nbytes() for t in tensors(state).values())
    assert state.state_bytes == held
    assert SpinState.estimate_bytes(layers, sequences, slots, dtype) == held


def test_bytes_by_hand() -> None:
    # 21 layers, 8 sequences and the scratch, 262144 slots, bf16:
    # 189 lanes of (262144 + 262145) * 2 + 1 + 8 bytes
    assert SpinState.estimate_bytes(21, 8, 262_144, torch.bfloat16) == 198_182_943
    # 189 * 524289 * 4 + 189 * 9
    assert SpinState.estimate_bytes(21, 8, 262_144, torch.float32) == 396_364_185
    # 189 * 524289 * 1 + 189 * 9
    assert SpinState.estimate_bytes(21, 8, 262_144, torch.int8) == 99_092_322


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("layers", []),
        ("layers", [3, 3]),
        *[("sequences", x) for x in (0, -2, True, 1.0, "2", None, [3], 2**20 + 1)],
        *[("slots", x) for x in (0, -64, False, True, 64.0, "64", None, 2**31, 2**64)],
        ("dtype", torch.float16),
        ("dtype", torch.float64),
        ("dtype", torch.int32),
        ("dtype", torch.uint8),
    ],
)
def test_refused_arguments_are_named(argument: str, given: Any) -> None:
    arguments = {"layers": [1], "sequences": 1, "slots": 8, "dtype": torch.float32}
    arguments[argument] = given
    with pytest.raises(SpinError) as caught:
        SpinState(arguments.pop("layers"), **arguments)
    assert str(caught.value).startswith(f"{argument}: got {given!r}, allowed: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layer", [-1, True, False, 1.0, "1", None, 2**20 + 1])
def test_a_layer_that_is_no_index_is_named(layer: Any) -> None:
    expected = f"layers: got {layer!r}, allowed: an integer in 0 .. 1048576"
    with pytest.raises(SpinError) as caught:
        SpinState([4, layer], sequences=1, slots=8)
    assert str(caught.value) == expected


def test_layers_may_come_from_anywhere_once() -> None:
    assert SpinState(iter((4, 2)), sequences=1, slots=8).layers == (4, 2)  # type: ignore[arg-type]


# ---------------------------------------------------------------- lanes
def test_a_lane_belongs_to_an_id_not_to_a_batch_position() -> None:
    state = make()
    first = dict(zip([7, 8, 9], state.lanes([7, 8, 9]), strict=True))
    assert sorted(first.values()) == [0, 1, 2]
    for sequence_id, lane in first.items():
        poison(state, lane, sequence_id)
    assert state.lanes([9, 7]) == [first[9], first[7]]
    state.release(8)
    nine, seven, ten = state.lanes([9, 7, 10])
    assert (nine, seven) == (first[9], first[7])
    assert ten == first[8]
    assert is_cold(state, ten)
    assert (state.v[:, nine] == 9).all()
    assert (state.v[:, seven] == 7).all()


def test_padding_and_overflow_go_to_scratch() -> None:
    state = make(sequences=2)
    assert state.lanes([None, 1, None, 2, 3, None]) == [2, 0, 2, 1, 2, 2]
    assert state.lanes([3]) == [state.scratch]
    state.release(3)  # it owns no lane: nothing is freed
    assert state.lanes([4]) == [state.scratch]
    state.release(1)
    assert state.lanes([3]) == [0]
    assert state.lanes([None, None]) == [2, 2]
    assert state.lanes([]) == []


def test_one_sequence_twice_is_refused() -> None:
    with pytest.raises(SpinError, match=r"^sequence_ids: got \[4, None, 4\], allowed: each "):
        make().lanes([4, None, 4])


@pytest.mark.parametrize("wrong", [-1, True, False, 1.0, "1", [1], 2**64])
def test_an_id_that_is_no_id_is_named_and_takes_no_lane(wrong: Any) -> None:
    state = make(sequences=2)
    with pytest.raises(SpinError) as caught:
        state.lanes([5, wrong])
    message = str(caught.value)
    assert message.startswith("sequence_ids: got ")
    assert message.endswith("allowed: an integer in 0 .. 18446744073709551615")
    assert state.export(5) is None
    assert sorted(state.lanes([0, 2**64 - 1])) == [0, 1]


def test_a_recycled_lane_remembers_nothing() -> None:
    state = make(sequences=1)
    (lane,) = state.lanes([5])
    poison(state, lane)
    before = state.generation(lane)
    state.release(5)
    assert state.lanes([6]) == [lane]
    assert is_cold(state, lane)
    assert state.generation(lane) > before


def test_a_lane_poisoned_while_it_was_free_is_cleared_when_taken() -> None:
    state = make(sequences=1)
    poison(state, 0)
    assert state.lanes([1]) == [0]
    assert is_cold(state, 0)


def test_reset_clears_one_sequence_only() -> None:
    state = make()
    one, two = state.lanes([1, 2])
    for lane in (one, two, state.scratch):
        poison(state, lane)
    before = state.generation(one), state.generation(two)
    state.reset(1)
    state.reset(99)  # unknown: ignored
    state.release(98)
    assert is_cold(state, one)
    assert all((t[:, two].float() == t.new_tensor(7).float()).all() for t in (state.v, state.d))
    assert state.warm[:, two].all()
    assert (state.v[:, state.scratch] == 7).all()
    assert state.generation(one) > before[0]
    assert state.generation(two) == before[1]
    assert state.lanes([1]) == [one]  # a reset sequence keeps its lane


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(("use", "release", "reset")), st.integers(0, 6)), max_size=60
    )
)
def test_lanes_against_a_dictionary(actions: list[tuple[str, int]]) -> None:
    state, written = make(sequences=3, slots=2), {}
    for stamp, (action, sequence_id) in enumerate(actions, start=1):
        if action == "use":
            (lane,) = state.lanes([sequence_id])
            if lane == state.scratch:
                assert len(written) == 3
                assert sequence_id not in written
                continue
            assert state.v[0, lane, 0] == written.get(sequence_id, 0)
            state.v[:, lane] = stamp
            written[sequence_id] = stamp
        elif action == "release":
            state.release(sequence_id)
            written.pop(sequence_id, None)
        else:
            state.reset(sequence_id)
            if sequence_id in written:
                written[sequence_id] = 0
        owned = state.lanes(list(written))
        assert len(set(owned)) == len(owned)
        for owner, lane in zip(written, owned, strict=True):
            assert lane != state.scratch
            assert (state.v[:, lane] == written[owner]).all()


# ---------------------------------------------------------------- moving a sequence
def filled(dtype: torch.dtype = torch.float32) -> SpinState:
    state = make(dtype=dtype)
    (lane,) = state.lanes([1])
    g = torch.Generator().manual_seed(1)
    state.v[:, lane] = (9 * torch.randn(2, 6, generator=g)).to(dtype)
    state.d[:, lane] = (9 * torch.randn(2, 7, generator=g)).to(dtype)
    state.v[0, lane, :2] = torch.tensor([-0.0, 1e-40])
    state.warm[:, lane] = torch.tensor([True, False])
    state.next_tokens[:, lane] = torch.tensor([77, NOWHERE])
    return state


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_moved_sequence_keeps_every_bit(dtype: torch.dtype) -> None:
    source, target = filled(dtype), make(dtype=dtype)
    target.lanes([50, 51])
    exported = source.export(1)
    assert exported is not None
    assert set(exported) == {*tensors(source), "layers"}
    assert exported["layers"].tolist() == list(LAYERS)
    target.adopt(9, exported)
    (lane,) = target.lanes([9])
    integer = {4: torch.int32, 2: torch.int16, 1: torch.int8}[dtype.itemsize]
    for name in ("v", "d"):
        found, wanted = tensors(target)[name][:, lane], tensors(source)[name][:, 0]
        assert torch.equal(found.view(integer), wanted.view(integer))
    assert target.warm[:, lane].tolist() == [True, False]
    assert target.next_tokens[:, lane].tolist() == [77, NOWHERE]
    assert is_cold(target, 0)


def test_an_export_is_a_copy() -> None:
    state = filled()
    exported = state.export(1)
    assert exported is not None
    before = exported["v"].clone()
    state.reset(1)
    assert torch.equal(exported["v"], before)
    other = make()
    other.adopt(1, exported)
    exported["v"].zero_()
    assert torch.equal(other.v[:, other.lanes([1])[0]], before)


def test_nothing_is_exported_for_a_sequence_without_a_lane() -> None:
    state = make(sequences=1)
    assert state.export(1) is None
    state.lanes([1])
    assert state.lanes([2]) == [state.scratch]
    assert state.export(2) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda e: None,
        lambda e: {},
        lambda e: {k: v for k, v in e.items() if k != "d"},
        lambda e: {k: v for k, v in e.items() if k != "warm"},
        lambda e: {**e, "extra": e["v"]},
        lambda e: {**e, "v": e["v"][:, :-1]},
        lambda e: {**e, "d": e["d"][:1]},
        lambda e: {**e, "v": e["v"].double()},
        lambda e: {**e, "d": e["d"].bfloat16()},
        lambda e: {**e, "v": e["v"].char(), "d": e["d"].char()},
        lambda e: {**e, "next_tokens": e["next_tokens"].int()},
        lambda e: {**e, "warm": e["warm"].long()},
        lambda e: {**e, "warm": e["warm"][:1]},
        lambda e: {k: v for k, v in e.items() if k != "layers"},
        lambda e: {**e, "layers": torch.tensor([2, 6])},
        lambda e: {**e, "layers": torch.tensor([5, 2])},
        lambda e: {**e, "layers": torch.tensor([2, 5, 6])},
    ],
)
def test_anything_but_a_whole_fitting_export_leaves_the_sequence_cold(damage: Any) -> None:
    source, target = filled(), make()
    (lane,) = target.lanes([1])
    poison(target, lane)
    before = target.generation(lane)
    exported = source.export(1)
    assert exported is not None
    target.adopt(1, damage(exported))
    (lane,) = target.lanes([1])
    assert lane != target.scratch
    assert is_cold(target, lane)
    assert sum(target.generation(n) for n in range(3)) > before


def test_an_export_of_other_layers_is_refused() -> None:
    target = SpinState((2, 6), sequences=3, slots=6)
    target.adopt(1, filled().export(1))
    (lane,) = target.lanes([1])
    assert lane != target.scratch
    assert is_cold(target, lane)


def test_adopting_without_a_free_lane_changes_nobody() -> None:
    target = make(sequences=1)
    target.lanes([5])
    poison(target, 0)
    target.adopt(1, filled().export(1))
    assert target.lanes([1]) == [target.scratch]
    assert (target.v[:, 0] == 7).all()
    assert not target.v[:, target.scratch].any()
    assert not target.warm[:, target.scratch].any()


def test_adopting_over_a_live_sequence_replaces_it() -> None:
    target = make()
    (lane,) = target.lanes([1])
    poison(target, lane)
    target.adopt(1, filled().export(1))
    (lane,) = target.lanes([1])
    assert torch.equal(target.v[:, lane], filled().v[:, 0])
    assert target.warm[:, lane].tolist() == [True, False]
