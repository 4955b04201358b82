# SPDX-License-Identifier: Apache-2.0
"""What the environment asks of a capture: traces of the sequences that a rank serves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spin_trtllm.errors import refuse

CAPTURE_VARIABLE = "TLLM_SPIN_CAPTURE"
SEQUENCES_VARIABLE = "TLLM_SPIN_CAPTURE_SEQUENCES"
STEPS_VARIABLE = "TLLM_SPIN_CAPTURE_STEPS"
TOKENS_VARIABLE = "TLLM_SPIN_CAPTURE_TOKENS"
MIB_VARIABLE = "TLLM_SPIN_CAPTURE_MIB"
LAYERS_VARIABLE = "TLLM_SPIN_CAPTURE_LAYERS"

MIN_STEPS = 2  # the first is cold: a trace of one step says nothing


@dataclass(frozen=True)
class CaptureSettings:
    """What to capture; `docs/tensorrt-llm.md` says how it is asked for.

    Attributes:
        folder: where the traces go. It must be there.
        sequences: most traces of a rank; steps: most steps of a trace.
        least_tokens: tokens of a sequence before its first decode step, or it is left out.
        limit_bytes: most bytes of scores of a rank, in memory and in files together.
        layers: decoder-layer indices; None for all that have an indexer.
    """

    folder: Path
    sequences: int = 8
    steps: int = 256
    least_tokens: int = 0
    limit_bytes: int = 4 * 2**30
    layers: tuple[int, ...] | None = None


def read_capture(environment: Mapping[str, str]) -> CaptureSettings | None:
    """What an environment asks for; None if that is nothing.

    Raises:
        SpinError: a variable that says something else than it may.
    """
    folder = environment.get(CAPTURE_VARIABLE)
    if not folder:
        return None
    default = CaptureSettings(Path(folder))
    return CaptureSettings(
        folder=default.folder,
        sequences=_integer(environment, SEQUENCES_VARIABLE, default.sequences, 1),
        steps=_integer(environment, STEPS_VARIABLE, default.steps, MIN_STEPS),
        least_tokens=_integer(environment, TOKENS_VARIABLE, default.least_tokens, 0),
        limit_bytes=_integer(environment, MIB_VARIABLE, default.limit_bytes >> 20, 1) << 20,
        layers=_layers(environment),
    )


def _integer(environment: Mapping[str, str], variable: str, default: int, least: int) -> int:
    text = environment.get(variable)
    if not text:
        return default
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
        refuse(variable, text, f"an integer in {least} .. 999999999")
    return int(text)


def _layers(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    text = environment.get(LAYERS_VARIABLE)
    if not text:
        return None
    if not re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", text):
        refuse(LAYERS_VARIABLE, text, "decoder-layer indices, as in 2,4,6")
    return tuple(sorted({int(layer) for layer in text.split(",")}))
