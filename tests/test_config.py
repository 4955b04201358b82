# SPDX-License-Identifier: Apache-2.0
"""`SpinConfig`: round trips, and one line for every value that it refuses."""

from __future__ import annotations

import sys
from dataclasses import FrozenInstanceError, asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import spin_trtllm
from spin_trtllm.config import SpinConfig, preset, preset_path
from spin_trtllm.errors import SpinError, refuse

NAN, INF = float("nan"), float("inf")
FIELDS = [field.name for field in fields(SpinConfig)]

# Written out rather than imported: these lists are the specification's.
CHOICES: dict[str, list[Any]] = {
    "block_size": [8, 16, 32, 64, 128],
    "pooling": ["max", "top4", "mean"],
    "reduction": ["A0", "A1", "A2"],
    "exploration_policy": ["none", "random", "staleness", "age"],
    "mask_policy": ["union", "row0"],
    "update_policy": ["prefix", "row0"],
    "state_dtype": ["fp32", "bf16", "log8"],
    "query_pooling": ["mean", "minmax"],
    "query_merge": ["split", "union", "max"],
    "backend": ["auto", "host", "fused"],
}

below_one = st.floats(0.0, 0.999999, allow_nan=False)
configs = st.fixed_dictionaries(
    {
        **{name: st.sampled_from(allowed) for name, allowed in CHOICES.items()},
        "target_sparsity": st.one_of(below_one, st.just(0)),
        "layer_sparsity": st.dictionaries(st.integers(0, 99), below_one, max_size=3),
        "ema_decay": st.one_of(st.floats(0.0, 1.0, exclude_max=True), st.just(5e-324)),
        "exploration": st.one_of(st.floats(0.0, 1.0), st.sampled_from((0, 1))),
        "query_share": st.one_of(st.floats(0.0, 1.0), st.sampled_from((0, 1))),
        "top_k": st.one_of(st.none(), st.integers(1, 2**20)),
        "seed": st.one_of(st.integers(0, 9), st.integers(0, 2**64 - 1), st.just(2**64 - 1)),
        "staleness_weight": st.one_of(
            st.floats(0.0, allow_infinity=False, allow_nan=False), st.integers(0, 2**53)
        ),
    }
)
quick = settings(max_examples=150, deadline=None, derandomize=True)


def refusal(**values: Any) -> str:
    """The message of a refused configuration, checked to be one line."""
    with pytest.raises(SpinError) as caught:
        SpinConfig(**values)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---------------------------------------------------------------- round trips
@quick
@given(values=configs)
def test_dict_round_trip(values: dict[str, Any]) -> None:
    config = SpinConfig(**values)
    written = config.to_dict()
    assert list(written) == FIELDS
    assert written == values  # equal as numbers: 0 and 0.0 are one
    assert SpinConfig.from_dict(written) == config
    assert hash(SpinConfig.from_dict(written)) == hash(config)


@quick
@given(values=configs)
def test_yaml_round_trip(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    config = SpinConfig(**values)
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert SpinConfig.from_yaml(path) == config
    assert yaml.safe_load(config.to_yaml()) == {"spin": values}


@quick
@given(values=configs)
def test_environment_round_trip(values: dict[str, Any]) -> None:
    config = SpinConfig(**values)
    environment = config.to_environment()
    assert set(environment) == {f"TLLM_SPIN_{name.upper()}" for name in FIELDS}
    assert all(isinstance(text, str) for text in environment.values())
    unrelated = {"PATH": "/bin", "TLLM_SPIN": "x", "SPIN_SEED": "x"}
    assert SpinConfig.from_environment({**unrelated, **environment}) == config


def test_environment_spelled_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_SPIN_TARGET_SPARSITY", "0.75")
    monkeypatch.setenv("TLLM_SPIN_BLOCK_SIZE", "32")
    monkeypatch.setenv("TLLM_SPIN_TOP_K", "null")
    monkeypatch.setenv("TLLM_SPIN_MASK_POLICY", "row0")
    config = SpinConfig.from_environment()
    assert config == SpinConfig(target_sparsity=0.75, block_size=32, mask_policy="row0")
    assert SpinConfig.from_environment({}) == SpinConfig()
    assert SpinConfig.from_environment({"TLLM_SPIN_TOP_K": "512"}).top_k == 512


@pytest.mark.parametrize(
    ("variable", "text", "allowed"),
    [
        ("TLLM_SPIN_TARGET_SPARSITY", "half", "a number"),
        ("TLLM_SPIN_EMA_DECAY", "", "a number"),
        ("TLLM_SPIN_EXPLORATION", "5%", "a number"),
        ("TLLM_SPIN_STALENESS_WEIGHT", "null", "a number"),
        ("TLLM_SPIN_BLOCK_SIZE", "64.0", "an integer"),
        ("TLLM_SPIN_SEED", "true", "an integer"),
        ("TLLM_SPIN_SEED", "0x10", "an integer"),
        ("TLLM_SPIN_TOP_K", "None", "an integer"),
    ],
)
def test_environment_text_of_the_wrong_kind(variable: str, text: str, allowed: str) -> None:
    with pytest.raises(SpinError) as caught:
        SpinConfig.from_environment({variable: text})
    assert str(caught.value) == f"{variable}: got {text!r}, allowed: {allowed}"


@pytest.mark.parametrize(
    ("variable", "text", "field"),
    [
        ("TLLM_SPIN_TARGET_SPARSITY", "nan", "target_sparsity"),
        ("TLLM_SPIN_STALENESS_WEIGHT", "inf", "staleness_weight"),
        ("TLLM_SPIN_BLOCK_SIZE", "63", "block_size"),
        ("TLLM_SPIN_SEED", "-1", "seed"),
        ("TLLM_SPIN_POOLING", "MAX", "pooling"),
    ],
)
def test_environment_value_out_of_range(variable: str, text: str, field: str) -> None:
    with pytest.raises(SpinError, match=rf"^{field}: got .*{text}.*, allowed: "):
        SpinConfig.from_environment({variable: text})


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(("field", "allowed"), CHOICES.items())
def test_choices(field: str, allowed: list[Any]) -> None:
    for value in allowed:
        assert getattr(SpinConfig(**{field: value}), field) == value
    names = ", ".join(map(str, allowed))
    wrong = [None, True, False, 0, 1, -1, 63, 64.0, 2**80, "", "64", "Max", "a1", NAN, [], {}]
    for value in [*wrong, allowed[-1:], (allowed[0],)]:
        assert refusal(**{field: value}) == f"{field}: got {value!r}, allowed: {names}"


@pytest.mark.parametrize(
    ("field", "allowed"),
    [
        ("target_sparsity", "a number in [0, 1)"),
        ("ema_decay", "a number in [0, 1)"),
        ("exploration", "a number in [0, 1]"),
        ("query_share", "a number in [0, 1]"),
    ],
)
def test_fractions(field: str, allowed: str) -> None:
    wrong = [None, True, False, "0.5", "", [0.5], {}, 1j, -1, 2, -1e-300, 1.0000001, NAN, INF, -INF]
    for value in wrong + ([] if allowed.endswith("1]") else [1, 1.0]):
        assert refusal(**{field: value}) == f"{field}: got {value!r}, allowed: {allowed}"
    for value in (0, 0.0, 0.5, 0.25) + ((1, 1.0) if allowed.endswith("1]") else ()):
        stored = getattr(SpinConfig(**{field: value}), field)
        assert stored == value
        assert type(stored) is float


def test_sparsity_that_rounds_up_to_one_is_refused() -> None:
    message = refusal(target_sparsity=0.9999996)
    assert message == "target_sparsity: got 0.9999996, allowed: a number in [0, 1) in steps of 1e-6"
    assert SpinConfig(target_sparsity=0.999999).sparsity_ppm == 999_999
    assert SpinConfig(ema_decay=0.9999999999).ema_decay == 0.9999999999


@pytest.mark.parametrize(("field", "low", "high"), [("top_k", 1, 2**20), ("seed", 0, 2**64 - 1)])
def test_integers(field: str, low: int, high: int) -> None:
    for value in (low, high):
        assert getattr(SpinConfig(**{field: value}), field) == value
    wrong = [True, False, low - 1, high + 1, -(2**70), 1.0, NAN, INF, "1", "", [1], {}, 1j]
    for value in wrong + ([None] if field == "seed" else []):
        expected = f"{field}: got {value!r}, allowed: an integer in {low} .. {high}"
        assert refusal(**{field: value}) == expected


def test_staleness_weight() -> None:
    for value in (None, True, False, -1, -1e-9, NAN, INF, -INF, "0.1", [0.1], {}):
        expected = f"staleness_weight: got {value!r}, allowed: a finite number >= 0"
        assert refusal(staleness_weight=value) == expected
    stored = SpinConfig(staleness_weight=3).staleness_weight
    assert (stored, type(stored)) == (3, float)


@pytest.mark.parametrize(
    "field",
    ["staleness_weight", "target_sparsity", "ema_decay", "exploration", "query_share"],
)
def test_an_integer_that_no_float_holds(field: str) -> None:
    start = f"{field}: got 1{'0' * 116}..., allowed: a "
    assert refusal(**{field: 10**400}).startswith(start)


@pytest.mark.parametrize("field", ["seed", "top_k"])
def test_an_integer_that_python_does_not_print(field: str) -> None:
    start = f"{field}: got int too long to print, allowed: an integer in "
    for value in (10**5000, -(10**5000)):
        assert refusal(**{field: value}).startswith(start)


@pytest.mark.parametrize("name", ["blocksize", "Seed", "spin", "", "__class__", "top-k"])
def test_unknown_fields_are_refused_by_name(name: str) -> None:
    with pytest.raises(SpinError) as caught:
        SpinConfig.from_dict({"seed": 1, name: 64}, source="here")
    assert str(caught.value) == f"here: field: got {name!r}, allowed: {', '.join(FIELDS)}"


def test_long_values_are_shortened_and_stay_on_one_line() -> None:
    message = refusal(pooling="x\n" * 5000)
    assert len(message) < 200
    assert message.startswith("pooling: got 'x\\nx\\n")
    assert message.endswith("..., allowed: max, top4, mean")
    with pytest.raises(SpinError, match=r"^name: got 'given', allowed: this$"):
        refuse("name", "given", "this")
    with pytest.raises(ValueError, match=r"^name: "):  # callers may catch the built-in
        refuse("name", 1, "2")


# ---------------------------------------------------------------- what is derived
def test_a_configuration_cannot_change() -> None:
    config = SpinConfig()
    for name in FIELDS:
        with pytest.raises(FrozenInstanceError):
            setattr(config, name, getattr(config, name))
    with pytest.raises(FrozenInstanceError):
        del config.seed  # type: ignore[misc]
    assert asdict(config) == asdict(SpinConfig())


def test_defaults_are_the_papers() -> None:
    config = SpinConfig()
    assert (config.block_size, config.ema_decay, config.exploration) == (64, 0.5, 0.05)
    assert (config.pooling, config.reduction, config.exploration_policy) == ("max", "A1", "random")
    assert (config.mask_policy, config.update_policy) == ("union", "prefix")
    assert (config.top_k, config.seed, config.state_dtype) == (None, 0, "fp32")


def test_parts_per_million() -> None:
    config = SpinConfig(target_sparsity=0.4, exploration=0.05)
    assert (config.sparsity_ppm, config.exploration_ppm) == (400_000, 50_000)
    assert SpinConfig(exploration=1.0).exploration_ppm == 1_000_000
    assert SpinConfig(exploration=0.3, exploration_policy="none").exploration_ppm == 0
    assert SpinConfig(exploration=0.3, exploration_policy="age").exploration_ppm == 300_000


def test_top_k_is_settled_once() -> None:
    settled = SpinConfig(seed=3).with_top_k(512)
    assert settled == SpinConfig(seed=3, top_k=512)
    assert settled.with_top_k(1024) is settled
    with pytest.raises(SpinError, match=r"^top_k: got 0, allowed: "):
        SpinConfig().with_top_k(0)


def test_storage_dtypes() -> None:
    assert SpinConfig(state_dtype="fp32").storage_dtype is torch.float32
    assert SpinConfig(state_dtype="bf16").storage_dtype is torch.bfloat16
    assert SpinConfig(state_dtype="log8").storage_dtype is torch.int8


# ---------------------------------------------------------------- YAML files
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("# nothing but a comment\n", {}),
        ("spin:\n", {}),
        ("spin: {}\n", {}),
        ("seed: 3\nblock_size: 8\n", {"seed": 3, "block_size": 8}),
        ("spin:\n  seed: 3\n  top_k: null\n", {"seed": 3}),
        ("target_sparsity: 0\n", {"target_sparsity": 0.0}),
        ("seed: 0x10\n", {"seed": 16}),
        ("\ufeffseed: 3\n", {"seed": 3}),
    ],
)
def test_yaml_shapes(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "spin.yaml"
    path.write_text(text, encoding="utf-8")
    assert SpinConfig.from_yaml(path) == SpinConfig(**expected)
    assert SpinConfig.from_yaml(str(path)) == SpinConfig(**expected)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"- 1\n- 2\n", ["got 'list'", "a YAML mapping"]),
        (b"just text", ["got 'str'", "a YAML mapping"]),
        (b"spin: 5\n", ["got 'int'", "a YAML mapping"]),
        (b"false\n", ["got 'bool'", "a YAML mapping"]),
        (b"spin: {seed: 1}\nseed: 2\n", ["field: got 'spin'"]),
        (b"1: 2\n", ["field: got 1,"]),
        (b"null: 2\n", ["field: got None,"]),
        (b"seed: [unclosed\n", ["is not valid YAML", "line 2"]),
        (b"seed: 1\n  pooling: max\n", ["is not valid YAML"]),
        (b"\tseed: 1\n", ["is not valid YAML"]),
        (b"seed: !!python/object:os.system x\n", ["is not valid YAML"]),
        (b"? [a]\n: 1\n? {b: c}\n: 1\n", ["is not valid YAML"]),
        (b"seed: 1\x00\n", ["is not valid YAML"]),
        (b"\xff\xfe\x00binary\x80", ["not UTF-8 text"]),
        (b"seed: 1\nseed: 2\n", ["is not valid YAML", "key 'seed' for the second", "line 2"]),
        (b"spin:\n  layer_sparsity: {3: 0.1, 3: 0.2}\n", ["key '3' for the second time"]),
        (b"seed: yes\n", ["seed: got True"]),
        (b"seed: '1'\n", ["seed: got '1'"]),
        (b"target_sparsity: .nan\n", ["target_sparsity: got nan"]),
        (b"target_sparsity: 40%\n", ["target_sparsity: got '40%'"]),
        ("pooling: größte\n".encode(), ["pooling: got 'größte'", "max, top4, mean"]),
        (b"block_size: 64.0\n", ["block_size: got 64.0"]),
        (b"seed: 1111-22-33\n", ["is not valid YAML"]),  # a date, and none
        (b"seed: !!int abc\n", ["is not valid YAML"]),
        (b'seed: !!timestamp "abc"\n', ["is not valid YAML"]),
        (b"seed: " + b"9" * 5000 + b"\n", ["is not valid YAML"]),
        (b"seed: 0x" + b"f" * 5000 + b"\n", ["seed: got int too long to print"]),
        (b"? 0x" + b"f" * 5000 + b"\n: 1\n", ["field: got int too long to print"]),
        (b"# " + b"x" * 2**20 + b"\nseed: 1\n", ["got 'a larger file'"]),
        (
            b"seed:\n- &a0 [1, 1]\n"
            + b"".join(
                b"- &a%d [%s]\n" % (n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 12)
            ),
            ["seed: got [[1, 1], ["],
        ),
        (b"seed: " + b"[" * 5000 + b"]" * 5000 + b"\n", ["is not valid YAML"]),
    ],
)
def test_yaml_refusals(content: bytes, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "spin.yaml"
    path.write_bytes(content)
    with pytest.raises(SpinError) as caught:
        SpinConfig.from_yaml(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_yaml_over_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "spin.yaml"
    path.write_text("{target_sparsity: 0.5, seed: 3}")
    base = SpinConfig(block_size=16, target_sparsity=0.2, state_dtype="bf16")
    assert base.with_yaml(path) == replace(base, target_sparsity=0.5, seed=3)
    path.write_text("block_sise: 8")
    with pytest.raises(
        SpinError, match=r"spin\.yaml: field: got 'block_sise', allowed: block_size"
    ):
        base.with_yaml(path)


def test_yaml_that_cannot_be_read(tmp_path: Path) -> None:
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    for path, reason in [
        (tmp_path / "absent.yaml", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (loop, "Too many levels of symbolic links"),
        ("", "No such file or directory"),
    ]:
        with pytest.raises(SpinError) as caught:
            SpinConfig.from_yaml(path)
        assert str(caught.value) == f"spin_config: cannot read {str(path)!r}: {reason}"


@pytest.mark.skipif(sys.platform != "linux", reason="devices and limits of Linux")
def test_yaml_from_a_device_without_an_end() -> None:
    import resource

    words = Path("/proc/self/statm").read_text().split()
    before = resource.getrlimit(resource.RLIMIT_AS)
    room = int(words[0]) * resource.getpagesize() + 2**30
    resource.setrlimit(resource.RLIMIT_AS, (room, before[1]))
    try:
        with pytest.raises(SpinError, match=r"^spin_config: /dev/zero: got 'a larger file'"):
            SpinConfig.from_yaml("/dev/zero")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# ---------------------------------------------------------------- presets
ROOT = Path(spin_trtllm.__file__).parents[1]
PRESETS = sorted((ROOT / "build_configs").glob("*.yaml"))


def test_presets_exist() -> None:
    assert {p.stem for p in PRESETS} >= {
        "deepseek-v4-flash",
        "deepseek-v4-pro",
        "deepseek-v3.2",
        "tiny-deepseek-v4",
    }


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_every_preset_loads(path: Path) -> None:
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    config = preset(path.stem)
    assert preset_path(path.stem).read_bytes() == path.read_bytes()
    assert raw["spin"]
    for name, value in raw["spin"].items():
        assert getattr(config, name) == value
    assert config.reduction == "A1"
    assert config.exploration_policy == "random"


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(SpinError) as caught:
        preset("deepseek-v5")
    known = ", ".join(sorted({p.stem for p in PRESETS}))
    assert str(caught.value) == f"preset: got 'deepseek-v5', allowed: {known}"
