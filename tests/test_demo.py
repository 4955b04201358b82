# SPDX-License-Identifier: Apache-2.0
"""The demo, reduced in size but with the real model, and how it ends."""

import contextlib
import io
import json
from dataclasses import replace

import pytest
import torch

from spin_trtllm import demo, tiny
from spin_trtllm.build.engine import load_engine
from spin_trtllm.commands.common import run
from spin_trtllm.errors import SpinError

SMALL = demo.DemoSize(context_bytes=2_400, queries=6, text_bytes=2_600, new_tokens=24)


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory):
    """Output directory, summary and screen of a small demo, run once for all tests."""
    pytest.importorskip("transformers")
    output = tmp_path_factory.mktemp("demo") / "not" / "there" / "yet"
    screen = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(screen):
            summary = demo.run_demo(output, SMALL)
    finally:
        torch.set_num_threads(threads)
    return output, summary, screen.buffer.getvalue().decode()


@pytest.fixture
def summary(demonstrated):
    return demonstrated[1]


def test_summary_is_what_was_written(demonstrated):
    output, summary, _ = demonstrated
    written = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(summary))
    assert sorted(path.name for path in output.iterdir()) == ["engine", "summary.json"]


def test_engine_is_one_of_the_tiny_checkpoint(demonstrated):
    engine = load_engine(demonstrated[0] / "engine")
    assert engine.check_checkpoint(tiny.checkpoint_path())
    assert engine.config.target_sparsity == 0.4


def test_headline_figures_come_from_the_parts(summary):
    text, recall = summary["parts"]["text"], summary["parts"]["recall"]
    headline = set(summary) - {"about", "parts", "environment", "seconds"}
    assert headline == {
        "target_sparsity",
        "expected_sparsity",
        "realized_sparsity",
        "mean_miss",
        "p99_miss",
        "token_agreement",
        "dense_slots_scored",
        "spin_slots_scored",
        "layers",
        "steps",
        "cold_steps",
        "queries",
        "exact_dense",
        "exact_spin",
    }
    for name in headline:
        part = recall if name in ("queries", "exact_dense", "exact_spin") else text
        assert summary[name] == part[name]


@pytest.mark.parametrize("name", ["recall", "text"])
def test_dense_slots_are_those_of_all_steps_and_layers(summary, name):
    part = summary["parts"][name]
    first = part["prompt_tokens"]
    visible = [(position + 1) // 4 for position in range(first, first + part["steps"])]
    assert part["layers"] == [1, 3, 4, 6]
    assert part["dense_slots_scored"] == 4 * sum(visible)


@pytest.mark.parametrize("name", ["recall", "text"])
def test_skipped_slots_agree_with_sparsity(summary, name):
    part = summary["parts"][name]
    warm_share = 1 - part["cold_steps"] / part["steps"]
    skipped = 1 - part["spin_slots_scored"] / part["dense_slots_scored"]
    # Slots and blocks differ by the newest block alone, which is kept and may be almost empty.
    blocks = -(-part["prompt_tokens"] // 4 // 16)
    assert skipped == pytest.approx(part["realized_sparsity"] * warm_share, abs=1 / blocks)
    assert part["cold_steps"] == 1
    assert part["fallbacks"] == {}
    assert demo.is_on_target(part)


def test_expected_sparsity_counted_by_hand(demonstrated):
    engine = load_engine(demonstrated[0] / "engine")
    # 2,400 tokens: 600 slots, 38 blocks of 16, of which 15 are skipped. From 2,563 tokens on there
    # are 641 slots and 41 blocks, of which 16 are skipped, as of the 40 before.
    assert demo.expected_sparsity(engine, 2_400, 3) == pytest.approx(15 / 38)
    assert demo.expected_sparsity(engine, 2_561, 4) == pytest.approx((0.4 + 2 * 16 / 41) / 3)


def test_expected_sparsity_is_the_mean_over_the_layers(demonstrated):
    engine = load_engine(demonstrated[0] / "engine")
    config = replace(engine.config, layer_sparsity={1: 0.5, 6: 0.1})
    skipped = (19 + 15 + 15 + 3) / 4  # of 38 blocks, in layers 1, 3, 4 and 6
    found = demo.expected_sparsity(replace(engine, config=config), 2_400, 3)
    assert found == pytest.approx(skipped / 38)


def test_dense_answers_nearly_everything(summary):
    assert summary["queries"] == SMALL.queries
    assert summary["exact_dense"] >= 5 / 6
    assert 0 <= summary["exact_spin"] <= 1
    assert 0 <= summary["mean_miss"] <= summary["p99_miss"] <= 1
    assert summary["token_agreement"] > 0.5


def test_screen_shows_every_question_and_the_figures(demonstrated):
    _, summary, screen = demonstrated
    rows = [line for line in screen.splitlines() if 'lookup("' in line]
    assert len(rows) == SMALL.queries
    right = sum(row.count(" ok ") for row in rows)
    assert right == round(SMALL.queries * (summary["exact_dense"] + summary["exact_spin"]))
    assert f"{summary['parts']['recall']['spin_slots_scored']:,}" in screen
    assert "$ trtllm-build --use_spin" in screen


def part(realized):
    return {"realized_sparsity": realized, "expected_sparsity": 0.39}


@pytest.mark.parametrize(
    ("realized", "code"), [(0.39, 0), (0.375, 0), (0.36, 1), (0.42, 1), (None, 1)]
)
def test_exit_code_tells_whether_sparsity_is_on_target(monkeypatch, capsys, realized, code):
    parts = {"recall": part(0.39), "text": part(realized)}
    monkeypatch.setattr(demo, "run_demo", lambda output: {"parts": parts})
    with pytest.raises(SystemExit) as ended:
        run(demo.command, [], "demo")
    assert ended.value.code == code
    assert ("text: realized sparsity" in capsys.readouterr().err) == bool(code)


def test_a_summary_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SpinError, match="output_dir"):
        demo.run_demo(tmp_path / "file", SMALL)


def test_no_license_no_demo(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "spin_trtllm" / "demo.py"))
    with pytest.raises(SpinError, match="in a clone of the repository"):
        demo.license_text()
