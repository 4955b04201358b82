# SPDX-License-Identifier: Apache-2.0
"""What a step decided for one layer, as a host sees it: the same on a GPU and on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LayerView:
    """What a step's `begin` decided for one layer: views of buffers that the next step overwrites.

    Attributes:
        block_list: int32 `[S, B]`, kept blocks ascending, then -1; block_count: int32 `[S]`.
        row_slots: int32 `[S, R]`, columns of `scores` that each row sees; kept_slots: the last
            row's; visible_slots: int32 `[S]`, what the last row sees of the whole sequence.
        pages: int32 `[S, pages]`, the compacted page table, where one is asked for.
        scores: fp32 `[places, R, stride]` of all layers and lanes: column `c` is slot
            `block_list[c // b] * b + c % b`. They wait there until each sequence's next step.
        places: int64 `[S]`, where each sequence's scores belong. Sequences without a lane share
            theirs with other layers: score and choose one layer before the next.
    """

    block_list: Tensor
    block_count: Tensor
    row_slots: Tensor
    kept_slots: Tensor
    visible_slots: Tensor
    pages: Tensor | None
    scores: Tensor
    places: Tensor

    def put_scores(self, scores: Tensor) -> None:
        """Take the scores of a scorer of one's own, fp32 `[S, up to R, up to stride]`."""
        part = self.scores[:, : scores.shape[1], : scores.shape[2]]
        part.index_copy_(0, self.places, scores)

    def get_scores(self) -> Tensor:
        """A copy of the scores, fp32 `[S, R, stride]`; what was not scored may hold anything."""
        return self.scores[self.places]
