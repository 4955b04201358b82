# SPDX-License-Identifier: Apache-2.0
"""`trtllm-build`: its command line, that it harms nothing, and the hand-over to another one."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FLASH, PRO, TINY, checkpoint_dir

from spin_trtllm.build import output
from spin_trtllm.build.cli import main
from spin_trtllm.build.engine import ENGINE_FILES, load_engine
from spin_trtllm.build.handover import has_own_build
from spin_trtllm.build.progress import Stages
from spin_trtllm.config import preset
from spin_trtllm.errors import SpinError

REPOSITORY = Path(__file__).parent.parent


class Ran:
    """What a call of the command line left behind."""

    def __init__(self, capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...]) -> None:
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        self.code = stopped.value.code
        self.out, self.err = capsys.readouterr()


def as_process(
    *arguments: object, program: Sequence[str] = ("-m", "spin_trtllm.build.cli")
) -> subprocess.CompletedProcess[bytes]:
    """Run a program of this package in a process of its own."""
    command = [sys.executable, *program, *map(os.fspath, arguments)]
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}  # as in a UTF-8 locale
    return subprocess.run(command, capture_output=True, cwd=REPOSITORY, env=strict)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Call `trtllm-build` in this process."""
    return lambda *arguments: Ran(capsys, arguments)


@pytest.fixture
def build(run: Any, tmp_path: Path) -> Any:
    """Call `trtllm-build --use_spin` for a checkpoint, Flash by default, into `engine`."""

    def call(*arguments: object, checkpoint: Path | None = None, to: Path | None = None) -> Ran:
        source = checkpoint or checkpoint_dir(tmp_path)
        target = to or tmp_path / "engine"
        places = ("--checkpoint_dir", source, "--output_dir", target)
        return run("--use_spin", *places, "--target_sm", 90, *arguments)

    return call


def assert_refused(ran: Ran, *fragments: str) -> None:
    """One line on stderr that says what is wrong, and exit code 2."""
    assert ran.code == 2
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    for fragment in fragments:
        assert fragment in ran.err


def test_help_has_a_section_for_spin(run: Any) -> None:
    ran = run("--help")
    assert ran.code == 0
    headings = [line for line in ran.out.splitlines() if line.endswith(":") and line[0] != " "]
    spin = "SPIN (overrides the file or preset):"
    assert headings == ["Build:", spin, "Deployment:", "TensorRT:", "Triton:", "Other:"]
    section = ran.out.split("SPIN (")[1].split("Deployment:")[0]
    for option in ("config", "preset", "sparsity", "block_size", "ema_decay", "exploration_policy"):
        assert f"--spin_{option}" in section
    assert "--checkpoint_dir" not in section


def test_a_plain_build_says_what_each_stage_found(build: Any) -> None:
    lines = build("--max_seq_len", 65536).out.splitlines()
    assert [line.split("...")[0] for line in lines[:5]] == [
        "[1/5] read checkpoint ",
        "[2/5] settle SPIN ",
        "[3/5] size state ",
        "[4/5] render files ",
        "[5/5] write engine ",
    ]
    assert "21 of 43 layers with an indexer of 64 heads x 128" in lines[0]
    assert "65536 tokens" in lines[2]
    assert "3.0% of its fp8 indexer keys on sm_90" in lines[2]
    assert lines[5].startswith("serve it: ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Terminal()
    stages = Stages(2, screen)
    assert stages.run("one", lambda: 7, lambda found: f"[found] {found}") == 7
    with pytest.raises(SpinError, match="no"):
        stages.run("two", lambda: _refuse("no"), str)
    text = screen.getvalue()
    assert "\x1b[1;32m[1/2] one\x1b[0m [found] 7\n" in text
    assert "\x1b[1;31m[2/2] two\x1b[0m failed\n" in text


def _refuse(message: str) -> None:
    raise SpinError(message)


def test_the_embedded_model_is_built_with_its_preset(build: Any) -> None:
    ran = build(checkpoint=TINY)
    assert (ran.code, ran.err) == (0, "")
    assert "preset tiny-deepseek-v4: sparsity 0.4" in ran.out


def test_a_dry_run_writes_nothing_and_shows_everything(build: Any, tmp_path: Path) -> None:
    ran = build("--dry_run")
    assert os.listdir(tmp_path) == ["model"]
    build()
    for name in ENGINE_FILES:
        assert f"# ---- {name}\n{(tmp_path / 'engine' / name).read_text()}" in ran.out


def test_single_options_override_the_file(build: Any, tmp_path: Path) -> None:
    file = tmp_path / "spin.yaml"
    file.write_text("{target_sparsity: 0.7, seed: 5}")
    ran = build("--spin_config", file, "--spin_seed", 6, "--spin_exploration_policy", "none")
    assert ran.code == 0
    config = load_engine(tmp_path / "engine").config
    given = {"target_sparsity": 0.7, "seed": 6, "exploration_policy": "none", "top_k": 512}
    assert config == replace(preset("deepseek-v4-flash"), **given)


def test_an_engine_takes_targets_of_layers(build: Any, tmp_path: Path) -> None:
    file = tmp_path / "layers.yaml"
    file.write_text("{layer_sparsity: {2: 0.5, 4: 0.0}}")
    ran = build("--spin_config", file, "--triton", tmp_path / "models")
    assert ran.code == 0
    assert "sparsity 0.4 (layers 2:0.5,4:0.0), blocks" in ran.out
    config = load_engine(tmp_path / "engine").config
    assert config.layer_sparsity == ((2, 0.5), (4, 0.0))
    assert [config.layer_ppm(layer) for layer in (2, 4, 6)] == [500_000, 0, 400_000]


def test_a_target_of_a_layer_without_an_indexer_is_not_built(build: Any, tmp_path: Path) -> None:
    file = tmp_path / "layers.yaml"
    file.write_text("{layer_sparsity: {2: 0.5, 3: 0.25}}")
    line = "layer_sparsity: layer: got 3, allowed: indexer layers [2, 4, 6, "
    assert_refused(build("--spin_config", file), line)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--spin_sparsity", 1), "target_sparsity: got 1.0"),
        (("--spin_sparsity", "nan"), "target_sparsity: got nan"),
        (("--spin_sparsity", "much"), "'much' is not a valid float"),
        (("--spin_block_size", 48), "block_size: got 48"),
        (("--spin_ema_decay", 1), "ema_decay: got 1.0"),
        (("--spin_exploration", -1), "exploration: got -1.0"),
        (("--spin_exploration_policy", "age"), "exploration_policy: got 'age', allowed: none,"),
        (("--spin_state_dtype", "fp8"), "state_dtype: got 'fp8'"),
        (("--spin_state_dtype", "log8"), "state_dtype: got 'log8', allowed: fp32, bf16: no kernel"),
        (("--spin_seed", 2**64), "seed: got 18446744073709551616"),
        (("--spin_preset", "huge"), "preset: got 'huge', allowed: deepseek-v3.2,"),
        (("--spin_preset", "a", "--spin_config", "b"), "--spin_preset: got one next to"),
        (("--spin_config", "/no/such"), "spin_config: cannot read '/no/such'"),
        (("--target_sm", "80"), "target_sm: got '80', allowed: 90, 100, 103, 120"),
        (("--max_batch_size", 0), "max_batch_size: got 0, allowed: an integer in 1 .. 65536"),
        (("--max_seq_len", 2**20 + 1), "max_seq_len: got 1048577, allowed: an integer in 1 .."),
        (("--max_seq_len", 3), "max_seq_len: got 3, allowed: at least 4"),
        (("--plugin",), "No such option '--plugin'"),
        (("extra",), "unexpected extra argument"),
    ],
)
def test_a_bad_option_is_one_line(
    build: Any, tmp_path: Path, options: tuple[object, ...], line: str
) -> None:
    assert_refused(build(*options), line)
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("reduction: A2", "reduction: got 'A2', allowed: A1"),
        ("exploration_policy: staleness", "exploration_policy: got 'staleness'"),
        ("top_k: 64", "top_k: got 64, allowed: 512, the checkpoint's index_topk"),
    ],
)
def test_study_variants_are_not_built(build: Any, tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "spin.yaml"
    file.write_text(text)
    assert_refused(build("--spin_config", file), line)


def test_as_a_process(tmp_path: Path) -> None:
    model = checkpoint_dir(tmp_path, FLASH | {"architectures": ["LlamaForCausalLM"]})
    done = as_process("--use_spin", "--checkpoint_dir", model, "--output_dir", tmp_path / "engine")
    assert done.returncode == 2
    assert done.stdout == b"[1/5] read checkpoint ... failed\n"
    assert done.stderr == (
        b"error: architecture: got 'LlamaForCausalLM', "
        b"allowed: DeepseekV4ForCausalLM, DeepseekV32ForCausalLM\n"
    )


def test_a_path_may_be_any_bytes(tmp_path: Path) -> None:
    model = checkpoint_dir(tmp_path, FLASH, os.fsdecode(b"model\xff"))
    engine = tmp_path / os.fsdecode(b"engine\xff")
    done = as_process("--use_spin", "--checkpoint_dir", model, "--output_dir", engine)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"engine\xff/run.sh" in done.stdout
    assert b"model\xff" in (engine / "run.sh").read_bytes()


def test_an_existing_directory_is_kept(build: Any, tmp_path: Path) -> None:
    build()
    assert_refused(build("--spin_seed", 1), "allowed: a new directory, or --force to replace")
    assert load_engine(tmp_path / "engine").config.seed == 0
    assert build("--spin_seed", 1, "--force").code == 0
    assert load_engine(tmp_path / "engine").config.seed == 1
    assert sorted(os.listdir(tmp_path)) == ["engine", "model"]


def test_force_replaces_an_empty_directory(build: Any, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    assert_refused(build(), "--force")
    assert build("--force").code == 0


def test_force_spares_whatever_is_not_an_engine(build: Any, tmp_path: Path) -> None:
    other = checkpoint_dir(tmp_path, PRO, "engine")
    assert_refused(build("--force"), "allowed: an engine or an empty directory")
    assert (other / "model.safetensors").exists()


def test_force_spares_files_that_were_added_to_an_engine(build: Any, tmp_path: Path) -> None:
    build()
    (tmp_path / "engine" / "notes.txt").write_text("mine")
    assert_refused(build("--force"), "holds: got 'notes.txt'")
    assert (tmp_path / "engine" / "notes.txt").read_text() == "mine"


def test_a_file_is_no_output_directory(build: Any, tmp_path: Path) -> None:
    (tmp_path / "engine").write_text("mine")
    assert_refused(build("--force"), "allowed: a directory, not a file")
    assert_refused(build(to=tmp_path / "engine" / "below"), "output_dir: cannot")
    assert_refused(build(to=tmp_path / ("x" * 300)), "output_dir: cannot")
    assert (tmp_path / "engine").read_text() == "mine"


@pytest.mark.parametrize("place", [".", "..", "inside", "../link/inside", "../link"])
def test_the_checkpoint_is_never_overwritten(build: Any, tmp_path: Path, place: str) -> None:
    model = checkpoint_dir(tmp_path / "store")
    (tmp_path / "store" / "link").symlink_to(model)
    refused = build("--force", checkpoint=model, to=model / place)
    assert_refused(refused, "allowed: a directory apart from checkpoint")
    assert sorted(os.listdir(model)) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("error", "code"), [(OSError(28, "No space left on device"), 2), (KeyboardInterrupt(), 130)]
)
def test_a_broken_write_leaves_no_trace(
    build: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
) -> None:
    build()

    def write_half(directory: Path, files: object) -> None:
        (directory / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(output, "write_engine", write_half)
    ran = build("--force", "--spin_seed", 1)
    assert ran.code == code
    assert "Traceback" not in ran.err
    assert sorted(os.listdir(tmp_path)) == ["engine", "model"]
    assert load_engine(tmp_path / "engine").config.seed == 0


def test_a_killed_write_leaves_no_engine(tmp_path: Path) -> None:
    model, engine = checkpoint_dir(tmp_path), tmp_path / "engine"
    program = (
        "import os, signal, sys\n"
        "from spin_trtllm.build import cli, output\n"
        "output.write_engine = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "cli.main(sys.argv[1:])\n"
    )
    arguments = ("--use_spin", "--checkpoint_dir", model, "--output_dir", engine)
    done = as_process(*arguments, program=["-c", program])
    assert done.returncode == -9
    assert not engine.exists()


# -- TensorRT-LLM's own command -------------------------------------------------------------------


@pytest.fixture
def own_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install a fake `tensorrt_llm.commands.build` whose body is given."""

    def install(body: str) -> None:
        commands = tmp_path / "site" / "tensorrt_llm" / "commands"
        commands.mkdir(parents=True)
        (commands.parent / "__init__.py").write_text("")
        (commands / "__init__.py").write_text("")
        (commands / "build.py").write_text(f"import sys\ndef main():\n    {body}\n")
        monkeypatch.syspath_prepend(commands.parent.parent)

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def test_without_use_spin_arguments_are_handed_over_untouched(own_build: Any, run: Any) -> None:
    own_build("print(sys.argv); return 7")
    before = list(sys.argv)
    ran = run("--checkpoint_dir", "a b", "--gemm_plugin", "auto", "--", "-x")
    assert ran.out == (
        "['trtllm-build', '--checkpoint_dir', 'a b', '--gemm_plugin', 'auto', '--', '-x']\n"
    )
    assert (ran.code, ran.err) == (7, "")
    assert sys.argv == before
    assert run().out == "['trtllm-build']\n"


def test_their_exit_and_their_errors_are_theirs(own_build: Any, run: Any) -> None:
    own_build("sys.exit('usage: theirs')")
    assert run("--model_config", "x").code == "usage: theirs"


def test_looking_for_their_command_imports_nothing(own_build: Any) -> None:
    own_build("pass")
    assert has_own_build()
    assert "tensorrt_llm" not in sys.modules


def test_a_broken_installation_of_theirs_is_one_line(own_build: Any, run: Any) -> None:
    own_build("pass\nimport no_such_module")
    assert_refused(run("--x"), "cannot import tensorrt_llm.commands.build", "no_such_module")


def test_their_command_may_not_come_back(own_build: Any, run: Any) -> None:
    own_build("from spin_trtllm.build.cli import main; main(['--x'])")
    assert_refused(run("--x"), "called this command again")
    assert_refused(run("--x"), "called this command again")  # and nothing is left behind


def test_without_their_command_the_line_says_what_to_use(run: Any) -> None:
    for arguments in ((), ("--checkpoint_dir", "x", "--gemm_plugin", "auto")):
        assert_refused(run(*arguments), "removed", "mid-2026", "trtllm-build --use_spin")
