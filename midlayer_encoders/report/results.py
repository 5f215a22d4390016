"""``Result``: the tidy frame, figures and page of a sweep, comparison, progression or probe."""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.files import read_artifact, write_file
from midlayer_encoders.frame.schema import parquet_bytes, read_parquet
from midlayer_encoders.report.drawing import write_figure
from midlayer_encoders.report.pages import write_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PACKAGES = ("midlayer-encoders", "torch", "transformers", "sentence-transformers")


class TidyResult:
    """A result with a tidy frame."""

    if TYPE_CHECKING:

        @property
        def frame(self) -> pl.DataFrame:
            """Tidy rows."""

    @property
    def scores(self) -> pl.DataFrame:
        """The rows of the frame that hold scores, without metrics."""
        return self.frame.filter(kind="score")

    def to_pandas(self) -> Any:
        """Return the frame as a pandas frame."""
        try:
            return self.frame.to_pandas()
        except ModuleNotFoundError as error:
            raise MidlayerError("`to_pandas` needs pandas: pip install pandas.") from error


@dataclass(frozen=True)
class Result(TidyResult, ABC):
    """A tidy frame with its figures and page.

    Attributes:
        frame: tidy: ``model, revision, layer, depth, kind, dataset, name, value``.
        folder: to write to; None if there is none.
    """

    frame: pl.DataFrame
    folder: Path | None

    @abstractmethod
    def html(self) -> str:
        """Return the self-contained page."""

    @abstractmethod
    def plots(self) -> dict[str, Figure]:
        """Return the figures by name."""

    def tables(self) -> Mapping[str, pl.DataFrame]:
        """Return the tables that :meth:`save` writes, by file name."""
        return {"frame.parquet": self.frame, "frame.csv": self.frame}

    def to_html(self, path: Path | str | None = None) -> Path:
        """Write the self-contained page, by default to ``report.html`` in the folder, and return its path."""
        return write_page(self.html(), Path(path) if path is not None else self._home() / "report.html")

    def save(self, folder: Path | str | None = None) -> Path:
        """Write the tables, figures and page into a folder, by default the result's, and return it."""
        output = self._write_tables(folder)
        for name, figure in self.plots().items():
            write_figure(figure, output / f"{name}.png")
        self.to_html(output / "report.html")
        return output

    def _write_tables(self, folder: Path | str | None) -> Path:
        output = Path(folder) if folder is not None else self._home()
        for name, frame in self.tables().items():
            write_frame(frame, output / name)
        return output

    def _home(self) -> Path:
        if self.folder is None:
            raise OptionError("`folder` must be set here, or `out` in the call before: there is nowhere to write.")
        return self.folder


def write_frame(frame: pl.DataFrame, path: Path, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write a frame atomically as CSV or as parquet with metadata and a checksum, depending on the suffix."""
    # Polars' errors about a full disk name neither the disk nor the path.
    write_file(path, frame.write_csv().encode() if path.suffix == ".csv" else parquet_bytes(frame, metadata))


def kept_frame(path: Path, make: Callable[[], pl.DataFrame]) -> pl.DataFrame:
    """Return the frame saved in a parquet file, or make and save it.

    A damaged file is set aside with a warning and made again.
    """
    frame, _ = read_artifact(path, read_parquet) or (None, {})
    if frame is None:
        frame = make()
        write_frame(frame, path)
    return frame


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Return the version of Python and of each package.

    Example:
        >>> versions(["no-such-package"])["no-such-package"]
        'not installed as a package'
    """
    return {"Python": platform.python_version(), **{package: _version(package) for package in packages}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"
