# SPDX-License-Identifier: Apache-2.0
"""Trace files `spin-trace/1` (SPEC 9): checked on opening, streamed step by step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spin_trtllm.config import BLOCK_SIZES, MAX_TOP_K, QUERY_POOLINGS
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_file, exists, save_tensors
from spin_trtllm.geometry import count_blocks, last_position, visible_slots
from spin_trtllm.state import MAX_LAYER

FORMAT = "spin-trace/1"
MAX_STEP_SCORES = 2**31  # 8 GB: a step must fit into memory

_SCORE_DTYPES = {"F32": np.float32, "F16": np.float16}
_DTYPES = {
    "scores": tuple(_SCORE_DTYPES),
    "positions": ("I64",),
    "accepted": ("I64",),
    "query_scores": ("F32",),
}
_RANKS = {"scores": 4, "positions": 2, "accepted": 1, "query_scores": 4}
_OPTIONAL = {"query_scores"}


@dataclass(frozen=True)
class TraceStep:
    """One decode step of a trace.

    Attributes:
        index: 0-based step.
        positions_tokens: int64 `[R]`.
        scores: fp32 `[layers, R, slots]`; `-inf` where a slot is not visible.
        accepted: drafts accepted, 0 .. R-1.
        query_scores: fp32 `[layers, R, blocks]`, what the query said of whole blocks, `-inf` where
            the row sees none; None when the trace does not hold them.
    """

    index: int
    positions_tokens: Tensor
    scores: Tensor
    accepted: int
    query_scores: Tensor | None = None


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in the file."""

    offset_bytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Trace:
    """A trace file. Scores stay on disk and are read one step at a time.

    Args:
        path: a `spin-trace/1` safetensors file.

    Attributes:
        steps, rows, slots, ratio, top_k, sequence_id: integers; layers: decoder-layer indices.
        positions_tokens: int64 `[steps, rows]`; accepted: int64 `[steps]`.
        source: where the trace came from, or an empty string.
        model: digest of the weights it came from, or an empty string.
        query_block_size_slots, query_pooling: of `query_scores`; 0 and "" when there are none.

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
        self.model = metadata.get("model", "")
        self.steps, layers, self.rows, self.slots = self._score_shape
        if layers != len(self.layers):
            self._refuse("layers", f"{len(self.layers)} indices", f"{layers}, as scores has")
        if self.rows < 1:
            self._refuse("scores", f"{self.rows} rows", "at least 1")
        self.query_block_size_slots, self.query_pooling = self._query_facts(metadata)
        self._check_positions()
        self._check_accepted()

    @property
    def model_facts(self) -> str:
        """What is known of the model, for people."""
        facts = f"{self.ratio} tokens a slot, top-k {self.top_k}, layers "
        weights = f", weights {self.model[:12]}" if self.model else ""
        return facts + ", ".join(map(str, self.layers)) + weights

    def of_same_model(self, other: Trace) -> bool:
        """Whether nothing shows that two traces are of different models."""
        if self.model and other.model and self.model != other.model:
            return False
        return (self.ratio, self.top_k, self.layers) == (other.ratio, other.top_k, other.layers)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[TraceStep]:
        """Read the steps in order.

        Raises:
            SpinError: NaN in a visible slot, or in a block that a row sees whole.
        """
        with self.path.open("rb") as file:
            for index in range(self.steps):
                slots = visible_slots(self.positions_tokens[index], self.ratio)
                scores = self._read("scores", file, index)
                queries = None
                if self.query_block_size_slots:
                    whole = slots // self.query_block_size_slots
                    queries = self._read("query_scores", file, index)
                    queries = self._visible("query_scores", index, queries, whole)
                yield TraceStep(
                    index,
                    self.positions_tokens[index],
                    self._visible("scores", index, scores, slots),
                    int(self.accepted[index]),
                    queries,
                )

    def _read(self, name: str, file: BinaryIO, index: int) -> Tensor:
        """One step of a tensor, fp32.

        safetensors maps the whole file to slice it; plain reads keep memory at one step instead.
        """
        place = self._places[name]
        count = int(np.prod(place.shape[1:]))
        file.seek(place.offset_bytes + index * count * place.dtype.itemsize)
        data = np.fromfile(file, dtype=place.dtype, count=count)
        if data.size < count:
            self._refuse(name, f"an end in step {index}", f"{self.steps} steps")
        return torch.from_numpy(data.astype(np.float32, copy=False).reshape(place.shape[1:]))

    def _visible(self, name: str, index: int, scores: Tensor, visible: Tensor) -> Tensor:
        """Scores `[layers, R, n]`, -inf past the first `visible` entries of each row."""
        seen = torch.arange(scores.shape[-1]) < visible.unsqueeze(-1)
        scores = torch.where(seen, scores, float("-inf"))
        if bool(scores.isnan().any()):
            unit = "slot" if name == "scores" else "block"
            layer, row, entry = (int(i) for i in scores.isnan().nonzero()[0])
            where = f"NaN at step {index}, layer {self.layers[layer]}, row {row}, {unit} {entry}"
            self._refuse(name, where, f"NaN only where a {unit} is not visible to the row")
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
        self._places = self._locate(shapes)
        return metadata

    def _check_tensors(self, file: safe_open) -> dict[str, tuple[int, ...]]:
        names = set(file.keys())
        shapes = {}
        for name, rank in _RANKS.items():
            if name not in names:
                if name in _OPTIONAL:
                    continue
                self._refuse("tensors", sorted(names), "scores, positions, accepted")
            view = file.get_slice(name)
            if view.get_dtype() not in _DTYPES[name]:
                self._refuse(f"{name} dtype", view.get_dtype(), " or ".join(_DTYPES[name]))
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

    def _locate(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, _Place]:
        """Where the tensors lie that are read step by step."""
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length))
        return {
            name: _Place(
                8 + length + int(entries[name]["data_offsets"][0]),
                np.dtype(_SCORE_DTYPES[entries[name]["dtype"]]),
                shapes[name],
            )
            for name in ("scores", "query_scores")
            if name in shapes
        }

    def _query_facts(self, metadata: dict[str, str]) -> tuple[int, str]:
        """Block size and pooling of `query_scores`; 0 and "" when there are none."""
        if "query_scores" not in self._places:
            return 0, ""
        block_size = self._integer(metadata, "query_block_size", BLOCK_SIZES[0], BLOCK_SIZES[-1])
        pooling = metadata.get("query_pooling")
        if pooling not in QUERY_POOLINGS:
            self._refuse("metadata query_pooling", pooling, ", ".join(QUERY_POOLINGS))
        given = list(self._places["query_scores"].shape)
        wanted = [*self._score_shape[:3], count_blocks(self.slots, block_size)]
        if given != wanted:
            self._refuse("query_scores shape", given, str(wanted))
        return block_size, pooling

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
    model: str = "",
    query_scores: Tensor | None = None,
    query_block_size_slots: int = 0,
    query_pooling: str = "mean",
) -> None:
    """Write a trace file, whole or not at all.

    Args:
        scores: fp32 or fp16 `[steps, layers, rows, slots]`, NaN where a slot is not visible.
        positions_tokens: int64 `[steps, rows]`; accepted: int64 `[steps]`.
        ratio, top_k, layers, sequence_id, source: metadata of SPEC 9.
        model: anything that tells the weights apart from others', such as a digest.
        query_scores: fp32 `[steps, layers, rows, blocks]`, NaN where the row does not see the
            whole block, or None; of blocks of `query_block_size_slots`, pooled by `query_pooling`.
    """
    metadata = {
        "format": FORMAT,
        "ratio": str(ratio),
        "top_k": str(top_k),
        "layers": ",".join(str(layer) for layer in layers),
        "sequence_id": str(sequence_id),
    }
    metadata |= {name: text for name, text in (("source", source), ("model", model)) if text}
    tensors = {"scores": scores, "positions": positions_tokens, "accepted": accepted}
    if query_scores is not None:
        tensors["query_scores"] = query_scores
        metadata["query_block_size"] = str(query_block_size_slots)
        metadata["query_pooling"] = query_pooling
    with atomic_file(path, argument="trace") as temporary:
        save_tensors(temporary, tensors, metadata, argument="trace")
        Trace(temporary)  # nothing is written that would not be read again
