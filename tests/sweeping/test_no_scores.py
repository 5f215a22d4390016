"""A sweep in which nothing, or only a part, was scored gives the reason and draws the available scores."""

from pathlib import Path

import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.sweeping.best_layer import Notes
from midlayer_encoders.sweeping.sweep_result import SweepResult
from tests.report.made_frames import rows_frame


def make_result(rows: list[tuple[object, ...]], folder: Path) -> SweepResult:
    return SweepResult(rows_frame(rows), folder, Notes("t", "m", {}, failures={"STS12": "no network"}))


def test_page_without_rows_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"nothing to draw: no layer was scored or measured. STS12: no network"):
        make_result([], tmp_path).to_html()


def test_page_names_no_best_layer_if_no_layer_has_all_tasks(tmp_path: Path) -> None:
    rows = [
        ("m", "main", layer, layer / 2, "score", task, "accuracy", 0.5)
        for task, layer in (("A", 0), ("A", 1), ("B", 2))
    ]
    page = make_result(rows, tmp_path).to_html().read_text()
    assert "STS12 failed: no network" in page
    assert "midlayer export" not in page
