from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.report import report_html
from midlayer_encoders.report.pages import write_page
from tests.report.made_frames import METRICS, TASKS, full_frame, metrics_frame, rows_frame, scores_frame

HOSTILE = "<img src=x onerror=alert(1)>\"'&</td></script>"
VOID = {"meta", "wbr", "br", "input", "img"}


class Balance(HTMLParser):
    """Checks that tags are closed in order, and collects tags and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


def check_script(page: Balance) -> None:
    """Assert that a page has no script and a policy against scripts and requests."""
    assert not [tag for tag, _ in page.seen if tag == "script"]
    (policy,) = (
        attributes["content"] or ""
        for _, attributes in page.seen
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.split("; ") == [
        "default-src 'none'", "img-src data:", "style-src 'unsafe-inline'", "base-uri 'none'", "form-action 'none'",
    ]  # fmt: skip


def checked_page(frame: pl.DataFrame, **options: Any) -> tuple[str, Balance]:
    """Return a page and its parsed content after the checks that apply to every page."""
    text = report_html(frame, **{"title": "T", "how": {}, **options})
    page = Balance()
    page.feed(text)
    page.close()
    assert page.open == []
    assert [tag for tag, _ in page.seen].count("h1") == 1
    assert not {"link", "iframe"} & {tag for tag, _ in page.seen}
    images = [attributes for tag, attributes in page.seen if tag == "img"]
    assert all(image["alt"] and str(image["src"]).startswith("data:image/png;base64,") for image in images)
    check_script(page)
    assert not re.findall(r"https?://|url\(|@import", text)
    return text, page


def scores_by_hand(*values: float, task: str = "STS") -> pl.DataFrame:
    last = max(len(values) - 1, 1)
    return rows_frame([("m", "main", k, k / last, "score", task, "accuracy", v) for k, v in enumerate(values)])


def test_numbers_on_the_page_match_the_frame() -> None:
    frame = pl.concat([scores_by_hand(0.40, 0.60, 0.50), scores_by_hand(0.20, 0.10, 0.18, task="B")])
    text, page = checked_page(
        frame,
        parameters={0: 10_000_000, 1: 60_000_000, 2: 100_000_000},
        seconds={1: 3.0, 2: 4.0},
        baselines={"TF-IDF": {"STS": 0.7, "B": 0.1}, "MiniLM": {"STS": 0.3, "B": 0.05}},
    )
    page_text = " ".join(page.words)
    assert "Layer 1 of 2 scores 35.0 on average over 2 tasks, 1.0 points more than the last layer (34.0)." in page_text
    assert '<tr class="winner"><th scope="row">1</th><td>60.0</td><td>3000</td><td>35.0</td>' in text
    assert '<th scope="row">TF-IDF</th><td>–</td><td>–</td><td>40.0</td><td>70.0</td><td>10.0</td>' in text
    assert '<th scope="row">MiniLM</th><td>–</td><td>–</td><td>17.5</td><td>30.0</td><td>5.0</td>' in text


def test_page_has_all_sections() -> None:
    text, page = checked_page(
        full_frame(),
        title="Every layer",
        how={"Seed": "42", "Versions": "mteb 2.20"},
        export={"Python": 'LayerEncoder("m", layer=1)', "Shell": "midlayer export m --layer 1"},
        notes=["A task failed: it had no texts."],
    )
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings == ["Score by depth", "Use this layer", "Metrics by depth", "The numbers", "How it was measured"]
    page_text = " ".join(page.words)
    for text_part in ("A task failed: it had no texts.", "42", "mteb 2.20", 'LayerEncoder("m", layer=1)', "--layer 1"):
        assert text_part in page_text
    assert all(name in "".join(page.words) for name in (*TASKS, *METRICS))


def test_metric_table_holds_every_value() -> None:
    frame = metrics_frame(3, names=["curvature", "lidar"], datasets=["a", "b"])
    text, _ = checked_page(frame)
    for value in frame["value"]:
        assert f"<td>{value:#.4g}</td>" in text


@pytest.mark.long
def test_malicious_names_stay_text() -> None:
    frame = pl.concat([scores_frame(4, model=HOSTILE), metrics_frame(4, datasets=[HOSTILE, "b"], model=HOSTILE)])
    frame = frame.with_columns(
        pl.col("dataset").str.replace("DocstringSTS", HOSTILE, literal=True), revision=pl.lit(HOSTILE)
    )
    _, page = checked_page(
        frame,
        title=HOSTILE,
        how={HOSTILE: HOSTILE},
        export={HOSTILE: HOSTILE},
        notes=[HOSTILE],
        baselines={HOSTILE: {HOSTILE: 0.9}},
    )
    assert "".join(page.words).count(HOSTILE) > 8
    assert not any("onerror" in attributes for _, attributes in page.seen)
    assert {attributes["class"] for tag, attributes in page.seen if tag == "img"} == {"chart"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("frame", "summary_text", "absent_text"),
    [
        (metrics_frame(6), "16 metrics by layer; no task was scored.", "Score by depth"),
        (scores_frame(6), "on average over 5 tasks", "Metrics by depth"),
        (scores_by_hand(0.4, 0.6, 0.5), "Layer 1 of 2 scores 60.0 on STS, 10.0 points more than", "average over"),
        (scores_by_hand(0.4, 0.5, 0.6), "No layer scores more than the last layer: 60.0 on STS.", "Gain in points"),
        (scores_by_hand(0.5), "Layer 0 scores 50.0 on STS; no other was scored.", "Score by depth"),
        (scores_frame(30, layers=[12]), "Layer 12 of 30 scores", "Layers and tasks"),
        (scores_frame(24, layers=[0, 6, 12, 20]), "points more than layer 20", "the last layer ("),
        (scores_frame(32, tasks=64), "on average over 64 tasks", "Metrics by depth"),
        (scores_by_hand(0.5, math.nan, 0.4), "Layer 0 of 2 scores 50.0 on STS, 10.0 points more", "nan"),
        (scores_by_hand(0.5, 0.5, 0.5), "No layer scores more than the last layer: 50.0 on STS.", "Metrics by depth"),
    ],
)
def test_unusual_frames_have_a_correct_summary(frame: pl.DataFrame, summary_text: str, absent_text: str) -> None:
    text, page = checked_page(frame)
    assert summary_text in " ".join(page.words)
    assert absent_text not in text


def test_tasks_are_shown_even_if_no_layer_has_all_of_them() -> None:
    frame = pl.concat([scores_by_hand(0.4, 0.6), scores_by_hand(0.3, 0.2, 0.1, task="B").filter(pl.col("layer") > 1)])
    _, page = checked_page(frame)
    assert "2 tasks scored, none of the layers on all of them." in " ".join(page.words)
    assert "STS" in page.words


def test_nonfinite_metrics_are_reported() -> None:
    rows = [("m", "r", k, k / 2, "metric", "t", "lidar", v) for k, v in enumerate([1.0, math.nan, math.inf])]
    _, page = checked_page(rows_frame(rows))
    assert "Not finite at some layers, and broken there: lidar." in " ".join(page.words)
    assert {"NaN", "∞"} <= set(page.words)


def test_baseline_that_is_worse_or_for_another_task() -> None:
    _, page = checked_page(scores_by_hand(0.4, 0.6, 0.5), baselines={"BM25": {"STS": 0.1}})
    assert "BM25 scores 10.0 on STS, 50.0 points less than the best layer." in " ".join(page.words)
    _, page = checked_page(scores_by_hand(0.4, 0.6, 0.5), baselines={"BM25": {"STS": 0.6002}})
    assert "BM25 scores 60.0 on STS, 0.0 points more than the best layer." in " ".join(page.words)
    _, page = checked_page(scores_by_hand(0.4, 0.6, 0.5), baselines={"BM25": {"elsewhere": 0.1}})
    assert "BM25" not in " ".join(page.words)


@pytest.mark.long
def test_wide_tables_are_split_to_fit_on_paper() -> None:
    text, _ = checked_page(scores_frame(4, tasks=24))
    tables = re.findall(r"<table>.*?</table>", text)
    assert len(tables) == 4
    assert max(table.count('<th scope="col">') for table in tables) <= 9
    assert text.count("<td") == 5 * 25


def test_page_is_written_to_the_given_path(tmp_path: Path) -> None:
    page = report_html(scores_by_hand(0.4, 0.6, 0.5), title="Zürich \udc80", how={})
    path = write_page(page, tmp_path / "new" / "report.html")
    assert path == tmp_path / "new" / "report.html"
    assert "<h1>Zürich &#56448;</h1>" in path.read_text(encoding="utf-8")
    page = report_html(scores_by_hand(0.4, 0.6, 0.5), title="T", how={})
    assert page == report_html(scores_by_hand(0.4, 0.6, 0.5), title="T", how={})


def test_invalid_frames_are_refused() -> None:
    with pytest.raises(OptionError, match="at least one row, but got none"):
        report_html(rows_frame([]), title="T", how={})
    with pytest.raises(OptionError, match="one model at one revision here, but got 2"):
        report_html(pl.concat([scores_frame(2, model="a"), scores_frame(2, model="b")]), title="T", how={})
