"""``TidyResult``: a result with a tidy frame; and frames in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from midlayer_encoders.files import read_artifact, write_file
from midlayer_encoders.frame.schema import parquet_bytes, read_parquet


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
        return self.frame.to_pandas()


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
