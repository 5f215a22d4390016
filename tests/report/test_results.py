"""Shared behavior of results: files are complete or absent, and a folder is required."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import atomic_write
from midlayer_encoders.frame import read_frame, tidy_frame, tidy_rows
from midlayer_encoders.frame.schema import NamedSubject, parquet_bytes
from midlayer_encoders.frame.tidy_result import kept_frame, write_frame
from midlayer_encoders.report.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRAME = pl.DataFrame({"layer": [0, 1], "value": [0.25, 0.5]})
RESULTS = tidy_frame(
    tidy_rows({0: 0.25, 1: 0.5, 2: 0.7}, NamedSubject("m", None, 2), kind="metric", dataset="t", name="dime")
)


@dataclass(frozen=True)
class PlainResult(Result):
    def html(self) -> str:
        return "<p>two layers</p>"

    def plots(self) -> dict[str, Figure]:
        from matplotlib.figure import Figure

        return {"curve": Figure()}


def test_result_writes_tables_figures_and_page_only(tmp_path: Path) -> None:
    folder = PlainResult(FRAME, tmp_path / "a" / "b").save()
    assert folder == tmp_path / "a" / "b"
    assert sorted(path.name for path in folder.iterdir()) == ["curve.png", "frame.csv", "frame.parquet", "report.html"]
    assert pl.read_parquet(folder / "frame.parquet").equals(FRAME)
    assert pl.read_csv(folder / "frame.csv").equals(FRAME)
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "report.html").read_text() == "<p>two layers</p>"


def test_result_without_a_folder_says_how_to_set_one(tmp_path: Path) -> None:
    result = PlainResult(FRAME, None)
    with pytest.raises(OptionError, match="`folder` must be set here, or `out` in the call before"):
        result.save()
    with pytest.raises(OptionError, match="there is nowhere to write"):
        result.to_html()
    assert result.to_html(tmp_path / "page.html") == tmp_path / "page.html"
    assert result.save(tmp_path) == tmp_path


def test_failed_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "frame.parquet"
    write_frame(FRAME, path)

    def write_half() -> None:
        with atomic_write(path) as temporary:
            temporary.write_text("half of it")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write_half()
    assert pl.read_parquet(path).equals(FRAME)
    assert list(tmp_path.iterdir()) == [path]


def test_cached_frame_is_computed_once_unless_unreadable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def make() -> pl.DataFrame:
        calls.append(1)
        return FRAME

    path = tmp_path / "steps" / "step1.parquet"
    assert all(kept_frame(path, make).equals(FRAME) for _ in range(2))
    assert len(calls) == 1
    path.write_bytes(b"PAR1 and half of it")
    assert kept_frame(path, make).equals(FRAME)
    assert (len(calls), path.with_name("step1.parquet.broken").read_bytes()) == (2, b"PAR1 and half of it")
    assert "could not be read" in caplog.text
    assert pl.read_parquet(path).equals(FRAME)


def test_frame_with_a_changed_bit_never_gives_other_numbers(tmp_path: Path) -> None:
    path = tmp_path / "frame.parquet"
    write_frame(RESULTS, path)
    content = path.read_bytes()
    num_refused = 0
    positions = range(0, len(content), 13)
    for position in positions:
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        try:
            frame = read_frame(path)
        except OptionError:
            num_refused += 1
        else:
            assert frame.equals(RESULTS), position
    assert num_refused >= len(positions) - 4  # a file without a checksum is one that another program wrote


def test_damaged_frame_is_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "frame.parquet"
    other = RESULTS.with_columns(value=pl.col("value") * 2)
    path.write_bytes(parquet_bytes(RESULTS).replace(struct.pack("<d", 0.7), struct.pack("<d", 0.6)))
    assert pl.read_parquet(path)["value"].to_list() == [0.25, 0.5, 0.6]
    assert kept_frame(path, lambda: other).equals(other)
    assert "does not match its checksum" in caplog.text


def test_frame_that_another_program_wrote_has_no_checksum(tmp_path: Path) -> None:
    path = tmp_path / "frame.parquet"
    RESULTS.write_parquet(path)
    assert read_frame(path).equals(RESULTS)
