"""Pages in Chromium, used as people use them: pointer, keys, a phone, the dark, paper; and names that mean harm."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from midlayer_encoders import board
from midlayer_encoders.report import report_html
from midlayer_encoders.report.pages import write_page
from midlayer_encoders.sweeping import RecipesResult
from tests.report.made_frames import TASKS, full_frame
from tests.report.made_runs import made_sweep

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=hacked=1><script>hacked=1</script>\"'&amp;</td>"
LONG = "an/extremely-long-name-" + "x" * 280
RTL = "نموذج-عربي"
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1100, "height": 900}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Return the browser that is installed: Debian's, or the one that CHROMIUM names."""
    library = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]'")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium here: install `chromium`, or name it in CHROMIUM")
    with library.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a board of five runs, `board.html`, and the page of a sweep, `sweep.html`."""
    home = tmp_path_factory.mktemp("pages")
    scores = {"plain": {"STS": [0.2, 0.6, 0.5]}, "one-word": {"STS": [0.1, 0.3, 0.4]}}
    parts = {
        name: made_sweep(home / "runs/a/recipes" / name, of, options={"recipe": name}) for name, of in scores.items()
    }
    RecipesResult.of(parts, home / "runs/a").save()
    made_sweep(
        home / "runs/b",
        {"STS": [0.3, 0.7, 0.65], "B": [0.1] * 3},
        model=HOSTILE,
        parameters={0: 5, 1: 2 * 10**6, 2: 9 * 10**6},
    )
    made_sweep(home / "runs/c", {"STS": [0.25, 0.5, 0.55]}, model=LONG, dimensions=16)
    made_sweep(home / "runs/d", {"STS": [0.2, 0.3, 0.45]}, model=RTL, seconds={}, timing={}, dimensions=0)
    board(home / "runs").to_html(home / "board.html")
    layers = range(31)
    text = report_html(
        full_frame(), title=HOSTILE, how={HOSTILE: LONG}, notes=[RTL], baselines={"TF-IDF": dict.fromkeys(TASKS, 0.5)},
        parameters={k: 10**6 * (k + 1) for k in layers}, seconds={k: 0.001 * (k + 1) for k in layers},
    )  # fmt: skip
    write_page(text, home / "sweep.html")
    return home


class Opened:
    """A page, and everything that went wrong on it or left it."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": DESK, **options})
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *failed: object) -> None:
        hacked = self.page.evaluate("typeof hacked")
        self.context.close()
        if failed[0] is None:
            assert self.errors == []
            assert all(url.startswith("file:") and url.endswith(".html") for url in self.asked), self.asked
            assert hacked == "undefined"


def names(page: Any) -> list[str]:
    """Return the runs in the rows that are shown, by the folder below each name."""
    return list(page.locator("table.sortable tbody tr:visible small").all_inner_texts())


def drawn(page: Any) -> set[str]:
    """Return the runs that are drawn in the wide chart."""
    return {one.get_attribute("data-curve") for one in page.locator(".wide g.line:visible").all()}


@pytest.mark.parametrize("name", ["board", "sweep"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_it_fits_and_hostile_names_are_words(
    chromium: Any, folder: Path, name: str, dark: bool, size: dict[str, int]
) -> None:
    scheme = "dark" if dark else "light"
    with Opened(chromium, folder / f"{name}.html", viewport=size, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
        assert HOSTILE in page.inner_text("body")
        small = page.eval_on_selector_all(
            "svg text", "all => all.map(o => o.getBoundingClientRect().height).filter(h => h)"
        )
        assert min(small) >= 9
        for field in page.locator(".filters input:visible, button:visible").all():
            box = field.bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= size["width"] or field.locator("xpath=ancestor::table").count()


def test_no_script_but_the_page_s_own_runs(chromium: Any, folder: Path) -> None:
    opened = Opened(chromium, folder / "board.html")
    opened.page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'hacked = 1'}))"
    )
    opened.page.evaluate("document.body.append(Object.assign(new Image(), {src: 'https://example.org/x.png'}))")
    opened.page.wait_for_timeout(100)
    assert opened.page.evaluate("typeof hacked") == "undefined"
    assert len([error for error in opened.errors if "Content Security Policy" in error]) == 2
    opened.context.close()


def test_columns_are_sorted_both_ways_and_what_is_not_known_comes_last(chromium: Any, folder: Path) -> None:
    with Opened(chromium, folder / "board.html") as page:
        assert names(page) == ["b", "a", "c", "d", "a"]  # the best first
        head = page.get_by_role("columnheader", name="Score")
        head.get_by_role("button").click()
        assert head.get_attribute("aria-sort") == "descending"
        assert names(page) == ["b", "a", "c", "d", "a"]
        head.get_by_role("button").press("Enter")
        assert head.get_attribute("aria-sort") == "ascending"
        assert names(page) == ["a", "d", "c", "a", "b"]
        bytes_head = page.get_by_role("columnheader", name="Bytes per vector")
        for way, most in (("ascending", ["32", "32", "32", "64", "–"]), ("descending", ["64", "32", "32", "32", "–"])):
            bytes_head.get_by_role("button").click()
            assert bytes_head.get_attribute("aria-sort") == way
            assert head.get_attribute("aria-sort") is None
            assert page.locator("tbody tr td:nth-child(7)").all_inner_texts() == most
        page.get_by_role("columnheader", name="Run").get_by_role("button").click()
        assert names(page) == ["b", "c", "a", "a", "d"]  # as a dictionary has them: <img, an/, m, m with, Arabic


def test_rows_are_filtered_and_the_charts_with_them(chromium: Any, folder: Path) -> None:
    with Opened(chromium, folder / "board.html") as page:
        status, everything = page.get_by_role("status"), drawn(page)
        assert status.inner_text() == "5 of 5 runs"
        page.get_by_label("Name, or part of it").fill("ONE word")
        assert (names(page), status.inner_text()) == (["a"], "1 of 5 runs")
        assert drawn(page) == {"m with one-word"}
        page.get_by_label("Name, or part of it").fill("<SCRIPT>")
        assert names(page) == ["b"]
        page.get_by_role("button", name="Show all").click()
        assert (len(names(page)), drawn(page)) == (5, everything)
        page.get_by_label("At most parameters").fill("1M")
        assert names(page) == ["a", "c", "d", "a"]
        page.get_by_label("At most milliseconds per text").fill("2.5")  # one has none noted
        assert names(page) == ["a"]
        page.get_by_label("At most parameters").fill("much")
        assert page.get_by_label("At most parameters").get_attribute("aria-invalid") == "true"
        page.get_by_role("button", name="Show all").click()
        page.get_by_label("On a front").check()
        assert set(names(page)) == {"a", "b"}
        assert page.locator("tfoot, tbody").first.is_visible()


def test_a_row_and_a_disc_open_the_sweep_s_own_page(chromium: Any, folder: Path) -> None:
    with Opened(chromium, folder / "board.html") as page:
        page.get_by_role("link", name="m with one-word").first.click()
        assert page.url == (folder / "runs/a/report.html").as_uri()
        assert page.inner_text("h1") == "Every layer of m"
        page.go_back()
        page.locator(".wide a").filter(has=page.locator("circle")).last.click(force=True)
        assert page.url.endswith("/report.html")
        assert "runs/" in page.url


def test_a_point_says_its_layer_score_parameters_and_time(chromium: Any, folder: Path) -> None:
    with Opened(chromium, folder / "sweep.html") as page:
        point, tip = page.locator(".wide g.line circle").nth(12), page.locator(".tip")
        assert not tip.is_visible()
        point.hover(force=True)
        text = tip.inner_text()
        assert text.startswith("average, layer 12: ")
        assert text.splitlines()[1] == "13M parameters, 13 ms per text"
        assert point.get_attribute("aria-label") == text
        page.mouse.move(2, 2)
        assert not tip.is_visible()
        page.locator(".heat i").first.hover(force=True)
        assert "layer 0:" in tip.inner_text()
    with Opened(chromium, folder / "board.html", viewport=PHONE, has_touch=True) as page:
        point = page.locator(".narrow g.line circle:visible").first  # of layer 0, which no disc covers
        point.scroll_into_view_if_needed()
        page.wait_for_timeout(100)  # scrolling takes a tip away
        point.tap(force=True)
        box = page.locator(".tip").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE["width"]
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_everything_is_reached_by_keys(chromium: Any, folder: Path) -> None:
    with Opened(chromium, folder / "board.html") as page:
        tip, label = page.locator(".tip"), "document.activeElement.getAttribute('aria-label')"
        stops: list[str] = []
        focused = "document.activeElement.tagName + ' ' + (document.activeElement.getAttribute('class') ?? '')"
        while len(stops) < 60 and "BODY " not in stops:
            page.keyboard.press("Tab")
            stops.append(page.evaluate(focused))
        assert stops.count("FIGURE ") == 1  # one stop for all points of a figure
        assert stops.count("DIV panels pair") == 1
        assert not any(stop.startswith("circle") for stop in stops)
        page.locator("figure").first.focus()
        assert not tip.is_visible()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert ", layer 1: 70.0 points" in page.evaluate(label)
        assert tip.inner_text() == page.evaluate(label)
        page.keyboard.press("End")
        assert ", layer 2: 65.0 points" in page.evaluate(label)
        page.keyboard.press("ArrowDown")  # the next run, at the same layer
        assert page.evaluate(label).startswith("m, layer 2: 50.0 points")
        page.keyboard.press("Escape")
        assert not tip.is_visible()
        for _ in range(4):
            page.keyboard.press("ArrowDown")
        assert page.evaluate("document.activeElement.getAttribute('role')") == "link"
        page.keyboard.press("Enter")
        page.wait_for_url("**/report.html")


def test_names_in_the_key_switch_their_curves(chromium: Any, folder: Path) -> None:
    with Opened(chromium, folder / "board.html") as page:
        everything = drawn(page)
        assert HOSTILE in everything
        button = page.locator(".legend button").filter(has_text="<script>")
        button.click()
        assert button.get_attribute("aria-pressed") == "false"
        assert drawn(page) == everything - {HOSTILE}
        assert "b" in names(page)  # the row stays
        button.press("Space")
        assert (button.get_attribute("aria-pressed"), drawn(page)) == ("true", everything)
        assert page.locator(".chart .front:visible").count() == 2  # that of bytes is level, and counts as nothing
        page.locator(".legend button").filter(has_text="Pareto front").click()
        assert page.locator(".chart .front:visible").count() == 0
    with Opened(chromium, folder / "sweep.html") as page:
        levels = "[...document.querySelectorAll('.chart .level')].filter(one => one.checkVisibility()).length"
        assert page.evaluate(levels) == 1 + 5  # of the average and of each task
        page.locator(".legend button").filter(has_text="TF-IDF").click()
        assert page.evaluate(levels) == 0
        assert not page.locator(".wide text").filter(has_text="TF-IDF").is_visible()


def test_paper_is_light_and_shows_nothing_that_needs_a_pointer(chromium: Any, folder: Path) -> None:
    with Opened(chromium, folder / "board.html", color_scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not page.locator(".filters").is_visible()
        arrow = page.evaluate("getComputedStyle(document.querySelector('th button'), '::after').display")
        assert arrow == "none"
        assert page.pdf(format="A4").startswith(b"%PDF")


def test_without_scripts_everything_is_there_to_read(chromium: Any, folder: Path) -> None:
    with Opened(chromium, folder / "board.html", java_script_enabled=False) as page:
        assert page.locator("table.sortable tbody tr").count() == 5
        assert not page.locator(".filters").is_visible()
        assert page.locator(".legend button").count() == 0
        assert page.locator(".wide circle title").count() > 10
