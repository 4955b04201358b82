# SPDX-License-Identifier: Apache-2.0
"""Training in miniature: it learns, stops and goes on, and exports what Transformers can load."""

import json
import math
import time

import pytest
import torch
from miniature import small_configuration
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.tiny_model import train as command
from benchmarks.tiny_model.batches import Batches
from benchmarks.tiny_model.corpus import Corpus, save_corpus
from benchmarks.tiny_model.evaluate import held_out_loss, recall_shares
from benchmarks.tiny_model.forward import Forward
from benchmarks.tiny_model.model import configuration, load_weights, new_model, save_checkpoint
from benchmarks.tiny_model.train import Places, make_trainer, train
from benchmarks.tiny_model.trainer import Trainer
from spin_trtllm import tiny
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.transformers import load_model

ALWAYS = math.inf


def take_steps(trainer, corpus, count):
    batches = Batches(corpus.train, trainer.stage, trainer.seed)
    first = trainer.next_step
    return [trainer.step(batches[step]) for step in range(first, first + count)]


def weights_of(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_both_stages_one_after_the_other(small_model, corpus, stage, tmp_path):
    losses = []
    for number in (1, 2):
        places = Places(tmp_path, number)
        trainer = make_trainer(small_model(), stage(number, steps=24), 0, corpus, places)
        assert train(trainer, corpus, places, deadline=ALWAYS, workers=0)
        lines = [json.loads(line) for line in (places.folder / "log.jsonl").open()]
        losses += [line["text_loss"] for line in lines if "text_loss" in line]
        assert lines[-1]["step"] == 24
        assert len(lines[-1]["indexer_losses"]) == 1
        assert not places.state.exists()
    first, stage_1, start_2, stage_2 = losses
    assert first == pytest.approx(math.log(272), abs=0.3)  # knows nothing
    assert stage_1 < 4.5
    assert start_2 < 3.5
    assert stage_2 < 3.0


def test_the_indexer_learns(small_model, corpus, stage):
    trainer = Trainer(small_model(initializer_range=0.2), stage(steps=80), seed=0)
    measured = take_steps(trainer, corpus, 60)[40:]
    first, last = (
        torch.stack([m.indexer_losses for m in part]).mean()
        for part in (measured[:4], measured[-4:])
    )
    assert last < 0.8 * first


def test_resumed_is_uninterrupted_bit_for_bit(small_model, corpus, stage, tmp_path):
    whole = Trainer(small_model(), stage(), seed=0)
    take_steps(whole, corpus, 8)

    state = tmp_path / "state.pt"
    part = Trainer(small_model(), stage(), seed=0)
    for seed in (1, 2, 3):  # models of other seeds: everything must come from the file
        take_steps(part, corpus, 2)
        part.save_state(state)
        part = Trainer(small_model(seed), stage(), seed=0)
        part.load_state(state)
    take_steps(part, corpus, 2)
    assert part.next_step == whole.next_step == 8
    assert_same(weights_of(part), weights_of(whole))


def test_held_out_text_is_never_trained_on(small_model, corpus, stage, tmp_path, monkeypatch):
    read = set()
    step = Trainer.step
    monkeypatch.setattr(
        Trainer,
        "step",
        lambda self, batch: read.update(batch.targets.flatten().tolist()) or step(self, batch),
    )
    places = Places(tmp_path, 1)
    train(
        make_trainer(small_model(), stage(), 0, corpus, places),
        corpus,
        places,
        deadline=ALWAYS,
        workers=0,
    )
    assert read
    assert read.isdisjoint(corpus.held_out.tolist())


def test_a_call_out_of_time_saves_and_the_next_goes_on(
    small_model, corpus, stage, tmp_path, monkeypatch
):
    places = Places(tmp_path / "cut", 1)
    clock = iter(range(10_000))
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock))
    calls = done = 0
    while not done:
        trainer = make_trainer(small_model(), stage(), 0, corpus, places)
        done = train(trainer, corpus, places, deadline=next(clock) + 10, workers=0)
        calls += 1
        assert places.state.exists() != places.done
    assert calls > 2

    whole = make_trainer(small_model(), stage(), 0, corpus, Places(tmp_path / "whole", 1))
    train(whole, corpus, Places(tmp_path / "whole", 1), deadline=ALWAYS, workers=0)
    cut, uncut = (tmp_path / name / "stage-1" / "model.safetensors" for name in ("cut", "whole"))
    assert cut.read_bytes() == uncut.read_bytes()


def test_workers_change_nothing(small_model, corpus, stage, tmp_path):
    written = []
    for workers in (0, 2):
        places = Places(tmp_path / str(workers), 1)
        trainer = make_trainer(small_model(), stage(), 0, corpus, places)
        train(trainer, corpus, places, deadline=ALWAYS, workers=workers)
        written.append((places.folder / "model.safetensors").read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize(("name", "seed", "number"), [("seed", 1, 1), ("stage", 0, 2)])
def test_state_of_another_run_is_refused(small_model, stage, tmp_path, name, seed, number):
    Trainer(small_model(), stage(), seed=0).save_state(tmp_path / "state.pt")
    with pytest.raises(SpinError, match=rf"{name} of .*state\.pt.* allowed: .*or an empty output"):
        Trainer(small_model(), stage(number), seed).load_state(tmp_path / "state.pt")


def cut_run(small_model, corpus, stage, tmp_path, start):
    """A stage that stopped after its first steps."""
    places = Places(tmp_path / "cut", 3)
    trainer = make_trainer(small_model(), stage(3), 0, corpus, places, start)
    assert not train(trainer, corpus, places, deadline=-math.inf, workers=0)
    return places


def test_a_state_of_other_text_weights_or_settings_is_refused(small_model, corpus, stage, tmp_path):
    starts = [tmp_path / "one", tmp_path / "other"]
    for seed, start in enumerate(starts):
        save_checkpoint(start, small_model(seed))
    places = cut_run(small_model, corpus, stage, tmp_path, starts[0])
    make_trainer(small_model(), stage(3), 0, corpus, places, starts[0])  # goes on

    shorter = Corpus(corpus.train[:-1], corpus.held_out)
    refused = {
        "training text": (small_model(), shorter, starts[0]),
        "first weights": (small_model(), corpus, starts[1]),
        "model settings": (small_model(swiglu_limit=9.0), corpus, starts[0]),
    }
    for name, (model, text, start) in refused.items():
        with pytest.raises(SpinError, match=rf"^{name} of .*state\.pt.*or an empty output$"):
            make_trainer(model, stage(3), 0, text, places, start)


def test_a_broken_state_is_refused(small_model, stage, tmp_path):
    (tmp_path / "state.pt").write_bytes(b"half a f")
    with pytest.raises(SpinError, match=r"state: cannot read '.*state\.pt'"):
        Trainer(small_model(), stage(), 0).load_state(tmp_path / "state.pt")


def test_stage_2_without_stage_1_is_refused(small_model, corpus, stage, tmp_path):
    with pytest.raises(SpinError, match=r"checkpoint: cannot load '.*stage-1/model\.safetensors'"):
        make_trainer(small_model(), stage(2), 0, corpus, Places(tmp_path, 2))


def test_a_stage_can_start_from_any_checkpoint(small_model, corpus, stage, tmp_path):
    save_checkpoint(tmp_path / "other", small_model(seed=5))
    trainer = make_trainer(
        small_model(), stage(3), 0, corpus, Places(tmp_path, 3), start=tmp_path / "other"
    )
    weight = trainer.model.lm_head.weight.detach()
    assert torch.equal(weight, small_model(seed=5).lm_head.weight.bfloat16().float())


def test_a_step_without_a_finite_gradient_is_left_out(small_model, corpus, stage):
    trainer = Trainer(small_model(), stage(), seed=0)
    embeddings = trainer.model.get_input_embeddings().weight
    with torch.no_grad():
        embeddings[256] = math.nan  # every sequence starts with it
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    take_steps(trainer, corpus, 1)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0, equal_nan=True)
    trainer._skipped = 20
    with pytest.raises(SpinError, match="training: 21 steps without a finite gradient"):
        take_steps(trainer, corpus, 1)


def test_experts_with_little_load_are_favoured(small_model, corpus, stage):
    trainer = Trainer(small_model(), stage(), seed=0)
    bias = trainer.model.model.layers[0].mlp.gate.e_score_correction_bias
    with torch.no_grad():
        bias.copy_(torch.tensor([9.0, 9.0, -9.0, -9.0]))  # the first two take every token
    take_steps(trainer, corpus, 1)
    moved = bias - torch.tensor([9.0, 9.0, -9.0, -9.0])
    torch.testing.assert_close(moved, torch.tensor([-1e-3, -1e-3, 1e-3, 1e-3]), atol=1e-6, rtol=0)


def test_export_loads_everywhere(small_model, corpus, stage, tmp_path):
    places = Places(tmp_path, 1)
    trainer = make_trainer(small_model(), stage(), 0, corpus, places)
    train(trainer, corpus, places, deadline=ALWAYS, workers=0)
    assert sorted(path.name for path in places.folder.iterdir()) == sorted(
        [*tiny.FILES, "log.jsonl"]
    )

    loaded = AutoModelForCausalLM.from_pretrained(places.folder, dtype=torch.float32).eval()
    tokens = Batches(corpus.train, stage(), 0)[0].tokens
    trained, exported = weights_of(trainer), loaded.state_dict()
    assert trained.keys() == exported.keys()
    for name, value in trained.items():
        matrix = value.ndim > 1 and "_hc." not in name and "hc_head" not in name
        rounding = 2**-8 if matrix and "position_bias" not in name else 0
        torch.testing.assert_close(exported[name], value, rtol=rounding, atol=0)
    load_weights(trainer.model, places.folder)
    with torch.no_grad():
        theirs = loaded(tokens, use_cache=False).logits
        mine = Forward(trainer.model, torch.float32)(tokens, sparse=True).logits
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(places.folder / "tokenizer.json"))
    text = "".join(chr(code) for code in range(0x250)) + "  \n\n€"
    assert tokenizer.encode(text) == list(text.encode())
    load_model(places.folder)  # the embedded host's own


def test_export_has_the_format_of_the_shipped_checkpoint(tmp_path):
    """Names, types, shapes, configuration and tokenizer, of the model at its real size."""
    save_checkpoint(tmp_path, new_model(configuration(), seed=1))
    shipped = tiny._IN_CLONE
    headers = []
    for directory in (tmp_path, shipped):
        with safe_open(directory / "model.safetensors", "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            headers.append({n: (s.get_dtype(), s.get_shape()) for n, s in slices.items()})
    assert headers[0] == headers[1]
    new, old = (json.loads((d / "config.json").read_text()) for d in (tmp_path, shipped))
    assert {key: new.get(key) for key in old} == old
    assert (tmp_path / "tokenizer.json").read_bytes() == (shipped / "tokenizer.json").read_bytes()


def test_evaluation_counts_what_it_says(small_model, corpus):
    forward = Forward(small_model().eval(), torch.float32)
    held_out = held_out_loss(forward, corpus.held_out, length=256, windows=99)
    assert held_out["windows"] == 16
    assert held_out["dense"] == pytest.approx(math.log(272), abs=0.3)
    recall = recall_shares(forward, corpus.train.tobytes(), length=1_024, episodes=3)
    assert recall["questions"] > 3
    assert recall["sparse"]["all"] == 0.0  # an untrained model answers nothing
    assert set(recall["dense"]) >= {"all", "from 0 bytes"}


def test_the_command_goes_on_where_it_stopped(corpus, stage, tmp_path, monkeypatch, capsys):
    save_corpus(tmp_path / "c.zip", corpus.train.tobytes(), corpus.held_out.tobytes(), {})
    monkeypatch.setattr(command, "STAGES", {1: stage(1), 2: stage(2)})
    monkeypatch.setattr(command, "configuration", small_configuration)

    def call(stage_number, seconds):
        arguments = ["--stage", stage_number, "--seed", 3, "--seconds", seconds, "--workers", 0]
        places = ["--corpus", tmp_path / "c.zip", "--output", tmp_path / "out"]
        monkeypatch.setattr("sys.argv", ["train", *map(str, arguments + places)])
        try:
            command.main()
        except SystemExit as exit_:
            return exit_.code
        return 0

    assert call(1, 0) == command.AGAIN == 75
    assert "the same command goes on" in capsys.readouterr().err
    assert call(2, 60) == 2  # there is no checkpoint to start from yet
    assert call(1, 60) == 0
    assert call(2, 60) == 0
    for number in (1, 2):
        assert {*tiny.FILES, "log.jsonl"} == {
            path.name for path in (tmp_path / "out" / f"stage-{number}").iterdir()
        }


def test_finished_stage_is_not_trained_again(tmp_path, monkeypatch, capsys):
    places = Places(tmp_path, 1)
    places.folder.mkdir()
    (places.folder / "tokenizer.json").touch()
    monkeypatch.setattr(
        "sys.argv",
        ["train", "--stage", "1", "--corpus", "none.zip", "--output", str(tmp_path)],
    )
    command.main()
    assert "done before" in capsys.readouterr().out


def test_missing_corpus_is_one_line(tmp_path, monkeypatch, capsys):
    arguments = ["--stage", "1", "--corpus", "none.zip", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["train", *arguments])
    started = time.monotonic()
    with pytest.raises(SystemExit) as exit_:
        command.main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith("corpus: cannot read 'none.zip'")
    assert time.monotonic() - started < 20
