"""A sweep in which nothing, or not everything, was scored still says why, and draws what there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.sweeping.sweep_result import Notes, SweepResult
from tests.report.made_frames import rows_frame


def made(rows: list[tuple[object, ...]], folder: Path) -> SweepResult:
    return SweepResult(rows_frame(rows), folder, Notes("t", "m", {}, failures={"STS12": "no network"}))


def test_without_any_row_the_page_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"nothing to draw: no layer was scored or measured. STS12: no network"):
        made([], tmp_path).to_html()


def test_without_a_layer_that_was_scored_on_every_task_the_page_names_no_best(tmp_path: Path) -> None:
    rows = [
        ("m", "main", layer, layer / 2, "score", task, "accuracy", 0.5)
        for task, layer in (("A", 0), ("A", 1), ("B", 2))
    ]
    page = made(rows, tmp_path).to_html().read_text()
    assert "STS12 failed: no network" in page
    assert "midlayer export" not in page
