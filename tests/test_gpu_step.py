# SPDX-License-Identifier: Apache-2.0
"""What `GpuState` and `GpuStep` do without a GPU: layout, bookkeeping, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from spin_trtllm import native
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.gpu_step import NO_LANE, GpuState, GpuStep

CONFIG = SpinConfig(top_k=8, block_size=64, state_dtype="bf16")


def make_state(dtype: torch.dtype = torch.bfloat16) -> GpuState:
    return GpuState((3, 7), sequences=2, slots=1001, dtype=dtype, device="cpu")


def make_step(**options: object) -> GpuStep:
    arguments = {"ratio": 4, "sequences": 2, "rows": 2, **options}
    return GpuStep(CONFIG, make_state(), **arguments)  # type: ignore[arg-type]


def test_rows_of_the_state_are_aligned_and_hide_their_padding() -> None:
    state = make_state()
    assert state.v.shape == (2, 3, 1001)
    assert state.d.shape == (2, 3, 1002)
    assert state.v.stride() == (3 * 1024, 1024, 1)
    assert state.d.stride() == (3 * 1024, 1024, 1)


def test_state_bytes_count_every_tensor_with_its_padding() -> None:
    lanes = 2 * 3
    assert make_state().state_bytes == lanes * (2 * 1024 * 2 + 1 + 8 + 1 + 8)


def test_padding_and_homeless_sequences_have_no_lane() -> None:
    state = make_state()
    assert state.device_lanes([10, None, 11, 12]) == [0, NO_LANE, 1, NO_LANE]


@pytest.mark.parametrize("event", ["reset", "release"])
def test_nothing_waits_for_a_cleared_lane(event: str) -> None:
    state = make_state()
    state.device_lanes([10, 11])
    state.lane_waits[:] = 1
    getattr(state, event)(10)
    assert state.lane_waits.tolist() == [[0, 1, 1]] * 2


def test_views_share_the_buffers_of_the_step() -> None:
    step = make_step(page_slots=32)
    step._live = 2
    view = step.layer(1)
    assert view.scores.shape == (2 * 3 + 2, 2, 1024)
    assert view.pages is not None
    assert view.pages.shape == (2, 32)
    assert view.block_list.data_ptr() == step.block_list[2:].data_ptr()
    assert view.places.data_ptr() == step.places[2:].data_ptr()


def test_buffer_bytes_include_the_waiting_scores() -> None:
    step = make_step()
    assert step.buffer_bytes > step.scores.numel() * 4


def test_a_step_without_sequences_launches_nothing() -> None:
    step = make_step()
    assert step.top_k(0).shape == (0, 2, 8)


@pytest.mark.parametrize("pooling", ["top4", "mean"])
def test_other_poolings_have_plain_block_scores(pooling: str) -> None:
    config = replace(CONFIG, pooling=pooling)
    step = GpuStep(config, make_state(), ratio=4, sequences=2)
    assert step.block_scores is not None
    assert step.block_scores.shape == (4, 1, 16)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ratio": 0}, "ratio"),
        ({"rows": 9}, "rows"),
        ({"sequences": 0}, "sequences"),
        ({"page_slots": 16}, "page_slots"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, int], named: str) -> None:
    with pytest.raises(SpinError, match=f"^{named}:"):
        make_step(**options)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"top_k": None}, "config.top_k"),
        ({"top_k": 4096}, "config.top_k"),
        ({"reduction": "A0"}, "reduction"),
        ({"exploration_policy": "age"}, "exploration_policy"),
        ({"state_dtype": "fp32"}, "state"),
        ({"state_dtype": "log8"}, "state_dtype"),
        ({"layer_sparsity": {3: 0.5, 4: 0.5}}, "layer_sparsity: layer"),
    ],
)
def test_a_configuration_that_the_kernels_lack_is_named(
    change: dict[str, object], named: str
) -> None:
    config = replace(CONFIG, **change)  # type: ignore[arg-type]
    with pytest.raises(SpinError, match=f"^{named}:"):
        GpuStep(config, make_state(), ratio=4, sequences=2)


@pytest.mark.parametrize(
    ("lanes", "ids", "positions", "table", "named"),
    [
        ((3,), (3,), (3, 2), None, "lanes"),
        ((2,), (1,), (2, 2), None, "sequence_ids"),
        ((2,), (2,), (2, 1), None, "positions_tokens"),
        ((2,), (2,), (2, 2), (2, 5), "page_table"),
    ],
)
def test_a_wrong_batch_is_named(
    lanes: tuple, ids: tuple, positions: tuple, table: tuple | None, named: str
) -> None:
    zeros = [torch.zeros(shape, dtype=torch.int64) for shape in (lanes, ids, positions)]
    pages = None if table is None else torch.zeros(table, dtype=torch.int32)
    with pytest.raises(SpinError, match=f"^{named}:"):
        make_step().begin(*zeros, pages)


def test_a_wrong_query_is_named() -> None:
    step = make_step()
    step._live = 2
    query = torch.zeros(2, 2, 64, 128)
    with pytest.raises(SpinError, match=r"^query:"):
        step.score(0, query, query[..., 0], query, query)


def test_the_estimate_is_what_a_step_takes() -> None:
    step = make_step(page_slots=32)
    sizes = {"ratio": 4, "sequences": 2, "slots": 1001, "rows": 2, "page_slots": 32}
    estimate = GpuStep.estimate_bytes(CONFIG, 2, **sizes)
    assert estimate == step.state.state_bytes + step.buffer_bytes
    layered = replace(CONFIG, layer_sparsity={7: 0.9})
    assert GpuStep.estimate_bytes(layered, 2, **sizes) == estimate
    huge = GpuStep.estimate_bytes(CONFIG, 21, **{**sizes, "sequences": 256, "slots": 1 << 18})
    assert huge > 21 * 256 * (1 << 18) * (4 + 2 * 4)  # bf16 V and D, and two rows of scores


def test_more_blocks_than_the_kernels_take_are_refused_at_once() -> None:
    sizes = {"ratio": 1, "sequences": 1}
    assert GpuStep.estimate_bytes(CONFIG, 1, slots=64 * 16_384, **sizes)
    with pytest.raises(
        SpinError, match=r"^slots: got 1048577, allowed: at most 16384 blocks of 64"
    ):
        GpuStep.estimate_bytes(CONFIG, 1, slots=64 * 16_384 + 1, **sizes)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Stems that would have been launched, and the fields they were given."""
    found: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(native, "stream_of", lambda _: 0)
    monkeypatch.setattr(native, "call", lambda stem, _, **fields: found.append((stem, fields)))
    return found


def begin(step: GpuStep, **more: torch.Tensor) -> None:
    lanes, positions = torch.tensor([1, -1]), torch.tensor([[5, 6], [7, -1]])
    step.begin(lanes, lanes + 40, positions, **more)


@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_every_field_of_a_launch_is_one_that_the_stem_has(
    launches: list[tuple[str, dict[str, Any]]], pooling: str
) -> None:
    """A struct of ctypes takes any other name, too, and the kernel never sees it."""
    config = replace(CONFIG, pooling=pooling)
    step = GpuStep(config, make_state(), ratio=4, sequences=2, rows=2, page_slots=32)
    begin(step, page_table=torch.zeros(2, 5, dtype=torch.int32), tenants=torch.tensor([8, 9]))
    step.adopt(0, torch.zeros(4, 100), torch.zeros(4, 8, dtype=torch.int32))
    step.top_k(0)
    predicted = [] if pooling == "max" else ["predict_blocks"]
    wanted = ["advance", *predicted, "select_blocks", "adopt_scores", "topk_slots"]
    assert [stem for stem, _ in launches] == wanted
    for stem, fields in launches:
        known = {name for name, _ in native.params_struct(stem)._fields_}
        assert not set(fields) - known, stem


@pytest.mark.parametrize(
    ("own", "targets"),
    [({}, [400_000] * 2), ({7: 0.0}, [400_000, 0]), ({3: 0.7}, [700_000, 400_000])],
)
def test_every_layer_is_launched_with_its_target(
    launches: list[tuple[str, dict[str, Any]]], own: dict[int, float], targets: list[int]
) -> None:
    begin(GpuStep(replace(CONFIG, layer_sparsity=own), make_state(), ratio=4, sequences=2, rows=2))
    fields = dict(launches)["select_blocks"]
    assert fields["layer_sparsity_ppm"].dtype == torch.int32
    assert fields["layer_sparsity_ppm"].tolist() == targets
    assert fields["layers"].tolist() == [3, 7]
    assert (fields["entries"], fields["layer_entries"]) == (4, 2)


def test_the_books_that_a_step_reads_are_those_it_writes(
    launches: list[tuple[str, dict[str, Any]]],
) -> None:
    state, tenants = make_state(), torch.tensor([8, 9])
    begin(GpuStep(CONFIG, state, ratio=4, sequences=2, rows=2), tenants=tenants)
    reads, writes = (dict(launches)[stem] for stem in ("advance", "select_blocks"))
    books = {
        "lane_waits": state.lane_waits,
        "lane_warm": state.warm,
        "lane_next": state.next_tokens,
        "lane_tenant": state.lane_tenant,
        "tenants": tenants,
    }
    for fields in (reads, writes):
        assert all(fields[name] is tensor for name, tensor in books.items())
        assert (fields["lane_stride"], fields["lanes_total"]) == (3, 6)
    for name in ("lanes", "lane_positions", "places", "warm", "compact_of_block"):
        assert reads[name] is writes[name], name
