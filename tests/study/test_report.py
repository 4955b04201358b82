# SPDX-License-Identifier: Apache-2.0
"""The report pairs every method with dense, and says what was run on what."""

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.study import report
from benchmarks.study.cells import PARTS
from benchmarks.study.figures import chart_of
from benchmarks.study.pack import SUFFIX, pack
from benchmarks.study.questions import ABOUT, load_about, load_results
from benchmarks.study.report import write_figure, write_markdown, write_page
from benchmarks.study.rows import distance_rows, draft_row, quality_row
from spin_trtllm.errors import SpinError

RIGHT = [[True, True], [True, False], [True, True]]


def result(method="dense", setting=0.0, right=RIGHT, keys=100, task="recall", drafts=None, **more):
    question = {"task": task, "context_bytes": 4_096, "documents": 3, "queries": 2}
    return {
        "cell": {"question": question | {"drafts": drafts}, "method": method, "setting": setting},
        "right": right,
        "cost": {
            "dense_keys": 100,
            "keys": keys,
            "dense_products": 200,
            "products": 2 * keys,
            "bytes_share": keys / 100 + 0.05 * (method == "spin"),
        },
        "seconds": 2.0,
        "source": "one model and text",
        "environment": {
            "date": "2026-11-30",
            "device": "a machine",
            "versions": {"torch": "1", "transformers": "2"},
        },
        **more,
    }


FORCED = {
    "nats": [[0.0, 1.0], [0.0, 5.0], [0.0, 0.0]],
    "distance_bytes": [[10, 2_000], [20, 5_000], [1_024, 30]],
}
DENSE = result(**FORCED)
SPIN = result(
    "spin",
    0.4,
    [[True, False], [True, True], [True, False]],
    keys=60,
    **FORCED | {"nats": [[3.0, 1.0], [0.0, 5.0], [3.0, 0.0]]},
)


STUDY = Path(__file__).parent.parent.parent / "benchmarks" / "study"


def save(folder, *results):
    for number, one in enumerate(results):
        (folder / f"{number}.json").write_text(json.dumps(one), encoding="utf-8")


def test_results_of_different_sources_are_not_paired(tmp_path):
    """Another corpus, and only half of the cells run again: the rest is of other documents."""
    save(tmp_path, DENSE, SPIN | {"source": "another text"})
    with pytest.raises(SpinError, match=r"^study: 0.json and 1.json come from different"):
        load_results(tmp_path)


def test_other_json_is_refused(tmp_path):
    save(tmp_path, DENSE, {"share": 1})
    with pytest.raises(SpinError, match=r"1.json' is no result: KeyError"):
        load_results(tmp_path)


def test_a_method_next_to_dense():
    row = quality_row(SPIN, DENSE)
    assert row["method"] == "`spin` 0.4"
    assert row["right"] == "4 of 6"
    assert row["lost, gained"] == "2, 1"
    assert row["share - dense"].startswith("-0.167 (")
    assert row["nats - dense"] == "+1.000 (too few documents)"
    assert (row["bytes"], row["keys"], row["products"]) == ("0.650", "0.600", "0.600")


def test_distances_are_counted_in_their_bucket():
    dense, spin = distance_rows([DENSE, SPIN])
    assert dense == {
        "method": "`dense`",
        "from 0 bytes": "3 of 3",
        "from 1,024 bytes": "2 of 2",
        "from 4,096 bytes": "0 of 1",
    }
    assert spin["from 0 bytes"] == "2 of 3"


def test_drafts_are_counted():
    fields = {"task": "text", "drafts": 3, "steps_of_rows": {"1": 1, "4": 3}}
    dense = result(tokens=[[1, 2, 3, 4], [5, 6, 7, 8]], accepted=6, proposed=9, **fields)
    for accepted, proposed in ((3, 9), ([1, 2], [5, 4])):  # totals, as earlier results have, or not
        some = {"accepted": accepted, "proposed": proposed}
        spin = result("spin", 0.4, tokens=[[1, 2, 3, 0], [5, 0, 7, 8]], **some, **fields)
        row = draft_row(spin, dense)
        assert row["drafts accepted"] == "3 of 9"
        assert row["tokens a step"] == "1.75"
        assert row["tokens as dense"] == "0.750"


def test_files_are_grouped_with_dense_first(tmp_path):
    save(tmp_path, SPIN, DENSE, result(task="single"))
    questions = load_results(tmp_path)
    assert [len(results) for results in questions.values()] == [2, 1]
    assert questions["recall at 4,096 bytes, 3 documents, 2 answers each"] == [DENSE, SPIN]
    text = write_markdown(questions, None)
    assert "3 cells on a machine, torch 1, transformers 2, 2026-11-30: 6 s of decoding." in text
    assert "Checkpoint and text were not named; their SHA-256 one model an." in text
    assert "| `spin` 0.4 | 4 of 6 |" in text


def test_questions_without_dense_alone_are_refused(tmp_path):
    save(tmp_path, SPIN)
    with pytest.raises(SpinError, match="no dense result of recall at 4,096"):
        load_results(tmp_path)


def test_a_question_without_dense_waits_for_it(tmp_path):
    save(tmp_path, SPIN, DENSE, result("spin", 0.4, task="single"))
    assert list(load_results(tmp_path)) == ["recall at 4,096 bytes, 3 documents, 2 answers each"]


METHODS_OF_A_FIGURE = ("streaming", "tisa", "hisa")


def others(**more):
    return [result(method, 0.6, keys=40, **FORCED | more) for method in METHODS_OF_A_FIGURE]


def test_the_figure_has_quality_over_bytes():
    results = [DENSE, SPIN, *others()]
    chart = chart_of("name", results)
    series = {one["label"]: one for one in chart["series"]}
    assert set(series) == {"dense", "spin", *METHODS_OF_A_FIGURE}
    (point,) = series["spin"]["points"]
    assert point["x"] == pytest.approx(0.65)
    assert point["value"] == pytest.approx(4 / 6)
    assert point["low"] < point["value"] < point["high"]
    assert len({one["number"] for one in series.values()}) == 5
    assert chart_of("few", results[:2]) is None


def test_the_figure_of_text_is_in_nats_over_denses():
    results = [one | {"cell": cell_of(one, task="text")} for one in (DENSE, SPIN, *others())]
    chart = chart_of("name", results)
    values = {one["label"]: one["points"][0]["value"] for one in chart["series"]}
    assert values["dense"] == values["hisa"] == 0
    assert values["spin"] == pytest.approx(1.0)
    assert chart["y_label"].startswith("nats a byte, over dense's")


def cell_of(one, **changes):
    return {**one["cell"], "question": one["cell"]["question"] | changes}


def far(*results):
    """As answers at the headline's lengths."""
    return [
        one | {"cell": cell_of(one, context_bytes=length)}
        for length in (8_192, 31_744)
        for one in results
    ]


class Page(HTMLParser):
    """Every element is closed where it should be."""

    def __init__(self, text):
        super().__init__()
        self.seen, self._open = [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag


def test_the_page_is_whole_and_says_what_was_found(tmp_path):
    save(tmp_path, DENSE, SPIN, *others(), *far(DENSE, SPIN, *others()))
    questions = load_results(tmp_path)
    text = write_page(questions, None)
    page = Page(text)
    tags = [tag for tag, _ in page.seen]
    assert tags.count("svg") == 1 + 3  # the headline, and each question
    assert {"script", "link", "img"}.isdisjoint(tags)
    assert "http" not in text
    for name in ("id", "aria-labelledby"):
        names = [attributes[name] for _, attributes in page.seen if name in attributes]
        assert len(set(names)) == len(names)
    for said in (
        "What a model of 7.6 million parameters can and cannot show",
        "It cannot show",
        "<strong>The paper: </strong>At 40 to 50 % sparsity exploration recalls at least as much",
        "<strong>Where they differ: </strong>Nothing to compare: no cells without",
        "At 40% SPIN loses 6 of dense's 15 right answers and gains 3, over 3 questions.",
        "Too few documents to tell from dense: hisa 0.6; spin 0.4; streaming 0.6; tisa 0.6.",
        "a machine, torch 1, transformers 2, 2026-11-30",
    ):
        assert said in text
    assert "`" not in text


def test_the_headline_is_a_file_of_its_own(tmp_path):
    save(tmp_path, *far(DENSE, SPIN, *others()))
    drawing = write_figure(load_results(tmp_path))
    root = ElementTree.fromstring(drawing)
    namespace = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{namespace}svg"
    found = [one.text for one in root.iter(f"{namespace}text")]
    places = [found.index(f"recall at {length} bytes") for length in ("31,744", "8,192")]
    assert places == sorted(places)  # the far one first
    for label in ("dense", "spin", *METHODS_OF_A_FIGURE):
        assert found.count(label) == 1  # one legend for both
    assert root.find(f"{namespace}style").text  # what the page's style says of its figures
    assert len(root.findall(f".//{namespace}polyline")) == 2 * 5
    assert write_figure({"recall at 8,192 bytes, 25": [DENSE, SPIN]}) is None


def test_command_writes_its_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        report.main()
    assert stopped.value.code == 2
    assert "a directory with results" in capsys.readouterr().err
    save(tmp_path, DENSE, SPIN)
    report.main()
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text.startswith("<!-- SPDX-License-Identifier: Apache-2.0 -->\n\n# Study\n")
    assert (tmp_path / "report.html").exists()
    assert not (tmp_path / "report.svg").exists()  # the headline's cells are not there


def test_packed_results_make_the_same_report(tmp_path, monkeypatch):
    """Beside the packed file, and named after it."""
    folder = tmp_path / "study"
    folder.mkdir()
    save(folder, *far(DENSE, SPIN, *others()))
    about = {"checkpoint": "weights", "sha256": {"config.json": "0123456789abcdef"}}
    about |= {"text": "a text", "text_bytes": 1_000, "text_sha256": "fedcba9876543210"}
    (folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")
    packed = tmp_path / f"h200{SUFFIX}"
    pack(folder, packed)
    assert load_results(packed) == load_results(folder)
    assert load_about(packed) == about
    for given in (folder, packed):
        monkeypatch.setattr(sys, "argv", ["report", str(given)])
        report.main()
    for suffix in (".md", ".html", ".svg"):
        beside = tmp_path / f"h200{suffix}"
        assert beside.read_bytes() == (folder / f"report{suffix}").read_bytes()
    text = (tmp_path / "h200.md").read_text(encoding="utf-8")
    assert "Checkpoint: `weights`, config.json SHA-256 0123456789ab." in text
    assert "a text, 1,000 bytes, SHA-256 fedcba987654." in text


@pytest.mark.parametrize("packed", sorted((STUDY / "results").glob(f"*{SUFFIX}")), ids=str)
def test_committed_reports_are_those_of_the_committed_results(packed):
    questions, about = load_results(packed), load_about(packed)
    for suffix, content in (
        (".md", write_markdown(questions, about)),
        (".html", write_page(questions, about)),
        (".svg", write_figure(questions)),
    ):
        file = packed.with_name(packed.name.removesuffix(SUFFIX) + suffix)
        assert (file.read_text(encoding="utf-8") if file.exists() else None) == content


def cells_of(row):
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_readme_quotes_the_first_look():
    section = (STUDY / "results" / "quick-cpu.md").read_text(encoding="utf-8")
    section = section[section.index("## recall at 4,096") :]
    rows = [cells_of(row) for row in section.splitlines() if row.startswith("| `")][:13]
    readme = (STUDY / "README.md").read_text(encoding="utf-8")
    assert {row[0].split("`")[1] for row in rows} == {cell.method for cell in PARTS["quick"]}
    for method, right, share, _, _, _, shared_bytes, *_ in rows:
        assert f"| {method} | {right} | {share} | {shared_bytes} |" in readme


def test_readme_lists_every_part():
    readme = (STUDY / "README.md").read_text(encoding="utf-8")
    for name, part in PARTS.items():
        if name == "quick":
            assert f"{len(part)} cells on the CPU" in readme
        else:
            assert f"| `{name}` | {len(part)} | " in readme
