"""Show figures on pages: each axes as an SVG with the page's colors and fonts, tooltips and links."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from threading import Lock
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from midlayer_encoders.report.style import css_colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FONT_SIZE = 11.5
_SETTINGS_LOCK = Lock()  # matplotlib's settings belong to the process, and a callback draws in a thread


@dataclass(frozen=True)
class Size:
    """Size of an SVG in CSS pixels, with the margins for the labels of ticks and axes."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int = 40


WIDE = Size(780, 310, 58, 112, 24)
PHONE = Size(343, 260, 50, 76, 30)
PANEL = Size(220, 140, 42, 10, 8)
ALONE = Size(780, 300, 58, 20, 10)
SMALL = Size(343, 230, 56, 20, 10)
PAIR = Size(380, 216, 44, 14, 10)


def rows_size(axes: Axes) -> Size:
    """Return the size of a panel with named rows, which depends on the length of the names and texts."""
    axes.tick_params(labelleft=True)
    names = [text.get_text() for text in axes.get_yticklabels()]
    texts = [text.get_text() for text in axes.texts if text.get_horizontalalignment() == "left"]
    left = 12 + 6 * max(len(line) for name in names for line in name.split("\n"))
    right = 14 + 6 * max(map(len, texts), default=0)
    return Size(left + right + 190, 26 * len(names) + 46, left, right, 6)


def legend_items(panels: Sequence[Axes]) -> dict[str, dict[str, Any]]:
    """Return the class, color and dashes of the first artist with each label."""
    from matplotlib.colors import to_hex

    items: dict[str, dict[str, Any]] = {}
    for axes in panels:
        for artist, label in zip(*axes.get_legend_handles_labels(), strict=True):
            details = json.loads(artist.get_gid() or "{}")
            color = css_colors(details.get("ordered", 0))[to_hex(artist.get_color())]  # type: ignore[attr-defined]
            items.setdefault(label, {**details, "color": color})
    return items


def panel_svg(axes: Axes, size: Size, y_label: str = "") -> str:
    """Return the SVG element of one axes of a figure, without its title; the figure is changed."""
    root = ElementTree.fromstring(_matplotlib_svg(axes, size, y_label))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    _inline_definitions(root)
    for text in root.iter("text"):
        text.set("class", "word")
    for text in (text for group in root.iter("g") if "axis" in group.get("id", "") for text in group.iter("text")):
        text.set("class", "tick")
    annotated = {group: json.loads(group.attrib["id"]) for group in root.iter("g") if group.get("id", "")[:1] == "{"}
    for group, details in annotated.items():
        _annotate(group, details)
    colors = css_colors(max((details.get("ordered", 0) for details in annotated.values()), default=0))
    for element in root.iter():
        _simplify(element, colors)
    view = {"class": "chart", "viewBox": f"0 0 {size.width} {size.height}"}
    root.attrib = {**view, "role": "img", "aria-label": str(axes.get_label())}
    return ElementTree.tostring(root, encoding="unicode")


def _matplotlib_svg(axes: Axes, size: Size, y_label: str) -> str:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import AutoLocator

    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    figure.set_layout_engine("none")
    figure.set_size_inches(size.width / 72, size.height / 72)
    for artist in (*figure.axes, *figure.legends, *filter(None, [axes.get_legend()])):
        artist.set_visible(artist is axes)
    width = size.width - size.left - size.right
    height = size.height - size.top - size.bottom
    axes.set_position((size.left / size.width, size.bottom / size.height, width / size.width, height / size.height))
    axes.set_title("", loc="left")
    figure.supylabel("")
    axes.set_ylabel(y_label, fontsize=_FONT_SIZE)
    axes.xaxis.label.set_fontsize(_FONT_SIZE)
    axes.tick_params(labelsize=_FONT_SIZE)
    if isinstance(axes.yaxis.get_major_locator(), AutoLocator):
        axes.locator_params(axis="y", nbins=3 if height < 100 else 6)
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    content = BytesIO()
    with _SETTINGS_LOCK, rc_context({"svg.fonttype": "none", "svg.hashsalt": "", "text.parse_math": False}):
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(content)  # savefig draws once more, for layouts
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


def _annotate(group: ElementTree.Element, details: Mapping[str, Any]) -> None:
    """Add class, label, tooltips and links to an artist's elements; ``details`` are as in ``drawing.annotate``."""
    kind = details["class"]
    group.set("class", kind)
    if details.get("curve"):
        group.set("data-curve", details["curve"])
    points = list(group.iter("circle"))
    points += [] if kind in ("line", "dots") else list(group.iter("path"))
    for point, tip in zip(points, details["tips"], strict=False):  # long curves have no points
        ElementTree.SubElement(point, "title").text = tip
    for point, link in zip(points, details.get("links", ()), strict=False):
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
