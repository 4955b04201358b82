# SPDX-License-Identifier: Apache-2.0
"""Trace files `spin-trace/1` (SPEC 9): checked on opening, streamed step by step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spin_trtllm.config import MAX_TOP_K
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_file, exists, save_tensors
from spin_trtllm.geometry import last_position, visible_slots
from spin_trtllm.state import MAX_LAYER

FORMAT = "spin-trace/1"
MAX_STEP_SCORES = 2**31  # 8 GB: a step must fit into memory

_SCORE_DTYPES = {"F32": np.float32, "F16": np.float16}
_RANKS = {"scores": 4, "positions": 2, "accepted": 1}


@dataclass(frozen=True)
class TraceStep:
    """One decode step of a trace.

    Attributes:
        index: 0-based step.
        positions_tokens: int64 `[R]`.
        scores: fp32 `[layers, R, slots]`; `-inf` where a slot is not visible.
        accepted: drafts accepted, 0 .. R-1.
    """

    index: int
    positions_tokens: Tensor
    scores: Tensor
    accepted: int


class Trace:
    """A trace file. Scores stay on disk and are read one step at a time.

    Args:
        path: a `spin-trace/1` safetensors file.

    Attributes:
        steps, rows, slots, ratio, top_k, sequence_id: integers; layers: decoder-layer indices.
        positions_tokens: int64 `[steps, rows]`; accepted: int64 `[steps]`.
        source: where the trace came from, or an empty string.

    Raises:
        SpinError: not a readable trace; the line says what is wrong with which tensor or key.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if exists(self.path, "trace") and not self.path.is_file():
            refuse("trace", str(path), "a regular file")
        metadata = self._open()
        self.ratio = self._integer(metadata, "ratio", 1, 2**31 - 1)
        self.top_k = self._integer(metadata, "top_k", 1, MAX_TOP_K)
        self.sequence_id = self._integer(metadata, "sequence_id", 0, 2**64 - 1)
        self.layers = self._layers(metadata)
        self.source = metadata.get("source", "")
        self.steps, layers, self.rows, self.slots = self._score_shape
        if layers != len(self.layers):
            self._refuse("layers", f"{len(self.layers)} indices", f"{layers}, as scores has")
        if self.rows < 1:
            self._refuse("scores", f"{self.rows} rows", "at least 1")
        self._check_positions()
        self._check_accepted()

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[TraceStep]:
        """Read the steps in order.

        Raises:
            SpinError: NaN in a visible slot.
        """
        shape = self._score_shape[1:]
        count = int(np.prod(shape))
        with self.path.open("rb") as file:
            file.seek(self._score_offset)
            for index in range(self.steps):
                data = np.fromfile(file, dtype=self._score_dtype, count=count)
                if data.size < count:
                    self._refuse("scores", f"an end in step {index}", f"{self.steps} steps")
                scores = torch.from_numpy(data.astype(np.float32, copy=False).reshape(shape))
                positions = self.positions_tokens[index]
                accepted = int(self.accepted[index])
                yield TraceStep(index, positions, self._visible(index, scores), accepted)

    def _visible(self, index: int, scores: Tensor) -> Tensor:
        visible = torch.arange(self.slots) < visible_slots(
            self.positions_tokens[index], self.ratio
        ).unsqueeze(-1)
        scores = torch.where(visible, scores, float("-inf"))
        if bool(scores.isnan().any()):
            layer, row, slot = (int(i) for i in scores.isnan().nonzero()[0])
            where = f"NaN at step {index}, layer {self.layers[layer]}, row {row}, slot {slot}"
            self._refuse("scores", where, "NaN only where a slot is not visible to the row")
        return scores

    def _open(self) -> dict[str, str]:
        """Read and check header, positions and accepted; returns the metadata."""
        try:
            with safe_open(self.path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    self._refuse("metadata format", metadata.get("format"), FORMAT)
                shapes = self._check_tensors(file)
                self.positions_tokens = torch.from_numpy(file.get_tensor("positions"))
                self.accepted = torch.from_numpy(file.get_tensor("accepted"))
        except FileNotFoundError:
            raise SpinError(f"trace: no file {str(self.path)!r}") from None
        except (SafetensorError, OSError, ValueError) as error:
            if isinstance(error, SpinError):
                raise
            reason = " ".join(str(error).split())
            raise SpinError(f"trace {self.path}: not a whole safetensors file: {reason}") from None
        self._score_shape = shapes["scores"]
        self._score_offset, self._score_dtype = self._locate_scores()
        return metadata

    def _check_tensors(self, file: safe_open) -> dict[str, tuple[int, ...]]:
        names = set(file.keys())
        shapes = {}
        for name, rank in _RANKS.items():
            if name not in names:
                self._refuse("tensors", sorted(names), "scores, positions, accepted")
            view = file.get_slice(name)
            allowed = tuple(_SCORE_DTYPES) if name == "scores" else ("I64",)
            if view.get_dtype() not in allowed:
                self._refuse(f"{name} dtype", view.get_dtype(), " or ".join(allowed))
            shape = tuple(view.get_shape())
            if len(shape) != rank:
                self._refuse(f"{name} shape", list(shape), f"{rank} dimensions")
            shapes[name] = shape
        steps, layers, rows, slots = shapes["scores"]
        if layers * rows * slots > MAX_STEP_SCORES:
            self._refuse("scores shape", list(shapes["scores"]), f"{MAX_STEP_SCORES} scores a step")
        if shapes["positions"] != (steps, rows):
            self._refuse("positions shape", list(shapes["positions"]), f"[{steps}, {rows}]")
        if shapes["accepted"] != (steps,):
            self._refuse("accepted shape", list(shapes["accepted"]), f"[{steps}]")
        return shapes

    def _locate_scores(self) -> tuple[int, type[np.floating]]:
        """Byte offset and dtype of `scores`.

        safetensors maps the whole file to slice it; plain reads keep memory at one step instead.
        """
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(length))["scores"]
        return 8 + length + int(entry["data_offsets"][0]), _SCORE_DTYPES[entry["dtype"]]

    def _integer(self, metadata: dict[str, str], key: str, low: int, high: int) -> int:
        text = metadata.get(key)
        number = int(text) if text is not None and _is_number(text) else -1
        if not low <= number <= high:
            self._refuse(f"metadata {key}", text, f"an integer in {low} .. {high}")
        return number

    def _layers(self, metadata: dict[str, str]) -> tuple[int, ...]:
        text = metadata.get("layers")
        parts = [] if text is None else [part.strip() for part in text.split(",")]
        good = bool(parts) and all(_is_number(p) and int(p) <= MAX_LAYER for p in parts)
        if not good or len({int(p) for p in parts}) != len(parts):
            self._refuse("metadata layers", text, "distinct decoder-layer indices, as in 2,4,6")
        return tuple(int(p) for p in parts)

    def _check_positions(self) -> None:
        positions = self.positions_tokens
        wanted = positions[:, :1] + torch.arange(self.rows)
        if bool((positions < 0).any()) or not bool((positions == wanted).all()):
            bad = int(((positions < 0) | (positions != wanted)).any(1).nonzero()[0])
            given = f"{positions[bad].tolist()} at step {bad}"
            self._refuse("positions", given, "p0, p0 + 1, ... from p0 >= 0")
        past = positions > last_position(self.slots, self.ratio)
        if bool(past.any()):
            bad = int(past.any(1).nonzero()[0])
            given = f"{positions[bad].tolist()} at step {bad}"
            self._refuse("positions", given, f"positions that see at most {self.slots} slots")

    def _check_accepted(self) -> None:
        bad = (self.accepted < 0) | (self.accepted > self.rows - 1)
        if bool(bad.any()):
            step = int(bad.nonzero()[0])
            given = f"{int(self.accepted[step])} at step {step}"
            self._refuse("accepted", given, f"0 .. {self.rows - 1} (rows - 1)")

    def _refuse(self, what: str, given: object, allowed: str) -> NoReturn:
        refuse(f"trace {self.path}: {what}", given, allowed)


def _is_number(text: str) -> bool:
    """Plain decimal digits, no more than 2**64 has."""
    return text.isascii() and text.isdigit() and len(text) <= 20


def write_trace(
    path: str | os.PathLike[str],
    scores: Tensor,
    positions_tokens: Tensor,
    accepted: Tensor,
    *,
    ratio: int,
    top_k: int,
    layers: Sequence[int],
    sequence_id: int,
    source: str = "",
) -> None:
    """Write a trace file, whole or not at all.

    Args:
        scores: fp32 or fp16 `[steps, layers, rows, slots]`, NaN where a slot is not visible.
        positions_tokens: int64 `[steps, rows]`; accepted: int64 `[steps]`.
        ratio, top_k, layers, sequence_id, source: metadata of SPEC 9.
    """
    metadata = {
        "format": FORMAT,
        "ratio": str(ratio),
        "top_k": str(top_k),
        "layers": ",".join(str(layer) for layer in layers),
        "sequence_id": str(sequence_id),
    }
    if source:
        metadata["source"] = source
    tensors = {"scores": scores, "positions": positions_tokens, "accepted": accepted}
    with atomic_file(path, argument="trace") as temporary:
        save_tensors(temporary, tensors, metadata, argument="trace")
        Trace(temporary)  # nothing is written that would not be read again
