# SPDX-License-Identifier: Apache-2.0
"""`model.yaml`: what it may say, and the one line for everything else."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoints import fuzz, json_values
from hypothesis import given

from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.triton import model_settings
from spin_trtllm.hosts.triton.model_settings import read_model_settings


def write(folder: Path, text: str, name: str = "model.yaml") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_defaults(tmp_path: Path) -> None:
    settings = read_model_settings(write(tmp_path, "model: DeepSeek-V4-Flash"))
    assert settings.llm_args == {"model": "DeepSeek-V4-Flash"}
    assert (settings.engine, settings.decoupled, settings.cancellation_check_ms) == (
        "auto",
        False,
        100,
    )
    assert (settings.max_active, settings.max_seq_len) == (64, None)
    assert settings.spin == SpinConfig()


def test_sections_are_no_llm_arguments(tmp_path: Path) -> None:
    text = (
        "{model: m, backend: pytorch, max_batch_size: 2, triton_config: {decoupled: true, "
        "cancellation_check_period_ms: 7}, spin: {engine: transformers, cpu_threads: 3, "
        "fingerprint: abc, settings: {seed: 5}}}"
    )
    settings = read_model_settings(write(tmp_path, text))
    assert settings.llm_args == {"model": "m", "backend": "pytorch", "max_batch_size": 2}
    assert (settings.decoupled, settings.cancellation_check_ms) == (True, 7)
    assert (settings.engine, settings.cpu_threads) == ("transformers", 3)
    assert (settings.fingerprint, settings.spin) == ("abc", SpinConfig(seed=5))


def test_upstreams_variable_names_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(write(tmp_path, "model: one"), "model: two", "other.yaml")
    monkeypatch.setenv("LLM_CONFIG_PATH", "other.yaml")
    assert read_model_settings(tmp_path).checkpoint == "two"


@pytest.mark.parametrize(("there", "engine"), [(None, "transformers"), (object(), "tensorrt_llm")])
def test_auto_takes_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: object, engine: str
) -> None:
    monkeypatch.setattr(model_settings.importlib.util, "find_spec", lambda name: there)
    assert read_model_settings(write(tmp_path, "model: m")).settled_engine() == engine
    text = "{model: m, spin: {engine: transformers}}"
    assert read_model_settings(write(tmp_path, text)).settled_engine() == "transformers"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "model.yaml: got 'NoneType', allowed: a YAML mapping"),
        ("- a", "model.yaml: got 'list', allowed: a YAML mapping"),
        ("model: [", "is not YAML: "),
        ("{}", "model: got None, allowed: the checkpoint's directory"),
        ("model: 3", "model: got 3, allowed: the checkpoint's directory"),
        ("{model: m, max_batch_size: 0}", "max_batch_size: got 0, allowed: an integer in 1 .. "),
        ("{model: m, max_seq_len: x}", "max_seq_len: got 'x', allowed: an integer in 1 .. "),
        ("{model: m, triton_config: 3}", "triton_config: got 'int', allowed: a YAML mapping"),
        ("{model: m, triton_config: {decouple: true}}", "triton_config: key: got 'decouple', "),
        ("{model: m, triton_config: {decoupled: 1}}", "decoupled: got 1, allowed: false, true"),
        ("{model: m, triton_config: {max_batch_size: 8}}", "max_batch_size: got 8, allowed: 0: "),
        ("{model: m, triton_config: {cancellation_check_period_ms: 0}}", "period_ms: got 0, "),
        ("{model: m, spin: {engine: vllm}}", "spin.engine: got 'vllm', allowed: auto, tensorrt"),
        ("{model: m, spin: {cpu_threads: true}}", "spin.cpu_threads: got True, allowed: an int"),
        ("{model: m, spin: {sparsity: 1}}", "spin: key: got 'sparsity', allowed: engine, cpu_"),
        ("{model: m, spin: {settings: {x: 1}}}", "spin.settings: field: got 'x', allowed: block"),
        ("{model: m, spin: {settings: {seed: -1}}}", "seed: got -1, allowed: an integer in 0 .."),
        ("# " + "x" * 2**20, "model.yaml: got 'a larger file', allowed: up to 1048576 bytes"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(SpinError) as refused:
        read_model_settings(write(tmp_path, text))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(SpinError, match=r"model.yaml: cannot read .*: No such file"):
        read_model_settings(tmp_path)


@fuzz
@given(values=json_values)
def test_any_values_are_read_or_refused(tmp_path: Path, values: object) -> None:
    write(tmp_path, json.dumps({"model": "m", "spin": values}))
    with suppress(SpinError):  # and nothing else
        read_model_settings(tmp_path)
