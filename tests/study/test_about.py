# SPDX-License-Identifier: Apache-2.0
"""What results were made from is written down only when it is so."""

import hashlib
import json
import sys

import pytest
import torch

from benchmarks.study import about
from benchmarks.study.questions import ABOUT, load_about, load_results
from benchmarks.study.study import Study
from benchmarks.tiny_model.corpus import save_corpus

WEIGHTS, CONFIG, TEXT = b"weights", b"{}", b"held-out text"


@pytest.fixture
def folder(tmp_path):
    """A checkpoint, a text, and a result of both."""
    for name in ("checkpoint", "study"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes(WEIGHTS)
    (tmp_path / "checkpoint" / "config.json").write_bytes(CONFIG)
    save_corpus(tmp_path / "corpus.zip", b"", TEXT, {})
    digests = [hashlib.sha256(content).hexdigest() for content in (WEIGHTS, CONFIG)]
    study = Study(torch.nn.Module(), " ".join(digests), TEXT, tmp_path / "study")
    question = {"task": "recall", "context_bytes": 400, "documents": 1, "queries": 1}
    cell = {"question": question | {"drafts": None}, "method": "dense", "setting": 0}
    result = {"cell": cell, "source": study.source}
    (study.output / "dense.json").write_text(json.dumps(result), encoding="utf-8")
    return tmp_path


def call(monkeypatch, folder, *more):
    line = ["about", str(folder / "study"), "--checkpoint", str(folder / "checkpoint"), *more]
    monkeypatch.setattr(sys, "argv", line)
    about.main()


def test_what_the_results_are_of(folder, monkeypatch):
    assert load_about(folder / "study") is None
    call(monkeypatch, folder, "--corpus", str(folder / "corpus.zip"))
    found = load_about(folder / "study")
    assert found["checkpoint"] == (folder / "checkpoint").as_posix()
    assert found["sha256"] == {
        "model.safetensors": hashlib.sha256(WEIGHTS).hexdigest(),
        "config.json": hashlib.sha256(CONFIG).hexdigest(),
    }
    assert (found["text"], found["text_bytes"]) == ("held-out text of corpus.zip", len(TEXT))
    assert found["text_sha256"] == hashlib.sha256(TEXT).hexdigest()
    (results,) = load_results(folder / "study").values()
    assert len(results) == 1  # it is no result itself


@pytest.mark.parametrize("changed", ["weights", "text", "none"])
def test_other_weights_or_text_are_refused(folder, monkeypatch, capsys, changed):
    corpus = ["--corpus", str(folder / "corpus.zip")]
    if changed == "weights":
        (folder / "checkpoint" / "config.json").write_bytes(b"[]")
    elif changed == "text":
        corpus = []  # the license
    else:
        (folder / "checkpoint" / "config.json").unlink()
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, folder, *corpus)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    allowed = "allowed: those that the results are of"
    assert ("cannot read" if changed == "none" else allowed) in error
    assert error.count("\n") == 1
    assert not (folder / "study" / ABOUT).exists()
