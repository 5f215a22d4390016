"""``Result``: what sweeps, comparisons, progressions and probes found, and how it is written to a folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import read_artifact, write_file
from midlayer_encoders.report.matplotlib_figures import write_figure
from midlayer_encoders.report.page import write_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Result", "kept_frame", "write_frame"]


@dataclass(frozen=True)
class Result(ABC):
    """A tidy frame, and everything that is shown of it.

    Attributes:
        frame: tidy: ``model, revision, layer, depth, kind, dataset, name, value``.
        folder: where it is written; ``None`` where it is not.
    """

    frame: pl.DataFrame
    folder: Path | None

    made_by: ClassVar[str]
    """The function that returns it."""

    @abstractmethod
    def html(self) -> str:
        """Return the self-contained page."""

    @abstractmethod
    def plots(self) -> dict[str, Figure]:
        """Return the figures by name."""

    def tables(self) -> Mapping[str, pl.DataFrame]:
        """Return what :meth:`save` writes, by file name."""
        return {"frame.parquet": self.frame, "frame.csv": self.frame}

    def to_html(self, path: Path | str | None = None) -> Path:
        """Write the self-contained page and return where it lies; by default ``report.html`` in the folder."""
        where = Path(path) if path is not None else self._home() / "report.html"
        return write_page(self.html(), where)

    def save(self, folder: Path | str | None = None) -> Path:
        """Write the tables, the figures and the page into a folder, by default the result's own, and return it."""
        home = self._write_tables(folder)
        for name, figure in self.plots().items():
            write_figure(figure, home / f"{name}.png")
        self.to_html(home / "report.html")
        return home

    def _write_tables(self, folder: Path | str | None) -> Path:
        home = Path(folder) if folder is not None else self._home()
        for name, frame in self.tables().items():
            write_frame(frame, home / name)
        return home

    def _home(self) -> Path:
        if self.folder is None:
            raise OptionError(f"`folder` must be given here, or `out` to `{self.made_by}`: there is none to write to.")
        return self.folder


def write_frame(frame: pl.DataFrame, path: Path, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write a frame as parquet, with metadata, or CSV, as the name ends: all of it is there, or what was before."""
    # In memory first: of a full disk polars says neither the disk nor the path.
    content = BytesIO()
    if path.suffix == ".csv":
        frame.write_csv(content)
    else:
        frame.write_parquet(content, metadata=dict(metadata) if metadata else None)
    write_file(path, content.getvalue())


def kept_frame(path: Path, make: Callable[[], pl.DataFrame]) -> pl.DataFrame:
    """Return the frame that was kept in a parquet file, or make it and keep it.

    A file that cannot be read is set aside, logged, and made again.
    """
    frame = read_artifact(path, pl.read_parquet)
    if frame is None:
        frame = make()
        write_frame(frame, path)
    return frame
