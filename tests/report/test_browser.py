"""Unusual pages in Chromium: they fit at two widths and in both themes."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from benchmarks.paper.charts import LabeledCurve, plot_curves
from benchmarks.paper.reproduce import TEMPLATE
from midlayer_encoders.report import drawing, report_html
from midlayer_encoders.report.pages import render
from tests.report.made_frames import full_frame, metrics_frame, scores_frame

pytestmark = pytest.mark.extras

WIDTHS = (375, 1100)
HOSTILE = "<img src=x onerror='parent.hacked = 1'><script>parent.hacked = 1</script>"
LONG = "an/extremely-long-model-name-without-any-break-" + "x" * 200

# A window in headless Chromium is at least 500 pixels wide, but a frame inside it can be narrower.
SCRIPT = """
const measured = [];
window.addEventListener("load", () => {
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, root = page.documentElement;
    measured.push({
      name: frame.name, width: root.clientWidth, content: root.scrollWidth, height: root.scrollHeight,
      ground: getComputedStyle(page.body).backgroundColor,
    });
  }
  const out = document.createElement("pre");
  out.id = "measured";
  out.textContent = JSON.stringify({pages: measured, hacked: window.hacked ?? 0});
  document.body.append(out);
});
"""


def measure_pages(pages: dict[str, str], folder: Path, *, dark: bool) -> tuple[dict[str, Any], int]:
    """Return Chromium's measurements of each page at each width, and whether a script in one of them ran."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium here to render the page; install `chromium`")
    frames = "".join(
        f'<iframe name="{name} {width}" width="{width}" height="800" style="border:0" srcdoc="{escape(text)}"></iframe>'
        for name, text in pages.items()
        for width in WIDTHS
    )
    outer = folder / "outer.html"
    outer.write_text(f'<!DOCTYPE html><meta charset="utf-8"><body>{frames}<script>{SCRIPT}</script>', encoding="utf-8")
    options = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    options += "--disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=5000 --dump-dom"
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [browser, *options.split(), scheme, f"--user-data-dir={folder / 'profile'}", outer.as_uri()]
    dom = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    match = re.search(r'<pre id="measured">(.*?)</pre>', dom, flags=re.DOTALL)
    assert match is not None, dom[-500:]
    measured = json.loads(unescape(match[1]))
    return {page["name"]: page for page in measured["pages"]}, measured["hacked"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages_fit_a_phone_and_a_desktop_in_both_themes(tmp_path: Path, dark: bool) -> None:
    hostile = pl.concat([scores_frame(12, model=HOSTILE), metrics_frame(12, datasets=[HOSTILE, LONG], model=HOSTILE)])
    long_texts = {"how": {"Model": LONG}, "export": {"Shell": f"midlayer export {LONG}"}, "notes": [LONG]}
    pages = {
        "full": report_html(
            full_frame(),
            title="T",
            how={"Seed": "0"},
            baselines={"TF-IDF": {"DocstringSTS": 0.9}, "all-MiniLM-L6-v2": {"DocstringSTS": 0.85}},
        )
    }
    # The dark theme changes only colors, so the widest and the most unusual pages are measured once.
    pages |= (
        {}
        if dark
        else {
            "many": report_html(scores_frame(33, tasks=64), title=LONG, **long_texts),  # type: ignore[arg-type]
            "hostile": report_html(hostile.with_columns(revision=pl.lit(LONG)), title=HOSTILE, how={HOSTILE: HOSTILE}),
        }
    )
    measured, hacked = measure_pages(pages, tmp_path, dark=dark)
    assert hacked == 0
    assert len(measured) == len(pages) * len(WIDTHS)
    for name, page in measured.items():
        width = int(name.split()[-1])
        assert page["content"] <= width, f"{name}: {page['content']} pixels of content"
        assert page["height"] > 1500
        assert page["ground"] == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")


def test_figures_and_long_row_names_fit(tmp_path: Path) -> None:
    """A figure too wide for a phone scrolls in its own box."""
    lines = [LabeledCurve(f"amount {10**k}", (0, 1), (0.0, float(k))) for k in range(9)]
    panels = {"a title that goes on " * words: lines[: 9 // words] for words in (1, 2, 4)}
    figure, (axes,) = drawing.panel_grid(1)
    drawing.row_axis(axes, [f"a statement whose name is as long as a formula in words, number {k}" for k in range(5)])
    drawing.draw_points(axes, (0.5,), (0,), "disc")
    drawing.set_title(axes, "statements")
    curves = plot_curves(panels, "layer", ordered=True)
    sections = [
        {"name": name, "title": name, "claim": "x", "findings": [], "table": [["a"]], "figure": drawn}
        for name, drawn in (("curves", curves), ("rows", drawing.finish(figure)))
    ]
    text = render(TEMPLATE, sections=sections, title="T", how={}, notes=[])
    measured, _ = measure_pages({"page": text}, tmp_path, dark=False)
    for name, page in measured.items():
        assert page["content"] <= int(name.split()[-1])
