"""``Result``: the tidy frame, figures and page of a sweep, comparison, progression or probe."""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.tidy_result import TidyResult, write_frame
from midlayer_encoders.report.drawing import write_figure
from midlayer_encoders.report.pages import write_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PACKAGES = ("midlayer-encoders", "torch", "transformers", "sentence-transformers")


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
