# SPDX-License-Identifier: Apache-2.0
"""Builds ONNX files with TensorRT-RTX and tells what became of each, as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spin_trtllm.hosts.tensorrt import allow_aliasing, import_flavour, load_plugin

TENSORRT = import_flavour()


class Log(TENSORRT.ILogger):
    """Keeps errors."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if severity <= TENSORRT.ILogger.ERROR:
            self.errors.append(message)


def main() -> None:
    request = json.load(sys.stdin)
    log = Log()
    builder = TENSORRT.Builder(log)  # the first logger is the one that plugins get
    load_plugin(TENSORRT, request["plugin"])
    answer = {"version": TENSORRT.__version__, "cases": {}}
    for case in request["cases"]:
        log.errors.clear()
        with standard_error(log.errors):
            result = build(builder, log, case)
        answer["cases"][case["title"]] = result | {"errors": list(log.errors)}
    Path(sys.argv[1]).write_text(json.dumps(answer))


@contextmanager
def standard_error(lines: list[str]) -> Iterator[None]:
    """Add what goes to standard error: RTX gives plugins no logger, so what they say ends there."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


def build(builder: Any, log: Log, case: dict[str, Any]) -> dict[str, Any]:
    """Parse and build; shapes are those of the largest profile."""
    flag = TENSORRT.NetworkDefinitionCreationFlag.STRONGLY_TYPED
    network = builder.create_network(1 << int(flag))
    parser = TENSORRT.OnnxParser(network, log)
    if not parser.parse(Path(case["path"]).read_bytes()):
        errors = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        return {"parsed": False, "why": errors, "built": False}
    layers = [network.get_layer(i).type.name for i in range(network.num_layers)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    shown = {tensor.name: [tensor.dtype.name, list(tensor.shape)] for tensor in outputs}
    config = builder.create_builder_config()
    if case["aliasing"]:
        allow_aliasing(config, TENSORRT)
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        if -1 in tensor.shape:
            least = tuple(1 if size < 0 else size for size in tensor.shape)
            most = tuple(
                case["most"][tensor.get_dimension_name(axis)] if size < 0 else size
                for axis, size in enumerate(tensor.shape)
            )
            profile.set_shape(tensor.name, least, most, most)
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    content = b"" if engine is None else bytes(engine)
    return {
        "parsed": True,
        "layers": layers,
        "outputs": shown,
        "built": engine is not None,
        "holds_plugin": case["node"].encode() in content,
    }


if __name__ == "__main__":
    main()
