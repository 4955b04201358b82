# SPDX-License-Identifier: Apache-2.0
"""The engine directory: what is in it, that it loads, and that its run.sh serves."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoints import FLASH, PRO, TINY, V32, checkpoint_dir, fuzz, json_values
from hypothesis import given
from hypothesis import strategies as st

from spin_trtllm.build.checkpoint import read_checkpoint
from spin_trtllm.build.engine import ENGINE_FILES, load_engine
from spin_trtllm.build.pipeline import BuildRequest, build
from spin_trtllm.build.progress import Stages
from spin_trtllm.build.spin_settings import preset_for
from spin_trtllm.config import SpinConfig, preset
from spin_trtllm.errors import SpinError


def make(checkpoint: Path, **changes: Any) -> Path:
    """Build `engine` beside a checkpoint and return its directory."""
    request: dict[str, Any] = {
        "checkpoint_dir": str(checkpoint),
        "output_dir": str(checkpoint.parent / "engine"),
        "spin_config": None,
        "spin_preset": None,
        "overrides": {},
        "target_sm": "90",
        "max_batch_size": 64,
        "max_seq_len": None,
        "dry_run": False,
        "force": False,
    }
    wanted = BuildRequest(**(request | changes))
    return build(wanted, Stages(wanted.stages, io.StringIO())).output


def test_an_engine_is_built_and_loaded(tmp_path: Path) -> None:
    model = checkpoint_dir(tmp_path)
    overrides = {"target_sparsity": 0.5, "seed": None}
    path = make(model, max_batch_size=8, max_seq_len=4096, overrides=overrides)
    assert sorted(os.listdir(path)) == sorted(ENGINE_FILES)
    engine = load_engine(path)
    assert engine.geometry == read_checkpoint(model).geometry
    assert engine.config == SpinConfig(target_sparsity=0.5, top_k=512, state_dtype="bf16")
    assert SpinConfig.from_yaml(path / "spin.yaml") == engine.config
    assert (engine.max_batch_size, engine.max_seq_len, engine.max_slots) == (8, 4096, 1024)
    assert (engine.target_sm, engine.checkpoint.name) == (90, "model")
    assert engine.versions["torch"] == torch.__version__


def test_the_embedded_model_gets_its_preset(tmp_path: Path) -> None:
    engine = load_engine(make(TINY, output_dir=str(tmp_path / "engine")))
    assert engine.config == preset("tiny-deepseek-v4").with_top_k(64)
    assert engine.check_checkpoint(TINY).geometry == engine.geometry


@pytest.mark.parametrize(
    ("config", "name"),
    [(FLASH, "deepseek-v4-flash"), (PRO, "deepseek-v4-pro"), (V32, "deepseek-v3.2")],
)
def test_the_checkpoint_chooses_the_preset(
    tmp_path: Path, config: dict[str, Any], name: str
) -> None:
    assert preset_for(read_checkpoint(checkpoint_dir(tmp_path, config))) == name


def test_an_engine_and_its_checkpoint_may_move(tmp_path: Path) -> None:
    model = checkpoint_dir(tmp_path)
    make(model).rename(tmp_path / "moved")
    model.rename(tmp_path / "away")
    engine = load_engine(tmp_path / "moved")
    assert engine.check_checkpoint(tmp_path / "away").path == tmp_path / "away"
    with pytest.raises(SpinError, match=r"checkpoint_dir: got 'other \(sha256:.*allowed: model"):
        engine.check_checkpoint(checkpoint_dir(tmp_path, PRO, "other"))


def edit(path: Path, change: Any) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda v: v.pop("format"), "allowed: a directory written by trtllm-build --use_spin"),
        (lambda v: v.update(schema_version=2), "schema_version: got 2, allowed: up to 1"),
        (lambda v: v.update(schema_version="1"), "schema_version: got '1'"),
        (lambda v: v.pop("spin"), "spin: got None, allowed: a JSON object"),
        (lambda v: v["spin"].update(rho=1), "engine_dir: spin: field: got 'rho'"),
        (lambda v: v["spin"].update(block_size=48), "block_size: got 48"),
        (lambda v: v["spin"].update(top_k=9), "spin.top_k: got 9, allowed: 512"),
        (lambda v: v["geometry"].update(layers=[]), "layers: got []"),
        (lambda v: v["geometry"].update(layers=[4, 2]), "layers: got [4, 2]"),
        (lambda v: v["geometry"].update(layers=["a"]), "layers: got 'a'"),
        (lambda v: v["geometry"].pop("ratio"), "ratio: got 0"),
        (lambda v: v["geometry"].update(ratio=None), "ratio: got None"),
        (lambda v: v.update(max_seq_len=0), "max_seq_len: got 0"),
        (lambda v: v["checkpoint"].update(fingerprint=""), "fingerprint: got ''"),
    ],
)
def test_a_damaged_engine_is_refused(tmp_path: Path, change: Any, line: str) -> None:
    path = make(checkpoint_dir(tmp_path))
    edit(path / "config.json", change)
    with pytest.raises(SpinError) as refused:
        load_engine(path)
    assert line in str(refused.value)


def test_a_spin_file_that_disagrees_is_refused(tmp_path: Path) -> None:
    spin = make(checkpoint_dir(tmp_path)) / "spin.yaml"
    spin.write_text(spin.read_text().replace("target_sparsity: 0.4", "target_sparsity: 0.6"))
    with pytest.raises(SpinError, match=r"spin.yaml: target_sparsity: got 0.6, allowed: 0.4"):
        load_engine(spin.parent)
    spin.unlink()
    with pytest.raises(SpinError, match="cannot read"):
        load_engine(spin.parent)


def test_a_checkpoint_is_not_an_engine(tmp_path: Path) -> None:
    with pytest.raises(SpinError, match="allowed: a directory written by trtllm-build"):
        load_engine(checkpoint_dir(tmp_path))
    with pytest.raises(SpinError, match="cannot read"):
        load_engine(tmp_path / "nowhere")


@fuzz
@given(data=st.data())
def test_whatever_an_engine_says_it_is_loaded_or_refused(
    tmp_path: Path, data: st.DataObject
) -> None:
    shutil.rmtree(tmp_path / "engine", ignore_errors=True)
    path = make(checkpoint_dir(tmp_path)) / "config.json"
    values = json.loads(path.read_text())
    where = data.draw(st.sampled_from([values, values["geometry"], values["spin"]]))
    where[data.draw(st.sampled_from(sorted(where)))] = data.draw(json_values)
    path.write_text(json.dumps(values))
    with contextlib.suppress(SpinError):
        load_engine(path.parent)


# Fields that these sections have in TensorRT-LLM 1.3.0rc24 .. 1.4.0rc4.
ALLOWED_ARGS = {
    "max_batch_size": None,
    "max_seq_len": None,
    "sparse_attention_config": {
        *("algorithm", "compress_ratios", "index_head_dim", "index_n_heads", "index_topk"),
        *("indexer_k_dtype", "use_cute_dsl_paged_mqa_logits"),
    },
    "kv_cache_config": {"dtype", "enable_block_reuse", "tokens_per_block"},
    "cuda_graph_config": {"enable_padding", "max_batch_size"},
}


@pytest.mark.parametrize(
    ("config", "sm", "algorithm", "key_dtype", "page_tokens", "main_dtype"),
    [
        (FLASH, 90, "deepseek_v4", "fp8", 256, "fp8_ds_mla"),
        (FLASH, 100, "deepseek_v4", "fp4", 256, "auto"),
        (PRO, 103, "deepseek_v4", "fp4", 256, "auto"),
        (FLASH, 120, "deepseek_v4", "fp8", 256, "fp8_ds_mla"),
        (FLASH | {"index_head_dim": 64}, 100, "deepseek_v4", "fp8", 256, "auto"),
        (V32, 90, "dsa", "fp8", 64, "auto"),
        (V32, 100, "dsa", "fp8", 64, "auto"),
        (V32, 120, "dsa", "fp8", 64, "fp8_ds_mla"),
    ],
)
def test_llm_args(
    tmp_path: Path,
    config: dict[str, Any],
    sm: int,
    algorithm: str,
    key_dtype: str,
    page_tokens: int,
    main_dtype: str,
) -> None:
    model = checkpoint_dir(tmp_path, config)
    path = make(model, target_sm=str(sm), max_batch_size=5)
    found = yaml.safe_load((path / "llm_args.yaml").read_text())
    for name, value in found.items():
        fields = ALLOWED_ARGS[name]
        assert fields is None or set(value) <= fields
    attention, cache = found["sparse_attention_config"], found["kv_cache_config"]
    assert (attention["algorithm"], attention["indexer_k_dtype"]) == (algorithm, key_dtype)
    assert attention["index_topk"] == read_checkpoint(model).geometry.top_k
    assert attention.get("compress_ratios", []) == config.get("compress_ratios", [0])[:-1]
    assert (cache["tokens_per_block"], cache["dtype"]) == (page_tokens, main_dtype)
    assert found["cuda_graph_config"] == {"enable_padding": True, "max_batch_size": 5}


def test_every_argument_is_explained(tmp_path: Path) -> None:
    lines = (make(checkpoint_dir(tmp_path)) / "llm_args.yaml").read_text().splitlines()
    for above, line in pairwise(lines):
        assert len(line) <= 300
        if line and not line.lstrip().startswith("#"):
            assert above.lstrip().startswith("# ")


NASTY = 'it\'s "a" $HOME `id` \\ & *;\n# path'


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a `trtllm-serve` on PATH that prints what it was called with; return how to run it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    fake = folder / "trtllm-serve"
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['TLLM_SPIN']]))"
    fake.write_text(f"#!{sys.executable}\n{show}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def serve(script: Path, *arguments: str, **environment: str) -> tuple[list[str], str]:
        done = subprocess.run(
            [script, *arguments],
            capture_output=True,
            text=True,
            check=True,
            cwd="/",
            env=os.environ | environment,
        )
        argv, spin = json.loads(done.stdout)
        return argv, spin

    return serve


def test_run_script_quotes_every_path(server: Any, tmp_path: Path) -> None:
    model = checkpoint_dir(tmp_path, FLASH, f"model {NASTY}")
    engine = make(model, output_dir=str(tmp_path / f"engine {NASTY}"))
    argv, spin = server(engine / "run.sh", "--host", "a b", "")
    assert argv == [str(model), "--config", str(engine / "llm_args.yaml"), "--host", "a b", ""]
    assert spin == str(engine / "spin.yaml")
    assert yaml.safe_load((engine / "llm_args.yaml").read_text())["max_batch_size"] == 64


def test_run_script_works_moved_and_linked(server: Any, tmp_path: Path) -> None:
    make(checkpoint_dir(tmp_path)).rename(tmp_path / "moved")
    (tmp_path / "link.sh").symlink_to(tmp_path / "moved" / "run.sh")
    argv, spin = server(tmp_path / "link.sh", SPIN_CHECKPOINT="/elsewhere")
    assert argv == ["/elsewhere", "--config", str(tmp_path / "moved" / "llm_args.yaml")]
    assert spin == str(tmp_path / "moved" / "spin.yaml")
