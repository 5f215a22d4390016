"""``Result``: what sweeps, comparisons, progressions and probes found, and how it is written to a folder."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.report.page import write_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Result", "beside", "kept_frame", "write_frame"]

_log = logging.getLogger(__name__)


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
        with beside(where) as aside:
            write_page(self.html(), aside)
        return where

    def save(self, folder: Path | str | None = None) -> Path:
        """Write the tables, the figures and the page into a folder, by default the result's own, and return it."""
        home = self._write_tables(folder)
        for name, figure in self.plots().items():
            with beside(home / f"{name}.png") as aside:
                figure.savefig(aside, dpi=150)
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


def write_frame(frame: pl.DataFrame, path: Path) -> None:
    """Write a frame as parquet or CSV, as the name ends: the whole of it is there, or what was there before."""
    with beside(path) as aside:
        if path.suffix == ".csv":
            frame.write_csv(aside)
        else:
            frame.write_parquet(aside)


def kept_frame(path: Path, make: Callable[[], pl.DataFrame]) -> pl.DataFrame:
    """Return the frame that was kept in a parquet file, or make it and keep it.

    A file that cannot be read is set aside, logged, and made again.
    """
    if path.is_file():
        try:
            return pl.read_parquet(path)
        except (OSError, pl.exceptions.PolarsError) as error:
            aside = path.with_suffix(".unreadable")
            path.replace(aside)
            _log.warning("%s could not be read (%s): it is made again, what was there is in %s.", path, error, aside)
    frame = make()
    write_frame(frame, path)
    return frame


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to; it takes the place of ``path`` in one step once all is written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with beside(Path(folder) / "new" / "notes.json") as aside:
        ...         _ = aside.write_text("{}")
        ...     (Path(folder) / "new" / "notes.json").read_text()
        '{}'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
