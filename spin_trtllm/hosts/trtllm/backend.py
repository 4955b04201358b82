# SPDX-License-Identifier: Apache-2.0
"""SPIN's state and step for one KV-cache manager of TensorRT-LLM.

A `DecodeEngine` is made in the first `prepare` of a manager and lives as long as it. To size its
page pool, TensorRT-LLM runs a forward with an estimation manager first, for the same batch and
length (`KvCacheCreator.configure_kv_cache_capacity`): an engine of the same size is in the peak
that it measures. It goes with that manager, which is torn down before the final one is built, and
the room it left outside the pool is for the final one's. Where upstream skips the estimate, under
context parallelism, nothing is set aside.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spin_trtllm import native
from spin_trtllm.config import BACKENDS, SpinConfig
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.gpu_step import GpuState, GpuStep
from spin_trtllm.hosts.trtllm.capture import Capture
from spin_trtllm.hosts.trtllm.cpu_step import CpuStep, PlacedState
from spin_trtllm.hosts.trtllm.eligibility import rows_of, step_obstacle
from spin_trtllm.hosts.trtllm.estimate import StepEstimate
from spin_trtllm.hosts.trtllm.pays import pays
from spin_trtllm.hosts.trtllm.probe import ShadowProbe
from spin_trtllm.hosts.trtllm.proxy import TWINS, Twins
from spin_trtllm.hosts.trtllm.sequences import SequenceLanes
from spin_trtllm.hosts.trtllm.settings import BACKEND_VARIABLE, HookRefused

FUSED_CAPABILITY = (9, 0)  # where `auto` trusts our own scoring kernel: it was measured there

# What the hooks read, of `DSAtrtllmAttentionMetadata` after its `prepare` and of its manager.
METADATA_ATTRIBUTES = (
    *TWINS,
    "block_table_expanded",
    "compress_ratios",
    "cuda_graph_buffers",
    "gen_indexer_kv_lens_cuda_runtime",
    "get_empty",
    "get_indexer_kv_lens",
    "indexer_k_cache_block_offsets",
    "is_cuda_graph",
    "kv_cache_params",
    "kv_lens_cuda_runtime",
    "kv_lens_expanded_cuda",
    "max_draft_tokens",
    "num_contexts",
    "num_ctx_tokens",
    "num_generations",
    "num_seqs",
    "num_sms",
    "num_tokens",
    "request_ids",
    "skip_indexer_for_gen_reqs",
    "sparse_mla_topk",
    "use_expanded_buffers_for_mtp",
)
MANAGER_ATTRIBUTES = (
    "get_indexer_k_cache_buffers",
    "max_batch_size",
    "pp_layers",
    "tokens_per_block",
)

_logger = logging.getLogger("spin_trtllm")


def read_backend(config: SpinConfig, environment: Mapping[str, str] | None = None) -> str:
    """Which kernels score the kept blocks: `TLLM_SPIN_BACKEND`, or else the configuration's.

    `host` shows TensorRT-LLM's own kernels a shorter context; `fused` scores and selects with this
    package's; `auto` takes `fused` on SM90 for fp8 keys and `host` otherwise, and leaves a step
    dense that is too small to gain by either (`pays`).
    """
    environment = os.environ if environment is None else environment
    backend = environment.get(BACKEND_VARIABLE) or config.backend
    if backend not in BACKENDS:
        refuse(BACKEND_VARIABLE, backend, ", ".join(BACKENDS))
    return backend


@dataclass(frozen=True)
class HostShape:
    """What a KV-cache manager and its metadata say about the indexer.

    Attributes:
        layers: decoder-layer indices of this rank's indexers, ascending.
        ratio: raw tokens a slot.
        page_slots: slots of a page of the indexer's key cache.
        slots: most slots a sequence can have: its block table, full.
        sequences: most sequences of a batch; rows: most rows of one, drafts + 1.
        top_k: slots a row selects.
        device: where the metadata's buffers live.
        pipeline_stages: with more than one, requests run in micro-batches that take turns.
    """

    layers: tuple[int, ...]
    ratio: int
    page_slots: int
    slots: int
    sequences: int
    rows: int
    top_k: int
    device: torch.device
    pipeline_stages: int = 1

    @classmethod
    def of(cls, metadata: Any) -> HostShape:
        """Read it off `DSAtrtllmAttentionMetadata` and its `kv_cache_manager`.

        Raises:
            HookRefused: an attribute that this version of the host does not have.
        """
        manager = metadata.kv_cache_manager
        for owner, names in ((metadata, METADATA_ATTRIBUTES), (manager, MANAGER_ATTRIBUTES)):
            missing = [name for name in names if not hasattr(owner, name)]
            if missing:
                raise HookRefused(f"{type(owner).__name__} has no {', '.join(missing)}")
        ratios = list(metadata.compress_ratios)  # one a layer on V4, [1] on V3.2
        ratio = 4 if 4 in ratios else 1
        if ratio == 4:
            layers = [n for n in manager.pp_layers if n < len(ratios) and ratios[n] == ratio]
        else:
            own = getattr(manager, "indexer_k_cache_local_layer_mask", None)
            own = own or [True] * len(manager.pp_layers)
            layers = [n for n, mine in zip(manager.pp_layers, own, strict=False) if mine]
        page_slots = manager.tokens_per_block // ratio
        table = metadata.indexer_k_cache_block_offsets
        return cls(
            layers=tuple(layers),
            ratio=ratio,
            page_slots=page_slots,
            slots=table.shape[1] * page_slots,
            sequences=manager.max_batch_size,
            rows=min(native.MAX_ROWS, _most_rows(metadata, manager)),
            top_k=metadata.sparse_mla_topk,
            device=table.device,
            pipeline_stages=_pipeline_stages(metadata, manager),
        )


class DecodeEngine:
    """State, step and fixed buffers of one KV-cache manager.

    Attributes:
        capture: writes traces; None where nobody asked for them.
        obstacle: why the step that was prepared last runs dense; None when SPIN may run.
        config: with the targets of this rank's layers only.
        chooses: of each layer, whether this package's top-k stands in for the host's.
        retired_probe: a probe that failed: captured graphs still write to its buffers.
        lengths: int32 `[layers, G]`, raw tokens of each request as the shorter context has them.
        probe: measures what is missed; None where nobody asked for it.
    """

    def __init__(self, shape: HostShape, config: SpinConfig, backend: str) -> None:
        if not shape.layers:
            raise HookRefused("no layer of this rank has an indexer")
        config = config.of_layers(shape.layers).with_top_k(shape.top_k)
        if config.top_k != shape.top_k:
            raise HookRefused(f"top_k: got {config.top_k}, the model selects {shape.top_k}")
        self.shape, self.config = shape, config
        self.step = _make_step(shape, config)
        self.lanes = SequenceLanes(
            shape.sequences, shape.device, micro_batches=shape.pipeline_stages
        )
        targets = [config.layer_ppm(layer) for layer in shape.layers]
        self.estimate = StepEstimate(config, targets, ratio=shape.ratio, slots=shape.slots)
        self.twins = Twins()
        self.fused = _prefers_fused(backend, shape.device)
        # Without sparsity every pick stays the host's own, ties and order included.
        self.chooses = [sparsity_ppm > 0 for sparsity_ppm in targets]
        self._may_decline = backend == "auto"
        self.capture: Capture | None = None
        self.probe: ShadowProbe | None = None
        self.retired_probe: ShadowProbe | None = None
        self.obstacle: str | None = "not_prepared"
        self._layer_obstacles: dict[int, str] = {}  # of each metadata object, by `id`
        size = (shape.sequences, shape.rows)
        self._positions = torch.full(size, -1, dtype=torch.int64, device=shape.device)
        entries = self.step.layers * shape.sequences
        self._lengths = torch.zeros(entries, dtype=torch.int32, device=shape.device)
        self.lengths = self._lengths.view(self.step.layers, -1)
        self._offsets = torch.arange(shape.rows, device=shape.device)
        self._open: tuple[int, ...] | None = None
        self._next_n = 0  # rows of each request in the step that was prepared last
        self._logged: set[str] = set()

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of the averages, and of the step's buffers."""
        buffers = self.step.buffer_bytes if isinstance(self.step, GpuStep) else 0
        return self.step.state.state_bytes, buffers

    def prepare(self, metadata: Any) -> None:
        """Refresh what a step needs from the host; eager, after the host's own `prepare`."""
        shape, contexts = self.shape, metadata.num_contexts
        self._open = None
        self.obstacle = step_obstacle(
            metadata, ratio=shape.ratio, rows=shape.rows, sequences=shape.sequences
        )
        if self.obstacle is None and self._may_decline and not self._pays(metadata):
            self.obstacle = "does_not_pay"
        ids = metadata.request_ids
        if self.obstacle is not None:
            self.lanes.leave(ids)
        elif not self.lanes.place(ids[:contexts], ids[contexts:]):
            self.obstacle = "repeated_request"
        self.twins.make(metadata)
        if self.probe is not None:
            self._probe(self.probe, metadata)
        if self.capture is not None:
            try:
                self.capture.next_step(metadata, self.obstacle, self.lanes)
            except Exception as error:
                self.drop_capture(error)

    def _probe(self, probe: ShadowProbe, metadata: Any) -> None:
        """Look back at the step before, if it is to be probed, and decide on this one."""
        try:
            if probe.replayed is not None and self._next_n:
                layer, requests = probe.replayed.layer, len(probe.replayed.request_ids)
                manager = metadata.kv_cache_manager
                keys = manager.get_indexer_k_cache_buffers(self.shape.layers[layer])
                probe.look_back(
                    probe.replayed,
                    self.step.layer(layer, requests),
                    self.positions_tokens(requests, self._next_n),
                    pages_of(keys),
                    metadata,
                    top_k=self.shape.top_k,
                    ratio=self.shape.ratio,
                    block_size_slots=self.config.block_size,
                )
            runs_sparse = self.obstacle is None
            if metadata.is_cuda_graph:  # which repeats what its layers did when it was captured
                runs_sparse = runs_sparse and self.layer_obstacle(metadata) is None
            probe.next_step(metadata, is_sparse=runs_sparse)
            self._next_n = rows_of(metadata) if metadata.num_generations else 0
        except Exception as error:
            self.drop_probe(error)

    def layer_obstacle(self, metadata: Any) -> str | None:
        """Why the first layer ran dense when it last ran with `metadata`, in a step that could have
        run SPIN. Captured graphs have metadata of their own, and repeat what they were captured
        with.
        """
        return self._layer_obstacles.get(id(metadata))

    def drop_probe(self, error: Exception) -> None:
        """Go on without the probe."""
        self.retired_probe, self.probe = self.probe, None
        # As text: whoever keeps the record must not keep the frames of the failure, too.
        _logger.warning("SPIN's probe is off: %s: %s", type(error).__name__, str(error))

    def drop_capture(self, error: Exception) -> None:
        """Go on without the capture."""
        if self.capture is not None:
            self.capture.fail(error)
        self.capture = None

    def positions_tokens(self, requests: int, next_n: int) -> Tensor:
        """Of the rows of the step that has begun, int64 `[requests, next_n]` on the device."""
        return self._positions[:requests, :next_n]

    def figures(self, metadata: Any) -> dict[str, int]:
        """What the step that was prepared will do, for the counters.

        `kv_cache_params.num_cached_tokens_per_seq` holds the raw tokens before this step, in batch
        order.
        """
        cached = metadata.kv_cache_params.num_cached_tokens_per_seq
        rows = cached[metadata.num_contexts : metadata.num_seqs]
        return self.estimate.figures(rows, rows_of(metadata), self.lanes)

    def is_open(self, metadata: Any, next_n: int) -> bool:
        """Whether `begin` ran for this batch: the layers after the first go on with it."""
        return self._open == self._key(metadata, next_n)

    def begin(self, metadata: Any, next_n: int) -> None:
        """Observe, predict and select for all layers, from lengths on the device alone.

        `kv_lens_cuda_runtime` is the truth under overlapped scheduling with drafts: row 0 stands
        at `length - next_n`, and what was accepted shows in where the next step starts.
        """
        contexts, requests = metadata.num_contexts, metadata.num_generations
        part = slice(contexts, contexts + requests)
        lengths = metadata.kv_lens_cuda_runtime[part]
        first = lengths.unsqueeze(1).long() - next_n
        rows = (self._offsets < next_n) & (first >= 0)
        positions = self._positions[:requests]
        positions.copy_(torch.where(rows, first + self._offsets, -1))
        self.step.begin(
            self.lanes.lanes[:requests],
            self.lanes.ids[:requests],
            positions,
            metadata.indexer_k_cache_block_offsets[part],
            self.lanes.tenants[:requests],
        )
        entries = self.step.layers * requests
        skipped = self.step.visible_slots[:entries] - self.step.kept_slots[:entries]
        self.lengths = self._lengths[:entries].view(-1, requests)
        self.lengths.copy_(lengths - self.shape.ratio * skipped.view(-1, requests))
        self._open = self._key(metadata, next_n)
        self._layer_obstacles.pop(id(metadata), None)

    def skip(self, metadata: Any, index: int, reason: str) -> None:
        """Note that a layer runs dense, and log the first time that it does so for a reason."""
        if index == 0:
            self.disown(reason)  # a later step must not take this one's tokens for drafts
            self._layer_obstacles[id(metadata)], self._open = reason, None
        elif self._open is not None:
            self.disown(reason, index)
        if reason not in self._logged:
            self._logged.add(reason)
            layer = self.shape.layers[index]
            _logger.warning("SPIN: layer %d runs dense: %s", layer, reason)

    def disown(self, reason: str, index: int | None = None) -> None:
        """Keep what waits of a layer, or of all, out of the averages, and out of a capture."""
        self.step.disown(index)
        if self.capture is not None:
            self.capture.interrupt(reason)

    def _pays(self, metadata: Any) -> bool:
        kernels = "fused" if self.fused else "host"
        return pays(kernels, metadata.num_generations, self.shape.slots, rows_of(metadata))

    def _key(self, metadata: Any, next_n: int) -> tuple[int, ...]:
        return (id(metadata), metadata.num_contexts, metadata.num_generations, next_n)


def make_engine(metadata: Any, config: SpinConfig, backend: str) -> DecodeEngine:
    """The engine for a metadata's KV-cache manager; its memory goes to the log.

    Raises:
        HookRefused: a host, device or configuration that SPIN does not run on.
    """
    shape = HostShape.of(metadata)
    try:
        engine = DecodeEngine(shape, config, backend)
    except SpinError as error:
        raise error if isinstance(error, HookRefused) else HookRefused(str(error)) from error
    averages, buffers = engine.bytes
    _logger.info(
        "SPIN: %d layers, %d sequences of %d slots: %.1f MiB of averages, %.1f MiB of buffers, "
        "sparsity %s",
        len(shape.layers),
        engine.step.state.sequences,
        shape.slots,
        averages / 2**20,
        buffers / 2**20,
        engine.config.sparsity_text,
    )
    return engine


def _make_step(shape: HostShape, config: SpinConfig) -> GpuStep | CpuStep:
    native.check_config(config)
    lanes = shape.sequences * shape.pipeline_stages
    room: dict[str, Any] = {"sequences": lanes, "slots": shape.slots}
    sizes: dict[str, Any] = {
        "ratio": shape.ratio,
        "sequences": shape.sequences,
        "rows": shape.rows,
        "page_slots": shape.page_slots,
    }
    dtype = config.storage_dtype
    if shape.device.type == "cpu":
        if config.block_size % shape.page_slots:
            refuse("block_size", config.block_size, f"a multiple of {shape.page_slots} page slots")
        return CpuStep(config, PlacedState(shape.layers, dtype=dtype, **room), **sizes)
    if not native.supports(shape.device):
        raise HookRefused(f"no SPIN kernels for {shape.device}; see `spin-trtllm doctor`")
    state = GpuState(shape.layers, dtype=dtype, device=shape.device, **room)
    return GpuStep(config, state, **sizes)


def _most_rows(metadata: Any, manager: Any) -> int:
    """Drafts + 1 at most: the first metadata that is prepared may be one without drafts."""
    drafts = max(metadata.max_draft_tokens, getattr(manager, "_max_draft_len", 0))
    return max(1 + int(drafts), int(metadata.kv_lens_cuda_2d.shape[1]))


def _pipeline_stages(metadata: Any, manager: Any) -> int:
    for owner in (manager, metadata):
        stages = getattr(getattr(owner, "mapping", None), "pp_size", None)
        if stages is not None:
            return int(stages)
    return 1


def _prefers_fused(backend: str, device: torch.device) -> bool:
    if backend != "auto":
        return backend == "fused"
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == FUSED_CAPABILITY


def pages_of(keys: Tensor) -> Tensor:
    """Keys uint8 `[pages, page_slots, 1, bytes]` as `[pages, page_slots * bytes]`, no copy."""
    return keys.view(keys.shape[0], -1)
