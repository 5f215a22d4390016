"""What every result shares: files that are whole or not there, and a folder that must be somewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import polars as pl
import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import atomic_write
from midlayer_encoders.report.results import Result, kept_frame, write_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRAME = pl.DataFrame({"layer": [0, 1], "value": [0.25, 0.5]})


@dataclass(frozen=True)
class PlainResult(Result):
    made_by: ClassVar[str] = "measure"

    def html(self) -> str:
        return "<p>two layers</p>"

    def plots(self) -> dict[str, Figure]:
        from matplotlib.figure import Figure

        return {"curve": Figure()}


def test_a_result_writes_its_tables_its_figures_and_its_page_and_nothing_else(tmp_path: Path) -> None:
    home = PlainResult(FRAME, tmp_path / "a" / "b").save()
    assert home == tmp_path / "a" / "b"
    assert sorted(path.name for path in home.iterdir()) == ["curve.png", "frame.csv", "frame.parquet", "report.html"]
    assert pl.read_parquet(home / "frame.parquet").equals(FRAME)
    assert pl.read_csv(home / "frame.csv").equals(FRAME)
    assert (home / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (home / "report.html").read_text() == "<p>two layers</p>"


def test_a_result_without_a_folder_says_how_to_give_it_one(tmp_path: Path) -> None:
    alone = PlainResult(FRAME, None)
    with pytest.raises(OptionError, match="`folder` must be set here, or `out` in `measure`"):
        alone.save()
    with pytest.raises(OptionError, match="there is no folder"):
        alone.to_html()
    assert alone.to_html(tmp_path / "page.html") == tmp_path / "page.html"
    assert alone.save(tmp_path) == tmp_path


def test_a_write_that_fails_leaves_the_file_of_before_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "frame.parquet"
    write_frame(FRAME, path)

    def half() -> None:
        with atomic_write(path) as aside:
            aside.write_text("half of it")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        half()
    assert pl.read_parquet(path).equals(FRAME)
    assert list(tmp_path.iterdir()) == [path]


def test_a_kept_frame_is_made_once_and_again_only_when_it_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[int] = []

    def make() -> pl.DataFrame:
        made.append(1)
        return FRAME

    path = tmp_path / "steps" / "step1.parquet"
    assert all(kept_frame(path, make).equals(FRAME) for _ in range(2))
    assert len(made) == 1
    path.write_bytes(b"PAR1 and half of it")
    assert kept_frame(path, make).equals(FRAME)
    assert (len(made), path.with_name("step1.parquet.broken").read_bytes()) == (2, b"PAR1 and half of it")
    assert "could not be read" in caplog.text
    assert pl.read_parquet(path).equals(FRAME)
