# SPDX-License-Identifier: Apache-2.0
"""Commands do not write over what they read; a trace says where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from spin_trtllm.commands import replay, trace
from spin_trtllm.errors import SpinError
from spin_trtllm.replay.trace import Trace, write_trace
from spin_trtllm.report.drafts import DraftedTrace, Drafts


@pytest.mark.parametrize("option", ["--out", "--dump"])
@pytest.mark.parametrize("target", ["prompt.txt", "spin.yaml", "model/model.safetensors"])
def test_a_trace_does_not_replace_its_inputs(tmp_path: Path, option: str, target: str) -> None:
    (tmp_path / "model").mkdir()
    for name in ("prompt.txt", "spin.yaml", "model/model.safetensors"):
        (tmp_path / name).write_text("spin: {}\n")
    arguments = {
        "--checkpoint": tmp_path / "model",
        "--prompt": tmp_path / "prompt.txt",
        "--spin-config": tmp_path / "spin.yaml",
        "--out": tmp_path / "model" / "new.safetensors",  # beside the weights is allowed
        option: tmp_path / target,
    }
    line = [str(part) for pair in arguments.items() for part in pair]
    found = CliRunner().invoke(trace.command, line)
    assert isinstance(found.exception, SpinError)
    assert str(found.exception).startswith(f"{option}: got ")
    assert (tmp_path / target).read_text() == "spin: {}\n"


def test_a_replay_does_not_replace_its_settings(tmp_path: Path) -> None:
    settings = tmp_path / "spin.yaml"
    settings.write_text("spin: {}\n")
    line = ["trace", "--spin-config", str(settings), "--dump", str(settings)]
    found = CliRunner().invoke(replay.command, line)
    assert isinstance(found.exception, SpinError)
    assert str(found.exception).startswith("--dump: got ")


# ---------------------------------------------------------------- what a trace says of its origin
PROMPTS = {"one": "A fox jumps over a dog, " * 4, "other": "Two foxes jump over a log, " * 4}


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Trace, str]]:
    """Captures with random weights from a seed: the trace, and what was said."""
    tiny_models = pytest.importorskip("tiny_models", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("captured")

    def capture(prompt: str, *options: str, seed: int = 0, top_k: int = 16) -> tuple[Trace, str]:
        checkpoint = folder / f"model-{seed}-{top_k}"
        if not checkpoint.exists():
            model = tiny_models.tiny_model(seed, index_topk=top_k)
            tiny_models.save_checkpoint(checkpoint, model)
        text, out = folder / "prompt.txt", folder / f"{len(list(folder.iterdir()))}.trace"
        text.write_text(PROMPTS[prompt])
        line = ["--checkpoint", checkpoint, "--prompt", text, "--out", out, *options]
        found = CliRunner().invoke(trace.command, [str(part) for part in line])
        assert found.exit_code == 0, found
        return Trace(out), found.stderr

    return capture


def test_a_prompt_names_its_sequence(captured: Callable[..., tuple[Trace, str]]) -> None:
    one, other = (captured(name)[0] for name in PROMPTS)
    assert one.sequence_id != other.sequence_id
    assert captured("one", "--sparsity", "0.2")[0].sequence_id == one.sequence_id
    assert captured("one", "--sequence-id", "7")[0].sequence_id == 7
    drafts = Drafts(tokens=3, acceptance=0.5)
    accepted = [DraftedTrace(each.path, drafts).accepted.tolist() for each in (one, other)]
    assert accepted[0][:10] != accepted[1][:10]


def test_a_trace_is_made_with_its_models_preset(
    captured: Callable[..., tuple[Trace, str]], tmp_path: Path
) -> None:
    found, said = captured("one")
    assert (said, "blocks of 64" in found.source) == ("", True)  # no preset has a top-k of 16
    found, said = captured("one", top_k=64)
    assert said == "settings: preset tiny-deepseek-v4\n"
    assert "sparsity 0.4, blocks of 16" in found.source
    settings = tmp_path / "spin.yaml"
    settings.write_text("block_size: 8")
    options = ("--spin-config", str(settings), "--sparsity", "0.1")
    found, said = captured("one", *options, top_k=64)
    assert said == f"settings: {settings} over preset tiny-deepseek-v4\n"
    assert "sparsity 0.1, blocks of 8" in found.source


def test_a_trace_knows_its_weights(captured: Callable[..., tuple[Trace, str]]) -> None:
    one, again, other = captured("one")[0], captured("other")[0], captured("one", seed=1)[0]
    assert one.model == again.model != other.model
    assert one.of_same_model(again)
    assert not one.of_same_model(other)
    assert other.model[:12] in other.model_facts


def test_a_replay_takes_the_preset_of_the_traces_model(tmp_path: Path) -> None:
    positions = torch.arange(400, 404).unsqueeze(1)
    scores = torch.rand(4, 1, 1, 101, generator=torch.Generator().manual_seed(0))
    facts = {"ratio": 4, "layers": [1], "sequence_id": 0}
    for top_k, said in ((64, "settings: preset tiny-deepseek-v4\n"), (9, "")):
        path = tmp_path / f"{top_k}.trace"
        write_trace(
            path, scores, positions, torch.zeros(4, dtype=torch.int64), top_k=top_k, **facts
        )
        found = CliRunner().invoke(replay.command, [str(path), "--dump", str(tmp_path / "dump")])
        assert (found.exit_code, found.stderr) == (0, said)
        blocks = load_file(tmp_path / "dump")["blocks"].shape[-1]
        assert blocks == -(-101 // (16 if said else 64))
