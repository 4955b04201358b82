# SPDX-License-Identifier: Apache-2.0
"""ONNX networks to serialized engines, in a process of its own.

A builder ends its process on some errors, and what it allocated stays: the caller is spared both.

    outcome = build_engines(jobs, builder="tensorrt", plugin=plugin_path(), ranges=sizes.ranges)
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import write_file
from spin_trtllm.hosts.tensorrt.flavours import import_flavour
from spin_trtllm.hosts.tensorrt.network import allow_aliasing
from spin_trtllm.hosts.tensorrt.plugin import load_plugin

Ranges = Mapping[str, Sequence[int]]

_PLUGIN_LINE = "Spin"  # what the plugin says starts with the name of a node
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class EngineJob:
    """One engine to build.

    Attributes:
        network: ONNX file.
        engine: file to write.
    """

    network: str
    engine: str


@dataclass(frozen=True)
class BuiltEngine:
    """One engine that was built: its file, what it took and how large it is."""

    engine: str
    seconds: float
    size_bytes: int


@dataclass(frozen=True)
class EngineRequest:
    """What the building process is told.

    Attributes:
        builder: module of `flavours.FLAVOURS`.
        plugin: the plugin library.
        ranges: least, usual and largest value of each dimension that networks name.
        target_sm: compute capability, 90 for sm_90; None is the GPU that is there. Only
            TensorRT-RTX builds for a GPU that is not.
        jobs: the engines.
        results: file for what came of it, one JSON object a line.
        parent: process id of who asks, without whom it ends.
    """

    builder: str
    plugin: str
    ranges: Ranges
    target_sm: int | None
    jobs: tuple[EngineJob, ...]
    results: str
    parent: int


def build_engines(
    jobs: Sequence[EngineJob],
    *,
    builder: str,
    plugin: str | os.PathLike[str],
    ranges: Ranges,
    target_sm: int | None = None,
) -> list[BuiltEngine]:
    """Build engines one after the other; each file is written whole or not at all.

    Raises:
        SpinError: the first engine that could not be built, with the plugin's own reason or else
            TensorRT's last error; those before it are there.
    """
    with tempfile.TemporaryDirectory(prefix="spin-engines-") as folder:
        results = Path(folder) / "results.jsonl"
        request = EngineRequest(
            builder,
            os.fspath(plugin),
            dict(ranges),
            target_sm,
            tuple(jobs),
            str(results),
            os.getpid(),
        )
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(asdict(request)),
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            errors="replace",
        )
        text = results.read_text(encoding="utf-8") if results.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    if lines and "error" in lines[-1]:
        raise SpinError(_with_plugins_reason(lines[-1]["error"], done.stderr))
    if done.returncode != 0 or len(lines) != len(jobs):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise SpinError(f"{builder}: its process ended with {done.returncode}: {last}")
    return [BuiltEngine(**line) for line in lines]


def _with_plugins_reason(error: str, log: str) -> str:
    """TensorRT's error says no more than that there is no node; why is what the plugin said last.

    Where TensorRT gives plugins no logger, that is in the standard error only.
    """
    said = [line.strip() for line in log.splitlines() if line.startswith(_PLUGIN_LINE)]
    return error if not said or said[-1] in error else f"{error}: {said[-1]}"


def build_engine(
    tensorrt: Any,
    logger: Any,
    network_path: Path,
    ranges: Ranges,
    *,
    target_sm: int | None = None,
) -> bytes:
    """One ONNX file as a serialized engine, in this process; the plugin has to be loaded.

    Args:
        tensorrt: the module.
        logger: its `ILogger`.
        network_path: ONNX file.
        ranges: as in `EngineRequest`.
        target_sm: likewise.

    Raises:
        SpinError: TensorRT refused, and its log says more; or a range is missing.
    """
    builder = tensorrt.Builder(logger)
    flag = tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED  # types as the network says
    network = builder.create_network(1 << int(flag))
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse(network_path.read_bytes()):
        errors = (parser.get_error(i).desc() for i in range(parser.num_errors))
        reasons = [" ".join(error.split()) for error in errors]
        raise SpinError(f"{network_path.name}: TensorRT does not read it: {'; '.join(reasons)}")
    config = builder.create_builder_config()
    allow_aliasing(config, tensorrt)
    config.clear_flag(tensorrt.BuilderFlag.TF32)  # fp32 is asked for where it is meant
    if target_sm is not None:
        config.num_compute_capabilities = 1
        capability = getattr(tensorrt.ComputeCapability, f"SM{target_sm}", None)
        if capability is None:
            raise SpinError(f"target_sm: {tensorrt.__name__} does not build for sm_{target_sm}")
        config.set_compute_capability(capability, 0)
    config.add_optimization_profile(_profile(builder, network, ranges))
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise SpinError(f"{network_path.name}: TensorRT does not build it")
    return bytes(engine)


def _profile(builder: Any, network: Any, ranges: Ranges) -> Any:
    """The range of every input that has named dimensions."""
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        sizes = [
            _range(ranges, tensor, axis) if size < 0 else (size, size, size)
            for axis, size in enumerate(tensor.shape)
        ]
        if any(size < 0 for size in tensor.shape):
            profile.set_shape(tensor.name, *(tuple(size) for size in zip(*sizes, strict=True)))
    return profile


def _range(ranges: Ranges, tensor: Any, axis: int) -> Sequence[int]:
    name = tensor.get_dimension_name(axis)
    if name not in ranges:
        refuse("ranges", sorted(ranges), f"{name!r} among them, a dimension of {tensor.name}")
    return ranges[name]


# ---- the process ----


def main() -> None:
    """Read an `EngineRequest` as JSON from standard input and carry it out."""
    given = json.load(sys.stdin)
    jobs = tuple(EngineJob(**job) for job in given.pop("jobs"))
    request = EngineRequest(jobs=jobs, **given)
    _end_with(request.parent)
    with open(request.results, "w", encoding="utf-8", buffering=1) as results:
        try:
            for built in _build_all(request):
                print(json.dumps(asdict(built)), file=results)
        except SpinError as error:
            print(json.dumps({"error": str(error)}), file=results)


def _end_with(parent: int) -> None:
    """Let this process end with who asked for it, or it would write an engine nobody waits for."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        sys.exit("whoever asked for engines is gone")


def _build_all(request: EngineRequest) -> Any:
    tensorrt = import_flavour(request.builder, builds=True)
    logger = _last_error_logger(tensorrt)
    load_plugin(tensorrt, request.plugin)
    for job in request.jobs:
        started = time.perf_counter()
        try:
            engine = build_engine(
                tensorrt, logger, Path(job.network), request.ranges, target_sm=request.target_sm
            )
        except SpinError as error:
            said = f" ({logger.error})" if logger.error else ""
            raise SpinError(f"{error}{said}") from error
        write_file(job.engine, engine)
        yield BuiltEngine(job.engine, round(time.perf_counter() - started, 3), len(engine))


def _last_error_logger(tensorrt: Any) -> Any:
    class Logger(tensorrt.ILogger):
        """Passes warnings and errors on, and keeps the last error."""

        error = ""

        def log(self, severity: Any, message: str) -> None:
            if severity in (tensorrt.ILogger.INTERNAL_ERROR, tensorrt.ILogger.ERROR):
                self.error = " ".join(message.split())
            if severity <= tensorrt.ILogger.WARNING:
                print(message, file=sys.stderr)

    return Logger()


if __name__ == "__main__":
    main()
