# SPDX-License-Identifier: Apache-2.0
"""The public operators on a CPU: the reference's results, named refusals, and fake tensors."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from spin_trtllm import ops, reference
from spin_trtllm.errors import SpinError
from spin_trtllm.ops.checks import padded_rows, row_stride
from spin_trtllm.ops.topk_slots import count_scored, list_blocks

GEOMETRY = {"ratio": 4, "block_size_slots": 16}
SEQUENCES, ROWS, SLOTS, BLOCKS = 3, 2, 100, 7


def arguments(stem: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and options of a small legal call."""
    generator = torch.Generator().manual_seed(1)
    lanes = torch.tensor([2, 0, 3])
    positions = torch.tensor([[300, 301], [60, -1], [-1, -1]])
    v = torch.randn(5, SLOTS, generator=generator)
    d = torch.randn(5, SLOTS + 1, generator=generator)
    scores = torch.randn(SEQUENCES, ROWS, SLOTS, generator=generator)
    blocks = torch.rand(SEQUENCES, BLOCKS, generator=generator) < 0.7
    ids = torch.tensor([7, 8, 9])
    state = {"v": v, "d": d, "lanes": lanes}
    if stem == "predict_blocks":
        return {**state, "positions_tokens": positions}, dict(GEOMETRY)
    if stem == "observe_scores":
        tensors = {"scores": scores, "blocks": blocks, "positions_tokens": positions}
        accepted = torch.tensor([1, 0, -1])
        return {**state, **tensors, "accepted": accepted}, {**GEOMETRY, "ema_decay": 0.5}
    if stem == "topk_slots":
        tensors = {"scores": scores, "blocks": blocks, "positions_tokens": positions}
        return tensors, {**GEOMETRY, "top_k": 8}
    tensors = {
        "block_scores": torch.randn(SEQUENCES, ROWS, BLOCKS, generator=generator),
        "positions_tokens": positions,
        "warm": torch.tensor([True, False, True]),
        "sequence_ids": ids,
        "layers": ids,
    }
    budget = {"top_k": 8, "sparsity_ppm": 400_000, "exploration_ppm": 50_000, "seed": 2**64 - 1}
    return tensors, {**GEOMETRY, **budget}


STEMS = ("predict_blocks", "observe_scores", "topk_slots", "select_blocks")


def clones(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("stem", STEMS)
def test_a_cpu_runs_the_reference(stem: str) -> None:
    tensors, options = arguments(stem)
    mine, theirs = clones(tensors), clones(tensors)
    got = getattr(ops, stem)(**mine, **options)
    want = getattr(reference, stem)(**theirs, **options)
    if stem == "select_blocks":
        for name in ("blocks", "row_blocks", "explored_blocks"):
            assert torch.equal(getattr(got, name), getattr(want, name))
    elif stem == "observe_scores":
        assert torch.equal(mine["v"], theirs["v"])
        assert torch.equal(mine["d"], theirs["d"])
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize("stem", STEMS)
def test_a_wrong_tensor_is_named(stem: str) -> None:
    tensors, options = arguments(stem)
    for name, tensor in tensors.items():
        bad = {**tensors, name: tensor.unsqueeze(0)}
        with pytest.raises(SpinError, match=f"^{name}:"):
            getattr(ops, stem)(**bad, **options)
        bad = {**tensors, name: tensor.to(torch.float64)}
        with pytest.raises(SpinError, match=rf"^{'d' if name == 'v' else name}:|^v:"):
            getattr(ops, stem)(**bad, **options)


@pytest.mark.parametrize(
    ("stem", "option", "value"),
    [
        *((stem, "ratio", 0) for stem in STEMS),
        *((stem, "block_size_slots", 48) for stem in ("predict_blocks", "select_blocks")),
        ("predict_blocks", "pooling", "median"),
        ("observe_scores", "update_policy", "last"),
        ("observe_scores", "ema_decay", 1.0),
        ("topk_slots", "top_k", 2049),
        ("select_blocks", "top_k", 0),
        ("select_blocks", "sparsity_ppm", 1_000_000),
        ("select_blocks", "exploration_ppm", -1),
        ("select_blocks", "mask_policy", "all"),
    ],
)
def test_a_wrong_option_is_named(stem: str, option: str, value: object) -> None:
    tensors, options = arguments(stem)
    with pytest.raises(SpinError, match=f"^{option}:"):
        getattr(ops, stem)(**tensors, **{**options, option: value})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_each_entry_may_have_its_own_target(dtype: torch.dtype) -> None:
    tensors, options = arguments("select_blocks")
    tensors |= {"warm": torch.ones(3, dtype=torch.bool), "positions_tokens": torch.tensor([[400]])}
    tensors["positions_tokens"] = tensors["positions_tokens"].expand(3, ROWS)
    targets = [850_000, 0, 300_000]
    options["sparsity_ppm"] = torch.tensor(targets, dtype=dtype)
    together = ops.select_blocks(**tensors, **options)
    for entry, sparsity_ppm in enumerate(targets):
        part = {name: tensor[entry : entry + 1] for name, tensor in tensors.items()}
        alone = ops.select_blocks(**part, **options | {"sparsity_ppm": sparsity_ppm})
        for name in ("blocks", "row_blocks", "explored_blocks"):
            assert torch.equal(getattr(together, name)[entry], getattr(alone, name)[0])
    assert together.row_blocks[:, 0].sum(1).tolist() == [2, 7, 5]
    compiled = torch.compile(ops.select_blocks, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**tensors, **options).blocks, together.blocks)
    meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    options["sparsity_ppm"] = options["sparsity_ppm"].to("meta")
    assert ops.select_blocks(**meta, **options).blocks.shape == (3, BLOCKS)


def test_a_target_out_of_range_counts_as_the_nearest() -> None:
    tensors, options = arguments("select_blocks")
    wild = torch.tensor([2**62, -(2**62), -1])
    near = torch.tensor([999_999, 0, 0])
    got, want = (
        ops.select_blocks(**tensors, **options | {"sparsity_ppm": ppm}) for ppm in (wild, near)
    )
    assert torch.equal(got.row_blocks, want.row_blocks)


@pytest.mark.parametrize("stem", ["predict_blocks", "observe_scores"])
def test_averages_in_eight_bits_are_for_the_reference(stem: str) -> None:
    tensors, options = arguments(stem)
    codes = {name: tensors[name].char() for name in ("v", "d")}
    with pytest.raises(SpinError, match=r"^v: got 'torch.int8', allowed: torch.float32, torch.bf"):
        getattr(ops, stem)(**tensors | codes, **options)
    getattr(reference, stem)(**tensors | codes, **options)


def test_a_wrong_tensor_of_targets_is_named() -> None:
    tensors, options = arguments("select_blocks")
    for wrong in (torch.zeros(2, dtype=torch.int32), torch.zeros(3), torch.zeros(3, device="meta")):
        with pytest.raises(SpinError, match=r"^sparsity_ppm:"):
            ops.select_blocks(**tensors, **options | {"sparsity_ppm": wrong})


def test_tensors_on_two_devices_are_refused() -> None:
    tensors, options = arguments("predict_blocks")
    tensors["lanes"] = tensors["lanes"].to("meta")
    with pytest.raises(SpinError, match=r"^lanes: got .meta"):
        ops.predict_blocks(**tensors, **options)


@pytest.mark.parametrize("stem", STEMS)
def test_operators_compile_without_graph_breaks(stem: str) -> None:
    tensors, options = arguments(stem)
    function = functools.partial(getattr(ops, stem), **options)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    mine, theirs = clones(tensors), clones(tensors)
    got, want = compiled(**mine), function(**theirs)
    if isinstance(want, torch.Tensor):
        assert torch.equal(got, want)
    elif want is not None:
        assert torch.equal(got.blocks, want.blocks)
    else:
        assert torch.equal(mine["d"], theirs["d"])


def paged_case(page_slots: int) -> dict[str, torch.Tensor]:
    """Two sequences over six pages that are built byte by byte."""
    generator = torch.Generator().manual_seed(page_slots)
    keys = torch.randn(6, page_slots, 128, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(6, page_slots, generator=generator) + 0.5
    pages = torch.zeros(6, page_slots * 132, dtype=torch.uint8)
    for page in range(6):
        for slot in range(page_slots):
            pages[page, slot * 128 : slot * 128 + 128] = keys[page, slot].view(torch.uint8)
            at = page_slots * 128 + slot * 4
            pages[page, at : at + 4] = scales[page, slot : slot + 1].view(torch.uint8)
    return {
        "keys": keys.float() * scales.unsqueeze(-1),
        "pages": pages,
        "query": torch.randn(2, 2, 4, 128, generator=generator).to(torch.float8_e4m3fn),
        "weights": torch.randn(2, 2, 4, generator=generator),
        "page_table": torch.tensor([[5, 0, 3], [2, 4, 1]], dtype=torch.int32),
        "visible_slots": torch.tensor([2 * page_slots + 7, page_slots], dtype=torch.int32),
        "block_list": torch.tensor([[0, 3, 4, -1], [1, 2, -1, -1]], dtype=torch.int32),
    }


@pytest.mark.parametrize("page_slots", [32, 64])
def test_paged_scores_equal_the_reference_on_the_same_keys(page_slots: int) -> None:
    case = paged_case(page_slots)
    keys = case.pop("keys")
    got = ops.score_pages(**case, block_size_slots=16)
    assert got.shape == (2, 2, 64)
    for s in range(2):
        plain = keys[case["page_table"][s].long()].flatten(0, 1)
        visible = int(case["visible_slots"][s])
        everything = torch.ones(1, len(plain) // 16, dtype=torch.bool)
        want = reference.score_slots(
            case["query"][s : s + 1].float(),
            plain.unsqueeze(0),
            case["weights"][s : s + 1],
            everything,
            torch.tensor([[visible - 1, visible - 1]]),
            ratio=1,
            block_size_slots=16,
        )[0]
        for place, block in enumerate(case["block_list"][s].tolist()):
            part = got[s, :, place * 16 : place * 16 + 16]
            if block < 0:
                assert bool((part == float("-inf")).all())
            else:
                torch.testing.assert_close(part, want[:, block * 16 : block * 16 + 16])


def test_paged_scoring_names_a_wrong_argument() -> None:
    case = paged_case(32)
    del case["keys"]
    for name, tensor in case.items():
        with pytest.raises(SpinError, match=f"^{name}:"):
            ops.score_pages(**{**case, name: tensor.unsqueeze(0)}, block_size_slots=16)
    with pytest.raises(SpinError, match=r"^pages:"):
        ops.score_pages(**{**case, "pages": case["pages"][:, 4:]}, block_size_slots=16)
    with pytest.raises(SpinError, match=r"^arithmetic:"):
        ops.score_pages(**case, block_size_slots=16, arithmetic="slow")


def test_paged_scoring_compiles_without_graph_breaks() -> None:
    case = paged_case(32)
    del case["keys"]
    function = functools.partial(ops.score_pages, block_size_slots=16)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**case), function(**case))


def test_lists_and_counts_of_a_mask() -> None:
    blocks = torch.tensor([[True, False, True, True], [False] * 4])
    assert list_blocks(blocks).tolist() == [[0, 2, 3, -1], [-1] * 4]
    positions = torch.tensor([[50, -1], [50, 51]])
    counts = count_scored(blocks, positions, 60, ratio=1, block_size=16)
    assert counts.tolist() == [[35, 0], [0, 0]]


def test_rows_are_padded_only_where_needed() -> None:
    fitting = torch.zeros(3, 16)
    assert padded_rows(fitting, 16) is fitting
    narrow = torch.arange(30.0).view(3, 10)
    padded = padded_rows(narrow, 10)
    assert row_stride(padded) == 16
    assert torch.equal(padded[:, :10], narrow)
    assert row_stride(torch.zeros(1, 24)) == 24
