# SPDX-License-Identifier: Apache-2.0
"""The hooks on TensorRT-LLM's indexer: `patch` puts them there, `unpatch` takes them away.

Two methods of `Indexer` (`dsa/indexer.py`) carry everything, for DeepSeek-V4 and V3.2 alike:

* `prepare`, a static method that both metadata classes call once a step, outside graphs: which
  request sits in which row is only known here;
* `sparse_attn_indexer`, once a layer, inside graphs: the decode rows score the kept blocks only.

Whatever is not certain runs the original method, untouched, and is counted by reason.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

from spin_trtllm.config import SpinConfig
from spin_trtllm.hosts.trtllm import eligibility
from spin_trtllm.hosts.trtllm.backend import DecodeEngine, make_engine, pages_of, read_backend
from spin_trtllm.hosts.trtllm.capture import make_capture
from spin_trtllm.hosts.trtllm.capture_settings import CaptureSettings
from spin_trtllm.hosts.trtllm.counters import Counters
from spin_trtllm.hosts.trtllm.metrics import process_counters
from spin_trtllm.hosts.trtllm.probe import ShadowProbe
from spin_trtllm.hosts.trtllm.proxy import (
    find_maker,
    intercepted,
    needs_maker,
    schedule,
    scores_in,
    shorter_context,
    to_sequence_slots,
)
from spin_trtllm.hosts.trtllm.settings import HookRefused

# Arguments that each hook relies on; further ones are handed through if they have a default.
METHODS: dict[str, tuple[str, ...]] = {
    "prepare": ("metadata",),
    "prepare_scheduler_metadata": ("metadata",),
    "sparse_attn_indexer": (
        "self",
        "metadata",
        "hidden_states",
        "q_fp8",
        "k_fp8",
        "k_scale",
        "weights",
        "q_scale",
        "is_generation",
    ),
}
TOP_K_ARGUMENTS = ("scores", "output_indices", "is_prefill")

_logger = logging.getLogger("spin_trtllm")
_patched: list[tuple[type, str, Any, bool]] = []  # class, name, what was there, whether its own


def patch(
    module: ModuleType,
    config: SpinConfig,
    backend: str | None = None,
    counters: Counters | None = None,
    *,
    probe_every: int = 0,
    capture: CaptureSettings | None = None,
) -> list[str]:
    """Hook the indexer of an imported `...sparse.dsa.indexer`, all or nothing.

    Args:
        module: the module that defines `Indexer` and imports `TopK`.
        config: `top_k` may be open; the model's own is taken.
        backend: `auto`, `host` or `fused`; None takes `TLLM_SPIN_BACKEND` or the configuration's.
        counters: None takes the process's.
        probe_every: one in so many of the steps that run in Python is also scored densely, to
            measure what is missed; 0 for none.
        capture: traces to write; None for none.

    Returns:
        Names of what is hooked; empty if it already was.

    Raises:
        HookRefused: the module is not what the hooks were written for; nothing was changed.
    """
    indexer: Any = getattr(module, "Indexer", None)
    if indexer is None:
        raise HookRefused(f"{module.__name__} has no class Indexer")
    if any(owner is indexer for owner, *_ in _patched):
        return []
    signatures = {name: _probe(indexer, name, wanted) for name, wanted in METHODS.items()}
    _probe(getattr(module, "TopK", None), "forward", TOP_K_ARGUMENTS, complete=False)
    backend, counters = backend or read_backend(config), counters or process_counters()
    host = Host(module, config, backend, counters, probe_every, capture)
    decode = _decode_hook(host, indexer.sparse_attn_indexer, signatures["sparse_attn_indexer"])
    prepare = _prepare_hook(host, indexer.prepare, signatures["prepare"])
    _replace(indexer, "sparse_attn_indexer", decode)
    _replace(indexer, "prepare", staticmethod(prepare))
    return ["Indexer.sparse_attn_indexer", "Indexer.prepare"]


def unpatch() -> None:
    """Give every hooked class back what it had."""
    while _patched:
        owner, name, original, own = _patched.pop()
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


class Host:
    """What the hooks of one module share: configuration, and an engine a KV-cache manager."""

    def __init__(
        self,
        module: ModuleType,
        config: SpinConfig,
        backend: str,
        counters: Counters,
        probe_every: int,
        capture: CaptureSettings | None,
    ) -> None:
        self.module, self.config, self.backend, self.counters = module, config, backend, counters
        self._probe_every, self._capture = probe_every, capture
        self._engines: WeakKeyDictionary[Any, DecodeEngine | str] = WeakKeyDictionary()
        self._is_off = False

    def prepare(self, metadata: Any) -> None:
        """After the host's own `prepare`: lanes of the rows, and the step's figures."""
        if not hasattr(metadata.kv_cache_manager, "index_head_dim"):
            return  # a draft model's plain cache, for which upstream prepares nothing either
        if not self._is_off:
            try:
                self._prepare(metadata)
                return
            except Exception as error:
                self.give_up(error)
        self._rest(metadata)

    def engine(self, metadata: Any) -> DecodeEngine | str:
        """The engine of a metadata's manager, or why there is none."""
        if self._is_off:
            return "failed"
        return self._engines.get(metadata.kv_cache_manager, "not_prepared")

    def give_up(self, error: Exception) -> None:
        """Leave everything dense from now on: a host must not fall over its plug-in."""
        what = f"{type(error).__name__}: {error}"
        _logger.error("SPIN is off, the indexer runs dense: %s", what, exc_info=True)
        self._is_off = True

    def _rest(self, metadata: Any) -> None:
        """After a failure. Graphs that were captured go on with the buffers of their engines.

        So those must stay, and be empty of lanes when a graph runs: dense, and no trace of it. They
        are emptied here, before each step, since the failure may have come while a graph was
        captured: what is launched then is not done then.
        """
        for engine in self._engines.values():
            if isinstance(engine, DecodeEngine):
                with suppress(Exception):  # nothing is left to fall back to
                    engine.lanes.clear()
        with suppress(Exception):
            self._count(metadata, "failed")

    def _prepare(self, metadata: Any) -> None:
        manager = metadata.kv_cache_manager
        engine = self._engines.get(manager)
        if engine is None:
            engine = self._engines[manager] = self._make(metadata)
        if isinstance(engine, str):
            self._count(metadata, engine)
            return
        engine.prepare(metadata)
        cause = engine.obstacle or engine.layer_obstacle(metadata)
        self._count(metadata, cause, {} if cause else engine.figures(metadata))
        if engine.lanes.warm_up_rows:
            # A release that gives real requests such ids would run them dense: let that be seen.
            rows = engine.lanes.warm_up_rows * eligibility.rows_of(metadata)
            self.counters.dense("warm_up", rows)

    def _count(
        self, metadata: Any, cause: str | None, figures: dict[str, int] | None = None
    ) -> None:
        if not metadata.num_generations:
            return
        if cause is not None:
            self.counters.dense(cause, metadata.num_tokens - metadata.num_ctx_tokens)
        self.counters.step(**(figures or {}))

    def _make(self, metadata: Any) -> DecodeEngine | str:
        try:
            engine = make_engine(metadata, self.config, self.backend)
        except HookRefused as refusal:
            _logger.warning("SPIN is off, the indexer runs dense: %s", refusal)
            return "refused"
        if self._probe_every:
            engine.probe = ShadowProbe(self._probe_every, len(engine.shape.layers), self.counters)
        manager = metadata.kv_cache_manager
        if self._capture is not None:
            engine.capture = make_capture(
                self._capture, metadata, engine.shape, engine.config, self.counters
            )
            if engine.capture is not None:  # at the end of the manager, or of the process
                finalize(manager, engine.capture.close)
        size = sum(engine.bytes)
        self.counters.add_state_bytes(size)
        finalize(manager, self.counters.add_state_bytes, -size)
        return engine


class Call:
    """One call of `sparse_attn_indexer` for decode rows of one layer.

    Attributes:
        arguments: of the call, by name.
        index: place of the layer among the state's; start: first output row that is a decode row.
    """

    def __init__(self, host: Host, engine: DecodeEngine, bound: inspect.BoundArguments) -> None:
        self.host, self.engine, self.bound = host, engine, bound
        self.arguments = bound.arguments
        self.indexer, self.metadata = self.arguments["self"], self.arguments["metadata"]
        self.requests = self.metadata.num_generations
        self.next_n = eligibility.rows_of(self.metadata)
        shape, whole = engine.shape, self.arguments["is_generation"] is None
        self.index = shape.layers.index(self.indexer.layer_idx)
        self.start = self.metadata.num_ctx_tokens if whole else 0
        manager, query = self.metadata.kv_cache_manager, self.arguments["q_fp8"]
        self.keys: Tensor = manager.get_indexer_k_cache_buffers(self.indexer.layer_idx)
        self.maker = find_maker(host.module, self.metadata)
        unfit = eligibility.fused_obstacle(self.keys, query, self.next_n, shape.rows)
        self.is_fused = engine.fused and self.start == 0 and unfit is None

    def obstacle(self) -> str | None:
        """Why this layer runs dense; None if SPIN runs, whose step the first layer opens."""
        query, shape = self.arguments["q_fp8"], self.engine.shape
        reason = eligibility.layer_obstacle(self.indexer, self.metadata, query, shape.top_k)
        reason = reason or eligibility.cache_obstacle(self.keys, query, shape.page_slots)
        if reason is None and needs_maker(self.metadata, self.next_n) and self.maker is None:
            reason = "split_drafts"
        if reason is None and self.index == 0:
            self.engine.begin(self.metadata, self.next_n)
        elif reason is None and not self.engine.is_open(self.metadata, self.next_n):
            reason = "step_not_begun"
        if reason is not None:
            self.engine.skip(self.metadata, self.index, reason)
        return reason

    def shorten(self) -> None:
        """Show the kept blocks to upstream's own method, where that is what scores them."""
        if self.is_fused:
            return
        engine, view = self.engine, self.engine.step.layer(self.index)
        assert view.pages is not None
        lengths = engine.lengths[self.index]
        context = shorter_context(self.metadata, engine.twins, lengths, view.pages, self.next_n)
        schedule(self.maker, self.indexer, context, self.next_n)
        self.arguments["metadata"] = context

    def shadow(self, dense: Callable[[], Tensor]) -> None:
        """Where this layer is probed, see what the host's own method selects; SPIN goes on alike.

        Args:
            dense: the call as the host made it, whose output buffer SPIN's run overwrites.
        """
        probe, engine = self.engine.probe, self.engine
        if probe is None:
            return
        try:
            if self.metadata.is_cuda_graph:
                self._keep_query(probe)
            if probe.layer != self.index or _is_capturing(self.keys):
                return
            truth = dense()[self.start : self.start + self.requests * self.next_n]
            probe.note(truth, engine.step.layer(self.index), engine.config.block_size)
        except Exception as error:
            engine.drop_probe(error)

    def capture(self, dense: Callable[[], Tensor]) -> None:
        """Where this layer is captured, keep what the host's own method scores; SPIN goes on alike.

        Args:
            dense: as for `shadow`.
        """
        capture, engine = self.engine.capture, self.engine
        if capture is None or not capture.is_watching:
            return
        layer, size = self.indexer.layer_idx, (self.requests, self.next_n)
        try:
            if _is_capturing(self.keys):
                capture.interrupt("cuda_graph")
            elif capture.wants(layer, engine.positions_tokens(*size)):
                seen = scores_in(self.indexer.top_k, dense)
                if _fit(seen, self.requests * self.next_n):
                    capture.add(layer, seen[0].unflatten(0, size))
                else:
                    capture.interrupt("unfit_scores")
        except Exception as error:
            engine.drop_capture(error)

    def _keep_query(self, probe: ShadowProbe) -> None:
        """Let a replayed step be scored afterwards, where that is fp8 on pages of a known form."""
        query, shape = self.arguments["q_fp8"], self.engine.shape
        if eligibility.fused_obstacle(self.keys, query, shape.rows, shape.rows) is None:
            rows = slice(self.start, self.start + self.requests * self.next_n)
            weights = self.arguments["weights"][rows]
            probe.keep_query(self.index, query[rows], weights, shape.sequences * shape.rows)

    def run(self, original: Callable[..., Tensor]) -> Tensor:
        """The layer's selected slots, int32 `[tokens, K]`, in upstream's own output buffer."""
        if self.is_fused:
            return self._run_fused()
        step, rows = self.engine.step, self.requests * self.next_n
        seen: list[Tensor] = []
        chosen: list[int] = []

        def choose(scores: Tensor, out: Tensor) -> bool:
            seen.append(scores)
            if not self.engine.chooses[self.index] or not _fit(seen, rows) or out.shape[0] != rows:
                return False
            step.adopt(self.index, scores)
            step.top_k(self.index, out)
            chosen.append(out.data_ptr())
            return True

        with intercepted(self.indexer.top_k, choose):
            selected = original(*self.bound.args, **self.bound.kwargs)
        columns = selected[self.start : self.start + rows]
        if chosen:
            if len(seen) != 1 or chosen != [columns.data_ptr()]:
                raise HookRefused("TopK: its output is not what sparse_attn_indexer returns")
        elif _fit(seen, rows):
            step.adopt(self.index, seen[0], columns)
        else:  # right all the same, and cold next time
            self.engine.disown("unfit_scores", self.index)
            view = step.layer(self.index)
            to_sequence_slots(columns, view.block_list, self.engine.config.block_size)
        return selected

    def _run_fused(self) -> Tensor:
        """This package's kernels, into the buffer that upstream would have used."""
        metadata, step, size = self.metadata, self.engine.step, (self.requests, self.next_n)
        first = metadata.num_contexts
        step.score(
            self.index,
            self.arguments["q_fp8"].unflatten(0, size),
            self.arguments["weights"].unflatten(0, size),
            pages_of(self.keys),
            metadata.indexer_k_cache_block_offsets[first : first + self.requests],
        )
        phase = "" if self.arguments["is_generation"] is None else "_gen"
        selected: Tensor = metadata.get_empty(
            metadata.cuda_graph_buffers,
            (self.arguments["hidden_states"].shape[0], self.indexer.index_topk),
            cache_name=f"indexer_topk_out_buffer{phase}",
            dtype=torch.int32,
            capture_graph=metadata.is_cuda_graph,
        )
        step.top_k(self.index, selected)
        return selected


def _fit(seen: list[Tensor], rows: int) -> bool:
    """Whether what upstream's top-k saw is the scores of all rows, once."""
    return len(seen) == 1 and seen[0].dtype == torch.float32 and seen[0].shape[0] == rows


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _decode_hook(
    host: Host, original: Callable[..., Tensor], signature: inspect.Signature
) -> Callable[..., Tensor]:
    def sparse_attn_indexer(*args: Any, **kwargs: Any) -> Tensor:
        dense = partial(original, *args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = _open_call(host, bound)
        if call is None:
            return dense()
        try:
            call.shadow(dense)
            call.capture(dense)
            return call.run(original)
        except Exception as error:
            selected = dense()  # raises if it is the host's own failure
            host.give_up(error)
            return selected

    return sparse_attn_indexer


def _open_call(host: Host, bound: inspect.BoundArguments) -> Call | None:
    """A call that runs SPIN, None where the original runs alone."""
    indexer, metadata = bound.arguments["self"], bound.arguments["metadata"]
    if bound.arguments["is_generation"] is False or metadata.num_generations == 0:
        return None
    try:
        engine = host.engine(metadata)
        if isinstance(engine, str) or indexer.layer_idx not in engine.shape.layers:
            return None
        if engine.obstacle is not None:
            if metadata.is_cuda_graph and indexer.layer_idx == engine.shape.layers[0]:
                engine.disown(engine.obstacle)  # whatever steps this graph is replayed for
            return None
        call = Call(host, engine, bound)
        if call.obstacle() is not None:
            return None
        call.shorten()
        return call
    except Exception as error:
        host.give_up(error)
        return None


def _prepare_hook(
    host: Host, original: Callable[..., None], signature: inspect.Signature
) -> Callable[..., None]:
    place = list(signature.parameters).index("metadata")

    def prepare(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        host.prepare(args[place] if place < len(args) else kwargs["metadata"])

    return prepare


def _probe(
    owner: Any, name: str, wanted: tuple[str, ...], *, complete: bool = True
) -> inspect.Signature:
    """The signature of a method, which must take the arguments wanted and, if these are complete,
    need no other.

    Raises:
        HookRefused: it does not.
    """
    method = getattr(owner, name, None)
    label = f"{getattr(owner, '__name__', 'TopK')}.{name}"
    if not callable(method):
        raise HookRefused(f"{label}: not there")
    signature = inspect.signature(method)
    missing = [n for n in wanted if n not in signature.parameters]
    if missing:
        raise HookRefused(f"{label}: takes no {', '.join(missing)}")
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        n
        for n, p in signature.parameters.items()
        if n not in (*wanted, "self") and p.default is p.empty and p.kind not in kinds
    ]
    if needed and complete:
        raise HookRefused(f"{label}: needs {', '.join(needed)}, which the hooks do not know")
    return signature


def _replace(owner: type, name: str, hook: Any) -> None:
    own = name in vars(owner)
    original = inspect.getattr_static(owner, name)
    setattr(owner, name, hook)
    _patched.append((owner, name, original, own))
