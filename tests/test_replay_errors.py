# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm replay` and `trace-info` on bad input: one line, exit code 2, nothing written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from malformed_traces import MALFORMED, STREAMED
from replay_cli import (
    Capture,
    call,
    make_trace,
    refused,
    save,
)
from safetensors import SafetensorError

import spin_trtllm
from spin_trtllm.replay.policies import POLICIES


# ---------------------------------------------------------------- errors
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_traces(name: str, tmp_path: Path, capsys: Capture) -> None:
    spoil, words = MALFORMED[name]
    path = tmp_path / "bad.trace"
    spoil(path)
    before = sorted(p.name for p in tmp_path.iterdir())
    commands = [["replay", path, "--json", "--dump", tmp_path / "out"], ["trace-info", path]]
    if name in STREAMED:  # a policy that reads the scores in another way
        commands.append(["replay", path, "--policy", "tisa", "--dump", tmp_path / "out"])
    for command in commands:
        message = refused(capsys, *command)
        for word in ["bad.trace", *words]:
            assert word in message
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "best"], ["policy: got 'best'", ", ".join(POLICIES)]),
        (["--policy", ""], ["policy: got ''"]),
        (["--block-size", "63"], ["block_size: got 63, allowed: 8, 16, 32, 64, 128"]),
        (["--block-size", "many"], ["--block-size", "many"]),
        (["--sparsity", "nan"], ["target_sparsity: got nan, allowed: a number in [0, 1)"]),
        (["--sparsity", "1"], ["target_sparsity: got 1.0"]),
        (["--sparsity", "-0.1"], ["target_sparsity: got -0.1"]),
        (["--sparsity", "40%"], ["--sparsity", "40%"]),
        (["--ema-decay", "1"], ["ema_decay: got 1.0"]),
        (["--exploration", "inf"], ["exploration: got inf"]),
        (["--pooling", "median"], ["pooling: got 'median', allowed: max, top4, mean"]),
        (["--reduction", "A3"], ["reduction: got 'A3', allowed: A0, A1, A2"]),
        (["--exploration-policy", "new"], ["exploration_policy: got 'new'"]),
        (["--mask-policy", "all"], ["mask_policy: got 'all', allowed: union, row0"]),
        (["--update-policy", "all"], ["update_policy: got 'all', allowed: prefix, row0"]),
        (["--top-k", "0"], ["top_k: got 0, allowed: an integer in 1 .. "]),
        (["--top-k", "-3"], ["top_k: got -3"]),
        (["--top-k", str(2**20 + 1)], ["top_k: got 1048577, allowed: an integer in 1 .. 1048576"]),
        (["--top-k", "1.5"], ["--top-k", "1.5"]),
        (["--seed", "-1"], ["seed: got -1, allowed: an integer in 0 .. "]),
        (["--seed", str(2**64)], ["seed: got 18446744073709551616"]),
        (["--seed", "9" * 5000], ["--seed"]),
        (["--state-dtype", "fp16"], ["state_dtype: got 'fp16', allowed: fp32, bf16, log8"]),
        (["--spin-config", "absent.yaml"], ["spin_config: cannot read 'absent.yaml'"]),
        (["--spin-config", ""], ["spin_config: cannot read ''"]),
        (["--spin-config", "/dev/zero"], ["spin_config: /dev/zero: got 'a larger file'"]),
        (["--speed", "9"], ["--speed"]),
        (["second"], ["second"]),
        (["--sparsity"], ["--sparsity"]),
    ],
)
def test_bad_options(
    options: list[str],
    words: list[str],
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path, make_trace())
    message = refused(capsys, "replay", "t.trace", "--dump", "out", "--json", *options)
    for word in words:
        assert word in message
    assert [p.name for p in tmp_path.iterdir()] == ["t.trace"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("seed: [\n", ["is not valid YAML"]),
        ("blocksize: 8\n", ["field: got 'blocksize'", "block_size"]),
        ("- 1\n", ["a YAML mapping"]),
        ('pooling: "a\\nb"\n', ["pooling: got 'a\\nb'"]),
    ],
)
def test_bad_configuration_files(
    content: str, words: list[str], tmp_path: Path, capsys: Capture
) -> None:
    path = save(tmp_path, make_trace())
    file = tmp_path / "spin.yaml"
    file.write_text(content)
    message = refused(capsys, "replay", path, "--spin-config", file)
    for word in words:
        assert word in message


def test_dumps_that_cannot_be_written(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before the replay starts, which may take long."""
    first_step = "spin_trtllm.replay.policies.SpinPolicy.step"
    monkeypatch.setattr(first_step, lambda *_: pytest.fail("too late"))
    path = save(tmp_path, make_trace())
    for dump, reason in [
        (tmp_path, "is no regular file, allowed: a file name"),
        (tmp_path / "no" / "out", "No such file or directory"),
        (Path(path) / "out", "Not a directory"),
        ("", "is no regular file, allowed: a file name"),
        ("/dev/null", "is no regular file, allowed: a file name"),
        ("/dev/full", "is no regular file, allowed: a file name"),
    ]:
        assert reason in (message := refused(capsys, "replay", path, "--dump", dump))
        assert message.startswith("error: dump: ")
    assert [p.name for p in tmp_path.iterdir()] == ["t.trace"]
    os.mkfifo(tmp_path / "pipe")
    message = refused(capsys, "replay", path, "--dump", tmp_path / "pipe")
    assert "is no regular file, allowed: a file name" in message
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("how", ["itself", "symlink", "hard link", "another spelling"])
def test_a_dump_never_replaces_its_trace(how: str, tmp_path: Path, capsys: Capture) -> None:
    path = Path(save(tmp_path, make_trace()))
    dump = {"itself": path, "another spelling": tmp_path / ".." / tmp_path.name / path.name}.get(
        how, tmp_path / "link"
    )
    if how == "symlink":
        dump.symlink_to(path)
    elif how == "hard link":
        dump.hardlink_to(path)
    before = path.read_bytes(), sorted(os.listdir(tmp_path))
    message = refused(capsys, "replay", path, "--dump", dump)
    assert message == f"error: dump: got {str(dump)!r}, allowed: a file other than the trace\n"
    assert (path.read_bytes(), sorted(os.listdir(tmp_path))) == before
    assert dump.is_symlink() == (how == "symlink")


def test_a_dump_on_a_full_disk(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(tensors: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise SafetensorError("Error while serializing:\n No space left on device")

    monkeypatch.setattr("spin_trtllm.files.save_file", half)
    path = save(tmp_path, make_trace())
    (tmp_path / "out").write_text("old")
    message = refused(capsys, "replay", path, "--dump", tmp_path / "out")
    assert message.startswith("error: dump: cannot write: ")
    assert "No space left on device" in message
    assert (tmp_path / "out").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "t.trace"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["replay"], ["TRACE"]),
        (["trace-info"], ["TRACE"]),
        (["trace-info", "a", "b"], ["b"]),
        (["rewind"], ["rewind"]),
        (["--loud"], ["--loud"]),
    ],
)
def test_bad_commands(arguments: list[str], words: list[str], capsys: Capture) -> None:
    message = refused(capsys, *arguments)
    for word in words:
        assert word in message


def test_help_and_version(capsys: Capture) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    for name in ("doctor", "generate", "replay", "trace", "trace-info"):
        assert f"  {name} " in out
    code, out, _ = call(capsys, "replay", "-h")
    assert code == 0
    for word in ["--sparsity", "--dump", "--json", "--policy", *POLICIES]:
        assert word in out
    assert call(capsys) == (0, call(capsys, "--help")[1], "")
    assert call(capsys, "--version")[1] == f"spin-trtllm, version {spin_trtllm.__version__}\n"


def test_an_interrupt_exits_with_130(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    path = save(tmp_path, make_trace())
    monkeypatch.setattr("spin_trtllm.replay.policies.SpinPolicy.step", interrupt)
    code, out, err = call(capsys, "replay", path, "--json", "--dump", tmp_path / "out")
    assert (code, out) == (130, "")
    assert "Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["t.trace"]
