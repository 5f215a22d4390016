"""Show figures on pages: matplotlib's SVG with the page's colors and fonts, and tooltips."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from io import BytesIO
from threading import Lock
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from midlayer_encoders.report.style import css_colors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SETTINGS_LOCK = Lock()  # matplotlib's settings belong to the process, and a callback draws in a thread
_LINK = "{http://www.w3.org/1999/xlink}href"


def figure_svg(figure: Figure) -> str:
    """Return the SVG element of a figure."""
    label = "; ".join(axes.get_title(loc="left").replace("\n", ": ") for axes in figure.axes)
    root = ElementTree.fromstring(_matplotlib_svg(figure, label))
    annotated = {group: json.loads(group.attrib["id"]) for group in root.iter() if group.get("id", "")[:1] == "{"}
    colors = css_colors(max((details.get("ordered", 0) for details in annotated.values()), default=0))
    for element in root.iter():
        _simplify(element, colors)
    for group, details in annotated.items():
        group.set("class", details["class"])
        points = list(group.iter("use")) or list(group.iter("path"))
        for point, tip in zip(points, details["tips"], strict=False):  # long curves have no points
            ElementTree.SubElement(point, "title").text = tip
    view = root.attrib["viewBox"]
    width = float(view.split()[2])
    style = f"min-width: {1.1 * width:.0f}px; max-width: {1.5 * width:.0f}px"
    root.attrib = {"class": "chart", "viewBox": view, "style": style, "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _matplotlib_svg(figure: Figure, label: str) -> bytes:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    content, dpi = BytesIO(), figure.get_dpi()
    canvas: Any = FigureCanvasSVG(figure)
    # The label distinguishes the ids of the figures of a page.
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": label, "text.parse_math": False}
    with _SETTINGS_LOCK, rc_context(settings):
        canvas.print_svg(content, metadata={"Date": None})  # savefig draws once more, for the layout
    figure.set_dpi(dpi)
    return content.getvalue()


def _simplify(element: ElementTree.Element, colors: Mapping[str, str]) -> None:
    """Remove metadata, namespaces, ids of groups, clipping, white space, fonts and needless digits; set the colors."""
    element.tag = element.tag.rpartition("}")[2]
    element.tail = None
    if element.tag != "text":
        element.text = None
    if element.tag == "g":
        element.attrib.pop("id", None)
    element.attrib.pop("clip-path", None)
    for child in [child for child in element if child.tag.endswith(("metadata", "clipPath", "style"))]:
        element.remove(child)
    if _LINK in element.attrib:
        element.set("href", element.attrib.pop(_LINK))
    for name in {"d", "x", "y", "transform"} & element.attrib.keys():
        rounded = re.sub(r"(\.\d\d)\d+", r"\1", element.attrib[name])
        element.set(name, re.sub(r"\s+", " ", rounded).strip())
    if "style" in element.attrib:
        style = re.sub(r"font-family: [^;]*; ?", "", element.attrib["style"])
        element.set("style", re.sub("#[0-9a-f]{6}", lambda color: colors.get(color[0], color[0]), style))
