"""Pages in Chromium on a phone, in the dark theme, in print, and with malicious names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from midlayer_encoders import board
from midlayer_encoders.report import report_html
from midlayer_encoders.report.pages import write_page
from midlayer_encoders.sweeping import SweepResult
from tests.report.made_frames import TASKS, full_frame
from tests.report.made_runs import make_sweep

pytestmark = pytest.mark.extras

HOSTILE = "<img src=x onerror=hacked=1><script>hacked=1</script>\"'&amp;</td>"
LONG = "an/extremely-long-name-" + "x" * 280
RTL = "نموذج-عربي"
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1100, "height": 900}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Return the installed browser: Debian's, or the one named by CHROMIUM."""
    library = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]'")
    visible_runs = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, visible_runs)), None)
    if path is None:
        pytest.skip("no Chromium here: install `chromium`, or name it in CHROMIUM")
    with library.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a board of five runs, `board.html`, and the page of a sweep, `sweep.html`."""
    root = tmp_path_factory.mktemp("pages")
    scores = {"plain": {"STS": [0.2, 0.6, 0.5]}, "one-word": {"STS": [0.1, 0.3, 0.4]}}
    parts = {
        name: make_sweep(root / "runs/a/recipes" / name, run_scores, options={"recipe": name})
        for name, run_scores in scores.items()
    }
    SweepResult.of(parts, root / "runs/a").save()
    make_sweep(
        root / "runs/b",
        {"STS": [0.3, 0.7, 0.65], "B": [0.1] * 3},
        model=HOSTILE,
        parameters={0: 5, 1: 2 * 10**6, 2: 9 * 10**6},
    )
    make_sweep(root / "runs/c", {"STS": [0.25, 0.5, 0.55]}, model=LONG, dimensions=16)
    make_sweep(root / "runs/d", {"STS": [0.2, 0.3, 0.45]}, model=RTL, seconds={}, timing={}, dimensions=0)
    board(root / "runs").to_html(root / "board.html")
    layers = range(31)
    text = report_html(
        full_frame(), title=HOSTILE, how={HOSTILE: LONG}, notes=[RTL], baselines={"TF-IDF": dict.fromkeys(TASKS, 0.5)},
        parameters={k: 10**6 * (k + 1) for k in layers}, seconds={k: 0.001 * (k + 1) for k in layers},
    )  # fmt: skip
    write_page(text, root / "sweep.html")
    return root


class OpenedPage:
    """A page with its errors and requests."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": DESK, **options})
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *failed: object) -> None:
        hacked = self.page.evaluate("typeof hacked")
        self.context.close()
        if failed[0] is None:
            assert self.errors == []
            assert all(url.startswith("file:") and url.endswith(".html") for url in self.requests), self.requests
            assert hacked == "undefined"


@pytest.mark.parametrize("name", ["sweep", "runs/a/report"])
def test_first_chart_starts_without_scrolling(chromium: Any, folder: Path, name: str) -> None:
    with OpenedPage(chromium, folder / f"{name}.html", viewport={"width": 1280, "height": 800}) as page:
        box = page.locator("img.chart").first.bounding_box()
        assert box["y"] < 400


@pytest.mark.parametrize("name", ["board", "sweep"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_page_fits_and_malicious_names_are_plain_text(
    chromium: Any, folder: Path, name: str, dark: bool, size: dict[str, int]
) -> None:
    scheme = "dark" if dark else "light"
    with OpenedPage(chromium, folder / f"{name}.html", viewport=size, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
        assert HOSTILE in page.inner_text("body")


def test_no_script_runs(chromium: Any, folder: Path) -> None:
    opened = OpenedPage(chromium, folder / "board.html")
    opened.page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'hacked = 1'}))"
    )
    opened.page.evaluate("document.body.append(Object.assign(new Image(), {src: 'https://example.org/x.png'}))")
    opened.page.wait_for_timeout(100)
    assert opened.page.evaluate("typeof hacked") == "undefined"
    assert len([error for error in opened.errors if "Content Security Policy" in error]) == 2
    opened.context.close()


def test_print_is_light_and_hides_interactive_parts(chromium: Any, folder: Path) -> None:
    with OpenedPage(chromium, folder / "board.html", color_scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.pdf(format="A4").startswith(b"%PDF")


@pytest.mark.parametrize(
    ("scheme", "theme", "dark"),
    [("light", "auto", False), ("dark", "auto", True), ("dark", "light", False), ("light", "dark", True)],
)
def test_figures_of_the_site_are_dark_in_its_dark_theme(
    chromium: Any, tmp_path: Path, scheme: str, theme: str, dark: bool
) -> None:
    css = (Path(__file__).parents[2] / "docs/_static/site.css").read_text(encoding="utf-8")
    Image.new("RGB", (40, 40), "white").save(tmp_path / "figure.png")
    page_text = f"<style>body {{ margin: 0 }} {css}</style><body data-theme={theme}><img src=figure.png>"
    (tmp_path / "page.html").write_text(page_text, encoding="utf-8")
    context = chromium.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    page.screenshot(path=tmp_path / "seen.png")
    context.close()
    color = Image.open(tmp_path / "seen.png").convert("RGB").getpixel((20, 20))
    assert max(color) < 40 if dark else min(color) == 255
