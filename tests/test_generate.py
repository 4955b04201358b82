# SPDX-License-Identifier: Apache-2.0
"""Greedy generation, and the commands that run it: `spin-trtllm generate` and `trace`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

pytest.importorskip("transformers")

from tiny_models import CSA_LAYERS, MAX_TOKENS, random_ids, save_checkpoint, tiny_model

from spin_trtllm import SpinConfig, SpinError
from spin_trtllm.build.cli import main as build_main
from spin_trtllm.cli import main
from spin_trtllm.commands.generate import first_divergence
from spin_trtllm.generate import Generation, decode, generate, prefill, read_prompt, split_prompt
from spin_trtllm.hosts.transformers import SpinStats, enable, encode_prompt, load_model

SPIN_OPTIONS = ["--block-size", "8", "--sparsity", "0.6", "--seed", "3"]
PROMPT = "The quick brown fox jumps over the lazy dog, again. " * 8


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model()


# ---------------------------------------------------------------- prefill and decode


@given(length=st.integers(1, 40), rows=st.integers(1, 2), chunk=st.integers(2, 9))
def test_no_piece_of_a_split_prompt_looks_like_a_decode_step(
    length: int, rows: int, chunk: int
) -> None:
    tokens = torch.arange(rows * length).view(rows, length)
    pieces = split_prompt(tokens, chunk)
    assert torch.equal(torch.cat(pieces, 1), tokens)
    sizes = [piece.shape[1] for piece in pieces]
    assert max(sizes) <= max(chunk, 3)
    assert min(sizes) > 1 or length == 1


def test_prefill_in_chunks_equals_one_call(model: torch.nn.Module) -> None:
    ids = random_ids(321)
    _, at_once = prefill(model, ids)
    for chunk in (64, 320):
        _, logits = prefill(model, ids, chunk_tokens=chunk)
        torch.testing.assert_close(logits, at_once, atol=1e-4, rtol=0)
    _, listed = prefill(model, ids[0].tolist())
    assert torch.equal(listed, at_once)


def test_generation_equals_the_librarys(model: torch.nn.Module) -> None:
    ids = random_ids(100)
    wanted = model.generate(ids, max_new_tokens=20, do_sample=False)[0, 100:].tolist()
    seen: list[int] = []
    generation = generate(model, ids[0].tolist(), 20, on_token=seen.append)
    assert generation.tokens == seen == wanted
    assert len(generation.seconds_per_token) == 19
    assert generation.median_seconds > 0
    assert generate(model, ids[0].tolist(), 1) == Generation(wanted[:1], [])
    assert Generation(wanted[:1], []).median_seconds is None


def test_forced_tokens_are_fed_and_the_picks_recorded(model: torch.nn.Module) -> None:
    ids = random_ids(60)[0].tolist()
    free = generate(model, ids, 10)
    assert generate(model, ids, 10, forced_tokens=free.tokens).tokens == free.tokens
    other = [(token + 1) % 96 for token in free.tokens]
    picks = generate(model, ids, 10, forced_tokens=other).tokens
    assert picks[0] == free.tokens[0]
    assert picks[1:3] == [generate(model, ids + other[: n + 1], 1).tokens[0] for n in range(2)]


@pytest.mark.parametrize("form", [int, lambda token: [token, 90]])
def test_end_of_sequence_stops_but_not_when_forced(form: Any) -> None:
    model = tiny_model()
    ids = random_ids(60)[0].tolist()
    free = generate(model, ids, 10).tokens
    stop = free.index(free[4])
    model.config.eos_token_id = form(free[4])
    assert generate(model, ids, 10).tokens == free[: stop + 1]
    assert generate(model, ids, 10, forced_tokens=free).tokens == free


def test_probing_is_not_counted_as_decoding(model: torch.nn.Module) -> None:
    ids = random_ids(200)[0].tolist()
    with enable(model, SpinConfig(block_size=8), probe=True, strict=True) as session:
        generate(model, ids, 3, session=session)
        assert session.stats.probe_seconds > 0

        def an_hour(*_: object) -> None:
            session.stats.probe_seconds += 3600

        hook = model.register_forward_hook(an_hour)
        generation = generate(model, ids, 3, session=session)
        hook.remove()
    assert all(-3600 < seconds < -3500 for seconds in generation.seconds_per_token)


def test_metrics_of_nothing_are_none() -> None:
    values = SpinStats().to_dict()
    assert values["realized_sparsity"] is None
    assert values["mean_miss"] is None
    assert values["p99_miss"] is None
    assert values["p99_miss_layer_mean"] is None


def test_bad_calls_are_refused(model: torch.nn.Module) -> None:
    cache, logits = prefill(model, random_ids(10))
    with pytest.raises(SpinError, match="max_new_tokens: got 0"):
        decode(model, cache, logits, 0)
    with pytest.raises(SpinError, match="one sequence"):
        decode(model, cache, logits.expand(2, -1), 3)
    with pytest.raises(SpinError, match="forced_tokens: got '1 tokens', allowed: 2 or more"):
        decode(model, cache, logits, 3, forced_tokens=[1])
    with pytest.raises(SpinError, match="chunk_tokens: got 1"):
        prefill(model, [1, 2], chunk_tokens=1)
    with pytest.raises(SpinError, match="prompt: got '0 tokens'"):
        prefill(model, [])
    with pytest.raises(SpinError, match=f"allowed: 1 .. {MAX_TOKENS} tokens"):
        prefill(model, [0] * (MAX_TOKENS + 1))
    with pytest.raises(SpinError, match=f"1 .. {MAX_TOKENS - 5} tokens with 5 to come"):
        generate(model, [0] * (MAX_TOKENS - 4), 5)


def test_first_divergence() -> None:
    assert first_divergence([1, 2], [1, 2]) is None
    assert first_divergence([1, 2], [1, 3]) == 1
    assert first_divergence([1, 2], [1, 2, 3]) == 2


def test_a_prompt_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    path.write_bytes("one\r\n\ttwo é\n".encode())
    assert read_prompt(path) == "one\r\n\ttwo é\n"
    path.write_bytes(b"ok \xff")
    with pytest.raises(SpinError, match="byte 3 is not UTF-8"):
        read_prompt(path)


def test_bos_leads_the_prompt_once(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, tiny_model(bos_token_id=33))  # "A"
    model, tokenizer = load_model(folder, device="cpu")
    assert encode_prompt(tokenizer, "bc", model) == [33, 66, 67]
    assert encode_prompt(tokenizer, "Abc", model) == [33, 66, 67]
    with pytest.raises(SpinError, match="at least one character"):
        encode_prompt(tokenizer, "", model)


# ---------------------------------------------------------------- the commands


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, an engine built for it, and a prompt."""
    folder = tmp_path_factory.mktemp("files")
    save_checkpoint(folder / "checkpoint", tiny_model())
    save_checkpoint(folder / "other", tiny_model(index_topk=8))
    arguments = ["--use_spin", "--checkpoint_dir", str(folder / "checkpoint"), "--target_sm", "90"]
    for name, length in (("engine", MAX_TOKENS), ("short", 256)):
        with pytest.raises(SystemExit) as exit_info:
            build_main(
                [
                    *arguments,
                    *("--output_dir", str(folder / name), "--max_seq_len", str(length)),
                    *("--spin_block_size", "8", "--spin_sparsity", "0.6"),
                ]
            )
        assert not exit_info.value.code
    (folder / "prompt").write_text(PROMPT, encoding="utf-8")
    (folder / "empty").touch()
    (folder / "long").write_text("x" * MAX_TOKENS, encoding="utf-8")
    (folder / "binary").write_bytes(b"\xff\xfe")
    return folder


def call(
    capsys: pytest.CaptureFixture[str], command: str, folder: Path, *options: str, **paths: str
) -> tuple[int, str, str]:
    """Run a command with paths inside a folder: exit code, stdout, stderr."""
    arguments = [command]
    for name, value in paths.items():
        arguments += ["--" + name.replace("_", "-"), str(folder / value)]
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        main([*arguments, *options])
    output = capsys.readouterr()
    return int(exit_info.value.code or 0), output.out, output.err


GENERATE = {"engine": "engine", "checkpoint": "checkpoint", "prompt_file": "prompt"}


def test_generate_prints_one_json_object(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-new-tokens", "12", "--compare-dense", "--json")
    code, out, _ = call(capsys, "generate", files, *options, **GENERATE)
    report = json.loads(out)
    assert code == 0
    assert report["layers"] == list(CSA_LAYERS)
    assert report["prompt_tokens"] == len(PROMPT)
    assert (report["steps"], report["cold_steps"]) == (11, 1)
    assert 0.4 < report["realized_sparsity"] < 0.6
    assert report["spin_slots_scored"] < report["dense_slots_scored"]
    assert 0 < report["mean_miss"] <= report["p99_miss"] <= 1
    assert 0 <= report["token_agreement"] <= 1
    assert len(report["text"]) == len(report["text_dense"]) == 12
    assert report["seconds_per_token_spin"] > 0
    assert report["seconds_per_token_dense"] > 0
    if report["first_divergence"] is None:
        assert report["text"] == report["text_dense"]
    else:
        assert (
            report["text"][: report["first_divergence"]]
            == report["text_dense"][: report["first_divergence"]]
        )


def test_generate_leaves_null_what_it_did_not_measure(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, "generate", files, "--max-new-tokens", "1", "--json", **GENERATE)
    report = json.loads(out)
    assert code == 0
    absent = {name for name, value in report.items() if value is None}
    assert absent == {
        *("mean_miss", "p99_miss", "p99_miss_layer_mean", "token_agreement", "first_divergence"),
        *("seconds_per_token_dense", "text_dense", "seconds_per_token_spin", "realized_sparsity"),
    }


def test_generate_streams_its_text_and_prints_a_table(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--max-new-tokens", "12")
    _, out, _ = call(capsys, "generate", files, *options, "--json", **GENERATE)
    text = json.loads(out)["text"]
    code, out, _ = call(capsys, "generate", files, *options, "--compare-dense", **GENERATE)
    assert code == 0
    assert out.startswith(text + "\n")
    assert "realized sparsity" in out
    assert "not measured" not in out
    code, out, _ = call(capsys, "generate", files, *options, **GENERATE)
    assert code == 0
    assert "not measured" in out


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"engine": "missing"}, (), "engine_dir"),
        ({"engine": "checkpoint"}, (), "a directory written by trtllm-build"),
        ({"checkpoint": "missing"}, (), "checkpoint"),
        ({"checkpoint": "other"}, (), "which"),
        ({"prompt_file": "missing"}, (), "No such file"),
        ({"prompt_file": "checkpoint"}, (), "Is a directory"),
        ({"prompt_file": "empty"}, (), "at least one character"),
        ({"prompt_file": "binary"}, (), "not UTF-8"),
        ({"prompt_file": "long"}, (), "2048 tokens"),
        ({"engine": "short"}, (), "the engine's max_seq_len"),
        ({}, ("--max-new-tokens", "0"), "--max-new-tokens: got 0"),
        ({}, ("--max-new-tokens", "many"), "many"),
    ],
)
def test_generate_refuses_in_one_line(
    files: Path,
    changed: dict[str, str],
    options: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = call(capsys, "generate", files, *options, **(GENERATE | changed))
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


TRACE = {"checkpoint": "checkpoint", "prompt": "prompt", "out": "trace", "dump": "dump"}


def test_replay_of_a_trace_equals_the_hosts_dump(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--max-new-tokens", "15", *SPIN_OPTIONS)
    code, out, _ = call(capsys, "trace", files, *options, **TRACE)
    assert code == 0
    assert "15 steps of layers 1, 3" in out
    with pytest.raises(SystemExit) as exit_info:
        main(["replay", str(files / "trace"), "--dump", str(files / "replayed"), *SPIN_OPTIONS])
    assert not exit_info.value.code
    ours, theirs = load_file(files / "dump"), load_file(files / "replayed")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert ours["blocks"].shape[0] == 15


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"out": "missing/trace"}, (), "No such file"),
        ({"out": "checkpoint"}, (), "is no regular file"),
        ({"dump": "missing/dump"}, (), "No such file"),
        ({"dump": "new"}, (), "another file than --out"),
        ({"prompt": "empty"}, (), "at least one character"),
        ({"prompt": "long"}, (), "2048 tokens"),
        ({}, ("--max-new-tokens", "0"), "--max-new-tokens: got 0"),
        ({}, ("--top-k", "7"), "the model's index_topk"),
        ({}, ("--reduction", "A0"), "reduction"),
        ({}, ("--sparsity", "1"), "target_sparsity"),
    ],
)
def test_trace_refuses_in_one_line_and_writes_nothing(
    files: Path,
    changed: dict[str, str],
    options: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = TRACE | {"out": "new", "dump": "new-dump"} | changed
    code, _, err = call(capsys, "trace", files, *options, **paths)
    assert code == 2
    assert err.count("\n") == 1
    assert message in err
    assert not (files / "new").exists()
    assert not (files / "new-dump").exists()
