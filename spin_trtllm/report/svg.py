# SPDX-License-Identifier: Apache-2.0
"""Elements of SVG and HTML, and the axes of a chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, tostring

WIDTH, HEIGHT = 640, 340  # of a chart's drawing, in its own units
STYLE = """
.grid { stroke: #e2e2e2; }
.tick, .frame { stroke: #777; }
.frame { stroke-width: 0.5; }
.whisker { stroke-width: 1.5; }
.cells { stroke-width: 1; shape-rendering: crispEdges; fill: none; }
"""  # of every chart


def element(tag: str, *children: Element | str | None, **attributes: object) -> Element:
    """An element; text children stand where they are given, None is left out.

    Attribute names are given as Python allows: `class_`, `stroke_width`.
    """
    node = Element(tag, {k.rstrip("_").replace("_", "-"): _text(v) for k, v in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            node.append(child)
        elif child is not None and len(node):
            node[-1].tail = (node[-1].tail or "") + child
        elif child is not None:
            node.text = (node.text or "") + child
    return node


def figure(
    key: str, title: str, description: str, height: float, *drawing: Element, note: str = ""
) -> Element:
    """A picture with its title as caption, and a description for those who cannot see it."""
    names = {"title": f"{key}-title", "desc": f"{key}-desc"}
    picture = element(
        "svg",
        element("title", title, id=names["title"]),
        element("desc", description, id=names["desc"]),
        *drawing,
        viewBox=f"0 0 {WIDTH} {height:g}",
        role="img",
        font_size=12,
        font_family="system-ui, sans-serif",
        aria_labelledby=" ".join(names.values()),
    )
    caption = element("figcaption", title, f". {note}" if note else None)
    return element("figure", picture, caption)


def standalone(chart: Element) -> str:
    """The picture of a `figure` as a file of its own, on white."""
    picture = next(chart.iter("svg"))
    left, top, width, height = picture.attrib["viewBox"].split()
    names = [child for child in picture if child.tag in ("title", "desc")]
    page = element("rect", x=left, y=top, width=width, height=height, fill="white")
    drawing = [child for child in picture if child not in names]
    file = element("svg", *names, element("style", STYLE), page, *drawing)
    attributes = {"xmlns": "http://www.w3.org/2000/svg", "width": width, "height": height}
    file.attrib.update(picture.attrib | attributes)
    return tostring(file, encoding="unicode") + "\n"


@dataclass(frozen=True)
class Axis:
    """Maps figures to places between two ends of a chart.

    Attributes:
        ticks: figures with a mark, in order; the first and last are the ends.
        start, end: where the ends stand, in units of the drawing.
    """

    ticks: Sequence[float]
    start: float
    end: float

    def place(self, value: float) -> float:
        """Where a figure stands."""
        share = (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])
        return round(self.start + share * (self.end - self.start), 1)


def axis(values: Sequence[float], start: float, end: float, *, with_zero: bool) -> Axis:
    """An axis that covers these figures with four to ten round ticks."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    low = min(low, 0.0) if with_zero else low
    if high - low < 1e-9:
        high = low + 1.0
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis([round(n * step, 10) for n in range(first, last + 1)], start, end)


def line(x1: float, y1: float, x2: float, y2: float, class_: str, **more: object) -> Element:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_, **more)


def text(x: float, y: float, content: str, anchor: str = "start", **more: object) -> Element:
    """A line of text; `anchor` is start, middle or end."""
    return element("text", content, x=x, y=y, text_anchor=anchor, **more)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
