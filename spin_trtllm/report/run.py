# SPDX-License-Identifier: Apache-2.0
"""The report: traces in, one JSON file a study and one HTML page out; resumes where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spin_trtllm import __version__
from spin_trtllm.config import SpinConfig
from spin_trtllm.environment import environment
from spin_trtllm.errors import SpinError, check_integer, refuse
from spin_trtllm.files import atomic_file, exists
from spin_trtllm.geometry import visible_slots
from spin_trtllm.report.inputs import check_traces
from spin_trtllm.report.page import write_page
from spin_trtllm.report.store import MAX_JOBS, Store, TraceFile
from spin_trtllm.report.studies import STUDIES
from spin_trtllm.report.study import Arms, Evidence, Study

PAGE = "report.html"
_REPLAYS = "replays"  # folder of records


@dataclass(frozen=True)
class Plan:
    """A report that was checked and can be run.

    Attributes:
        traces: at least one, all different.
        output: directory for the results; exists.
        config: SPIN's parameters.
        studies: in the order of the page.
        jobs: processes that replay.
    """

    traces: Sequence[TraceFile]
    output: Path
    config: SpinConfig
    studies: Sequence[Study]
    jobs: int = 1

    @property
    def arms(self) -> dict[str, Arms]:
        """What each study replays, by its key."""
        return {study.key: study.arms(self.config, self.traces) for study in self.studies}

    @property
    def store(self) -> Store:
        """The records of the replays."""
        return Store(self.output / _REPLAYS, self.traces)


def plan_report(
    traces: Sequence[str],
    output: str,
    config: SpinConfig,
    *,
    studies: Sequence[str] = tuple(STUDIES),
    jobs: int = 1,
    resume: bool = False,
) -> Plan:
    """Check everything that can be checked beforehand, and make the output directory.

    Args:
        traces: `spin-trace/1` files, each of another sequence or stretch.
        output: a new directory, or with `resume` one of an earlier run.
        studies: keys of `STUDIES`.
        jobs: processes that replay, 1 to 1024.

    Raises:
        SpinError: a bad or repeated trace, traces of different models, parameters they cannot be
            replayed with, an unknown study, an output that may not be written.
    """
    for name in studies:
        if name not in STUDIES:
            refuse("--studies", name, ", ".join(STUDIES))
    check_integer("--jobs", jobs, 1, MAX_JOBS)
    files = check_traces(traces, config)
    chosen = [study for key, study in STUDIES.items() if key in studies]
    return Plan(files, _make_output(Path(output), resume=resume), config, chosen, jobs)


def run_report(plan: Plan, *, on_steps: Callable[[int], object]) -> list[Path]:
    """Replay what is missing, then write each study and the page, each whole or not at all.

    Args:
        on_steps: called with the number of steps just replayed.

    Returns:
        The files written, the page last.

    Raises:
        SpinError: NaN in a visible slot, or a full disk. Finished replays stay for a resumption.
    """
    store, arms = plan.store, plan.arms
    wanted = [arm for of_study in arms.values() for arm in of_study.values()]
    store.fill(wanted, jobs=plan.jobs, on_steps=on_steps)
    inputs, made_on = _describe(plan), environment()
    written, results = [], []
    for study in plan.studies:
        records = {label: store.records(arm) for label, arm in arms[study.key].items()}
        evidence = Evidence(plan.config, plan.traces, arms[study.key], records)
        results.append(_result(study, evidence, inputs, made_on))
        written.append(plan.output / f"{study.key}.json")
        _write(written[-1], json.dumps(results[-1], indent=1) + "\n")
    written.append(plan.output / PAGE)
    _write(written[-1], write_page(results))
    return written


def _result(
    study: Study, evidence: Evidence, inputs: dict[str, Any], made_on: dict[str, Any]
) -> dict[str, Any]:
    """A study's JSON file."""
    return {
        "study": study.key,
        "title": study.title,
        "asks": study.asks,
        "paper": study.paper,
        **study.compute(evidence).to_json(),
        "replays": evidence.replays(),
        "inputs": inputs,
        "environment": made_on,
    }


def _describe(plan: Plan) -> dict[str, Any]:
    return {
        "version": __version__,
        "config": plan.config.to_dict(),
        "traces": [_describe_trace(file) for file in plan.traces],
    }


def _describe_trace(file: TraceFile) -> dict[str, Any]:
    trace = file.open()
    slots = visible_slots(trace.positions_tokens[:, 0], trace.ratio).tolist()
    return {
        "name": file.path.name,
        "sha256": file.sha256,
        "source": trace.source,
        "steps": trace.steps,
        "rows": trace.rows,
        "layers": ", ".join(map(str, trace.layers)),
        "first_slots": slots[0] if slots else None,
        "last_slots": slots[-1] if slots else None,
        "top_k": trace.top_k,
    }


def _make_output(output: Path, *, resume: bool) -> Path:
    if exists(output, "--output") and not output.is_dir():
        refuse("--output", str(output), "a directory name")
    try:
        filled = output.is_dir() and any(output.iterdir())
        if filled and not resume:
            refuse("--output", str(output), "a new directory, or --resume to go on with this one")
        if filled and not (output / _REPLAYS).is_dir():
            refuse("--output", str(output), "a new directory, or one of an earlier report")
        (output / _REPLAYS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot make {str(output)!r}: {error.strerror}"
        raise SpinError(f"--output: {reason}") from error
    return output


def _write(path: Path, content: str) -> None:
    with atomic_file(path, argument="--output") as temporary:
        try:
            # A file name need not be text; the page shall be there all the same.
            temporary.write_text(content, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            reason = f"cannot write {str(path)!r}: {error.strerror}"
            raise SpinError(f"--output: {reason}") from error
