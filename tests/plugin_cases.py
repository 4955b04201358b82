# SPDX-License-Identifier: Apache-2.0
"""Legal fields and tensors of each TensorRT node, for tests that then change one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plugin_host import BF16, BOOL, FLOAT, FP8, HALF, INT8, INT32, INT64, Desc, desc

FIELDS: dict[str, dict[str, Any]] = {
    "SpinIndexer": {"ratio": 4, "slots": 1000, "top_k": 512, "layer": 7},
    "SpinPredictBlocks": {"ratio": 4, "slots": 1000, "top_k": 512, "layer": 7},
    "SpinSparseIndexer": {"slots": 1000, "top_k": 512},
    "SpinObserve": {"ratio": 4, "slots": 1000},
}

AVERAGES = (FLOAT, BF16)
PAGES = (INT32, INT8, FP8)
QUERIES = (FP8, HALF, BF16)


@dataclass(frozen=True)
class Sizes:
    """Sizes of one call; names are those of the nodes' table."""

    sequences: int = 3
    rows: int = 2
    heads: int = 64
    lanes: int = 5
    pages: int = 40
    table_width: int = 16
    slots: int = 1000
    block_size: int = 64
    page_slots: int = 64
    top_k: int = 512
    query: int = FP8
    page_type: int = INT32
    state: int = FLOAT
    spare_places: int = 0

    @property
    def blocks(self) -> int:
        return -(-self.slots // self.block_size)

    @property
    def width(self) -> int:
        return self.blocks * self.block_size

    def fields(self, node: str) -> dict[str, Any]:
        """Fields of a node that go with these sizes."""
        fields = {**FIELDS[node], "slots": self.slots, "block_size": self.block_size}
        if node != "SpinObserve":
            fields |= {"top_k": self.top_k, "page_slots": self.page_slots}
        return fields

    def inputs(self, node: str) -> dict[str, Desc]:
        """Descriptions of a node's inputs, by name, in order."""
        s, r, m, b = self.sequences, self.rows, self.lanes, self.blocks
        page_bytes = self.page_slots * 132
        places = m + s + self.spare_places
        query = {
            "query": desc(self.query, (s, r, self.heads, 128)),
            "weights": desc(FLOAT, (s, r, self.heads)),
            "pages": desc(
                self.page_type,
                (self.pages, page_bytes // 4 if self.page_type == INT32 else page_bytes),
            ),
            "page_table": desc(INT32, (s, self.table_width)),
        }
        v_width, d_width = -(-self.slots // 8) * 8, -(-(self.slots + 1) // 8) * 8
        state = {"v": desc(self.state, (m, v_width)), "d": desc(self.state, (m, d_width))}
        who = {"lanes": desc(INT64, (s,)), "positions": desc(INT64, (s, r))}
        ids = {"sequence_ids": desc(INT64, (s,))}
        if node == "SpinIndexer":
            waiting = {
                "scores": desc(FLOAT, (places, r, self.width)),
                "compact_of_block": desc(INT32, (places, b)),
                "books": desc(INT64, (r + 3, m)),
            }
            return {**query, **who, **ids, **state, **waiting}
        if node == "SpinPredictBlocks":
            warm = {"warm": desc(BOOL, (s,))}
            return {**state, **who, **ids, **warm, "page_table": query["page_table"]}
        if node == "SpinSparseIndexer":
            chosen = {
                "block_list": desc(INT32, (s, b)),
                "block_count": desc(INT32, (s,)),
                "row_slots": desc(INT32, (s, r)),
                "visible_slots": desc(INT32, (s,)),
            }
            return {**query, **chosen}
        return {
            **state,
            **who,
            "accepted": desc(INT64, (s,)),
            "scores": desc(FLOAT, (s, r, self.width)),
            "compact_of_block": desc(INT32, (s, b)),
        }

    def outputs(self, node: str) -> list[tuple[int, tuple[int, ...]]]:
        """Types and shapes that a node's outputs have to have."""
        s, r, b = self.sequences, self.rows, self.blocks
        inputs = self.inputs(node)
        state = [
            (d.type, tuple(d.dims.d[: d.dims.rank]))
            for d in (inputs[n] for n in ("v", "d") if n in inputs)
        ]
        if node == "SpinIndexer":
            places = self.lanes + s + self.spare_places
            waiting = [
                (FLOAT, (places, r, self.width)),
                (INT32, (places, b)),
                (INT64, (r + 3, self.lanes)),
            ]
            return [(INT32, (s, r, self.top_k)), (INT32, (s,)), *state, *waiting]
        if node == "SpinPredictBlocks":
            lists = [(INT32, (s, b)), (INT32, (s,)), (INT32, (s, b))]
            pages = (INT32, (s, self.width // self.page_slots))
            return [*lists, (INT32, (s, r)), (INT32, (s,)), (INT32, (s,)), pages]
        if node == "SpinSparseIndexer":
            return [(INT32, (s, r, self.top_k)), (FLOAT, (s, r, self.width))]
        return state
