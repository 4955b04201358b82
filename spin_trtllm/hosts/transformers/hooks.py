# SPDX-License-Identifier: Apache-2.0
"""Four forward hooks on one indexer: they narrow what its scorer sees and widen what it returns.

    indexer.forward(hidden, q_residual, position_ids, cache, layer_idx)
        enter   -> which sequences at which positions: a `Call`
        scorer.forward(q, keys, hidden)
            narrow  -> only the keys of kept blocks go in
            widen   -> scores back in their slots, -inf elsewhere; SPIN decides and learns
        the host's top-k
        choose  -> the host's picks are replaced where blocks were skipped

No module is replaced and no forward function patched, so the state dict never changes and the hooks
outlive changes inside the library: arguments are found by place, or by either of their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from spin_trtllm.errors import refuse
from spin_trtllm.hosts.transformers.call import Call
from spin_trtllm.hosts.transformers.decoder import SpinDecoder


class IndexerHooks:
    """The hooks of one layer and the call that runs through them; one forward at a time."""

    def __init__(self, layer: int, indexer: torch.nn.Module, decoder: SpinDecoder) -> None:
        self._layer = layer
        self._decoder = decoder
        self._call: Call | None = None
        scorer = scorer_of(indexer)
        self._handles: list[RemovableHandle] = [
            indexer.register_forward_pre_hook(self._enter, with_kwargs=True),
            scorer.register_forward_pre_hook(self._narrow),
            scorer.register_forward_hook(self._widen),
            indexer.register_forward_hook(self._choose),
        ]

    def remove(self) -> None:
        """Take the hooks off; harmless when they are off already."""
        for handle in self._handles:
            handle.remove()
        self._call = None

    def _enter(self, _: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._call = self._decoder.enter(
            self._layer,
            _argument(args, kwargs, 0, "hidden_states"),
            _argument(args, kwargs, 2, "position_ids"),
            _argument(args, kwargs, 3, "cache", "past_key_values"),
        )

    def _narrow(self, _: torch.nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> Any:
        if self._call is None:
            return None
        keys = self._decoder.narrow(self._call, args)
        return None if keys is None else (args[0], keys, args[2])

    def _widen(self, _: torch.nn.Module, args: Any, scores: Tensor) -> Tensor | None:
        return None if self._call is None else self._decoder.widen(self._call, scores)

    def _choose(self, _: torch.nn.Module, args: Any, picks: Tensor) -> Tensor | None:
        call, self._call = self._call, None
        return None if call is None else call.picks


def find_indexers(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """The indexers of a DeepSeek-V4 by decoder layer, in layer order.

    Raises:
        SpinError: the model has none with a scorer of its own.
    """
    found = {}
    for name, module in model.named_modules():
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if layer and type(getattr(module, "scorer", None)).__name__.endswith("IndexerScorer"):
            found[int(layer[1])] = module
    if not found:
        refuse("model", type(model).__name__, "a DeepSeek-V4 with compressed sparse attention")
    return dict(sorted(found.items()))


def geometry_of(indexer: torch.nn.Module) -> tuple[int, int]:
    """Raw tokens a slot, and the slots that attention reads, of an indexer."""
    ratio: Any = indexer.compress_rate
    top_k: Any = indexer.index_topk
    return int(ratio), int(top_k)


def scorer_of(indexer: torch.nn.Module) -> torch.nn.Module:
    """The submodule of an indexer that turns queries and keys into scores."""
    scorer = indexer.scorer
    assert isinstance(scorer, torch.nn.Module)
    return scorer


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, *names: str) -> Any:
    """One argument of a module's call: the model passes them by place, others may by name."""
    if place < len(args):
        return args[place]
    return next((kwargs[name] for name in names if name in kwargs), None)
