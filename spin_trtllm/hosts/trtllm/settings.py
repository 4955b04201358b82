# SPDX-License-Identifier: Apache-2.0
"""What the environment asks of SPIN in a TensorRT-LLM process.

All names begin with TLLM: TensorRT-LLM hands such variables on to the ranks it starts, and refuses
keys that it does not know in its own YAML.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.hosts.trtllm.capture_settings import CaptureSettings, read_capture

SPIN_VARIABLE = "TLLM_SPIN"
BACKEND_VARIABLE = "TLLM_SPIN_BACKEND"
METRICS_VARIABLE = "TLLM_SPIN_METRICS"
LOG_SECONDS_VARIABLE = "TLLM_SPIN_LOG_SECONDS"
PROBE_VARIABLE = "TLLM_SPIN_PROBE"

DEFAULT_LOG_SECONDS = 60.0
MAX_PROBE_EVERY = 2**31 - 1


class HookRefused(SpinError):
    """This version of the host is not what a hook was written for: the host runs dense."""


@dataclass(frozen=True)
class Settings:
    """What one process was asked to do.

    Attributes:
        path: the spin.yaml that `TLLM_SPIN` names.
        config: what it says.
        metrics: export counters through prometheus_client.
        log_seconds: seconds of activity between two log lines of the counters; 0 for none, which
            is the default where metrics are on.
        probe_every: one in so many of the steps that run in Python is also scored densely, to
            measure what is missed; 0 for none.
        capture: traces to write; None for none.
    """

    path: Path
    config: SpinConfig
    metrics: bool = False
    log_seconds: float = DEFAULT_LOG_SECONDS
    probe_every: int = 0
    capture: CaptureSettings | None = None


def read_settings(environment: Mapping[str, str] | None = None) -> Settings | None:
    """The settings in an environment, by default this process's; None if SPIN is not asked for.

    Raises:
        SpinError: a variable that says something else than it may, or a spin.yaml that cannot be
            read.
    """
    environment = os.environ if environment is None else environment
    path = environment.get(SPIN_VARIABLE)
    if not path:
        return None
    metrics = _switch(environment, METRICS_VARIABLE)
    default_seconds = 0.0 if metrics else DEFAULT_LOG_SECONDS
    return Settings(
        path=Path(path),
        config=SpinConfig.from_yaml(path),
        metrics=metrics,
        log_seconds=_seconds(environment, LOG_SECONDS_VARIABLE, default_seconds),
        probe_every=_one_in(environment, PROBE_VARIABLE),
        capture=read_capture(environment),
    )


def _switch(environment: Mapping[str, str], variable: str) -> bool:
    text = environment.get(variable) or "0"
    if text not in ("0", "1"):
        refuse(variable, text, "0 or 1")
    return text == "1"


def _seconds(environment: Mapping[str, str], variable: str, default: float) -> float:
    text = environment.get(variable)
    if not text:
        return default
    allowed = "seconds, or 0 for no log"
    try:
        seconds = float(text)
    except ValueError:
        refuse(variable, text, allowed)
    if not 0 <= seconds < math.inf:  # also refuses NaN
        refuse(variable, text, allowed)
    return seconds


def _one_in(environment: Mapping[str, str], variable: str) -> int:
    """`1/N` as N; 0 when nothing is asked for."""
    text = environment.get(variable) or "0"
    if text == "0":
        return 0
    match = re.fullmatch(r"1/([1-9][0-9]{0,9})", text)
    if match is None or int(match[1]) > MAX_PROBE_EVERY:
        refuse(variable, text, f"1/N of the steps, N up to {MAX_PROBE_EVERY}, or 0")
    return int(match[1])
