# SPDX-License-Identifier: Apache-2.0
"""The variants of the sweep by name, and what each reads and writes besides keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from benchmarks.study.beyond.capture import VIEWS, View
from benchmarks.study.beyond.rivals import RulePolicy
from benchmarks.study.beyond.variants import (
    E4m3State,
    NewestRead,
    Surprise,
    VerticalLog8,
    VerticalOnly,
)
from benchmarks.study.methods.heavy_hitters import SUM_BYTES, HeavyHitters
from benchmarks.study.methods.index_cache import IndexCache
from benchmarks.study.methods.previous_picks import PreviousPicks
from benchmarks.study.methods.rule import Rule
from benchmarks.study.methods.streaming import Streaming
from benchmarks.study.methods.tisa import SCORE_BYTES, Tisa
from spin_trtllm.config import SpinConfig, preset
from spin_trtllm.replay.policies import Policy, SpinPolicy

SPARSITIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.65)
DEEP = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.8, 0.9)
DEFAULT_BLOCKS = (16, 64)  # of the study, and the smallest that TensorRT-LLM's kernels can skip
OPTIONS = {  # what a default may set
    "block_size",
    "exploration",
    "exploration_policy",
    "query_merge",
    "query_pooling",
    "query_share",
    "state_dtype",
}
BASELINE = "spin"

MakePolicy = Callable[..., Policy]  # of a configuration and a trace


@dataclass(frozen=True)
class Arm:
    """A way to decide.

    Attributes:
        group: what it varies, a heading of the table.
        changes: fields of the baseline's configuration.
        make: its policy.
        averages: of every slot that are stored: V and D, V, or none; a rival's sums or scores.
        average_bytes: of one of them; None: what the configuration stores.
        by_layer: the arm whose misses on other documents decide the target of each layer; None: all
            layers have the same.
        fp8_pooled_keys: whether the query ranks by pooled keys rounded as they are counted.
        fixed: whether it has no target: there is one setting.
        against: another arm that it is compared with, besides the baseline.
        deep: whether it is run at the targets of `DEEP`, as what may be a default at high sparsity.
    """

    group: str
    changes: dict[str, Any] = field(default_factory=dict)
    make: MakePolicy = SpinPolicy
    averages: int = 2
    average_bytes: int | None = None
    by_layer: str | None = None
    fp8_pooled_keys: bool = False
    fixed: bool = False
    against: str | None = None
    deep: bool = False

    def config(self, target_sparsity: float) -> SpinConfig:
        """Settled but for the top-k."""
        return replace(baseline(), **self.changes, target_sparsity=target_sparsity)

    @property
    def targets(self) -> tuple[float, ...]:
        """Target sparsities that are run."""
        if self.fixed:
            return (0.0,)
        return DEEP if self.deep else SPARSITIES

    @property
    def default_block_slots(self) -> int | None:
        """Block size, of `DEFAULT_BLOCKS`, if it may be a default, which takes `OPTIONS` alone.

        No option spares the averages of a query that ranks alone, so `averages=0` is none.
        """
        options = self.make is SpinPolicy and set(self.changes) <= OPTIONS
        served = self.averages and not self.fp8_pooled_keys
        block_slots = self.config(0.0).block_size
        return block_slots if options and served and block_slots in DEFAULT_BLOCKS else None

    @property
    def has_kernels(self) -> bool:
        """Whether a default runs in the kernels, and so under TensorRT-LLM, too."""
        config = self.config(0.0)
        return not config.query_share_ppm and config.state_dtype != "log8"

    @property
    def view(self) -> View:
        """Of `VIEWS`: which trace it needs."""
        config = self.config(0.0)
        if not config.query_share_ppm:
            return VIEWS[0]
        return View(config.block_size, config.query_pooling, self.fp8_pooled_keys)

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


def _query(share: float, against: str | None = None, **changes: Any) -> Arm:
    return Arm("query", {"query_share": share, **changes}, against=against)


def _by_layer(arms: Mapping[str, Arm]) -> dict[str, Arm]:
    """The same with a target for each layer, by each arm's own misses."""
    return {
        f"{name}, budget by layer".removeprefix(f"{BASELINE}, "): replace(
            arm, group="adaptive", by_layer=name
        )
        for name, arm in arms.items()
    }


def _options(plain: str, **changes: Any) -> dict[str, Arm]:
    """What options of `SpinConfig` make together of plain SPIN with one block size."""
    here = "" if plain == BASELINE else f", {plain}"
    history, log8 = Arm("block size", changes), {"state_dtype": "log8"}
    arms = {
        f"log 8 bit{here}": Arm("state", changes | log8),
        f"query 0.5, log 8 bit{here}": _query(0.5, **changes, **log8),
        f"query 0.5, union, log 8 bit{here}": _query(0.5, query_merge="union", **changes, **log8),
        # As the option has it: the averages that nothing asks are read and written all the same.
        f"query 1, log 8 bit{here}": _query(1.0, exploration_policy="none", **changes, **log8),
    }
    arms |= {f"query 0.5{here}": _query(0.5, **changes), **_by_layer({plain: history, **arms})}
    against = plain if here else None
    return {name: replace(arm, against=against, deep=True) for name, arm in arms.items()}


def _rival(rule: Callable[[int], Rule], *, slot_bytes: int = 0) -> Arm:
    return Arm(
        "rival",
        make=partial(RulePolicy, rule),
        averages=1 if slot_bytes else 0,
        average_bytes=slot_bytes or None,
    )


def _rival_of_one_setting(rule: Callable[[], Rule]) -> Arm:
    return replace(_rival(lambda _: rule()), fixed=True)


_HALF = "query 0.5"  # which other merges and pooled keys are compared with


def _against_half(**changes: Any) -> Arm:
    return replace(_query(0.5, _HALF, **changes), deep=True)  # the same targets as it has


_MERGES = {"union": {"query_merge": "union"}, "max": {"query_merge": "max"}}
_MINMAX = {"query_pooling": "minmax"}
# No history at all: HISA's rule, but for the budget.
_QUERY_ALONE = Arm("query", {"query_share": 1.0, "exploration_policy": "none"}, averages=0)
_VERTICAL_LOG8 = _variant(VerticalLog8, group="state", averages=1, average_bytes=1)
_OPTIONS, _OPTIONS_64 = _options(BASELINE), _options("block 64", block_size=64)

ARMS: dict[str, Arm] = {
    BASELINE: Arm("baseline", deep=True),
    **{f"block {b}": Arm("block size", {"block_size": b}, deep=b == 64) for b in (8, 32, 64)},
    "fp32": Arm("state", {"state_dtype": "fp32"}),
    "fp8 e4m3": _variant(E4m3State, group="state", average_bytes=1),
    "log 8 bit": _OPTIONS["log 8 bit"],
    "vertical": _variant(VerticalOnly, group="state", averages=1),
    "vertical, log 8 bit": _VERTICAL_LOG8,
    **{f"decay {a:g}": Arm("decay", {"ema_decay": a}) for a in (0.0, 0.3, 0.7, 0.9, 0.99)},
    "explore none": Arm("exploration", {"exploration_policy": "none"}, deep=True),
    **{f"explore {g:g}": Arm("exploration", {"exploration": g}) for g in (0.1, 0.2)},
    **{f"query {q:g}": _query(q) for q in (0.1, 0.2, 0.3)},
    _HALF: _OPTIONS[_HALF],
    **{f"query 0.3, {name}": _query(0.3, **merge) for name, merge in _MERGES.items()},
    "query 0.3, minmax": _query(0.3, **_MINMAX),
    **{f"{_HALF}, {name}": _against_half(**merge) for name, merge in _MERGES.items()},
    f"{_HALF}, minmax": _against_half(**_MINMAX),
    f"{_HALF}, fp8 pooled keys": replace(_against_half(), fp8_pooled_keys=True),
    **{f"query {q:g}, block {b}": _query(q, block_size=b) for q in (0.3, 0.5) for b in (8, 32)},
    "query 0.3, block 64": _query(0.3, "block 64", block_size=64),
    "query alone": _QUERY_ALONE,
    **{
        f"query alone, block {b}": replace(
            _QUERY_ALONE, changes={**_QUERY_ALONE.changes, "block_size": b}
        )
        for b in (8, 32, 64)
    },
    **{
        f"query {q:g}, vertical, log 8 bit": _variant(
            VerticalLog8, group="query", averages=1, average_bytes=1, changes={"query_share": q}
        )
        for q in (0.3, 0.5)
    },
    **_OPTIONS,
    **_by_layer(
        {
            "query 0.3": _query(0.3),
            "query alone": _QUERY_ALONE,
            "vertical, log 8 bit": _VERTICAL_LOG8,
        }
    ),
    **_OPTIONS_64,
    "budget by newest": Arm("adaptive", make=NewestRead),
    "budget by surprise": Arm("adaptive", make=Surprise),
    "streaming": _rival(Streaming),
    "tisa": _rival(Tisa, slot_bytes=SCORE_BYTES),
    "heavy hitters": _rival(HeavyHitters, slot_bytes=SUM_BYTES),
    "previous picks": _rival_of_one_setting(PreviousPicks),
    **{f"index cache {n}": _rival_of_one_setting(partial(IndexCache, n)) for n in (2, 4)},
}
