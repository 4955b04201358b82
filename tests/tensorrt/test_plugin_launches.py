# SPDX-License-Identifier: Apache-2.0
"""What each TensorRT node launches, with which parameters: read off without a GPU.

Pointers are compared by what they point to, numbers with those of the call.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch
from plugin_cases import Sizes
from plugin_host import BF16, HALF, NODES
from plugin_recorder import DECAY, OUTPUTS, SEED, SIZES, Recorded, Recorder, open_recorder

from spin_trtllm import native

SCORING = ("score_slots", "topk_slots")
STEMS = {
    "SpinIndexer": ("advance", "select_blocks", *SCORING),
    "SpinPredictBlocks": ("predict_blocks", "select_blocks"),
    "SpinSparseIndexer": SCORING,
    "SpinObserve": ("observe_scores",),
}
# Parameters whose tensors have another name in the node's table. Those not listed have their own
# name there, or lie in the workspace.
ALIASES = {
    "tenants": "sequence_ids",
    "slots_out": "slots",
    "lane_tenant": "books row 0",
    "lane_next": "books row 1",
    "lane_waits": "books row 2",
    "lane_warm": f"books row 2 + {SIZES.lanes}",
    "lane_positions": "books row 3",
}
UNUSED = {
    *("lane_slots", "block_mask", "row_masks", "explored_mask"),
    *("page_table", "compact_pages"),  # of select_blocks in SpinIndexer, which scores by list
}
UNUSED_SELECTING = {
    *UNUSED,
    *("layers", "layer_sparsity_ppm"),  # numbers instead
    "lanes",  # only of lanes whose memory grows
}
WAITING = {
    *("places", "lane_positions", "lane_waits", "lane_warm", "lane_next"),
    *("tenants", "lane_tenant"),
}


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return open_recorder()


def pointers(stem: str) -> list[str]:
    return [n for kind, names in native._FIELDS[stem] if kind == "p" for n in names.split()]


def numbers(stem: str, sizes: Sizes) -> dict[str, Any]:
    """What the numbers of a stem have to be."""
    s, r, m = sizes.sequences, sizes.rows, sizes.lanes
    wanted: dict[str, Any] = {
        "slots": 1001,
        **dict.fromkeys(("v_stride", "d_stride"), 1008),
        **dict.fromkeys(("v_layer_stride", "d_layer_stride", "full_rows"), 0),
        "tile_stride": 256,
        "score_stride": sizes.width,
        **dict.fromkeys(("lane_stride", "lanes_total"), m),
        **dict.fromkeys(("entries", "sequences", "layer_entries"), s),
        "layer": 9,
        "rows": r,
        "heads": sizes.heads,
        "heads_total": s * r * sizes.heads,
        "query_dtype": 0,
        **dict.fromkeys(("blocks", "block_list_stride"), sizes.blocks),
        "tiles": 4,
        "tile_blocks": 256 // sizes.block_size,
        "ratio": 4,
        "block_size": sizes.block_size,
        "page_slots": sizes.page_slots,
        "num_pages": sizes.pages,
        **dict.fromkeys(("page_table_stride", "page_table_width"), sizes.table_width),
        "compact_pages_stride": sizes.width // sizes.page_slots,
        "top_k": sizes.top_k,
        "sparsity_ppm": 3,
        "exploration_ppm": 4,
        "seed": SEED,
        **dict.fromkeys(("row0_mask", "row0_update"), 1),
        "state_dtype": native.STATE_DTYPES[torch.bfloat16],
        "pooling": 0,
        "arithmetic": native.SCORE_FAST,
        "decay": ctypes.c_float(DECAY).value,
        "gain": ctypes.c_float(1.0 - DECAY).value,
    }
    names = [n for kind, ns in native._FIELDS[stem] if kind != "p" for n in ns.split()]
    return {n: wanted[n] for n in names}


@pytest.mark.parametrize("node", NODES)
def test_stems_and_their_numbers(recorder: Any, node: str) -> None:
    launches = Recorded(*recorder, node, SIZES).launches
    assert tuple(stem for stem, _ in launches) == STEMS[node]
    for stem, params in launches:
        assert params.struct_bytes == ctypes.sizeof(params)
        wanted = numbers(stem, SIZES)
        if stem == "select_blocks":
            wanted["lane_stride"] = 0
        if stem == "select_blocks" and node == "SpinIndexer":
            paged = ("page_table_stride", "page_table_width", "compact_pages_stride", "page_slots")
            wanted |= dict.fromkeys(paged, 0)
        elif stem == "select_blocks":
            wanted |= dict.fromkeys(("tile_blocks", "tiles", "lanes_total"), 0)
        assert {n: getattr(params, n) for n in wanted} == wanted, stem


@pytest.mark.parametrize("node", NODES)
def test_pointers_lead_to_their_tensors(recorder: Any, node: str) -> None:
    recorded = Recorded(*recorder, node, SIZES)
    tensors = {*recorded.names, *OUTPUTS[node]}
    pieces: dict[str, str] = {}
    for stem, params in recorded.launches:
        for name in pointers(stem):
            got = recorded.point(getattr(params, name))
            wanted = ALIASES.get(name, name)
            unused = name in {"advance": UNUSED, "select_blocks": UNUSED_SELECTING}.get(stem, ())
            if node == "SpinPredictBlocks" and name in UNUSED & tensors:
                assert got == name
            elif unused or (name in WAITING and node != "SpinIndexer"):
                assert got is None, (stem, name)
            elif wanted in tensors or wanted.startswith("books"):
                assert got == wanted, (stem, name)
            else:  # the same piece of the workspace in every launch
                assert got is not None, (stem, name)
                assert got.startswith("piece")
                assert pieces.setdefault(name, got) == got, (stem, name)
    assert len(set(pieces.values())) == len(pieces)


@pytest.mark.parametrize("sizes", [SIZES, replace(SIZES, sequences=70, rows=7, query=HALF)])
@pytest.mark.parametrize("pooling", [0, 2])
def test_pieces_of_the_workspace_do_not_overlap(recorder: Any, sizes: Sizes, pooling: int) -> None:
    recorded = Recorded(*recorder, "SpinIndexer", sizes, pooling=pooling)
    s, r, heads = sizes.sequences, sizes.rows, sizes.sequences * sizes.rows * sizes.heads
    tile_width = 256 // sizes.block_size + 2
    block_scores = {
        "advance": 4 * s * r * 4 * tile_width,
        "predict_blocks": 4 * s * r * sizes.blocks,
    }
    room = {
        "places": 8 * s,
        "warm": s,
        **dict.fromkeys(("observed_rows", "kept_slots", "visible_slots"), 4 * s),
        "block_list": 4 * s * sizes.blocks,
        "row_slots": 4 * s * r,
        "query_out": 128 * heads,
        "weights_out": 4 * heads,
    }
    taken: dict[int, int] = {}
    for stem, params in recorded.launches:
        for name in pointers(stem):
            got = recorded.point(getattr(params, name)) or ""
            if got.startswith("piece"):
                size = room.get(name) or block_scores.get(stem, 0)
                at = int(got.split()[-1])
                taken[at] = max(taken.get(at, 0), size)
    ends = [at + size for at, size in sorted(taken.items())]
    starts = [*sorted(taken)[1:], recorded.binding.workspace.nbytes]
    assert all(end <= start for end, start in zip(ends, starts, strict=True))


def test_a_wide_query_is_quantised_between(recorder: Any) -> None:
    recorded = Recorded(*recorder, "SpinSparseIndexer", replace(SIZES, query=HALF))
    stems = [stem for stem, _ in recorded.launches]
    assert stems == ["quantize_query", *SCORING]
    quantize, score = (params for _, params in recorded.launches[:2])
    assert numbers("quantize_query", SIZES) == {"heads_total": 384, "query_dtype": 0}
    assert (quantize.heads_total, quantize.query_dtype) == (384, 0)
    assert (score.query, score.weights) == (quantize.query_out, quantize.weights_out)
    bf16 = Recorded(*recorder, "SpinIndexer", replace(SIZES, query=BF16))
    assert bf16.launches[2][1].query_dtype == 1


def test_pages_are_listed_even_from_a_table_without_columns(recorder: Any) -> None:
    recorded = Recorded(*recorder, "SpinPredictBlocks", replace(SIZES, table_width=0))
    assert recorded.inputs[recorded.names.index("page_table")].data_ptr() == 0
    select = dict(recorded.launches)["select_blocks"]
    assert select.page_table is not None
    assert (select.page_table_width, recorded.point(select.compact_pages)) == (0, "compact_pages")


@pytest.mark.parametrize("pooling", [1, 2])
def test_other_poolings_rank_by_their_own_scores(recorder: Any, pooling: int) -> None:
    launches = dict(Recorded(*recorder, "SpinIndexer", SIZES, pooling=pooling).launches)
    assert list(launches) == ["advance", "predict_blocks", "select_blocks", *SCORING]
    predict, select = launches["predict_blocks"], launches["select_blocks"]
    assert predict.pooling == pooling
    assert predict.block_scores == select.block_scores != launches["advance"].block_scores
    assert (select.tile_blocks, select.tiles) == (0, 0)


@pytest.mark.parametrize("node", ["SpinIndexer", "SpinObserve"])
def test_a_copying_node_starts_from_its_inputs(recorder: Any, node: str) -> None:
    recorded = Recorded(*recorder, node, SIZES, aliased=0)
    for name, output in zip(OUTPUTS[node], recorded.binding.outputs, strict=True):
        if name in recorded.names:
            given = recorded.inputs[recorded.names.index(name)]
            given.view(torch.uint8).random_(0, 256)
            assert output.data_ptr() != given.data_ptr()
    recorded.binding.enqueue()
    for name in ("v", "d"):
        output = recorded.binding.outputs[OUTPUTS[node].index(name)]
        assert getattr(recorded.launches[0][1], name) == output.data_ptr()
    for name, output in zip(OUTPUTS[node], recorded.binding.outputs, strict=True):
        if name in recorded.names:
            given = recorded.inputs[recorded.names.index(name)]
            assert torch.equal(output.view(torch.uint8), given.view(torch.uint8)), name
