# SPDX-License-Identifier: Apache-2.0
"""Fields of the TensorRT nodes: what is taken, what is refused, and what an engine keeps."""

from __future__ import annotations

import locale
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugin_cases import FIELDS
from plugin_host import (
    FIELD_FLOAT32,
    FIELD_FLOAT64,
    FIELD_INT32,
    FIELD_INT64,
    NODES,
    Host,
    Typed,
    find_host,
)

HOST = find_host()
pytestmark = pytest.mark.skipif(HOST is None, reason="the plugin or its host cannot be built here")
DEFAULTS = {
    "block_size": 64,
    "page_slots": 64,
    "sparsity_ppm": 400_000,
    "exploration_ppm": 50_000,
    "seed": 0,
    "pooling": 0,
    "row0_mask": 0,
    "ema_decay": 0.5,
    "row0_update": 0,
    "exact": 1,
    "aliased": 1,
}
REQUIRED = {node: set(fields) for node, fields in FIELDS.items()}


def host() -> Host:
    assert HOST is not None
    return HOST


def fields_of(node: str, *extra: tuple[str, Any], **changes: Any) -> dict[str, Any]:
    made = host().create(node, *extra, **{**FIELDS[node], **changes})
    assert made is not None, host().log()
    return made.fields()


@pytest.mark.parametrize("node", NODES)
def test_defaults_fill_what_is_not_given(node: str) -> None:
    names = host().field_names(node)
    assert REQUIRED[node] < set(names) <= REQUIRED[node] | set(DEFAULTS)
    assert fields_of(node) == {n: FIELDS[node].get(n, DEFAULTS.get(n)) for n in names}


@pytest.mark.parametrize("node", NODES)
def test_a_required_field_that_is_missing_is_named(node: str) -> None:
    for missing in REQUIRED[node]:
        given_fields = {n: v for n, v in FIELDS[node].items() if n != missing}
        assert host().create(node, **given_fields) is None
        assert host().log().startswith(f"{node}: {missing}: got nothing, allowed: ")


OTHERS = {
    "ratio": 2,
    "slots": 5000,
    "top_k": 1024,
    "layer": 60,
    "block_size": 128,
    "page_slots": 32,
    "sparsity_ppm": 999_999,
    "exploration_ppm": 0,
    "seed": -(2**63),
    "pooling": 2,
    "row0_mask": 1,
    "ema_decay": 0.7,
    "row0_update": 1,
    "exact": 0,
    "aliased": 0,
}


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("times", [1, 3])
def test_an_engine_keeps_every_field(node: str, times: int) -> None:
    fields = {n: OTHERS[n] for n in host().field_names(node)}
    made = host().create(node, **fields)
    assert made is not None
    for _ in range(times):
        made = made.reload()
    assert made.fields() == made.clone().fields() == made.attach().fields() == fields


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ratio", 0),
        ("ratio", 2**20 + 1),
        ("ratio", 4.0),
        ("ratio", "four"),
        ("ratio", "4 "),
        ("ratio", ""),
        ("ratio", Typed(FIELD_INT32, 4, 4)),
        ("ratio", Typed(FIELD_INT64)),
        ("ratio", Typed(FIELD_FLOAT32, 4.0)),
        ("slots", 0),
        ("slots", 2**62),
        ("top_k", 2049),
        ("layer", -1),
        ("layer", 1024),
        ("block_size", 8),
        ("block_size", 48),
        ("page_slots", 128),
        ("sparsity_ppm", 1_000_000),
        ("exploration_ppm", 1_000_001),
        ("seed", 2.0),
        ("seed", "18446744073709551616"),
        ("pooling", 3),
        ("row0_mask", 2),
        ("row0_update", -1),
        ("ema_decay", 1.0),
        ("ema_decay", -0.1),
        ("ema_decay", math.nan),
        ("ema_decay", math.inf),
        ("ema_decay", "nan"),
        ("ema_decay", ""),
        ("ema_decay", " 0.5"),
        ("ema_decay", "0.5 "),
        ("ema_decay", "+0.5"),
        ("ema_decay", "0,5"),
        ("ema_decay", "0x1p-1"),
        ("ema_decay", "0.5f"),
        ("ema_decay", "1e-1e"),
        ("ema_decay", "1e-400"),
        ("ema_decay", "0.5\0.5"),
        ("ema_decay", "0." + "5" * 1000),
        ("ema_decay", Typed(FIELD_INT32, 0)),
        ("ema_decay", Typed(FIELD_FLOAT32, math.nan)),
        ("exact", 2),
        ("aliased", 2),
    ],
)
def test_a_bad_field_is_refused_on_one_line(name: str, value: Any) -> None:
    assert host().create("SpinIndexer", **{**FIELDS["SpinIndexer"], name: value}) is None
    line = host().log()
    assert line.startswith(f"SpinIndexer: {name}: got ")
    assert ", allowed: " in line
    assert line.endswith("\n")
    assert line.count("\n") == 1


def test_capacity_is_limited_by_blocks() -> None:
    node = "SpinIndexer"
    assert fields_of(node, slots=16_384 * 16, block_size=16)["slots"] == 2**18
    fields = {**FIELDS[node], "slots": 16_384 * 16 + 1, "block_size": 16}
    assert host().create(node, **fields) is None
    assert host().log() == f"{node}: slots: got 262145, allowed: 1 .. 16384 * block_size\n"


@pytest.mark.parametrize("node", NODES)
def test_unknown_and_repeated_fields_are_refused(node: str) -> None:
    known = ", ".join(host().field_names(node))
    assert host().create(node, **FIELDS[node], blocksize=64) is None
    assert host().log() == f"{node}: field: got blocksize, allowed: {known}\n"
    assert host().create(node, ("a\nb\x1b", 1), **FIELDS[node]) is None
    assert host().log() == f"{node}: field: got a?b?, allowed: {known}\n"
    assert host().create(node, ("slots", 1000), **FIELDS[node]) is None
    assert host().log().startswith(f"{node}: slots: got it twice, allowed: ")


def test_fields_of_another_node_are_unknown() -> None:
    assert host().create("SpinObserve", **FIELDS["SpinObserve"], top_k=512) is None
    assert host().log().startswith("SpinObserve: field: got top_k")


def test_pages_larger_than_blocks_are_refused_where_pages_are_listed() -> None:
    small = {"block_size": 32, "page_slots": 64}
    assert fields_of("SpinIndexer", **small)["page_slots"] == 64
    assert host().create("SpinPredictBlocks", **FIELDS["SpinPredictBlocks"], **small) is None
    wanted = "SpinPredictBlocks: page_slots: got 64, allowed: at most block_size = 32\n"
    assert host().log() == wanted


@given(st.integers(0, 2**64 - 1))
def test_a_seed_has_64_bits_as_text_or_number(seed: int) -> None:
    signed = seed - 2**64 if seed >= 2**63 else seed
    assert fields_of("SpinIndexer", seed=str(seed))["seed"] == signed
    assert fields_of("SpinIndexer", seed=Typed(FIELD_INT64, signed))["seed"] == signed


@given(st.floats(0, 1, exclude_max=True))
def test_a_decay_is_kept_exactly(decay: float) -> None:
    assert fields_of("SpinObserve", ema_decay=decay)["ema_decay"] == decay
    assert fields_of("SpinObserve", ema_decay=repr(decay))["ema_decay"] == decay


@pytest.mark.parametrize("text", [".5", "5e-1", "5.0E-1", "0.50000", "0005e-001", "-0.0", "0e-999"])
def test_a_decay_is_a_decimal(text: str) -> None:
    assert fields_of("SpinObserve", ema_decay=text)["ema_decay"] == float(text)


@pytest.fixture
def decimal_comma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process in a locale whose numbers have a decimal comma."""
    definition = tmp_path / "comma.src"
    definition.write_text(
        'LC_NUMERIC\ndecimal_point "<U002C>"\nthousands_sep ""\ngrouping -1\nEND LC_NUMERIC\n'
    )
    localedef = shutil.which("localedef")
    if localedef is None:
        pytest.skip("there is no localedef")
    command = [localedef, "-c", "-i", definition, tmp_path / "comma"]
    subprocess.run(command, capture_output=True)  # 1 says that other categories are missing
    monkeypatch.setenv("LOCPATH", str(tmp_path))
    old = locale.setlocale(locale.LC_NUMERIC)
    locale.setlocale(locale.LC_NUMERIC, "comma")
    yield
    locale.setlocale(locale.LC_NUMERIC, old)


@pytest.mark.usefixtures("decimal_comma")
def test_a_decay_is_read_alike_in_every_locale() -> None:
    """What an engine says is the same everywhere, and so is the log."""
    assert locale.localeconv()["decimal_point"] == ","
    assert fields_of("SpinObserve", ema_decay="0.7")["ema_decay"] == 0.7
    assert fields_of("SpinObserve", ema_decay=Typed(FIELD_FLOAT32, 0.7))["ema_decay"] == 0.7
    for decay, shown in (("0,7", "text '0,7'"), (1.5, "1.5")):
        assert host().create("SpinObserve", **FIELDS["SpinObserve"], ema_decay=decay) is None
        assert f": got {shown}, allowed: " in host().log()


@given(st.floats(0, 1, exclude_max=True, width=32))
def test_a_decay_of_32_bits_has_these_bits(decay: float) -> None:
    read = fields_of("SpinObserve", ema_decay=Typed(FIELD_FLOAT32, decay))["ema_decay"]
    assert np.float32(read) == decay


@given(st.integers(0, 99_999))
def test_a_decay_of_32_bits_is_the_decimal_that_was_meant(hundred_thousandths: int) -> None:
    decay = hundred_thousandths / 100_000
    given_decay = Typed(FIELD_FLOAT32, decay)
    assert fields_of("SpinObserve", ema_decay=given_decay)["ema_decay"] == decay


@pytest.mark.parametrize("kind", [FIELD_INT32, FIELD_INT64])
def test_integers_come_in_both_widths(kind: int) -> None:
    assert fields_of("SpinObserve", ratio=Typed(kind, 2), slots="640")["slots"] == 640
    double = Typed(FIELD_FLOAT64, 0.25)
    assert fields_of("SpinObserve", ema_decay=double)["ema_decay"] == 0.25
