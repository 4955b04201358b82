# SPDX-License-Identifier: Apache-2.0
"""Where the hooks on the indexer go, and what kind of host they refuse."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import hook_standin
import pytest
import torch
from hook_batch import HostBatch
from hook_helpers import SMALL, module_with

from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.trtllm import indexer as hooks
from spin_trtllm.hosts.trtllm.backend import read_backend
from spin_trtllm.hosts.trtllm.counters import Counters
from spin_trtllm.hosts.trtllm.settings import HookRefused

CONFIG = SpinConfig.from_dict(SMALL)


def test_hooking_names_what_it_did_and_unhooking_restores_it() -> None:
    before = dict(vars(hook_standin.Indexer))
    names = hooks.patch(hook_standin.module(), CONFIG, "host", Counters())
    assert names == ["Indexer.sparse_attn_indexer", "Indexer.prepare"]
    assert hooks.patch(hook_standin.module(), CONFIG, "host", Counters()) == []
    assert dict(vars(hook_standin.Indexer)) != before
    hooks.unpatch()
    assert dict(vars(hook_standin.Indexer)) == before


def test_inherited_methods_are_given_back_to_the_parent() -> None:
    class Indexer(hook_standin.Indexer):
        pass

    hooks.patch(module_with(Indexer), CONFIG, "host", Counters())
    assert "prepare" in vars(Indexer)
    hooks.unpatch()
    assert not {"prepare", "sparse_attn_indexer"} & set(vars(Indexer))


class NoPrepare(torch.nn.Module):
    sparse_attn_indexer = hook_standin.Indexer.sparse_attn_indexer
    prepare_scheduler_metadata = staticmethod(hook_standin.Indexer.prepare_scheduler_metadata)


class OtherNames(hook_standin.Indexer):
    def sparse_attn_indexer(self, metadata: Any, hidden_states: Any, query: Any) -> Any:
        raise NotImplementedError


class NeedsMore(hook_standin.Indexer):
    def sparse_attn_indexer(  # type: ignore[override]
        self,
        metadata: Any,
        hidden_states: Any,
        q_fp8: Any,
        k_fp8: Any,
        k_scale: Any,
        weights: Any,
        phase: Any,
        q_scale: Any = None,
        is_generation: Any = None,
    ) -> Any:
        raise NotImplementedError


class PrepareNeedsMore(hook_standin.Indexer):
    @staticmethod
    def prepare(metadata: Any, plan: Any) -> None:  # type: ignore[override]
        raise NotImplementedError


class OtherTopK(torch.nn.Module):
    def forward(self, values: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (module_with(None), "has no class Indexer"),
        (module_with(NoPrepare), "NoPrepare.prepare: not there"),
        (module_with(OtherNames), "takes no q_fp8, k_fp8"),
        (module_with(NeedsMore), "needs phase, which the hooks do not know"),
        (module_with(PrepareNeedsMore), "needs plan"),
        (module_with(hook_standin.Indexer, None), "TopK.forward: not there"),
        (module_with(hook_standin.Indexer, OtherTopK), "OtherTopK.forward: takes no scores"),
    ],
)
def test_a_changed_host_is_refused_and_left_alone(module: ModuleType, message: str) -> None:
    owner = getattr(module, "Indexer", None)
    before = dict(vars(owner)) if owner else {}
    with pytest.raises(HookRefused, match=message):
        hooks.patch(module, CONFIG, "host", Counters())
    assert (dict(vars(owner)) if owner else {}) == before


def test_further_arguments_with_a_default_are_handed_through() -> None:
    seen = []

    class Indexer(hook_standin.Indexer):
        def sparse_attn_indexer(  # type: ignore[override]
            self,
            metadata: Any,
            hidden_states: Any,
            q_fp8: Any,
            k_fp8: Any,
            k_scale: Any,
            weights: Any,
            q_scale: Any = None,
            is_generation: Any = None,
            tier: int = 0,
        ) -> Any:
            seen.append(tier)
            return hook_standin.Indexer.sparse_attn_indexer(
                self, metadata, hidden_states, q_fp8, k_fp8, k_scale, weights, None, is_generation
            )

    hooks.patch(module_with(Indexer), CONFIG, "host", Counters())
    none = torch.empty(0)
    batch = HostBatch(0)
    batch.step([batch.join(5)])
    indexer = Indexer(2, 8, 4)
    query = torch.zeros(1, 2, 128).to(torch.float8_e4m3fn)
    weights = torch.zeros(1, 2)
    indexer.sparse_attn_indexer(batch.metadata, weights, query, none, none, weights, tier=3)
    assert seen == [3]


def test_the_backend_comes_from_the_environment_or_the_configuration() -> None:
    fused = SpinConfig(backend="fused")
    assert read_backend(SpinConfig(), {}) == "auto"
    assert read_backend(fused, {}) == "fused"
    assert read_backend(fused, {"TLLM_SPIN_BACKEND": ""}) == "fused"
    assert read_backend(fused, {"TLLM_SPIN_BACKEND": "host"}) == "host"
    with pytest.raises(SpinError, match="TLLM_SPIN_BACKEND: got 'fast', allowed: auto, host"):
        read_backend(fused, {"TLLM_SPIN_BACKEND": "fast"})
