# SPDX-License-Identifier: Apache-2.0
"""The corpus builder: English documents, each once and on one side of the split."""

import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from benchmarks.tiny_model import corpus as builder
from benchmarks.tiny_model.corpus import (
    SHORTEST_DOCUMENT,
    Source,
    load_corpus,
    read_documents,
    save_corpus,
    split,
)
from spin_trtllm.errors import SpinError

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "nobody",
    "in",
    "particular",
    "is",
    "looking",
]


def prose(seed, size=SHORTEST_DOCUMENT + 100):
    draws = np.random.default_rng(seed)
    text = f"document {seed} "
    while len(text) < size:
        text += WORDS[draws.integers(len(WORDS))] + " "
    return text


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def test_reads_english_documents_once(tmp_path):
    write(tmp_path / "b.txt", prose(0))
    write(tmp_path / "a" / "c.rst.gz", prose(1))
    write(tmp_path / "copy.txt", "another head here" + prose(0)[len("another head here") :])
    write(tmp_path / "short.txt", prose(2, size=100))
    write(tmp_path / "numbers.txt", "0123456789 " * 300)
    write(tmp_path / "greek.txt", "αβγδ " * 600)
    write(tmp_path / "program.py", prose(3))
    write(tmp_path / "translations" / "d.txt", prose(4))
    write(tmp_path / "plain" / "e.txt", prose(5))
    (tmp_path / "latin.txt").write_bytes(prose(6).encode() + b"\xe9" * 2)
    (tmp_path / "link.txt").symlink_to(tmp_path / "plain" / "e.txt")
    found = read_documents(tmp_path, Source("any", skip="/plain"))
    assert found == [prose(0).strip().encode(), prose(1).strip().encode()]


def test_pages_lose_their_markup(tmp_path):
    page = (
        "<html><head><title>gone</title></head><body><script>gone()</script>"
        '<div class="navheader">gone</div><h1>Title</h1>\r\n\r\n\r\n<p>one&nbsp;&amp;\t two</p>'
        f"<!-- gone --><p>{prose(0)}</p></body></html>"
    )
    write(tmp_path / "page.html", page)
    (text,) = read_documents(tmp_path, Source("any"))
    assert b"gone" not in text
    assert re.match(rb"Title\s+one & +two\s+document 0 the|Title\s+one & +two\s+document 0 ", text)
    assert b"<" not in text
    assert b"\n\n\n" not in text
    assert read_documents(tmp_path, Source("any", html=False)) == []


def test_split_holds_out_whole_documents():
    documents = {
        Source(name): [prose(seed, 2_000).encode() for seed in range(start, start + 100)]
        for name, start in (("a", 0), ("b", 100))
    }
    train, held_out = split(documents)
    numbers = [set(re.findall(rb"document (\d+) ", text)) for text in (train, held_out)]
    assert numbers[0].isdisjoint(numbers[1])
    assert len(numbers[0] | numbers[1]) == 200
    assert 8 <= len(numbers[1]) <= 12  # 4 % of either source
    assert {int(number) < 100 for number in numbers[1]} == {True, False}
    assert split(documents) == (train, held_out)


def test_a_limited_source_keeps_the_most_prose_like():
    tables = [f"document {n} {'|0123| ' * 300}".encode() for n in range(50)]
    texts = [prose(seed, 2_000).encode() for seed in range(50, 100)]
    train, held_out = split({Source("a", limit_bytes=90_000): tables + texts})
    assert b"0123" not in train + held_out
    assert 90_000 <= len(train + held_out) < 95_000


def test_file_round_trip(tmp_path):
    path = tmp_path / "corpus.zip"
    save_corpus(path, b"to train on", b"held out", {"packages": {"a": "1-2"}})
    loaded = load_corpus(path)
    assert loaded.train.tobytes() == b"to train on"
    assert loaded.held_out.tobytes() == b"held out"
    with zipfile.ZipFile(path) as file:
        about = json.loads(file.read("about.json"))
    assert about["packages"] == {"a": "1-2"}
    assert about["texts"]["train.txt"]["sha256"] == hashlib.sha256(b"to train on").hexdigest()


@pytest.mark.parametrize("content", [None, b"no zip"])
def test_no_corpus_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "c.zip").write_bytes(content)
    with pytest.raises(SpinError, match=r"corpus: cannot read '.*c\.zip'"):
        load_corpus(tmp_path / "c.zip")


def test_missing_packages_are_named(tmp_path, monkeypatch, capsys):
    arguments = ["--packages", str(tmp_path), "--output", str(tmp_path / "c.zip")]
    monkeypatch.setattr(sys, "argv", ["corpus", *arguments])
    with pytest.raises(SystemExit) as exit_:
        builder.main()
    assert exit_.value.code == 2
    assert "allowed: a folder with one anarchism_*.deb" in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="packages are made with dpkg-deb")
def test_from_packages_to_file(tmp_path, monkeypatch):
    sources = (Source("a"), Source("b"))
    for source, first in zip(sources, (0, 100), strict=True):
        tree = tmp_path / source.package
        for seed in range(first, first + 60):
            write(tree / "usr/share/doc" / f"{seed}.txt", prose(seed))
        control = f"Package: {source.package}\nVersion: 1.0-{first}\nArchitecture: all\n"
        write(tree / "DEBIAN/control", control + "Maintainer: a <a@b.c>\nDescription: test\n")
        target = tmp_path / f"{source.package}_1.0_all.deb"
        subprocess.run(["dpkg-deb", "--build", tree, target], check=True, capture_output=True)
    monkeypatch.setattr(builder, "SOURCES", sources)
    output = tmp_path / "new" / "corpus.zip"
    arguments = ["--packages", str(tmp_path), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["corpus", *arguments])
    builder.main()
    text = load_corpus(output)
    numbers = [
        set(re.findall(rb"document (\d+) ", t.tobytes())) for t in (text.train, text.held_out)
    ]
    assert len(numbers[0]) + len(numbers[1]) == len(numbers[0] | numbers[1]) == 120
    assert numbers[1]
    with zipfile.ZipFile(output) as file:
        assert json.loads(file.read("about.json"))["packages"] == {"a": "1.0-0", "b": "1.0-100"}
