# SPDX-License-Identifier: Apache-2.0
"""A good trace, and every way to spoil it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

NAN, INF = float("nan"), float("inf")
STEPS, LAYERS, ROWS, SLOTS, RATIO = 5, 2, 2, 40, 4


def good_tensors() -> dict[str, torch.Tensor]:
    """Five steps of two rows, one draft accepted at every other step."""
    accepted = torch.tensor([0, 1, 0, 1, 0])
    first = torch.tensor([140, 141, 143, 144, 146])
    positions = first.unsqueeze(1) + torch.arange(ROWS)
    scores = torch.randn(
        STEPS, LAYERS, ROWS, SLOTS, generator=torch.Generator().manual_seed(1), dtype=torch.float32
    )
    visible = torch.arange(SLOTS) < ((positions + 1) // RATIO).unsqueeze(-1)  # 35 .. 37 slots
    scores = torch.where(visible.unsqueeze(1), scores, NAN)
    return {"scores": scores, "positions": positions, "accepted": accepted}


GOOD_METADATA = {
    "format": "spin-trace/1",
    "ratio": "4",
    "top_k": "8",
    "layers": "2,6",
    "sequence_id": "7",
}


def good_bytes(folder: Path) -> bytes:
    path = folder / "good-bytes"
    save_file(good_tensors(), path, GOOD_METADATA)
    content = path.read_bytes()
    path.unlink()
    return content


Spoil = Callable[[Path], None]


def tensors(**changes: Any) -> Spoil:
    """Write the good trace with tensors replaced by a function of the good one, or dropped."""

    def write(path: Path) -> None:
        content = good_tensors()
        for name, change in changes.items():
            new = change(content.pop(name))
            if new is not None:
                content[name] = new.contiguous()
        save_file(content, path, GOOD_METADATA)

    return write


def metadata(**changes: str | None) -> Spoil:
    """Write the good trace with metadata replaced, or dropped."""

    def write(path: Path) -> None:
        merged = {**GOOD_METADATA, **changes}
        save_file(good_tensors(), path, {k: v for k, v in merged.items() if v is not None})

    return write


def content(change: Callable[[bytes], bytes]) -> Spoil:
    """Write the good trace with its bytes changed."""

    def write(path: Path) -> None:
        path.write_bytes(change(good_bytes(path.parent)))

    return write


def header(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """Write the good trace with its header, as JSON, changed."""

    def edit(good: bytes) -> bytes:
        length = struct.unpack("<Q", good[:8])[0]
        entries = json.loads(good[8 : 8 + length])
        text = json.dumps(change(entries)).encode()
        return struct.pack("<Q", len(text)) + text + good[8 + length :]

    return content(edit)


def put(name: str, index: tuple[int, ...], value: float) -> Spoil:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[index] = value
        return tensor

    return tensors(**{name: change})


def entry(name: str, key: str, value: Any) -> Spoil:
    def change(entries: dict[str, Any]) -> dict[str, Any]:
        entries[name][key] = value
        return entries

    return header(change)


def symlink_loop(path: Path) -> None:
    path.symlink_to(path)


def drop(tensor: torch.Tensor) -> None:
    return None


WHOLE = "not a whole safetensors file"
# name: (how to write it, words that its one line must hold)
MALFORMED: dict[str, tuple[Spoil, list[str]]] = {
    "no file": (lambda path: None, ["no file"]),
    "directory": (lambda path: path.mkdir(), ["allowed: a regular file"]),
    "device": (lambda path: path.symlink_to("/dev/zero"), ["allowed: a regular file"]),
    "symlink loop": (symlink_loop, []),
    "empty": (lambda path: path.write_bytes(b""), [WHOLE]),
    "text": (lambda path: path.write_text("not a trace, just a note\n" * 9), [WHOLE]),
    "zeros": (lambda path: path.write_bytes(bytes(4096)), []),
    "binary": (lambda path: path.write_bytes(bytes(range(255, -1, -1)) * 16), [WHOLE]),
    "trailing bytes": (content(lambda good: good + b"\0" * 8), [WHOLE]),
    # the header
    "header length huge": (content(lambda good: b"\xff" * 8 + good[8:]), [WHOLE]),
    "header length past the end": (
        content(lambda good: struct.pack("<Q", 10**6) + good[8:]),
        [WHOLE],
    ),
    "header length short": (content(lambda good: struct.pack("<Q", 40) + good[8:]), [WHOLE]),
    "header no JSON": (content(lambda good: good[:8] + b"#" + good[9:]), [WHOLE]),
    "header no UTF-8": (content(lambda good: good[:8] + b'{"\xff' + good[11:]), [WHOLE]),
    "header a list": (header(lambda entries: [1, 2]), [WHOLE]),
    "header empty": (header(lambda entries: {}), []),
    "header offsets past the end": (entry("scores", "data_offsets", [80, 10**9]), [WHOLE]),
    "header offsets overlap": (entry("positions", "data_offsets", [0, 80]), [WHOLE]),
    "header offsets backwards": (entry("scores", "data_offsets", [90, 10]), [WHOLE]),
    "header shape too large": (entry("scores", "shape", [STEPS, LAYERS, ROWS, 41]), [WHOLE]),
    "header shape negative": (entry("scores", "shape", [-5, -2, 2, 40]), [WHOLE]),
    "header shape overflows": (entry("scores", "shape", [2**62, 2**62, 2, 40]), [WHOLE]),
    "header dtype unknown": (entry("scores", "dtype", "F31"), [WHOLE]),
    # tensors
    "no scores": (tensors(scores=drop), ["['accepted', 'positions']", "scores, positions, acc"]),
    "no positions": (tensors(positions=drop), ["['accepted', 'scores']", "positions"]),
    "no accepted": (tensors(accepted=drop), ["['positions', 'scores']", "accepted"]),
    "scores f64": (tensors(scores=torch.Tensor.double), ["scores dtype", "F64", "F32 or F16"]),
    "scores bf16": (tensors(scores=torch.Tensor.bfloat16), ["scores dtype", "BF16", "F32 or F16"]),
    "scores i32": (tensors(scores=lambda x: x.nan_to_num().int()), ["scores dtype", "I32"]),
    "positions i32": (tensors(positions=torch.Tensor.int), ["positions dtype", "I32", "I64"]),
    "positions f32": (tensors(positions=torch.Tensor.float), ["positions dtype", "F32", "I64"]),
    "accepted i32": (tensors(accepted=torch.Tensor.int), ["accepted dtype", "I32", "I64"]),
    "accepted bool": (tensors(accepted=torch.Tensor.bool), ["accepted dtype", "BOOL", "I64"]),
    "scores 3-d": (tensors(scores=lambda x: x[:, 0]), ["scores shape", "[5, 2, 40]", "4 dim"]),
    "scores 5-d": (tensors(scores=lambda x: x[None]), ["scores shape", "4 dimensions"]),
    "scores scalar": (tensors(scores=lambda x: x[0, 0, 0, 0]), ["scores shape", "[]", "4 dim"]),
    "positions 1-d": (tensors(positions=lambda x: x[:, 0]), ["positions shape", "2 dimensions"]),
    "accepted 2-d": (tensors(accepted=lambda x: x[:, None]), ["accepted shape", "1 dimensions"]),
    "positions of fewer steps": (
        tensors(positions=lambda x: x[:4]),
        ["positions shape", "[4, 2]", "[5, 2]"],
    ),
    "positions of fewer rows": (
        tensors(positions=lambda x: x[:, :1]),
        ["positions shape", "[5, 1]", "[5, 2]"],
    ),
    "accepted of more steps": (
        tensors(accepted=lambda x: torch.cat([x, x])),
        ["accepted shape", "[10]", "[5]"],
    ),
    "no rows": (
        tensors(scores=lambda x: x[:, :, :0], positions=lambda x: x[:, :0]),
        ["scores", "0 rows", "at least 1"],
    ),
    # positions and accepted
    "position gap in a row": (put("positions", (2, 1), 145), ["positions", "step 2", "p0, p0 + 1"]),
    "position repeated": (put("positions", (4, 1), 146), ["positions", "step 4"]),
    "position negative": (
        tensors(positions=lambda x: x - 142),
        ["positions", "[-2, -1] at step 0", "p0 >= 0"],
    ),
    "position past the slots": (
        tensors(positions=lambda x: x + 18 * (torch.arange(5) == 3).long()[:, None]),
        ["positions", "[162, 163]", "step 3", "at most 40 slots"],  # 163 completes slot 40
    ),
    "position enormous": (
        tensors(positions=lambda x: x + 2**62),
        ["positions", "step 0", "40 slots"],
    ),
    "position wraps": (
        tensors(positions=lambda x: torch.full_like(x, 2**63 - 1)),
        ["positions", "step 0"],
    ),
    "position the largest": (
        tensors(
            scores=lambda x: x[:, :, :1],
            positions=lambda x: torch.full_like(x[:, :1], 2**63 - 1),
            accepted=torch.zeros_like,
        ),
        ["positions", "[9223372036854775807] at step 0", "at most 40 slots"],
    ),
    "accepted negative": (put("accepted", (3,), -1), ["accepted", "-1 at step 3", "0 .. 1"]),
    "accepted too many": (put("accepted", (1,), 2), ["accepted", "2 at step 1", "0 .. 1"]),
    "accepted enormous": (put("accepted", (0,), 2**63 - 1), ["accepted", "step 0", "0 .. 1"]),
    # NaN, found while streaming
    "NaN first": (put("scores", (0, 0, 0, 0), NAN), ["NaN at step 0, layer 2, row 0, slot 0"]),
    "NaN last": (put("scores", (4, 1, 1, 36), NAN), ["NaN at step 4, layer 6, row 1, slot 36"]),
    "NaN in f16": (
        tensors(scores=lambda x: torch.where(torch.arange(SLOTS) == 9, NAN, x).half()),
        ["NaN at step 0, layer 2, row 0, slot 9", "not visible"],
    ),
    # metadata
    "no metadata": (lambda path: save_file(good_tensors(), path), ["format", "None", "spin-trace"]),
    "no format": (metadata(format=None), ["metadata format", "None", "spin-trace/1"]),
    "other format": (metadata(format="spin-trace/2"), ["got 'spin-trace/2'", "spin-trace/1"]),
    "format with control characters": (
        metadata(format="\x1b[2J\r\x07"),
        ["metadata format", r"got '\x1b[2J\r\x07'"],
    ),
    "no ratio": (metadata(ratio=None), ["metadata ratio", "None"]),
    "ratio 0": (metadata(ratio="0"), ["metadata ratio", "got '0'", "1 .. 2147483647"]),
    "ratio negative": (metadata(ratio="-4"), ["metadata ratio", "got '-4'"]),
    "ratio fraction": (metadata(ratio="4.0"), ["metadata ratio", "got '4.0'"]),
    "ratio with space": (metadata(ratio=" 4"), ["metadata ratio"]),
    "ratio other digits": (metadata(ratio="\uff14"), ["metadata ratio"]),
    "ratio huge": (metadata(ratio="9" * 40), ["metadata ratio"]),
    "ratio of 5000 digits": (metadata(ratio="9" * 5000), ["metadata ratio"]),
    "no top_k": (metadata(top_k=None), ["metadata top_k", "None"]),
    "top_k 0": (metadata(top_k="0"), ["metadata top_k", "got '0'", "1 .. 1048576"]),
    "top_k word": (metadata(top_k="all"), ["metadata top_k", "got 'all'"]),
    "top_k too large": (metadata(top_k=str(2**20 + 1)), ["metadata top_k", "got '1048577'"]),
    "top_k of 5000 digits": (metadata(top_k="9" * 5000), ["metadata top_k"]),
    "no sequence_id": (metadata(sequence_id=None), ["metadata sequence_id", "None"]),
    "sequence_id negative": (metadata(sequence_id="-1"), ["metadata sequence_id", "got '-1'"]),
    "sequence_id too large": (metadata(sequence_id=str(2**64)), ["metadata sequence_id"]),
    "sequence_id of 5000 digits": (metadata(sequence_id="9" * 5000), ["metadata sequence_id"]),
    "no layers": (metadata(layers=None), ["metadata layers", "None"]),
    "layers empty": (metadata(layers=""), ["metadata layers", "decoder-layer indices"]),
    "layers with a hole": (metadata(layers="2,,6"), ["metadata layers", "2,,6"]),
    "layers repeated": (metadata(layers="2,2"), ["metadata layers", "2,2", "distinct"]),
    "layers negative": (metadata(layers="2,-6"), ["metadata layers", "2,-6"]),
    "layers of 5000 digits": (metadata(layers="2," + "9" * 5000), ["metadata layers"]),
    "layers words": (metadata(layers="two,six"), ["metadata layers", "two,six"]),
    "layers too few": (metadata(layers="2"), ["layers", "1 indices", "2, as scores has"]),
    "layers too many": (metadata(layers="2,4,6"), ["layers", "3 indices", "2, as scores has"]),
}
# Bytes kept: in the length, in the header, at its end, in the data, all but one.
TRUNCATIONS = (1, 7, 8, 9, 60, 200, 1000, -81, -80, -41, -8, -1)
MALFORMED.update(
    {
        f"truncated to {kept}": (content(lambda good, kept=kept: good[:kept]), [WHOLE])
        for kept in TRUNCATIONS
    }
)
# Known on opening; NaN is found only when its step is read.
STREAMED = {"NaN first", "NaN last", "NaN in f16"}
