# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm serve`, with a fake `trtllm-serve` that prints how it was started."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click.testing
import pytest
from checkpoints import FLASH, PRO, checkpoint_dir

from spin_trtllm.build.cli import command as build
from spin_trtllm.build.run_script import checkpoint_of
from spin_trtllm.commands import serve
from spin_trtllm.errors import SpinError
from spin_trtllm.probe import Device, Hook, Host, KernelLibrary, Report, probe

ROOT = Path(__file__).parent.parent
NASTY = 'it\'s "a" $HOME `id`;\n\n# path'
HOOK = Hook("Indexer.sparse_attn_indexer", True, "(metadata)")
TENSORRT_LLM = Host("tensorrt_llm", True, "1.4.0rc4", (HOOK,))
H200 = Device(0, "NVIDIA H200", 90, 2**37)

SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['TLLM_SPIN']]))"

# A fit machine is made up in the process, the rest is real: the command line and the exec.
DRIVER = """
import sys
sys.path.insert(0, {tests!r})
import test_serve
from spin_trtllm import cli
from spin_trtllm.commands import serve
serve.probe = test_serve.fit
serve.has_hooks = serve.startup_file = lambda: True
cli.main(["serve", *sys.argv[1:]])
"""


def fit(**changes: Any) -> Report:
    """This machine's report, made fit to serve an engine for sm_90."""
    report = vars(probe())
    hosts = tuple(TENSORRT_LLM if h.name == "tensorrt_llm" else h for h in report["hosts"])
    ready = {"devices": (H200, H200), "kernel_library": KernelLibrary(True, ""), "hosts": hosts}
    return Report(**report | ready | changes)


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """An engine for sm_90, of a checkpoint and in a directory with unpleasant names."""
    return make(tmp_path, checkpoint_dir(tmp_path, FLASH, f"model {NASTY}"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that can serve."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "trtllm-serve"
    program.write_text(f"#!{sys.executable}\n{SHOW}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(serve, "probe", fit)
    monkeypatch.setattr(serve, "has_hooks", lambda: True)
    monkeypatch.setattr(serve, "startup_file", lambda: Path("/site/stub.pth"))


def make(folder: Path, model: Path) -> Path:
    output = folder / f"engine {NASTY}"
    arguments = ["--use_spin", "--checkpoint_dir", str(model), "--output_dir", str(output)]
    build.main([*arguments, "--target_sm", "90"], standalone_mode=False)
    return output


def dry_run(*arguments: str) -> click.testing.Result:
    runner = click.testing.CliRunner()
    return runner.invoke(serve.command, ["--dry_run", *arguments], catch_exceptions=False)


def expected(engine: Path, *arguments: str) -> list[str]:
    model = engine.parent / f"model {NASTY}"
    return [str(model), "--config", str(engine / "llm_args.yaml"), *arguments]


@pytest.mark.usefixtures("machine")
def test_the_printed_command_is_the_one_that_runs(engine: Path, tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.format(tests=str(ROOT / "tests")))
    arguments = ["--tp_size", "8", "--host", "a b", ""]
    done = subprocess.run(
        [sys.executable, str(driver), str(engine), "--", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    printed, _, ran = done.stdout.rstrip("\n").rpartition("\n")
    assert json.loads(ran) == [expected(engine, *arguments), str(engine / "spin.yaml")]
    variable, program, *words = shlex.split(printed)
    assert (variable, program) == (f"TLLM_SPIN={engine / 'spin.yaml'}", "trtllm-serve")
    assert words == expected(engine, *arguments)


@pytest.mark.usefixtures("machine")
def test_a_dry_run_only_prints(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("it started"))
    result = dry_run(str(engine), "--", "--port", "1")
    assert (result.exit_code, result.stderr) == (0, "")
    assert shlex.split(result.stdout)[2:] == expected(engine, "--port", "1")


def test_a_dry_run_says_what_is_missing(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(serve, "startup_file", lambda: None)
    result = dry_run(str(engine))
    assert result.exit_code == 0
    assert shlex.split(result.stdout)[2:] == expected(engine)
    lines = result.stderr.splitlines()
    assert all(line.startswith("missing here: ") for line in lines)
    for part in ("trtllm-serve on PATH", "tensorrt_llm", "GPU", "spin_trtllm_activate.pth"):
        assert any(part in line for line in lines)


OLD = Host("tensorrt_llm", True, "1.2.0", (Hook("Indexer.x", False, "missing"),))


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": ()}, "GPU: got no CUDA device, allowed: sm_90"),
        ({"devices": (H200, Device(1, "B200", 100, 1))}, "GPU: got sm_90, sm_100, allowed: sm_90"),
        ({"kernel_library": KernelLibrary(False, "not built")}, "kernel library: not built"),
        ({"hosts": (OLD,)}, "tensorrt_llm: got 1.2.0 with Indexer.x missing, allowed: 1.3.0rc24"),
        ({"hosts": (Host("tensorrt_llm", False, None),)}, "tensorrt_llm is not installed"),
    ],
)
def test_an_unfit_machine_is_refused_before_anything_starts(
    engine: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(serve, "probe", lambda: fit(**changes))
    refused(message, str(engine))


@pytest.mark.usefixtures("machine")
def test_ranks_must_be_reached_one_way_or_another(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "startup_file", lambda: None)
    refused("ranks would run dense", str(engine))
    assert dry_run(str(engine), "--", "--custom_module_dirs", "spin_trtllm_ranks").stderr == ""
    monkeypatch.setattr(serve, "has_hooks", lambda: False)
    refused("this version of spin-trtllm has none", str(engine))


@pytest.mark.usefixtures("machine")
def test_no_server_on_the_path(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    refused("no trtllm-serve on PATH", str(engine))


@pytest.mark.usefixtures("machine")
def test_bad_input(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused("engine_dir", str(tmp_path))
    refused(
        "which .* was built for", str(engine), "--checkpoint", str(checkpoint_dir(tmp_path, PRO))
    )
    monkeypatch.setenv("TLLM_SPIN_PROBE", "often")
    refused("TLLM_SPIN_PROBE: got 'often', allowed: 1/N", str(engine))
    monkeypatch.delenv("TLLM_SPIN_PROBE")
    monkeypatch.setenv("TLLM_SPIN_BACKEND", "best")
    refused("TLLM_SPIN_BACKEND: got 'best', allowed: auto", str(engine))


@pytest.mark.usefixtures("machine")
def test_the_checkpoint_may_have_moved(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = engine.parent / "moved"
    (engine.parent / f"model {NASTY}").rename(moved)
    refused("checkpoint", str(engine))
    assert shlex.split(dry_run(str(engine), "--checkpoint", str(moved)).stdout)[2] == str(moved)
    monkeypatch.setenv("SPIN_CHECKPOINT", str(moved))
    assert shlex.split(dry_run(str(engine)).stdout)[2] == str(moved)


@pytest.mark.usefixtures("machine")
def test_a_run_script_without_its_checkpoint(engine: Path) -> None:
    (engine / "run.sh").write_text("#!/bin/sh\n")
    refused("--checkpoint: got None, allowed: a directory", str(engine))
    (engine / "run.sh").unlink()
    refused("cannot read run.sh", str(engine))


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("#!/bin/sh\ncheckpoint=/a/b\n\nexec\n", "/a/b"),
        ("#!/bin/sh\ncheckpoint='/a\n\nb'\n", "/a\n\nb"),
        ("#!/bin/sh\ncheckpoint='/a b\n", None),
        ("#!/bin/sh\ncheckpoint=/a b\n", None),
        ("", None),
    ],
)
def test_the_checkpoint_of_a_script(script: str, found: str | None) -> None:
    assert checkpoint_of(script) == found


def refused(message: str, *arguments: str) -> None:
    """The command raises the error that the command line prints on one line, with exit code 2."""
    with pytest.raises(SpinError, match=message):
        serve.command.main(list(arguments), standalone_mode=False)


def test_options_of_the_server_have_their_place(engine: Path) -> None:
    done = click.testing.CliRunner().invoke(serve.command, [str(engine), "--port", "8000"])
    assert done.exit_code == 2
    assert done.output.splitlines()[-1].endswith("Those of trtllm-serve come after `--`.")
