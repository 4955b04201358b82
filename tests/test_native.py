# SPDX-License-Identifier: Apache-2.0
"""The kernel library without a GPU: it is built, exports its interface, and refuses by field."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from spin_trtllm import native
from spin_trtllm.errors import SpinError

ROOT = Path(__file__).parents[1]
HEADERS = ROOT / "plugins" / "include"
STEMS = (
    *("predict_blocks", "select_blocks", "topk_slots", "observe_scores"),
    *("adopt_scores", "advance"),
)
NULL, RANGE, ALIGNMENT, UNSUPPORTED, CUDA = 1, 2, 3, 4, 5
WHEEL_INCLUDE = "lib/python*/site-packages/nvidia/cu*/include"  # of requirements/cuda.txt
SOMEWHERE = 0x7F00_0000_0000  # aligned, never dereferenced: every check comes before the launch


def cuda_include() -> Path | None:
    nvcc = shutil.which("nvcc")
    places = [Path("/usr/local/cuda/include"), *Path(sys.prefix).glob(WHEEL_INCLUDE)]
    if nvcc:
        places.append(Path(nvcc).resolve().parents[1] / "include")
    return next((p for p in places if (p / "cuda_runtime_api.h").is_file()), None)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    if native.library_path() is None:
        if shutil.which("nvcc") is None:
            pytest.skip("no CUDA compiler (nvcc) and no built library")
        subprocess.run(["make", "-j2", "kernels"], cwd=ROOT, check=True)
    return native.load()


@pytest.fixture
def c_compiler() -> list[str]:
    include, compiler = cuda_include(), shutil.which("cc")
    if include is None or compiler is None:
        pytest.skip("no C compiler or no CUDA headers")
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", f"-I{HEADERS}", f"-isystem{include}"]
    return [compiler, *flags]


def good(stem: str) -> dict[str, Any]:
    """Arguments that pass every check of a stem."""
    pointers = {
        name: SOMEWHERE
        for kind, names in native._FIELDS[stem]
        if kind == "p"
        for name in names.split()
    }
    slots = 1000
    numbers: dict[str, Any] = {
        "slots": slots,
        "v_stride": slots,
        "d_stride": slots + 8,
        "v_layer_stride": 4 * slots,
        "d_layer_stride": 4 * slots + 32,
        "tile_stride": 256,
        "host_stride": 1000,
        "host_columns": 900,
        "host_rows": 1,
        "score_stride": 1024,
        "entries": 4,
        "sequences": 2,
        "rows": 2,
        "blocks": 16,
        "ratio": 4,
        "block_size": 64,
        "tiles": 4,
        "lanes_total": 8,
        "lane_stride": 4,
        "top_k": 512,
        "sparsity_ppm": 400_000,
        "layer_entries": 2,
        "page_table_stride": 20,
        "page_table_width": 20,
        "compact_pages_stride": 20,
        "page_slots": 64,
        "decay": 0.5,
        "gain": 0.5,
    }
    fields = {name for name, _ in native.params_struct(stem)._fields_}
    return {**pointers, **{k: v for k, v in numbers.items() if k in fields}}


def status(library: ctypes.CDLL, stem: str, **values: Any) -> tuple[int, str]:
    params = native.pack(stem, **values)
    code = getattr(library, f"spin_{stem}")(ctypes.byref(params), None)
    return code, library.spin_error_string(code).decode()


def test_headers_are_plain_c(c_compiler: list[str], tmp_path: Path) -> None:
    source = tmp_path / "use.c"
    source.write_text('#include "spin/spin.h"\nint main(void) { return SPIN_OK; }\n')
    subprocess.run([*c_compiler, "-c", str(source), "-o", str(tmp_path / "use.o")], check=True)


def test_structs_have_the_layout_of_the_headers(c_compiler: list[str], tmp_path: Path) -> None:
    lines, expected = [], []
    for stem in (*STEMS, "score_slots", "quantize_query"):
        struct = native.params_struct(stem)
        name = "Spin" + "".join(part.title() for part in stem.split("_")) + "Params"
        lines.append(f'printf("%zu\\n", sizeof({name}));')
        expected.append(ctypes.sizeof(struct))
        for field, _ in struct._fields_:
            lines.append(f'printf("%zu\\n", offsetof({name}, {field}));')
            expected.append(getattr(struct, field).offset)
    source = tmp_path / "layout.c"
    body = "\n    ".join(lines)
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "spin/spin.h"\n'
        f"int main(void) {{\n    {body}\n    return 0;\n}}\n"
    )
    program = tmp_path / "layout"
    subprocess.run([*c_compiler, str(source), "-o", str(program)], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert [int(line) for line in printed.split()] == expected


def test_version_is_that_of_the_headers(library: ctypes.CDLL) -> None:
    text = (HEADERS / "spin" / "common.h").read_text()
    found = re.search(r"#define SPIN_VERSION (\d+)", text)
    assert found is not None
    assert int(found[1]) == native.VERSION == library.spin_version()


def test_exports_are_the_interface_and_nothing_else(library: ctypes.CDLL) -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm")
    path = str(native.library_path())
    listed = subprocess.run([nm, "-D", "--defined-only", path], capture_output=True, text=True)
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    stems = {h.stem for h in (HEADERS / "spin").glob("*.h")} - {"common", "spin"}
    wanted = {f"spin_{stem}" for stem in stems} | {"spin_version", "spin_error_string"}
    assert {n for n in names if n.startswith("spin_")} == wanted
    assert not {n for n in names if "spin" in n} - wanted


@pytest.mark.parametrize("stem", STEMS)
def test_null_params_are_refused(library: ctypes.CDLL, stem: str) -> None:
    assert getattr(library, f"spin_{stem}")(None, None) == NULL


@pytest.mark.parametrize("stem", STEMS)
def test_a_struct_of_another_size_is_refused(library: ctypes.CDLL, stem: str) -> None:
    params = native.pack(stem, **good(stem))
    params.struct_bytes += 8
    assert getattr(library, f"spin_{stem}")(ctypes.byref(params), None) == RANGE
    assert b"struct_bytes" in library.spin_error_string(RANGE)


@pytest.mark.parametrize("stem", STEMS)
def test_no_entries_is_legal_and_launches_nothing(library: ctypes.CDLL, stem: str) -> None:
    assert status(library, stem, entries=0) == (0, "ok")


OPTIONAL = {
    "select_blocks": {
        *("layer_sparsity_ppm", "page_table", "compact_pages", "visible_slots", "block_mask"),
        *("row_masks", "explored_mask", "places", "lanes", "tenants"),
    },
    "topk_slots": {"block_list", "places"},
    "adopt_scores": {"columns"},
    "advance": {"lane_slots", "tenants"},
}


@pytest.mark.parametrize("stem", STEMS)
def test_each_required_pointer_is_named(library: ctypes.CDLL, stem: str) -> None:
    values = good(stem)
    for name, value in values.items():
        if value == SOMEWHERE and name not in OPTIONAL.get(stem, set()):
            code, text = status(library, stem, **{**values, name: None})
            assert (code, text.split(":")[0]) == (NULL, name)


@pytest.mark.parametrize(
    ("stem", "field", "value", "expected"),
    [
        ("predict_blocks", "rows", 9, RANGE),
        ("predict_blocks", "slots", 0, RANGE),
        ("predict_blocks", "block_size", 48, UNSUPPORTED),
        ("predict_blocks", "pooling", 3, RANGE),
        ("predict_blocks", "d_stride", 1000, RANGE),
        ("predict_blocks", "blocks", 15, RANGE),
        ("predict_blocks", "state_dtype", 2, UNSUPPORTED),
        ("predict_blocks", "lane_stride", 0, RANGE),
        ("select_blocks", "blocks", 16385, RANGE),
        ("select_blocks", "sparsity_ppm", 1_000_000, RANGE),
        ("select_blocks", "exploration_ppm", -1, RANGE),
        ("select_blocks", "page_slots", 16, UNSUPPORTED),
        ("select_blocks", "page_table_width", 21, RANGE),
        ("select_blocks", "tile_blocks", 5, RANGE),
        ("select_blocks", "places", 0x7F00_0000_0004, ALIGNMENT),
        ("select_blocks", "layer_sparsity_ppm", 0x7F00_0000_0002, ALIGNMENT),
        ("select_blocks", "lane_waits", None, NULL),
        ("select_blocks", "lane_stride", 0, RANGE),
        ("select_blocks", "lane_stride", 5, RANGE),  # of two layers, in 8 lanes
        ("select_blocks", "lanes_total", 1 << 31, RANGE),
        ("select_blocks", "tenants", 0x7F00_0000_0004, ALIGNMENT),
        ("topk_slots", "top_k", 2049, RANGE),
        ("topk_slots", "top_k", 0, RANGE),
        ("topk_slots", "score_stride", 1020, ALIGNMENT),
        ("topk_slots", "scores", 0x7F00_0000_0008, ALIGNMENT),
        ("observe_scores", "v_stride", 1004, ALIGNMENT),
        ("observe_scores", "d", 0x7F00_0000_0002, ALIGNMENT),
        ("observe_scores", "entries", -1, RANGE),
        ("observe_scores", "lanes_total", 0, RANGE),
        ("advance", "sequences", 3, RANGE),
        ("advance", "tiles", 2, RANGE),
        ("advance", "ratio", 0, RANGE),
        ("advance", "score_stride", 1016, ALIGNMENT),
        ("advance", "lane_stride", 0, RANGE),
        ("advance", "lane_stride", 5, RANGE),
        ("advance", "lanes_total", 1 << 31, RANGE),
        ("advance", "v_layer_stride", 4, ALIGNMENT),
        ("advance", "d_layer_stride", -8, ALIGNMENT),
        ("advance", "tile_stride", 248, ALIGNMENT),
        ("advance", "lane_slots", 0x7F00_0000_0004, ALIGNMENT),
        ("topk_slots", "places", 0x7F00_0000_0004, ALIGNMENT),
        ("adopt_scores", "host_rows", 3, RANGE),
        ("adopt_scores", "host_columns", 1001, RANGE),
        ("adopt_scores", "score_stride", 1020, ALIGNMENT),
        ("adopt_scores", "places", 0x7F00_0000_0004, ALIGNMENT),
        ("adopt_scores", "top_k", 0, RANGE),
    ],
)
def test_a_bad_argument_is_named(
    library: ctypes.CDLL, stem: str, field: str, value: int, expected: int
) -> None:
    code, text = status(library, stem, **{**good(stem), field: value})
    assert (code, text.split(":")[0]) == (expected, field)


def test_pages_larger_than_a_block_are_refused(library: ctypes.CDLL) -> None:
    values = {**good("select_blocks"), "block_size": 32, "blocks": 32}
    assert status(library, "select_blocks", **values)[0] == UNSUPPORTED


def test_one_layer_may_be_a_number(library: ctypes.CDLL) -> None:
    values = {**good("select_blocks"), "layers": None, "layer_entries": 4, "layer": -1}
    code, text = status(library, "select_blocks", **values)
    assert (code, text.split(":")[0]) == (RANGE, "layer")


@pytest.mark.parametrize(
    ("stem", "names"),
    [
        ("advance", ("tenants", "lane_tenant", "lane_slots")),
        ("select_blocks", ("tenants", "lane_tenant", "lanes")),
    ],
)
def test_tenants_and_growing_lanes_are_optional(
    library: ctypes.CDLL, stem: str, names: tuple[str, ...]
) -> None:
    values = {**good(stem), **dict.fromkeys(names), "rows": 9}  # the only thing to refuse
    code, text = status(library, stem, **values)
    assert (code, text.split(":")[0]) == (RANGE, "rows")


def test_the_call_wrapper_raises_with_the_field(library: ctypes.CDLL) -> None:
    with pytest.raises(SpinError, match=r"^spin_topk_slots: scores: allowed: not null$"):
        native.call("topk_slots", 0, entries=1)


def test_tensors_stand_for_their_addresses() -> None:
    scores = torch.zeros(8)
    assert native.pack("topk_slots", scores=scores).scores == scores.data_ptr()


def test_the_environment_overrides_the_search(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = tmp_path / "libspin.so"
    monkeypatch.setenv("SPIN_LIBRARY", str(wrong))
    assert native.search_paths() == [wrong]
    assert not native.has_library()
    with pytest.raises(SpinError, match="not found"):
        native.load()
    wrong.write_text("not a library")
    with pytest.raises(SpinError, match="not a loadable SPIN library"):
        native.load()


def test_the_library_is_searched_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, searches = tmp_path / "libspin.so", []
    file.touch()

    def search() -> list[Path]:
        searches.append(file)
        return [file]

    monkeypatch.setattr(native, "search_paths", search)
    monkeypatch.setattr(native, "_load", lambda _: "a library")
    monkeypatch.setattr(native, "_found", {})
    assert native.load() == native.load() == "a library"
    assert len(searches) == 1


def test_a_cpu_is_not_supported() -> None:
    assert not native.supports("cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="builds for Linux only")
def test_a_launch_without_a_device_reports_cuda(library: ctypes.CDLL) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device, and these addresses are not its own")
    assert status(library, "topk_slots", **good("topk_slots"))[0] == CUDA
