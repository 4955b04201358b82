# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML page: no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from spin_trtllm.report import svg
from spin_trtllm.report.charts import draw
from spin_trtllm.report.claims import FAILS, HOLDS, UNDECIDED
from spin_trtllm.report.intervals import CONFIDENCE, MINIMUM_RUNS, RESAMPLES, RUN_STEPS
from spin_trtllm.report.svg import element

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
  max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; }
h2 { margin-top: 3rem; border-top: 1px solid #bbb; padding-top: 1.5rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: bold; padding-bottom: 0.3rem; }
th, td { border-bottom: 1px solid #ddd; padding: 0.25rem 0.7rem; text-align: left;
  vertical-align: top; }
small { color: #555; font-size: 1em; white-space: nowrap; }
.wide { overflow-x: auto; }
.verdict { font-weight: bold; white-space: nowrap; }
figure { margin: 1.5rem 0; }
figcaption { font-size: 0.9rem; color: #333; }
svg { width: 100%; max-width: 46rem; height: auto; }
"""
_VERDICT_SIGNS = {HOLDS: "✓ holds", FAILS: "✗ does not hold", UNDECIDED: "? undecided"}

_PLURALS = {HOLDS: "hold", FAILS: "do not hold", UNDECIDED: "undecided"}

_METHOD = (
    "Every figure is of all rows of all warm steps and indexer layers of all traces. The interval "
    f"in brackets is at {CONFIDENCE:.0%}, from {RESAMPLES:,} resamples: traces are drawn with "
    f"replacement, then runs of {RUN_STEPS} consecutive steps within each; the layers and rows of "
    "a step stay together, and two figures that are compared share their draws.",
    "A claim holds, or does not hold, when the whole interval of the difference lies on one side "
    "of zero. Everything else is undecided, and so is a claim whose two sides never differ. "
    "Intervals are not corrected for the number of claims: of twenty true nothings, one is "
    "expected to look like something.",
    "A miss rate is a number of slots out of K, so percentiles move in steps of 1 / K. The p99 "
    "miss is of all rows together; its mean over layers is of each layer of each trace by itself.",
    "With few traces the intervals say how sure these traces are, hardly how sure traffic at "
    f"large is; from fewer than {MINIMUM_RUNS} runs of steps no interval is formed. With one "
    "trace, nothing says how sequences differ.",
)
_CAN = (
    "that each part of the method works on a real, trained indexer with its compressed keys, "
    "and by how much the parts differ there;",
    "that this code measures what it says: every figure is that of a replay anyone can repeat;",
    "where an ordering of the paper does not even hold in the small.",
)
_CANNOT = (
    "how much DeepSeek-V4 misses at a given sparsity: its indexers have 64 heads and read 512 or "
    "1,024 slots, not 16 heads and 64 slots, and its contexts are up to hundreds of times longer;",
    "which layers of a deep model are hard, or whether neighbouring layers of many resemble each "
    "other as few far-apart ones do;",
    "what a miss costs in answers: a row that loses a slot may lose nothing that matters, or "
    "everything; only decoding and checking answers tells;",
    "anything about speed.",
)
_COLUMNS_OF_REPLAYS = {
    "arm": "arm",
    "trace": "trace",
    "mean_miss": "mean miss",
    "p99_miss": "p99 miss",
    "p99_miss_layer_mean": "p99 miss, mean over layers",
    "realized_sparsity": "realized sparsity",
    "cold_steps": "cold steps",
    "steps": "steps",
    "pearson": "Pearson",
    "topk_recall": "top-K recall",
}


def write_page(results: Sequence[dict[str, Any]]) -> str:
    """The page of these studies, each as its JSON file has it."""
    body = element("body", *_head(results), *(_study(result) for result in results))
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", "SPIN: the paper's studies on captured traces"),
        element("style", _STYLE + svg.STYLE),
    )
    page = element("html", head, body, lang="en")
    return "<!DOCTYPE html>\n" + ElementTree.tostring(page, encoding="unicode", method="html")


def _head(results: Sequence[dict[str, Any]]) -> Iterable[Element]:
    counts = _count(claim for result in results for claim in result["claims"])
    counted = ", ".join(f"{count} {_PLURALS[verdict]}" for verdict, count in counts.items())
    yield element("h1", "SPIN: the paper's studies on captured traces")
    yield element(
        "p",
        f"Of {sum(counts.values())} claims checked on these traces, {counted}. The method is from "
        "SPIN: Shadow Predictive Indexer for Sparse Attention, arXiv 2610.09025; what the paper "
        "found is quoted as an ordering, since its figures are of other models and other text.",
    )
    yield _table(
        "Claims of the paper, by study",
        {"study": "study", **_VERDICT_SIGNS},
        [{"study": _link(result), **_count(result["claims"])} for result in results],
    )
    yield element("h2", "The traces")
    yield from _inputs(results)
    yield element("h2", "How to read the figures")
    for paragraph in _METHOD:
        yield element("p", paragraph)
    yield element("h2", "What a model of 7.6 million parameters can and cannot show")
    yield element(
        "p",
        "The tiny DeepSeek-V4 that comes with this package has 7.6 million parameters. Traces of "
        "it (K = 64, layers 1, 3, 4, 6) can show",
    )
    yield element("ul", *(element("li", line) for line in _CAN))
    yield element("p", "They cannot show")
    yield element("ul", *(element("li", line) for line in _CANNOT))
    yield element(
        "p", "For those, capture traces of the deployment's own model and traffic, and run this."
    )


def _inputs(results: Sequence[dict[str, Any]]) -> Iterable[Element]:
    if not results:
        return
    inputs = results[0]["inputs"]
    headings = {
        "name": "file",
        "source": "source",
        "steps": "steps",
        "rows": "rows a step",
        "layers": "indexer layers",
        "first_slots": "slots at first",
        "last_slots": "slots at last",
        "top_k": "K",
        "sha256": "SHA-256",
    }
    rows = [{**t, "sha256": t["sha256"][:12]} for t in inputs["traces"]]
    yield _table("Traces, as they were given", headings, rows)
    shown = ", ".join(f"{name} {value}" for name, value in inputs["config"].items())
    yield element("p", f"SPIN's parameters, where a study does not vary them: {shown}.")
    yield element("p", _made_on(results[0]["environment"]))


def _made_on(made_on: dict[str, Any]) -> str:
    """Machine and date; the studies of a page are made at once."""
    versions = ", ".join(f"{name} {version}" for name, version in made_on["versions"].items())
    return (
        f"Made on {made_on['date']} on {made_on['device']}, {made_on['cpu_cores']} cores, with "
        f"{versions}; replays that an earlier call had finished were taken from it."
    )


def _study(result: dict[str, Any]) -> Element:
    key = result["study"]
    parts = [element("h2", result["title"]), element("p", result["asks"])]
    parts.append(element("p", element("strong", "The paper: "), result["paper"]))
    found = element("p", element("strong", "These traces: "), _found(result["claims"]))
    parts.append(found)
    if result["claims"]:
        parts.append(_claims(result["claims"]))
    parts.extend(draw(chart, f"{key}-{n}") for n, chart in enumerate(result["charts"], 1))
    parts.append(_table("Figures", result["columns"], result["rows"]))
    parts.append(element("ul", *(element("li", note) for note in result["notes"])))
    if result["replays"]:
        there = {key for row in result["replays"] for key in row}
        columns = {k: v for k, v in _COLUMNS_OF_REPLAYS.items() if k in there}
        table = _table(
            "Single replays, as spin-trtllm replay gives them", columns, result["replays"]
        )
        summary = element("summary", f"All {len(result['replays'])} replays")
        parts.append(element("details", summary, table))
    return element("section", *parts, id=key)


def _found(claims: Sequence[dict[str, Any]]) -> str:
    """Where these traces and the paper differ, in a sentence."""
    if not claims:
        return "see the figures; there is no ordering to hold them against."
    by_verdict = _count(claims)
    parts = [f"{count} {_PLURALS[verdict]}" for verdict, count in by_verdict.items() if count]
    agree = "They agree with the paper" if by_verdict[HOLDS] == len(claims) else None
    differ = "They contradict the paper where a claim does not hold" if by_verdict[FAILS] else None
    decided = "They neither confirm nor contradict the rest" if by_verdict[UNDECIDED] else None
    tail = ". ".join(part for part in (agree, differ, decided) if part)
    return f"of {len(claims)} claims {', '.join(parts)}. {tail}."


def _count(claims: Iterable[dict[str, Any]]) -> dict[str, int]:
    """How many claims have each verdict."""
    verdicts = [claim["verdict"] for claim in claims]
    return {verdict: verdicts.count(verdict) for verdict in _VERDICT_SIGNS}


def _link(result: dict[str, Any]) -> Element:
    return element("a", result["title"], href=f"#{result['study']}")


def _claims(claims: Sequence[dict[str, Any]]) -> Element:
    rows = [
        {
            **claim,
            "result": {"value": claim["difference"], "low": claim["low"], "high": claim["high"]},
            "in_traces": f"{claim['for_it']} of {claim['traces']}",
            "judged": element(
                "span",
                element("span", _VERDICT_SIGNS[claim["verdict"]], class_="verdict"),
                f" ({claim['reason']})" if claim["reason"] else None,
            ),
        }
        for claim in claims
    ]
    headings = {
        "text": "claim of the paper",
        "metric": "measured as",
        "result": "found (positive speaks for it)",
        "in_traces": "traces for it",
        "judged": "verdict",
    }
    return _table("Claims", headings, rows)


def _table(caption: str, columns: dict[str, str], rows: Sequence[dict[str, Any]]) -> Element:
    heads = (element("th", heading, scope="col") for heading in columns.values())
    table = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *heads)),
        element("tbody", *(_row(row, list(columns)) for row in rows)),
    )
    return element("div", table, class_="wide")


def _row(row: dict[str, Any], keys: Sequence[str]) -> Element:
    return element("tr", *(_cell(row.get(key)) for key in keys))


def _cell(value: Any) -> Element:
    if isinstance(value, Element):
        return element("td", value)
    if isinstance(value, dict):
        if value["value"] is None:
            return element("td", "not measured")
        interval = "no interval"
        if value["low"] is not None:
            interval = f"{value['low']:.4f} to {value['high']:.4f}"
        shown = element("small", f"({interval})")
        return element("td", f"{value['value']:.4f} ", shown)
    if isinstance(value, float):
        return element("td", f"{value:.4f}")
    if isinstance(value, (int, str)) and value != "":
        return element("td", str(value))
    return element("td", "–")
