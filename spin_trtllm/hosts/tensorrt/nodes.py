# SPDX-License-Identifier: Apache-2.0
"""What the plugin's nodes are called, what goes in and out, and their fields.

`plugins/tensorrt/README.md` says what each tensor and field means, and the library itself checks
dtypes, shapes and ranges. Here are the names in their order, for building networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from spin_trtllm import native
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import check_integer, refuse

NAMESPACE = "spin"
VERSION = "1"

FieldValue = int | float
Fields = dict[str, FieldValue]


@dataclass(frozen=True)
class Node:
    """One kind of node.

    Attributes:
        name: of its creator.
        inputs: names in order.
        outputs: names in order; an input's name again is that state, as the step leaves it.
        fields: names of its fields.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fields: tuple[str, ...]

    @property
    def state(self) -> tuple[str, ...]:
        """The inputs that an output is aliased to."""
        return tuple(name for name in self.outputs if name in self.inputs)


def _node(name: str, inputs: str, outputs: str, fields: str) -> Node:
    return Node(name, tuple(inputs.split()), tuple(outputs.split()), tuple(fields.split()))


NODES = {
    node.name: node
    for node in (
        _node(
            "SpinIndexer",
            "query weights pages page_table lanes positions sequence_ids "
            "v d scores compact_of_block books",
            "slots block_count v d scores compact_of_block books",
            "ratio slots top_k layer block_size page_slots sparsity_ppm exploration_ppm seed "
            "pooling row0_mask ema_decay row0_update exact aliased",
        ),
        _node(
            "SpinPredictBlocks",
            "v d lanes positions sequence_ids warm page_table",
            "block_list block_count compact_of_block row_slots kept_slots visible_slots "
            "compact_pages",
            "ratio slots top_k layer block_size page_slots sparsity_ppm exploration_ppm seed "
            "pooling row0_mask",
        ),
        _node(
            "SpinSparseIndexer",
            "query weights pages page_table block_list block_count row_slots visible_slots",
            "slots scores",
            "slots top_k block_size page_slots exact",
        ),
        _node(
            "SpinObserve",
            "v d lanes positions accepted scores compact_of_block",
            "v d",
            "ratio slots block_size ema_decay row0_update aliased",
        ),
    )
}
REQUIRED_FIELDS = ("ratio", "slots", "top_k", "layer")  # the others have defaults
REAL_FIELDS = ("ema_decay",)  # the others are integers

BLOCK_SIZES = (16, 32, 64, 128)
PAGE_SLOTS = (32, 64)
MAX_RATIO = 2**20
MAX_LAYERS = 1024
_SIGNED_END = 2**63
_INTEGER = (int, np.integer)
_REAL = (*_INTEGER, float, np.floating)


def node_of(name: str) -> Node:
    """The node of that name.

    Raises:
        SpinError: there is none.
    """
    if name not in NODES:
        refuse("node", name, ", ".join(NODES))
    return NODES[name]


def check_names(node: Node, given: Mapping[str, object], fields: Mapping[str, FieldValue]) -> None:
    """Refuse inputs and fields that a node does not have, or lacks.

    Raises:
        SpinError: names the node and the first name that is wrong.
    """
    for name in node.inputs:
        if name not in given:
            refuse(f"{node.name}: inputs", sorted(given), f"all of {', '.join(node.inputs)}")
    for name in given:
        if name not in node.inputs:
            refuse(f"{node.name}: input", name, ", ".join(node.inputs))
    for name in fields:
        if name not in node.fields:
            refuse(f"{node.name}: field", name, ", ".join(node.fields))
    for name in REQUIRED_FIELDS:
        if name in node.fields and name not in fields:
            refuse(f"{node.name}: fields", sorted(fields), f"{name} among them")


def settle_fields(node: Node, fields: Mapping[str, object]) -> Fields:
    """Values as a field holds them: integers of 64 bits with a sign, or doubles.

    An integer without a sign is taken as its bits. Ranges are the plugin's to check.

    Raises:
        SpinError: names the field that is no such number.
    """
    return {name: _settle(f"{node.name}: {name}", name, value) for name, value in fields.items()}


def _settle(argument: str, name: str, value: object) -> FieldValue:
    if name in REAL_FIELDS:
        if not isinstance(value, _REAL) or not 0 <= value < 1:
            refuse(argument, value, "a number in [0, 1)")
        return float(value)
    if not isinstance(value, _INTEGER) or not -_SIGNED_END <= value < 2 * _SIGNED_END:
        refuse(argument, value, "an integer of 64 bits")
    return _signed(int(value))


def _signed(bits: int) -> int:
    return bits - 2 * _SIGNED_END if bits >= _SIGNED_END else bits


def node_fields(
    name: str,
    config: SpinConfig,
    *,
    ratio: int,
    slots: int,
    layer: int,
    page_slots: int = 64,
    exact: bool = True,
    aliased: bool = True,
) -> Fields:
    """The fields of a node for a configuration.

    Args:
        name: of the node.
        config: `top_k` must be settled.
        ratio: raw tokens a slot.
        slots: capacity `N` of a sequence.
        layer: decoder-layer index.
        page_slots: slots a page of the key cache.
        exact: products as good as fp32, or fp8 tensor cores where they are quicker.
        aliased: state in place; otherwise the state outputs are copies.

    Raises:
        SpinError: a configuration that the plugin cannot run.
    """
    node = node_of(name)
    check_integer("ratio", ratio, 1, MAX_RATIO)
    check_integer("layer", layer, 0, MAX_LAYERS - 1)
    _check_config(config, slots, page_slots)
    for option, given in (("exact", exact), ("aliased", aliased)):
        if type(given) is not bool:
            refuse(option, given, "True, False")
    if name == "SpinPredictBlocks" and page_slots > config.block_size:  # it lists whole pages
        refuse("page_slots", page_slots, f"at most block_size = {config.block_size}")
    values: dict[str, FieldValue | None] = {
        "ratio": ratio,
        "slots": slots,
        "top_k": config.top_k,
        "layer": layer,
        "block_size": config.block_size,
        "page_slots": page_slots,
        "sparsity_ppm": config.layer_ppm(layer),
        "exploration_ppm": config.exploration_ppm,
        "seed": _signed(config.seed),
        "pooling": native.POOLINGS[config.pooling],
        "row0_mask": int(config.mask_policy == "row0"),
        "ema_decay": config.ema_decay,
        "row0_update": int(config.update_policy == "row0"),
        "exact": int(exact),
        "aliased": int(aliased),
    }
    return {name: value for name in node.fields if (value := values[name]) is not None}


def _check_config(config: SpinConfig, slots: int, page_slots: int) -> None:
    native.check_config(config)
    if config.block_size not in BLOCK_SIZES:
        refuse("block_size", config.block_size, f"{', '.join(map(str, BLOCK_SIZES))}")
    if type(page_slots) is not int or page_slots not in PAGE_SLOTS:
        refuse("page_slots", page_slots, ", ".join(map(str, PAGE_SLOTS)))
    check_integer("slots", slots, 1, native.MAX_BLOCKS * config.block_size)
