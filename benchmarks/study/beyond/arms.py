# SPDX-License-Identifier: Apache-2.0
"""The variants of the sweep by name, and what each reads and writes besides keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from benchmarks.study.beyond.capture import VIEWS
from benchmarks.study.beyond.variants import (
    E4m3State,
    Log8State,
    NewestRead,
    Surprise,
    VerticalLog8,
    VerticalOnly,
)
from spin_trtllm.config import SpinConfig, preset
from spin_trtllm.replay.policies import Policy, SpinPolicy

SPARSITIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.65)
BASELINE = "spin"

MakePolicy = Callable[..., Policy]  # of a configuration and a trace


@dataclass(frozen=True)
class Arm:
    """A way to decide.

    Attributes:
        group: what it varies, a heading of the table.
        changes: fields of the baseline's configuration.
        make: its policy.
        averages: of every slot that are stored: V and D, V, or none.
        average_bytes: of one of them; None: what the configuration stores.
        by_layer: the arm whose misses on other documents decide the target of each layer; None: all
            layers have the same.
    """

    group: str
    changes: dict[str, Any] = field(default_factory=dict)
    make: MakePolicy = SpinPolicy
    averages: int = 2
    average_bytes: int | None = None
    by_layer: str | None = None

    def config(self, target_sparsity: float) -> SpinConfig:
        """Settled but for the top-k."""
        return replace(baseline(), **self.changes, target_sparsity=target_sparsity)

    @property
    def view(self) -> tuple[int, str]:
        """Of `VIEWS`: which trace it needs."""
        config = self.config(0.0)
        return (config.block_size, config.query_pooling) if config.query_share_ppm else VIEWS[0]

    @property
    def bytes_a_slot(self) -> int:
        """Of stored averages."""
        stored = self.average_bytes or self.config(0.0).storage_dtype.itemsize
        return self.averages * stored


@cache
def baseline() -> SpinConfig:
    """The tiny model's preset, with averages in bf16 as the large models' presets have them."""
    return replace(preset("tiny-deepseek-v4"), state_dtype="bf16")


def _variant(step: type, **options: Any) -> Arm:
    changes = {"state_dtype": "fp32"} if options.get("average_bytes") else {}
    changes |= options.pop("changes", {})
    return Arm(changes=changes, make=partial(SpinPolicy, variant=step), **options)


def _query(share: float, **changes: Any) -> Arm:
    return Arm("query", {"query_share": share, **changes})


# No history at all: HISA's rule, but for the budget.
_QUERY_ALONE = Arm("query", {"query_share": 1.0, "exploration_policy": "none"}, averages=0)

ARMS: dict[str, Arm] = {
    BASELINE: Arm("baseline"),
    **{f"block {b}": Arm("block size", {"block_size": b}) for b in (8, 32, 64)},
    "fp32": Arm("state", {"state_dtype": "fp32"}),
    "fp8 e4m3": _variant(E4m3State, group="state", average_bytes=1),
    "log 8 bit": _variant(Log8State, group="state", average_bytes=1),
    "vertical": _variant(VerticalOnly, group="state", averages=1),
    "vertical, log 8 bit": _variant(VerticalLog8, group="state", averages=1, average_bytes=1),
    **{f"decay {a:g}": Arm("decay", {"ema_decay": a}) for a in (0.7, 0.9, 0.99)},
    "explore none": Arm("exploration", {"exploration_policy": "none"}),
    **{f"explore {g:g}": Arm("exploration", {"exploration": g}) for g in (0.1, 0.2)},
    **{f"query {q:g}": _query(q) for q in (0.1, 0.2, 0.3, 0.5)},
    "query 0.3, union": _query(0.3, query_merge="union"),
    **{f"query {q:g}, max": _query(q, query_merge="max") for q in (0.3, 0.5)},
    "query 0.3, minmax": _query(0.3, query_pooling="minmax"),
    **{f"query {q:g}, block {b}": _query(q, block_size=b) for q in (0.3, 0.5) for b in (8, 32)},
    "query alone": _QUERY_ALONE,
    **{
        f"query alone, block {b}": replace(
            _QUERY_ALONE, changes={**_QUERY_ALONE.changes, "block_size": b}
        )
        for b in (8, 32)
    },
    **{
        f"query {q:g}, vertical, log 8 bit": _variant(
            VerticalLog8, group="query", averages=1, average_bytes=1, changes={"query_share": q}
        )
        for q in (0.3, 0.5)
    },
    "budget by layer": Arm("adaptive", by_layer=BASELINE),
    "query 0.3, budget by layer": replace(_query(0.3), group="adaptive", by_layer="query 0.3"),
    "query alone, budget by layer": replace(_QUERY_ALONE, group="adaptive", by_layer="query alone"),
    "vertical, log 8 bit, budget by layer": _variant(
        VerticalLog8,
        group="adaptive",
        averages=1,
        average_bytes=1,
        by_layer="vertical, log 8 bit",
    ),
    "budget by newest": Arm("adaptive", make=NewestRead),
    "budget by surprise": Arm("adaptive", make=Surprise),
}
