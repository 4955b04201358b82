# SPDX-License-Identifier: Apache-2.0
"""A slow, literal SPIN: plain loops, one line of the specification at a time.

It is the referee for the product's vectorised code, so it shares nothing with it. "SPEC n" in the
comments is section n of the algorithm page. All score arithmetic is IEEE fp32, one rounding per
operation (np.float32 scalars); all budgets and priorities are Python integers.

Only two things may differ between correct implementations, and want a tolerance or an equality
that ignores the sign of zero:
* `top4` and `mean` pooling: SPEC does not fix the order of the sum (here: `pool_values`);
* A2 with `max` pooling of {-0.0, 0.0}: SPEC does not fix the sign of the pooled zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MASK64 = (1 << 64) - 1
NEG_INF = float("-inf")


# ---------------------------------------------------------------- SPEC 6: priorities
def mix(x: int) -> int:
    """The 64-bit mixer of SPEC 6 (splitmix64's step and finaliser)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def priority(seed: int, sequence_id: int, layer: int, p0: int, j: int) -> int:
    """Exploration priority of block j; the smallest (priority, j) are explored."""
    inner = mix(mix(seed & MASK64) ^ (sequence_id & MASK64))
    key = mix(inner ^ ((layer << 40) & MASK64) ^ p0)
    return mix(key ^ j) >> 32


# ---------------------------------------------------------------- SPEC 1 and 4: counts
def ceil_div(a: int, b: int) -> int:
    return -((-a) // b)


def visible_slots(position: int, ratio: int) -> int:
    """SPEC 1: N(p)."""
    return (position + 1) // ratio


def query_slot(position: int, ratio: int) -> int:
    """SPEC 1: q(p)."""
    return position // ratio


def budget(
    n_blocks: int, top_k: int, block_size: int, rho_ppm: int, gamma_ppm: int, explore: bool
) -> tuple[int, set[int], int]:
    """SPEC 4.4 to 4.6 for a row that sees n_blocks >= 1 blocks: (m, F, e)."""
    dropped = (rho_ppm * n_blocks) // 1_000_000  # floor(rho_ppm * B / 1e6)
    m = min(n_blocks, max(ceil_div(top_k, block_size), n_blocks - dropped))  # 4.4
    forced = {0, n_blocks - 1}  # 4.5: one block when B = 1
    m = max(m, len(forced))
    e = min(ceil_div(gamma_ppm * m, 1_000_000), m - len(forced)) if explore else 0  # 4.6
    return m, forced, e


# ---------------------------------------------------------------- fp32 arithmetic and storage
def round_bf16(x: np.float32) -> np.float32:
    """Nearest bf16 value, ties to even, kept as fp32 (SPEC 5, bf16 storage). x is not NaN."""
    bits = int(np.array(x, dtype=np.float32).view(np.uint32))
    bits += 0x7FFF + ((bits >> 16) & 1)  # half an ulp less one, plus one where the ulp bit is odd
    return np.array(bits & 0xFFFF0000, dtype=np.uint32).view(np.float32)[()]


def round_log8(x: np.float32) -> np.float32:
    """What `log8` stores for x, kept as fp32 (SPEC 5). x is finite.

    Double precision is enough: the nearest fp32 to a point between two codes is much farther away.
    """
    if x == 0:
        return np.float32(0.0)
    n = min(127, round(8 * math.log2(abs(float(x)))) + 89)
    return np.float32(math.copysign(2.0 ** ((n - 89) / 8), x)) if n > 0 else np.float32(0.0)


ROUNDINGS = {"fp32": np.float32, "bf16": round_bf16, "log8": round_log8}


def pool_values(values: list[np.float32], pooling: str) -> np.float32:
    """SPEC 7 pooling of one block's values, given in slot order; at least one, none NaN.

    The order of the fp32 sum is the one thing SPEC leaves open for `mean` and `top4`: here slot
    order and descending order. Comparisons of those two poolings must allow a tolerance.
    """
    if pooling == "max":
        return max(values)
    if pooling == "top4":
        values = sorted(values, reverse=True)[:4]
    total = values[0]
    for value in values[1:]:
        total = np.float32(total + value)
    return np.float32(total / np.float32(len(values)))


def best_slots(slots: list[int], score: dict[int, float], k: int) -> list[int]:
    """The min(k, len) best slots, best first, ties to the lower slot; NaN counts as -inf (SPEC 4).

    -0.0 and 0.0 are equal scores.
    """

    def rank(i: int) -> tuple[float, int]:
        value = NEG_INF if math.isnan(score[i]) else score[i]
        return (-value, i)

    return sorted(slots, key=rank)[:k]


# ---------------------------------------------------------------- SPEC 3 to 5: one sequence
@dataclass
class LayerRecord:
    """What one layer did in one step."""

    warm: bool  # before the step
    blocks: set[int] = field(default_factory=set)  # U
    row_blocks: list[set[int]] = field(default_factory=list)  # sel_r, for every row
    explored: set[int] = field(default_factory=set)
    topk: list[list[int]] = field(default_factory=list)  # T_r, padded with -1 to K


class OracleSequence:
    """V, D and warm of one sequence on every indexer layer.

    V has n_slots entries and D n_slots + 1 (SPEC 3). A2 keeps its block-level state in the first
    entries of the same lists. `layers` holds decoder-layer indices (they enter SPEC 6).
    """

    def __init__(
        self,
        ratio: int,
        top_k: int,
        layers: Sequence[int],
        sequence_id: int,
        n_slots: int,
        block_size: int = 64,
        sparsity: float = 0.5,
        ema_decay: float = 0.5,
        exploration: float = 0.05,
        pooling: str = "max",
        reduction: str = "A1",
        exploration_policy: str = "random",
        mask_policy: str = "union",
        update_policy: str = "prefix",
        seed: int = 0,
        state_dtype: str = "fp32",
    ) -> None:
        assert pooling in ("max", "top4", "mean")
        assert reduction in ("A0", "A1", "A2")
        assert exploration_policy in ("none", "random")
        assert state_dtype in ROUNDINGS
        assert mask_policy in ("union", "row0")
        assert update_policy in ("prefix", "row0")
        self.ratio, self.top_k, self.n_slots = ratio, top_k, n_slots
        self.layers, self.sequence_id = [int(x) for x in layers], sequence_id
        self.block_size, self.seed = block_size, seed
        self.rho_ppm = round(sparsity * 1e6)  # SPEC 2
        self.gamma_ppm = round(exploration * 1e6)
        self.alpha = np.float32(ema_decay)
        self.one_minus_alpha = np.float32(1.0 - ema_decay)  # the difference in double
        self.pooling, self.reduction = pooling, reduction
        self.explore = exploration_policy == "random"
        self.mask_policy, self.update_policy = mask_policy, update_policy
        self.state_dtype = state_dtype
        self.reset()

    def reset(self) -> None:
        """SPEC 3."""
        zero = np.float32(0.0)
        self.v = [[zero] * self.n_slots for _ in self.layers]
        self.d = [[zero] * (self.n_slots + 1) for _ in self.layers]
        self.warm = False

    def step(
        self, positions: Sequence[int], scores: np.ndarray, accepted: int
    ) -> list[LayerRecord]:
        """One decode step (SPEC 4) and its observation (SPEC 5); scores [layers, rows, n_slots]."""
        positions = [int(p) for p in positions]
        assert 0 <= accepted <= len(positions) - 1
        assert scores.dtype == np.float32
        assert scores.shape[:2] == (len(self.layers), len(positions))
        assert max(visible_slots(p, self.ratio) for p in positions) <= self.n_slots
        records = []
        for layer_index in range(len(self.layers)):
            record = self._select(layer_index, positions, scores[layer_index])
            self._observe(layer_index, positions, scores[layer_index], record.blocks, accepted)
            records.append(record)
        self.warm = True  # SPEC 5, even if no row saw a slot
        return records

    # ------------------------------------------------------------ SPEC 4
    def _select(self, layer_index: int, positions: list[int], z: np.ndarray) -> LayerRecord:
        record = LayerRecord(warm=self.warm)
        row_explored: list[set[int]] = []
        for position in positions:
            chosen, explored = self._select_row(layer_index, position, positions[0])
            record.row_blocks.append(chosen)
            row_explored.append(explored)
        if self.mask_policy == "union":
            for chosen, explored in zip(record.row_blocks, row_explored, strict=True):
                record.blocks |= chosen
                record.explored |= explored
        else:  # row0: sel_0 plus the newest block of the last row, warm or cold
            record.blocks = set(record.row_blocks[0])
            record.explored = set(row_explored[0])
            last_n_slots = visible_slots(positions[-1], self.ratio)
            if last_n_slots > 0:
                record.blocks.add(ceil_div(last_n_slots, self.block_size) - 1)
        for row, position in enumerate(positions):  # T_r
            scored = self._scored_slots(record.blocks, position)
            best = best_slots(scored, {i: float(z[row, i]) for i in scored}, self.top_k)
            record.topk.append(best + [-1] * (self.top_k - len(best)))
        return record

    def _select_row(self, layer_index: int, position: int, p0: int) -> tuple[set[int], set[int]]:
        """SPEC 4.1 to 4.9 for one row: (sel_r, its explored part)."""
        n_slots = visible_slots(position, self.ratio)
        if n_slots == 0:
            return set(), set()
        n_blocks = ceil_div(n_slots, self.block_size)
        if not self.warm:  # 4.1
            return set(range(n_blocks)), set()
        m, forced, e = budget(
            n_blocks, self.top_k, self.block_size, self.rho_ppm, self.gamma_ppm, self.explore
        )
        v, d, q = self.v[layer_index], self.d[layer_index], query_slot(position, self.ratio)
        if self.reduction == "A2":  # SPEC 7: V and D are block-level, no pooling here
            block_score = [max(v[j], d[q // self.block_size - j]) for j in range(n_blocks)]
        else:
            zhat = [max(v[i], d[q - i]) for i in range(n_slots)]  # 4.2
            if self.reduction == "A0":  # SPEC 7: no budget, no exploration
                score = {i: float(zhat[i]) for i in range(n_slots)}
                best = best_slots(list(range(n_slots)), score, self.top_k)
                return forced | {i // self.block_size for i in best}, set()
            block_score = []  # 4.3
            for j in range(n_blocks):
                end = min((j + 1) * self.block_size, n_slots)
                block_score.append(pool_values(zhat[j * self.block_size : end], self.pooling))
        others = [j for j in range(n_blocks) if j not in forced]
        by_score = sorted(others, key=lambda j: (-float(block_score[j]), j))  # 4.7
        ranked = set(by_score[: m - e - len(forced)])
        rest = [j for j in others if j not in ranked]
        layer = self.layers[layer_index]
        rest.sort(key=lambda j: (priority(self.seed, self.sequence_id, layer, p0, j), j))
        explored = set(rest[:e])  # 4.8
        return forced | ranked | explored, explored  # 4.9

    def _scored_slots(self, blocks: set[int], position: int) -> list[int]:
        """The slots of U that are visible to the row, in slot order."""
        n_slots = visible_slots(position, self.ratio)
        return [i for i in range(n_slots) if i // self.block_size in blocks]

    # ------------------------------------------------------------ SPEC 5
    def _ema(self, old: np.float32, z: np.float32) -> np.float32:
        kept = np.float32(self.alpha * old)  # three roundings, never fused
        new = np.float32(self.one_minus_alpha * z)
        total = np.float32(kept + new)
        return ROUNDINGS[self.state_dtype](total)

    def _observe(
        self, layer_index: int, positions: list[int], z: np.ndarray, blocks: set[int], accepted: int
    ) -> None:
        v, d = self.v[layer_index], self.d[layer_index]
        last_row = accepted if self.update_policy == "prefix" else 0
        for row in range(last_row + 1):
            q = query_slot(positions[row], self.ratio)
            finite: dict[int, list[np.float32]] = {}  # block -> its finite scores in slot order
            for i in self._scored_slots(blocks, positions[row]):
                value = z[row, i]
                if not math.isfinite(value):
                    continue
                finite.setdefault(i // self.block_size, []).append(value)
                if self.reduction != "A2":
                    v[i] = self._ema(v[i], value)
                    d[q - i] = self._ema(d[q - i], value)
            if self.reduction == "A2":  # SPEC 7: pool first, then block-level V and D
                for j, values in finite.items():
                    pooled = pool_values(values, self.pooling)
                    v[j] = self._ema(v[j], pooled)
                    offset = q // self.block_size - j
                    d[offset] = self._ema(d[offset], pooled)


# ---------------------------------------------------------------- SPEC 8 and 9: replay
def percentile99(values: list[float]) -> float | None:
    """p99 with linear interpolation; None with no data."""
    if not values:
        return None
    ordered = sorted(values)
    rank = 0.99 * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (rank - low) * (ordered[high] - ordered[low])


def mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def replay(trace: dict[str, Any], **params: Any) -> dict[str, Any]:
    """Replays a trace (SPEC 9); `params` are OracleSequence's, from block_size on.

    Returns the arrays of the dump and, under `metrics`, the metrics of SPEC 8.
    """
    scores, positions, accepted = trace["scores"], trace["positions"], trace["accepted"]
    n_steps, n_layers, n_rows, n_slots = scores.shape
    ratio, top_k = trace["ratio"], trace["top_k"]
    layers, sequence_id = trace["layers"], trace["sequence_id"]
    sequence = OracleSequence(ratio, top_k, layers, sequence_id, n_slots, **params)
    block_size = sequence.block_size
    b_max = ceil_div(n_slots, block_size)
    blocks = np.zeros((n_steps, n_layers, b_max), dtype=bool)
    row_blocks = np.zeros((n_steps, n_layers, n_rows, b_max), dtype=bool)
    explored = np.zeros((n_steps, n_layers, b_max), dtype=bool)
    topk = np.full((n_steps, n_layers, n_rows, top_k), -1, dtype=np.int32)
    misses: list[list[float]] = [[] for _ in range(n_layers)]
    sparsities: list[float] = []
    cold_steps = 0
    for t in range(n_steps):
        if t > 0 and positions[t, 0] != positions[t - 1, 0] + accepted[t - 1] + 1:
            sequence.reset()  # a gap or a step back
        cold_steps += not sequence.warm
        records = sequence.step(positions[t], scores[t], int(accepted[t]))
        for layer_index, record in enumerate(records):
            blocks[t, layer_index, list(record.blocks)] = True
            explored[t, layer_index, list(record.explored)] = True
            for row in range(n_rows):
                row_blocks[t, layer_index, row, list(record.row_blocks[row])] = True
                topk[t, layer_index, row] = record.topk[row]
            if not record.warm:
                continue
            for row in range(n_rows):  # SPEC 8, every row, accepted or not
                visible = list(range(visible_slots(int(positions[t, row]), ratio)))
                z = {i: float(scores[t, layer_index, row, i]) for i in visible}
                truth = best_slots(visible, z, top_k)
                if truth:
                    missed = sum(i // block_size not in record.blocks for i in truth)
                    misses[layer_index].append(missed / len(truth))
            b_last = ceil_div(visible_slots(int(positions[t, -1]), ratio), block_size)
            if b_last > 0:
                sparsities.append(1 - len(record.blocks) / b_last)
    pooled = [miss for layer_misses in misses for miss in layer_misses]
    per_layer = [p for p in map(percentile99, misses) if p is not None]
    return {
        "blocks": blocks,
        "row_blocks": row_blocks,
        "explored": explored,
        "topk": topk,
        "v": np.array(sequence.v, dtype=np.float32),
        "d": np.array(sequence.d, dtype=np.float32),
        "metrics": {
            "mean_miss": mean(pooled),
            "p99_miss": percentile99(pooled),
            "p99_miss_layer_mean": mean(per_layer),
            "realized_sparsity": mean(sparsities),
            "cold_steps": cold_steps,
            "steps": n_steps,
        },
    }
