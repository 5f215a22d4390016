"""Render panels as SVG for pages: matplotlib's output, with the page's colors and fonts, tooltips and links."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from xml.etree import ElementTree

from midlayer_encoders.report.charts import Dots, Keyed, Line, Panel, Part, Word
from midlayer_encoders.report.drawing import draw_panel
from midlayer_encoders.report.style import css_colors

FONT_SIZE = 11.5


@dataclass(frozen=True)
class Size:
    """Size of a panel in CSS pixels.

    Attributes:
        width: of the SVG.
        height: of the SVG.
        left: margin for the tick labels.
        right: margin.
        top: margin.
        bottom: margin for the tick labels.
        words: whether marks show their texts.
    """

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int = 24
    words: bool = False


WIDE = Size(780, 320, 44, 112, 30, 40, words=True)
PHONE = Size(343, 260, 36, 76, 30, 40, words=True)
PANEL = Size(220, 124, 42, 10, 8)
ALONE = Size(780, 300, 44, 20, 10)
SMALL = Size(343, 220, 44, 20, 10)
PAIR = Size(380, 200, 44, 14, 10)
MAP = Size(220, 150, 30, 12, 4)


def rows_size(panel: Panel) -> Size:
    """Return the size of a panel with named rows, which depends on the length of the names and texts."""
    longest_name = max(len(line) for _, text in panel.y.ticks for line in text.split("\n"))
    words = (part.text for part in panel.parts if isinstance(part, Word) and not part.centered)
    left = 12 + 6 * longest_name
    right = 14 + 6 * max(map(len, words), default=0)
    return Size(left + right + 190, 26 * len(panel.y.ticks) + 30, left, right, 6)


def panel_svg(panel: Panel, size: Size) -> str:
    """Return the SVG element of a panel.

    Example:
        >>> from midlayer_encoders.report.charts import Line, layer_axis, value_axis
        >>> line = Line((0, 1), (1.0, 2.0), tips=("layer 0: 1", "layer 1: 2"))
        >>> text = panel_svg(Panel("a line", layer_axis(1), value_axis([line]), (line,)), PANEL)
        >>> text.startswith('<svg class="chart" viewBox="0 0 220 124" role="img" aria-label="a line">')
        True
    """
    root = ElementTree.fromstring(_matplotlib_svg(panel, size))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    _inline_definitions(root)
    for text in root.iter("text"):
        text.set("class", "word")
    for text in (text for group in root.iter("g") if "axis" in group.get("id", "") for text in group.iter("text")):
        text.set("class", "tick")
    for index, part in enumerate(panel.parts):
        _annotate(root, panel, part, f"part-{index}")
    colors = css_colors(panel.ordered)
    for element in root.iter():
        _simplify(element, colors)
    view = {"class": "chart", "viewBox": f"0 0 {size.width} {size.height}"}
    root.attrib = {**view, "role": "img", "aria-label": panel.label or panel.title}
    return ElementTree.tostring(root, encoding="unicode")


def _matplotlib_svg(panel: Panel, size: Size) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    content = BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "", "text.parse_math": False}):
        figure = Figure(figsize=(size.width / 72, size.height / 72))
        width = size.width - size.left - size.right
        height = size.height - size.top - size.bottom
        box = (size.left / size.width, size.bottom / size.height, width / size.width, height / size.height)
        axes = figure.add_axes(box)
        draw_panel(axes, panel, words=size.words, font_size=FONT_SIZE)
        if not panel.y.ticks:
            axes.locator_params(axis="y", nbins=3 if height < 100 else 6)
        if size.words:
            axes.set_xlabel(panel.x.label, fontsize=FONT_SIZE)
        figure.patch.set_visible(False)
        axes.patch.set_visible(False)
        figure.savefig(content, format="svg")
    return content.getvalue().decode()


def _inline_definitions(root: ElementTree.Element) -> None:
    """Replace references to shared definitions, so that the SVGs of a page need no unique ids."""
    shapes = {path.get("id"): path.get("d", "") for path in root.iter("path") if path.get("id")}
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in ("defs", "metadata"):
                parent.remove(child)
            elif child.tag == "use":
                shape = shapes[child.attrib["{http://www.w3.org/1999/xlink}href"].removeprefix("#")]
                x, y, style = (child.attrib[name] for name in ("x", "y", "style"))
                circle = re.match(r"M 0 ([\d.]+)\s+C", shape)
                child.tag = "circle" if circle else "path"
                place = (
                    {"cx": x, "cy": y, "r": circle[1]} if circle else {"d": shape, "transform": f"translate({x} {y})"}
                )
                child.attrib = {**place, "style": style}


def _annotate(root: ElementTree.Element, panel: Panel, part: Part, gid: str) -> None:
    """Add class, label, tooltips and links to the elements of a part."""
    label = part.label if isinstance(part, Keyed) else ""
    front = isinstance(part, Line) and part.front
    tips = panel.tips(part)
    if isinstance(part, Line):
        tips = tuple(tip for tip, value in zip(tips, part.y, strict=True) if math.isfinite(value))
    points = []
    for group in root.iter("g"):
        if group.get("id") == gid:
            group.set("class", "front" if front else type(part).__name__.lower())
            if label:
                group.set("data-curve", label)
            points += list(group.iter("circle"))
            points += [] if isinstance(part, Line | Dots) else list(group.iter("path"))
    for point, tip in zip(points, tips, strict=False):  # long curves have no points
        ElementTree.SubElement(point, "title").text = tip
    for point, link in zip(points, part.links if isinstance(part, Dots) else (), strict=False):
        if link:
            copy = ElementTree.Element("circle", point.attrib)
            copy.extend(list(point))
            point.clear()
            point.tag = "a"
            point.set("href", link)
            point.append(copy)


def _simplify(element: ElementTree.Element, colors: Mapping[str, str]) -> None:
    """Remove ids, clipping, white space, fonts and needless digits, and apply the colors of the page."""
    for name in ("id", "clip-path"):
        element.attrib.pop(name, None)
    if element.tag not in ("text", "title"):
        element.text = None
    element.tail = None
    if element.get("transform", "").startswith("rotate(-0 "):
        element.attrib.pop("transform")
    for name in ("d", "x", "y", "cx", "cy", "transform"):
        if name in element.attrib:
            rounded = re.sub(r"(\.\d)\d+", r"\1", element.attrib[name])
            element.set(name, re.sub(r"\s+", " ", rounded).strip())
    if "style" in element.attrib:
        style = re.sub(r"font(-size|-family)?: [^;]*; ?", "", element.attrib["style"])
        element.set("style", re.sub("#[0-9a-f]{6}", lambda color: colors.get(color[0], color[0]), style))
