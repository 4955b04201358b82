# SPDX-License-Identifier: Apache-2.0
"""`trtllm-build --triton`: what it writes, and whose files it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoints import checkpoint_dir

from spin_trtllm.build.cli import main
from spin_trtllm.config import preset
from spin_trtllm.hosts.triton.model_settings import read_model_settings

FILES = {"config.pbtxt", "1/model.py", "1/model.yaml"}


class Ran:
    """What a call of the command line left behind."""

    def __init__(self, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            main(words)
        self.code = stopped.value.code
        self.out, self.err = capsys.readouterr()


@pytest.fixture
def build(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Call `trtllm-build --use_spin --triton REPOSITORY` for a checkpoint of Flash's shape."""
    source = checkpoint_dir(tmp_path)

    def call(*words: object, triton: Path = tmp_path / "models") -> Ran:
        places = ["--checkpoint_dir", source, "--output_dir", tmp_path / "engine"]
        all_words = ["--use_spin", *places, "--target_sm", 90, "--triton", triton, *words]
        return Ran(capsys, [str(word) for word in all_words])

    return call


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_is_written_is_what_the_server_reads(build: Any, tmp_path: Path) -> None:
    ran = build("--spin_sparsity", 0.000001, "--max_batch_size", 3, "--max_seq_len", 5000)
    assert ran.code == 0
    assert "[6/6] write Triton model ... " in ran.out
    assert f"with Triton: spin-trtllm triton {tmp_path / 'models'}\n" in ran.out
    folder = tmp_path / "models" / "tensorrt_llm"
    assert files_of(folder) == FILES

    settings = read_model_settings(folder / "1")
    assert settings.checkpoint == str((tmp_path / "model").resolve())
    assert (settings.max_active, settings.max_seq_len) == (3, 5000)
    assert (settings.engine, settings.decoupled, settings.cpu_threads) == ("auto", False, 1)
    flash = preset("deepseek-v4-flash").to_dict()
    assert settings.spin.to_dict() == flash | {"target_sparsity": 1e-6, "top_k": 512}
    # The LLM gets what trtllm-serve gets, and the checkpoint.
    served = yaml.safe_load((tmp_path / "engine" / "llm_args.yaml").read_text())
    assert settings.llm_args == served | {"model": settings.checkpoint}


def test_the_configuration_leaves_to_model_yaml_what_upstream_does(
    build: Any, tmp_path: Path
) -> None:
    assert build("--triton_name", "spin", "--triton_streaming").code == 0
    text = (tmp_path / "models" / "spin" / "config.pbtxt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert 'name: "spin"' in lines
    assert not any("max_batch_size" in line or "decoupled" in line for line in lines)
    assert '  { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] },' in lines
    seed = '  { name: "sampling_param_seed" data_type: TYPE_UINT64 dims: [ 1 ] optional: true },'
    assert seed in lines
    assert text.count("optional") == 17
    assert read_model_settings(tmp_path / "models" / "spin" / "1").decoupled


def test_a_dry_run_writes_nothing_and_shows_everything(build: Any, tmp_path: Path) -> None:
    ran = build("--dry_run")
    assert ran.code == 0
    for name in FILES:
        assert f"# ---- {name}\n" in ran.out
    assert "(dry run: not written)" in ran.out.split("[6/6]")[1].splitlines()[0]
    assert not (tmp_path / "models").exists()


def test_other_models_stay_and_ours_is_replaced_by_force(build: Any, tmp_path: Path) -> None:
    other = tmp_path / "models" / "other" / "config.pbtxt"
    other.parent.mkdir(parents=True)
    other.write_text("theirs")
    assert build().code == 0
    assert build("--triton_name", "more", "--force").code == 0
    ran = build("--force", "--triton_streaming")
    assert ran.code == 0
    assert read_model_settings(tmp_path / "models" / "tensorrt_llm" / "1").decoupled
    assert other.read_text() == "theirs"
    assert {path.name for path in other.parents[1].iterdir()} == {"other", "more", "tensorrt_llm"}


def test_compiled_python_does_not_stand_in_the_way(build: Any, tmp_path: Path) -> None:
    assert build().code == 0
    cache = tmp_path / "models" / "tensorrt_llm" / "1" / "__pycache__"
    cache.mkdir()
    (cache / "model.cpython-311.pyc").touch()
    assert build("--force").code == 0


@pytest.mark.parametrize("name", ["", ".x", "-x", "a/b", "..", "a b", "ä", "x" * 129])
def test_names_that_are_refused(build: Any, tmp_path: Path, name: str) -> None:
    assert_refused(build("--triton_name", name), tmp_path, f"--triton_name: got '{name[:100]}")


@pytest.mark.parametrize("place", ["model", "model/inside", "engine", "."])
def test_places_that_are_refused(build: Any, tmp_path: Path, place: str) -> None:
    """In the checkpoint or the engine, or around them, where Triton takes them for models."""
    ran = build(triton=tmp_path / place)
    assert_refused(ran, tmp_path, "--triton: got ", "allowed: a directory apart from ")


def test_what_is_not_ours_is_not_replaced(build: Any, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tensorrt_llm"
    folder.mkdir(parents=True)
    assert_refused(build(), tmp_path, "allowed: a new model, or --force")
    (folder / "config.pbtxt").write_text('name: "tensorrt_llm"\n')
    assert_refused(build("--force"), tmp_path, "a model that trtllm-build wrote")


def test_files_that_were_added_to_a_model_are_spared(build: Any, tmp_path: Path) -> None:
    assert build().code == 0
    added = tmp_path / "models" / "tensorrt_llm" / "1" / "notes.txt"
    added.write_text("mine")
    ran = build("--force")
    assert ran.code == 2
    assert "holds: got '1/notes.txt', allowed: config.pbtxt, 1/model.py, 1/model.yaml" in ran.err
    assert added.read_text() == "mine"


@pytest.mark.parametrize("option", [("--triton_name", "x"), ("--triton_streaming",)])
def test_options_that_need_a_repository(
    capsys: pytest.CaptureFixture[str], option: tuple[str, ...], tmp_path: Path
) -> None:
    words = ["--use_spin", "--checkpoint_dir", "x", "--output_dir", str(tmp_path / "y"), *option]
    ran = Ran(capsys, words)
    assert ran.code == 2
    assert "allowed: only with --triton" in ran.err


def test_an_engine_nobody_knows(build: Any, tmp_path: Path) -> None:
    ran = build("--triton_engine", "vllm")
    assert_refused(ran, tmp_path, "--triton_engine: got 'vllm', allowed: auto, tensorrt_llm, tran")


def assert_refused(ran: Ran, tmp_path: Path, *fragments: str) -> None:
    """One line, and nothing has been written."""
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    for fragment in fragments:
        assert fragment in ran.err
    assert not (tmp_path / "engine").exists()


def test_the_document_quotes_the_committed_run() -> None:
    root = Path(__file__).parents[2]
    result = json.loads((root / "benchmarks/results/triton-cpu.json").read_text())
    text = (root / "docs/triton.md").read_text(encoding="utf-8")
    overhead, streams = result["overhead"], result["streams"]
    clients, soak = result["clients"], result["soak"]
    outcomes = soak["outcomes"]
    for quoted in (
        f"| {overhead['direct_seconds']:.3f} s |",
        f"| {overhead['triton_seconds']:.3f} s |",
        f"| {streams['sequence_seconds']:.3f} s |",
        f"| {streams['together_seconds']:.3f} s |",
        f"| {streams['tokens_of_slowest_when_first_ends']} |",
        f"| {clients['as_generate']:,} of {clients['requests']:,} |",
        f"| {outcomes['answered']:,}, {outcomes['refused']:,} |",
        f"| {soak['growth_after_first_tenth']:.1%} |".replace("%", " %"),
    ):
        assert quoted in text
    assert sum(outcomes.values()) == outcomes["answered"] + outcomes["refused"] == soak["requests"]
