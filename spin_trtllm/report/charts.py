# SPDX-License-Identifier: Apache-2.0
"""The kinds of chart that studies ask for, as inline SVG without scripts.

`lines`: `x_label`, `y_label`, `series` of `label` and `points` (`x`, `value`, `low`, `high`); a
series may have a `number` that decides its look, the chart an `aside`, the space between series.
`panels`: `charts` of lines, one below another, with one legend; equal labels have equal numbers.
`dots`: `x_label`, `rows` of `label`, `value`, `low`, `high`.
`mask`: `rows` of one string a step, a character a block (see `studies.masks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any
from xml.etree.ElementTree import Element

from spin_trtllm.report.studies.masks import HIT, INVISIBLE, KEPT, MISSED, SKIPPED
from spin_trtllm.report.svg import HEIGHT, WIDTH, Axis, axis, element, figure, line, text

# Colours that stay apart for colour-blind readers (Okabe and Ito, 2008); shapes repeat the message.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#999999")
_SHAPES = {  # around the origin
    "circle": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "square": "M-3.5 -3.5h7v7h-7z",
    "triangle": "M0 -4.5l4.5 8h-9z",
    "diamond": "M0 -5l5 5l-5 5l-5 -5z",
}
_MASK_COLOURS = {KEPT: "#A6CEE3", HIT: "#00487A", MISSED: "#D55E00"}
_MASK_LEGEND = {
    HIT: "kept and needed",
    KEPT: "kept, not needed",
    MISSED: "needed but missed",
    SKIPPED: "skipped, not needed",
}
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 10, 45  # margins
_ROW_HEIGHT, _LABEL_WIDTH = 26, 170
_LEGEND_COLUMN, _LEGEND_ROW = 290, 18
_LONGEST_LABEL = 40
_PANEL_HEADING = 30
_ASIDE = 2  # between series, in units of the drawing

Point = dict[str, Any]


def draw(chart: dict[str, Any], key: str) -> Element:
    """A chart as a figure; `key` is its id, unique on the page."""
    kinds = {"lines": _lines, "panels": _panels, "dots": _dots, "mask": _mask}
    return kinds[chart["kind"]](chart, key)


def _lines(chart: dict[str, Any], key: str) -> Element:
    return _panels({**chart, "charts": [chart]}, key)


def _panels(chart: dict[str, Any], key: str) -> Element:
    panels: list[dict[str, Any]] = chart["charts"]
    heading = _PANEL_HEADING if len(panels) > 1 else 0
    drawing, described = [], []
    numbers: dict[str, int] = {}
    for place, panel in enumerate(panels):
        series = [_Series.of(each, number) for number, each in enumerate(panel["series"])]
        parts = [*_plot(panel, series)]
        if heading:
            parts.append(text(_LEFT, _TOP - 14, panel["title"], font_weight="bold"))
        top = heading + place * (HEIGHT + heading)
        drawing.append(element("g", *parts, transform=f"translate(0 {top})"))
        numbers |= {each.label: each.number for each in series}
        shown = "; ".join(each.described for each in series)
        described.append(f"{panel['title']}: {shown}" if heading else shown)
    bottom = len(panels) * (HEIGHT + heading)
    drawing.extend(_legend(numbers, bottom))
    height = bottom + _LEGEND_ROW * ((len(numbers) + 1) // 2) + 4
    note = f"{_WHISKERS} Lines are drawn a little aside of each other."
    return figure(key, chart["title"], "; ".join(described), height, *drawing, note=note)


@dataclass(frozen=True)
class _Series:
    """A line of a chart; `number` is its look, `points` those that were measured."""

    label: str
    number: int
    points: list[Point]

    @classmethod
    def of(cls, given: dict[str, Any], place: int) -> _Series:
        measured = [p for p in given["points"] if None not in (p["x"], p["value"])]
        points = sorted(measured, key=lambda p: p["x"])
        return cls(given["label"], given.get("number", place), points)

    @property
    def described(self) -> str:
        found = ", ".join(f"{p['value']:.3g} at {p['x']:.3g}" for p in self.points)
        return f"{self.label}: {found or 'nothing measured'}"


def _plot(chart: dict[str, Any], series: Sequence[_Series]) -> Iterator[Element]:
    points = [point for each in series for point in each.points]
    xs = axis([p["x"] for p in points], _LEFT, WIDTH - _RIGHT, with_zero=False)
    ys = axis([v for p in points for v in _span(p)], HEIGHT - _BOTTOM, _TOP, with_zero=True)
    yield from _grid(xs, ys)
    yield from _axis_labels(chart["x_label"], chart["y_label"])
    for place, each in enumerate(series):
        aside = chart.get("aside", _ASIDE) * (place - (len(series) - 1) / 2)
        yield from _line(each, aside, xs, ys)


def _line(series: _Series, aside: float, xs: Axis, ys: Axis) -> Iterator[Element]:
    """Drawn `aside` of its place, or whiskers at one place would hide each other."""
    colour = _COLOURS[series.number % len(_COLOURS)]
    places = [(round(xs.place(p["x"]) + aside, 1), ys.place(p["value"])) for p in series.points]
    route = " ".join(f"{x:g},{y:g}" for x, y in places)
    yield element("polyline", points=route, fill="none", stroke=colour, stroke_width=1.5)
    for point, (x, y) in zip(series.points, places, strict=True):
        low, high = (ys.place(end) for end in _span(point))
        yield line(x, low, x, high, "whisker", stroke=colour)
        yield _marker(x, y, series.number)


def _dots(chart: dict[str, Any], key: str) -> Element:
    rows = chart["rows"]
    bottom = _TOP + _ROW_HEIGHT * len(rows)
    shown = [row for row in rows if row["value"] is not None]
    values = [value for row in shown for value in _span(row)]
    xs = axis(values, _LABEL_WIDTH, WIDTH - _RIGHT, with_zero=True)
    drawing = []
    for tick in xs.ticks:
        drawing.append(line(xs.place(tick), _TOP, xs.place(tick), bottom, "grid"))
        drawing.append(text(xs.place(tick), bottom + 16, f"{tick:g}", "middle"))
    for number, row in enumerate(rows):
        y = _TOP + _ROW_HEIGHT * (number + 0.5)
        drawing.append(text(_LABEL_WIDTH - 12, y + 4, row["label"], "end"))
        if row["value"] is None:
            drawing.append(text(_LABEL_WIDTH + 6, y + 4, "not measured"))
            continue
        low, high = (xs.place(end) for end in _span(row))
        drawing.append(line(low, y, high, y, "whisker", stroke=_COLOURS[0]))
        drawing.append(_marker(xs.place(row["value"]), y, 0))
    drawing.append(text((_LABEL_WIDTH + WIDTH) / 2, bottom + 36, chart["x_label"], "middle"))
    described = ", ".join(
        f"{row['label']} {row['value']:.3f}" if row in shown else f"{row['label']} not measured"
        for row in rows
    )
    return figure(key, chart["title"], described, bottom + 44, *drawing, note=_WHISKERS)


def _mask(chart: dict[str, Any], key: str) -> Element:
    rows: list[str] = chart["rows"]
    steps, blocks = max(len(rows), 1), max(map(len, rows), default=1)
    width, height = WIDTH - _LEFT - _RIGHT, min(3.0 * steps, 300.0)
    scale = f"translate({_LEFT} {_TOP}) scale({width / blocks:.4f} {height / steps:.4f})"
    paths = [
        element("path", d=_cells(rows, mark), stroke=colour, class_="cells")
        for mark, colour in _MASK_COLOURS.items()
    ]
    drawing = [
        element("rect", x=_LEFT, y=_TOP, width=width, height=height, fill="white", class_="frame"),
        element("g", *paths, transform=scale),
        text(_LEFT + width / 2, _TOP + height + 16, f"block, 0 to {blocks - 1}", "middle"),
        text(_LEFT - 8, _TOP + 10, "step 1", "end"),
        text(_LEFT - 8, _TOP + height, str(len(rows)), "end"),
    ]
    for number, (mark, label) in enumerate(_MASK_LEGEND.items()):
        x, y = _LEFT + number * width / 4, _TOP + height + 28
        fill = _MASK_COLOURS.get(mark, "white")
        drawing.append(element("rect", x=x, y=y, width=11, height=11, fill=fill, class_="frame"))
        drawing.append(text(x + 16, y + 10, label))
    everything = "".join(rows)
    visible = max(len(everything) - everything.count(INVISIBLE), 1)
    shares = (f"{everything.count(m) / visible:.1%} {t}" for m, t in _MASK_LEGEND.items())
    described = f"{len(rows)} steps of {blocks} blocks: {', '.join(shares)}."
    return figure(key, chart["title"], described, _TOP + height + 46, *drawing)


def _cells(rows: Sequence[str], mark: str) -> str:
    """Every stretch of one character, as strokes in units of blocks and steps.

    Strokes go down the steps, since a block stays what it was for a while, and each starts where
    the last one ended: a picture of many cells is a large part of a page.
    """
    strokes = []
    x, y = 0, 0  # where the last one ended
    for block, column in enumerate(zip_longest(*rows, fillvalue=INVISIBLE)):
        step = 0
        for character, stretch in groupby(column):
            length = len(list(stretch))
            if character == mark:
                strokes.append(f"m{block - x} {step - y}v{length}")
                x, y = block, step + length
            step += length
    return f"M0.5 0{''.join(strokes)}"


def _grid(xs: Axis, ys: Axis) -> Iterator[Element]:
    for tick in ys.ticks:
        y = ys.place(tick)
        yield line(_LEFT, y, WIDTH - _RIGHT, y, "grid")
        yield text(_LEFT - 8, y + 4, f"{tick:g}", "end")
    for tick in xs.ticks:
        x = xs.place(tick)
        yield line(x, HEIGHT - _BOTTOM, x, HEIGHT - _BOTTOM + 4, "tick")
        yield text(x, HEIGHT - _BOTTOM + 18, f"{tick:g}", "middle")


def _axis_labels(x_label: str, y_label: str) -> Iterator[Element]:
    yield text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, x_label, "middle")
    middle = (HEIGHT - _BOTTOM + _TOP) / 2
    yield text(18, middle, y_label, "middle", transform=f"rotate(-90 18 {middle:g})")


def _legend(numbers: Mapping[str, int], top: float) -> Iterator[Element]:
    """Labels and their looks, below `top`."""
    for place, (label, number) in enumerate(numbers.items()):
        x = _LEFT + _LEGEND_COLUMN * (place % 2)
        y = top + 8 + _LEGEND_ROW * (place // 2)
        yield _marker(x, y, number)
        yield text(x + 10, y + 4, label[:_LONGEST_LABEL])


def _marker(x: float, y: float, number: int) -> Element:
    shape = list(_SHAPES.values())[(number + number // len(_COLOURS)) % len(_SHAPES)]
    fill = _COLOURS[number % len(_COLOURS)]
    return element("path", d=shape, transform=f"translate({x:g} {y:g})", fill=fill)


def _span(point: Point) -> tuple[float, float]:
    """The ends of the interval, or the figure itself where there is none."""
    value = point["value"]
    return (value, value) if point["low"] is None else (point["low"], point["high"])


_WHISKERS = "Whiskers are the intervals; a figure without one has none."
