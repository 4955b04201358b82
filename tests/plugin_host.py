# SPDX-License-Identifier: Apache-2.0
"""TensorRT's part for the plugin library, by ctypes: `tests/tensorrt/cpp/host.cpp`.

Paths: `SPIN_TRT_PLUGIN` and `SPIN_TRT_HOST` name built libraries. Otherwise the plugin is searched
for, and the host is built here, which takes a C++ compiler and the headers of TensorRT and CUDA.
"""

from __future__ import annotations

import ctypes
import functools
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spin_trtllm import native

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "tests" / "tensorrt" / "cpp"
PLUGIN_SOURCES = ROOT / "plugins" / "tensorrt"
KERNEL_SOURCES = ROOT / "plugins" / "kernels"
BUILT = ROOT / "build" / "tensorrt"
PLUGIN_NAME, HOST_NAME = "libspin_trt_plugin.so", "libspin_trt_host.so"
NODES = ("SpinIndexer", "SpinPredictBlocks", "SpinSparseIndexer", "SpinObserve")

# TensorRT's numbers.
FLOAT, HALF, INT8, INT32, BOOL, UINT8, FP8, BF16, INT64 = range(9)
TYPES = {
    torch.float32: FLOAT,
    torch.float16: HALF,
    torch.int8: INT8,
    torch.int32: INT32,
    torch.bool: BOOL,
    torch.uint8: UINT8,
    torch.float8_e4m3fn: FP8,
    torch.bfloat16: BF16,
    torch.int64: INT64,
}
TORCH_TYPES = {number: dtype for dtype, number in TYPES.items()}
LINEAR = 0
FIELD_INT32, FIELD_INT64, FIELD_FLOAT32, FIELD_FLOAT64, FIELD_TEXT = 5, 10, 1, 2, 6
_C_TYPES: dict[int, Any] = {
    FIELD_INT32: c_int32,
    FIELD_INT64: c_int64,
    FIELD_FLOAT32: ctypes.c_float,
    FIELD_FLOAT64: ctypes.c_double,
}


class Dims(ctypes.Structure):
    """`nvinfer1::Dims`."""

    _fields_ = (("rank", c_int32), ("d", c_int64 * 8))


class Desc(ctypes.Structure):
    """`nvinfer1::PluginTensorDesc`."""

    _fields_ = (
        ("dims", Dims),
        ("type", c_int32),
        ("format", c_int32),
        ("scale", ctypes.c_float),
    )


class Field(ctypes.Structure):
    """`nvinfer1::PluginField`."""

    _fields_ = (("name", c_char_p), ("data", c_void_p), ("type", c_int32), ("length", c_int32))


class Fields(ctypes.Structure):
    """`nvinfer1::PluginFieldCollection`."""

    _fields_ = (("count", c_int32), ("fields", POINTER(Field)))


def dims(shape: Iterable[int]) -> Dims:
    sizes = tuple(shape)
    return Dims(len(sizes), (c_int64 * 8)(*sizes))


def desc(dtype: torch.dtype | int, shape: Iterable[int], form: int = LINEAR) -> Desc:
    """A tensor's description, from a torch dtype or TensorRT's number."""
    return Desc(dims(shape), TYPES[dtype] if isinstance(dtype, torch.dtype) else dtype, form, 1.0)


def desc_of(tensor: Tensor) -> Desc:
    return desc(tensor.dtype, tensor.shape)


def array(descs: Sequence[Desc]) -> Any:
    return (Desc * max(len(descs), 1))(*descs)


class Typed:
    """A field's value of a chosen type, where what Python's would stand for is not meant."""

    def __init__(self, kind: int, *values: Any) -> None:
        self.kind, self.values = kind, values

    @classmethod
    def of(cls, value: Any) -> Typed:
        if isinstance(value, Typed):
            return value
        if isinstance(value, str):
            return cls(FIELD_TEXT, value)
        return cls(FIELD_FLOAT64 if isinstance(value, float) else FIELD_INT64, value)

    def field(self, name: str, keep: list[Any]) -> Field:
        if self.kind == FIELD_TEXT:
            text = self.values[0].encode()
            data: Any = ctypes.create_string_buffer(text, len(text) + 1)
            length = len(text) + 1  # as the ONNX parser gives it
        else:
            data = (_C_TYPES[self.kind] * len(self.values))(*self.values)
            length = len(self.values)
        keep.append(data)
        return Field(name.encode(), ctypes.addressof(data), self.kind, length)


def collection(values: Sequence[tuple[str, Any]], keep: list[Any]) -> Fields:
    """A field collection; what it points to is added to `keep`."""
    made = (Field * max(len(values), 1))(*(Typed.of(v).field(n, keep) for n, v in values))
    keep.append(made)
    return Fields(len(values), made)


def read(fields: Fields) -> dict[str, Any]:
    """Names and values of a collection; None where a field has no data."""
    found = {}
    for field in fields.fields[: fields.count]:
        pointer = ctypes.cast(field.data, POINTER(_C_TYPES[field.type]))
        found[field.name.decode()] = pointer[0] if field.data else None
    return found


def tensorrt_headers() -> Path | None:
    found = runpy.run_path(str(PLUGIN_SOURCES / "find_headers.py"))["find_headers"]()
    return None if found is None else Path(found)


def cuda_headers() -> Path | None:
    nvcc = shutil.which("nvcc")
    places = [Path("/usr/local/cuda/include")]
    places += Path(sys.prefix).glob("lib/python*/site-packages/nvidia/cu*/include")
    if nvcc:
        places.append(Path(nvcc).resolve().parents[1] / "include")
    return next((p for p in places if (p / "cuda_runtime_api.h").is_file()), None)


def compile_cpp(output: Path, sources: Iterable[Path], *flags: str) -> str | None:
    """Build a program or library, if one of its sources is newer. Returns what is missing."""
    compiler, tensorrt, cuda = shutil.which("c++"), tensorrt_headers(), cuda_headers()
    if compiler is None or tensorrt is None or cuda is None:
        return "no C++ compiler, TensorRT headers or CUDA headers"
    sources = list(sources)
    watched = [*sources, *SOURCES.glob("*.h"), *(ROOT / "plugins").rglob("*.h")]
    if output.is_file() and output.stat().st_mtime > max(p.stat().st_mtime for p in watched):
        return None
    output.parent.mkdir(parents=True, exist_ok=True)
    include = (f"-isystem{tensorrt}", f"-isystem{cuda}")
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", *include, *flags]
    unfinished = output.with_suffix(f".{os.getpid()}")
    subprocess.run([*command, *map(str, sources), "-o", str(unfinished), "-ldl"], check=True)
    unfinished.replace(output)  # of two workers that build at once, each leaves a whole file
    return None


def compile_plugin(output: Path, doubles: Iterable[str], *flags: str) -> str | None:
    """Build the plugin over doubles of the kernels and of CUDA. Returns what is missing."""
    sources = [*PLUGIN_SOURCES.glob("*.cpp"), KERNEL_SOURCES / "status.cu"]
    sources += [SOURCES / name for name in doubles]
    folders = (ROOT / "plugins" / "include", KERNEL_SOURCES, PLUGIN_SOURCES)
    return compile_cpp(output, sources, *flags, *(f"-I{f}" for f in folders), "-x", "c++")


def plugin_path() -> Path | None:
    chosen = os.environ.get("SPIN_TRT_PLUGIN")
    places = [p.with_name(PLUGIN_NAME) for p in native.search_paths()]
    return next((p for p in ([Path(chosen)] if chosen else places) if p.is_file()), None)


def host_path() -> Path | None:
    chosen = os.environ.get("SPIN_TRT_HOST")
    if chosen:
        return Path(chosen)
    path = BUILT / HOST_NAME
    missing = compile_cpp(
        path, [SOURCES / "host.cpp"], "-O1", "-shared", "-fPIC", "-fvisibility=hidden"
    )
    return path if missing is None or path.is_file() else None


@functools.cache
def find_host() -> Host | None:
    """The host with the plugin opened, or None where either is missing."""
    plugin, host = plugin_path(), host_path()
    return None if plugin is None or host is None else Host(host, plugin)


class Host:
    """The host library with one plugin library opened."""

    def __init__(self, host: Path, plugin: Path) -> None:
        self.calls = ctypes.CDLL(str(host))
        for name in ("open", "create", "reload", "clone", "attach"):
            self._call(name).restype = c_void_p
        for name in ("log", "creator"):
            self._call(name).restype = c_char_p
        for name in ("serialize", "field_names"):
            self._call(name).restype = POINTER(Fields)
        self._call("workspace").restype = c_int64
        library = self.calls.host_open(str(plugin).encode())
        if library is None:
            raise OSError(f"{plugin}: not a TensorRT plugin library")
        self.library = c_void_p(library)

    def _call(self, name: str) -> Any:
        return getattr(self.calls, f"host_{name}")

    def log(self) -> str:
        """Lines logged since the last call."""
        return str(self.calls.host_log().decode())

    def creators(self) -> list[str]:
        """`namespace/version/name/kind` of every creator."""
        found: list[str] = []
        while (line := self.calls.host_creator(self.library, len(found))) is not None:
            found.append(line.decode())
        return found

    def field_names(self, node: str) -> list[str]:
        return list(read(self.calls.host_field_names(self.library, node.encode()).contents))

    def create(self, node: str, *extra: tuple[str, Any], **fields: Any) -> Node | None:
        """A node, or None if the creator refused; `extra` may repeat names."""
        keep: list[Any] = []
        given = collection([*fields.items(), *extra], keep)
        self.log()
        made = self.calls.host_create(self.library, node.encode(), ctypes.byref(given))
        return None if made is None else Node(self, made)


class Node:
    """A plugin object, as TensorRT holds one."""

    def __init__(self, host: Host, plugin: int) -> None:
        self.host, self.plugin = host, c_void_p(plugin)

    def __del__(self) -> None:
        if self.plugin:
            self.host.calls.host_destroy(self.plugin)

    def reload(self) -> Node:
        """This node as an engine's file brings it back; this one is gone."""
        plugin, self.plugin = self.plugin, c_void_p()
        return Node(self.host, self.host.calls.host_reload(self.host.library, plugin))

    def clone(self) -> Node:
        return Node(self.host, self.host.calls.host_clone(self.plugin))

    def attach(self) -> Node:
        return Node(self.host, self.host.calls.host_attach(self.plugin))

    def fields(self) -> dict[str, Any]:
        return read(self.host.calls.host_serialize(self.plugin).contents)

    @property
    def build_version(self) -> int:
        return int(self.host.calls.host_build_version(self.plugin))

    def aliases(self) -> list[int]:
        """Input of each output that is written in place, else -1."""
        count = self.host.calls.host_outputs(self.plugin)
        return [self.host.calls.host_aliased(self.plugin, i) for i in range(count)]

    def output_descs(self, inputs: Sequence[Desc]) -> tuple[list[Desc], list[list[bool]]]:
        """What TensorRT makes of the outputs, and which of their sizes are constants."""
        count, given = self.host.calls.host_outputs(self.plugin), len(inputs)
        types, made = (c_int32 * given)(*(d.type for d in inputs)), (c_int32 * count)()
        status = self.host.calls.host_output_types(self.plugin, types, given, made, count)
        shapes, constant = (Dims * count)(), (c_int32 * (8 * count))()
        given_dims = (Dims * given)(*(d.dims for d in inputs))
        arguments = (self.plugin, given_dims, given, shapes, constant, count, 0)
        status = status or self.host.calls.host_output_shapes(*arguments)
        if status:
            raise ValueError(self.host.log())
        descs = [desc(made[i], shapes[i].d[: shapes[i].rank]) for i in range(count)]
        flags = [[bool(f) for f in constant[8 * i : 8 * i + shapes[i].rank]] for i in range(count)]
        return descs, flags

    def supports(self, at: int, inputs: Sequence[Desc], outputs: Sequence[Desc]) -> bool:
        every = array([*inputs, *outputs])
        counts = (len(inputs), len(outputs))
        return bool(self.host.calls.host_supports(self.plugin, at, every, *counts))

    def configure(self, inputs: Sequence[Desc], outputs: Sequence[Desc]) -> int:
        return int(self._described("configure", inputs, outputs))

    def shape_change(self, inputs: Sequence[Desc], outputs: Sequence[Desc]) -> int:
        return int(self._described("shape_change", inputs, outputs))

    def workspace_bytes(self, inputs: Sequence[Desc], outputs: Sequence[Desc]) -> int:
        return int(self._described("workspace", inputs, outputs))

    def _described(self, name: str, inputs: Sequence[Desc], outputs: Sequence[Desc]) -> int:
        call = getattr(self.host.calls, f"host_{name}")
        return int(call(self.plugin, array(inputs), len(inputs), array(outputs), len(outputs)))


class Binding:
    """A node with its tensors bound, as an execution context has it: `enqueue` may be captured.

    Args:
        node: attached.
        inputs: tensors in the node's order, dense.
        outputs: likewise; None makes them, aliased ones being their inputs.
        tell: whether the node is told the shapes, as TensorRT does; if not it makes no graph.
    """

    def __init__(
        self,
        node: Node,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        *,
        tell: bool = True,
    ) -> None:
        assert all(t.is_contiguous() for t in inputs)
        self.node, self.inputs = node, list(inputs)
        in_descs = [desc_of(t) for t in inputs]
        out_descs, _ = node.output_descs(in_descs)
        device = inputs[0].device
        if outputs is None:
            outputs = [
                self.inputs[alias]
                if alias >= 0
                else torch.zeros(
                    tuple(d.dims.d[: d.dims.rank]), dtype=TORCH_TYPES[d.type], device=device
                )
                for d, alias in zip(out_descs, node.aliases(), strict=True)
            ]
        self.outputs = list(outputs)
        problem = node.configure(in_descs, out_descs)
        if problem or (tell and node.shape_change(in_descs, out_descs)):
            raise ValueError(node.host.log())
        size = node.workspace_bytes(in_descs, out_descs)
        self.workspace = torch.full((max(size, 1),), 0xCD, dtype=torch.uint8, device=device)
        self._arguments = (
            node.plugin,
            array(in_descs),
            array(out_descs),
            (c_void_p * len(self.inputs))(*(t.data_ptr() for t in self.inputs)),
            (c_void_p * len(self.outputs))(*(t.data_ptr() for t in self.outputs)),
            c_void_p(self.workspace.data_ptr()),
        )

    def tell(self) -> None:
        """The node is told the shapes again, after those of another binding.

        Raises:
            ValueError: as `enqueue`.
        """
        _, inputs, outputs, *_ = self._arguments
        if self.node.shape_change(list(inputs), list(outputs)):
            raise ValueError(self.node.host.log())

    def enqueue(self, stream: int = 0) -> list[Tensor]:
        """Launch on a stream.

        Raises:
            ValueError: the node returned an error; with what it logged.
        """
        if self.node.host.calls.host_enqueue(*self._arguments, c_void_p(stream)):
            raise ValueError(self.node.host.log())
        return self.outputs

    def time_enqueue(self, stream: int, count: int) -> list[int]:
        """Nanoseconds that each of `count` calls took on the host."""
        taken = (c_int64 * count)()
        arguments = (*self._arguments, c_void_p(stream), taken, count)
        if self.node.host.calls.host_time_enqueue(*arguments):
            raise ValueError(self.node.host.log())
        return list(taken)
