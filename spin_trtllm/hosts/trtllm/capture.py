# SPDX-License-Identifier: Apache-2.0
"""Traces of what a rank serves: the dense scores of some sequences, for `spin-trtllm replay`.

A captured layer is also scored by the host's own method, as a probed one is; the answer stays
SPIN's. A recording begins with a sequence's first decode step, where SPIN is cold, and lasts while
one whole step follows another, so a replay with the same configuration decides as SPIN did. Each is
written as a file of its own once it ends.

Scores are copied to the host as they come, which waits for the device: this is for measuring, not
for service. Nothing here runs inside a graph, so a captured process runs without CUDA graphs.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from torch import Tensor

from spin_trtllm import __version__
from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.files import write_new_file
from spin_trtllm.hosts.trtllm.capture_settings import (
    CAPTURE_VARIABLE,
    MIB_VARIABLE,
    MIN_STEPS,
    CaptureSettings,
)
from spin_trtllm.hosts.trtllm.counters import Counters
from spin_trtllm.hosts.trtllm.rank import rank_of
from spin_trtllm.hosts.trtllm.recording import SCORE_BYTES, Recording
from spin_trtllm.hosts.trtllm.sequences import SequenceLanes, is_dummy
from spin_trtllm.hosts.trtllm.settings import BACKEND_VARIABLE

HINTS = {  # what to do, where the reason alone does not tell
    "cuda_graph": "CUDA graphs are on; `cuda_graph_config: null` in llm_args.yaml turns them off",
    "does_not_pay": f"SPIN leaves it dense, as too small to gain; {BACKEND_VARIABLE}=host does not",
    "no_room": f"{MIB_VARIABLE} has no room for another sequence",
}

_logger = logging.getLogger("spin_trtllm")


class Capture:
    """Chooses the sequences to record, follows them from step to step, and writes their traces.

    Args:
        settings: what was asked for.
        layers: decoder-layer indices of the engine.
        ratio, top_k: of the model; slots: most that a sequence can have.
        rank: as the names of the files have it.
        about: of the configuration, for whoever finds the files.

    Attributes:
        layers: decoder-layer indices of the traces.

    Raises:
        SpinError: a folder that cannot be written, or none of the layers asked for.
    """

    def __init__(
        self,
        settings: CaptureSettings,
        layers: Sequence[int],
        counters: Counters,
        *,
        ratio: int,
        top_k: int,
        slots: int,
        rank: str,
        about: str,
    ) -> None:
        wanted = layers if settings.layers is None else settings.layers
        self.layers = tuple(layer for layer in layers if layer in wanted)
        if not self.layers:
            raise SpinError(f"this rank has no indexer in layers {', '.join(map(str, wanted))}")
        _check_folder(settings.folder)
        self._settings, self._counters, self._rank = settings, counters, rank
        self._ratio, self._top_k, self._slots = ratio, top_k, slots
        self._source = f"spin-trtllm {__version__} in TensorRT-LLM, rank {rank}, {about}"
        self._places = {layer: place for place, layer in enumerate(self.layers)}
        self._open: dict[int, Recording] = {}  # by request id
        self._left_sequences, self._left_bytes = settings.sequences, settings.limit_bytes
        self._has_graphs = False
        self._logged: set[str] = set()
        # Of the step that was prepared last: request ids and tenancies of the rows to record, until
        # all layers came; their recordings; layers that came; and whose step is not whole yet.
        self._rows: dict[int, tuple[int, int]] = {}
        self._now: dict[int, Recording] = {}
        self._seen_layers = 0
        self._unfinished: list[Recording] = []

    def next_step(self, metadata: Any, obstacle: str | None, lanes: SequenceLanes) -> None:
        """Write what has ended, and choose the rows of the step that was prepared; eager.

        Args:
            obstacle: why the step runs dense; None if SPIN may run.
            lanes: after they were placed.
        """
        if self._rows:
            self.miss("unfinished_step")
        self._has_graphs |= metadata.is_cuda_graph
        for recording in list(self._open.values()):
            stays = lanes.tenancy_of(recording.request_id) == recording.tenancy
            if recording in self._unfinished or self._has_graphs or not stays:
                self._close(recording)
        self._rows, self._now, self._seen_layers, self._unfinished = {}, {}, 0, []
        ids = metadata.request_ids[metadata.num_contexts :]
        if not ids or not (self._open or self._left_sequences):
            return
        if self._has_graphs:
            self.miss("cuda_graph")
        elif obstacle is None:
            self._choose(ids, lanes)
        elif not all(is_dummy(request_id, lanes.sequences) for request_id in ids):
            self.miss(obstacle)

    @property
    def is_watching(self) -> bool:
        """Whether a row of this step is to be recorded, and layers of it are still to come."""
        return bool(self._rows)

    def wants(self, layer: int, positions_tokens: Tensor) -> bool:
        """Whether to score a layer densely, and `add` it; waits for the device.

        Args:
            layer: decoder-layer index.
            positions_tokens: int64 `[G, rows]`, as the device has them.
        """
        if not self._rows or self._places.get(layer) != self._seen_layers:
            return False
        if self._seen_layers == 0:
            self._begin(positions_tokens[:, 0].tolist(), positions_tokens.shape[1])
        return bool(self._rows)

    def add(self, layer: int, scores: Tensor) -> None:
        """Keep a layer that is wanted.

        Args:
            scores: fp32 `[G, rows, width]`, what the host's own kernel gave; anything past what a
                row sees.
        """
        for row, recording in self._now.items():
            recording.put(self._places[layer], scores[row])
        self._seen_layers += 1
        if self._seen_layers == len(self.layers):
            self._finish()

    def miss(self, reason: str) -> None:
        """Count a step of which nothing is kept; the log says so the first time for a reason."""
        self._rows = {}
        if not (self._open or self._left_sequences):
            return
        self._counters.capture(reason)
        self._log_once(reason, HINTS.get(reason, reason))

    def interrupt(self, reason: str) -> None:
        """End all recordings with their last whole step: SPIN is cold next, whatever comes."""
        if self._rows:
            self.miss(reason)
        self._unfinished = list(self._open.values())

    def fail(self, error: Exception) -> None:
        """Forget what was recorded, and say why."""
        self._counters.capture("failed")
        self._stop()
        _say_off(error)

    def close(self) -> None:
        """Write what there is of every recording, and stop; never raises."""
        try:
            for recording in list(self._open.values()):
                self._close(recording)
        except Exception as error:
            self.fail(error)
        self._stop()

    def _stop(self) -> None:
        self._open, self._rows, self._now, self._unfinished = {}, {}, {}, []
        self._left_sequences = 0

    def _choose(self, ids: Sequence[int], lanes: SequenceLanes) -> None:
        """Rows that go on, and rows of sequences that begin; padding has no tenancy."""
        for row, (request_id, is_known) in enumerate(zip(ids, lanes.is_known, strict=True)):
            tenancy, recording = lanes.tenancy_of(request_id), self._open.get(request_id)
            if tenancy is None or (recording is None and is_known):
                continue
            self._rows[row] = request_id, tenancy
            if recording is not None:
                self._unfinished.append(recording)

    def _begin(self, starts_tokens: list[int], rows: int) -> None:
        """Open the step of every recording, and recordings for who begins."""
        for row, (request_id, tenancy) in self._rows.items():
            start, recording = starts_tokens[row], self._open.get(request_id)
            if recording is None:
                recording = self._start(request_id, tenancy, start, rows)
            if recording is None:
                continue
            if recording.goes_on(start, rows):
                self._now[row] = recording
            else:
                self._close(recording)
        if not self._now:
            self._rows = {}

    def _start(
        self, request_id: int, tenancy: int, start_tokens: int, rows: int
    ) -> Recording | None:
        """A recording for which there is room, None if there is none."""
        if start_tokens < self._settings.least_tokens or not self._left_sequences:
            return None
        most_steps = self._settings.steps
        slots = min(self._slots, (start_tokens + most_steps * rows) // self._ratio)
        step_bytes = SCORE_BYTES * len(self.layers) * rows * max(slots, 1)
        steps = min(most_steps, self._left_bytes // step_bytes)
        if steps < MIN_STEPS:
            self._counters.capture("no_room")
            self._log_once("no_room", HINTS["no_room"])
            return None
        recording = Recording(
            request_id,
            tenancy,
            self.layers,
            ratio=self._ratio,
            steps=steps,
            rows=rows,
            slots=slots,
        )
        self._open[request_id] = recording
        self._unfinished.append(recording)
        self._left_sequences -= 1
        self._left_bytes -= recording.room_bytes
        return recording

    def _finish(self) -> None:
        """Call the step whole."""
        self._rows, self._unfinished = {}, []
        for recording in self._now.values():
            recording.close_step()
            if recording.is_complete:  # the server may have nothing to do next
                self._close(recording)

    def _close(self, recording: Recording) -> None:
        """Write a recording, or give back its place if it is too short."""
        del self._open[recording.request_id]
        if recording.steps < MIN_STEPS:
            self._left_sequences += 1
            self._left_bytes += recording.room_bytes
            self._counters.capture("too_short", max(recording.steps, 1))
            return
        self._left_bytes += recording.room_bytes - recording.used_bytes
        stem = f"rank{self._rank}-request{recording.request_id}"
        path = write_new_file(
            _paths(self._settings.folder, stem),
            partial(recording.save, top_k=self._top_k, source=self._source),
            argument="trace",
        )
        self._counters.capture("written", recording.steps)
        _logger.info("SPIN captured %d steps of a sequence: %s", recording.steps, path)
        if not (self._open or self._left_sequences):
            _logger.info("SPIN's capture is complete")

    def _log_once(self, key: str, text: str) -> None:
        if key not in self._logged:
            self._logged.add(key)
            _logger.warning("SPIN captures nothing of a step: %s", text)


def make_capture(
    settings: CaptureSettings, metadata: Any, shape: Any, config: SpinConfig, counters: Counters
) -> Capture | None:
    """A capture for an engine; None, and a line in the log, if none can be.

    Args:
        metadata: of the engine's KV-cache manager; shape: the engine's `HostShape`.
        config: with the targets of its layers.
    """
    try:
        capture = Capture(
            settings,
            shape.layers,
            counters,
            ratio=shape.ratio,
            top_k=shape.top_k,
            slots=shape.slots,
            rank=rank_of(metadata),
            about=f"sparsity {config.sparsity_text}, blocks of {config.block_size}",
        )
    except Exception as error:
        _say_off(error)
        return None
    _logger.info(
        "SPIN captures layers %s of up to %d sequences in %s, %d steps each, %d MiB in all",
        ", ".join(map(str, capture.layers)),
        settings.sequences,
        settings.folder,
        settings.steps,
        settings.limit_bytes >> 20,
    )
    return capture


def _say_off(error: Exception) -> None:
    # As text: whoever keeps the record must not keep the frames of the failure, too.
    _logger.warning("SPIN's capture is off: %s: %s", type(error).__name__, str(error))


def _check_folder(folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        shown = f"{CAPTURE_VARIABLE}: cannot write in {str(folder)!r}: {error.strerror}"
        raise SpinError(shown) from error


def _paths(folder: Path, stem: str) -> Iterator[Path]:
    """Names that a trace may get: what other servers left or leave stays."""
    suffixes = chain([""], (f"-{number}" for number in count(2)))
    return (folder / f"{stem}{suffix}.safetensors" for suffix in suffixes)
