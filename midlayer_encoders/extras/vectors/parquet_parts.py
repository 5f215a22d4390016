"""Parquet files in parts: planned from their footers, and each embedded into a file of its own by a worker of Ray.

The plan depends on the files and the size of a part only, so that batches, and with them the last bits of the vectors,
do not depend on the cluster. A file is written in one step under a name of the plan: a part that runs again replaces
it by the same.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midlayer_encoders._types import content_digest
from midlayer_encoders.errors import MidlayerError, OptionError, did_you_mean, error_summary
from midlayer_encoders.files import atomic_write, expand_home, make_folder
from midlayer_encoders.processes.group import ProcessLostError
from midlayer_encoders.validation import check_count, check_path

if TYPE_CHECKING:
    import pyarrow as pa

_ATTEMPTS = 3  # Ray would repeat a part that kills its process, such as by running out of memory, forever


@dataclass(frozen=True)
class Part:
    """Rows of a source file that are embedded together and written to one file."""

    name: str
    file: str
    start: int
    count: int
    first: int
    stamp: str


def plan_parts(source: Path | str, text_column: str, size: int, limit: int | None) -> list[Part]:
    """Return the parts of parquet files, from their footers; no part holds rows of two files."""
    import pyarrow as pa
    from pyarrow import parquet

    check_path("source", source)
    path = expand_home(source).absolute()
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files or files[0].suffix != ".parquet" or not files[0].is_file():
        raise OptionError(
            f"`source` must be a parquet file or a folder of .parquet files, but got {path}. "
            "Without Ray, texts are also read from other formats."
        )
    parts: list[Part] = []
    first_schema = None
    remaining = float("inf") if limit is None else check_count("limit", limit, "texts")
    total = 0
    for file in files:
        try:
            with parquet.ParquetFile(file) as footer:
                schema, num_rows = footer.schema_arrow, footer.metadata.num_rows
        except (OSError, pa.ArrowInvalid) as reason:
            raise OptionError(f"`source` must be readable parquet, but {file} is not: {reason}") from reason
        check_columns(schema.names, text_column, [], str(file))
        if schema.field(text_column).type not in (pa.string(), pa.large_string(), pa.string_view()):
            raise OptionError(
                f"`text_column` must be a column of texts, but {text_column!r} of {file} has the type "
                f"{schema.field(text_column).type}: use another column."
            )
        first_schema = first_schema or schema
        if not schema.equals(first_schema):
            raise OptionError(f"`source` must hold files with the same columns, but {files[0]} and {file} differ.")
        status = file.stat()
        stamp = f"{file} {status.st_size} {status.st_mtime_ns}"
        count = int(min(num_rows, remaining))
        for start in range(0, count, size):
            name = f"part-{len(parts):06d}.parquet"
            parts.append(Part(name, str(file), start, min(size, count - start), total + start, stamp))
        remaining -= count
        total += count
    if not parts:
        raise OptionError(f"`source` must hold texts, but {path} has no rows.")
    return parts


def plan_digest(parts: Sequence[Part], token_budget: int | str) -> str:
    """Return the name of the folder that a killed run resumes in: it differs if the rows or batches do."""
    return content_digest(json.dumps([[asdict(part) for part in parts], token_budget]), 16)


def vectors_digest(metadata: Mapping[str, Any]) -> str:
    """Return the name of the folder for files of one encoder, with the same layers and prompt."""
    return content_digest(json.dumps([metadata[name] for name in ("spec", "layers", "prompt")]), 16)


@lru_cache(maxsize=1)  # the next part of an actor is often in the same row group
def _row_groups(file: str, first: int, last: int, stamp: str) -> pa.Table:  # noqa: ARG001  (the key of a file that changes)
    from pyarrow import parquet

    with parquet.ParquetFile(file) as reader:
        return reader.read_row_groups(range(first, last + 1))


def _read_rows(part: Part) -> pa.Table:
    """Return the rows of a part, from the row groups that hold them."""
    from pyarrow import parquet

    with parquet.ParquetFile(part.file) as reader:
        sizes = [reader.metadata.row_group(group).num_rows for group in range(reader.num_row_groups)]
    ends = list(accumulate(sizes))
    first = next(group for group, end in enumerate(ends) if end > part.start)
    last = next(group for group, end in enumerate(ends) if end >= part.start + part.count)
    return _row_groups(part.file, first, last, part.stamp).slice(part.start - ends[first] + sizes[first], part.count)


@dataclass
class PartWriter:
    """Writes the files of parts; the model is loaded for the first one, so that its errors are results, too."""

    load: Callable[[], Any]
    folder: Path
    directory: Path
    run: str
    embedder: Any = None

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return what became of the only part of a batch: the folder of its file, or the error."""
        part = Part(**{name: values.tolist()[0] for name, values in batch.items()})
        folder, error = "", b""
        with _collected_warnings() as warnings:
            try:
                with self._attempt(part):
                    folder = str(self.write(part))
            except Exception as reason:  # Ray would print its own frames around it
                error = _pickled(reason)
        return {"folder": [folder], "count": [part.count], "error": [error], "warnings": ["\n".join(warnings)]}

    @contextmanager
    def _attempt(self, part: Part) -> Iterator[None]:
        """Raise if the process of a part was killed several times in this run: a file has a byte for each attempt."""
        make_folder(self.folder)
        path = self.folder / f"{part.name}.{self.run}"
        with path.open("ab") as file:
            file.write(b".")
        try:
            if path.stat().st_size > _ATTEMPTS:
                rows = f"Rows {part.start} to {part.start + part.count - 1} of {part.file}"
                raise ProcessLostError(
                    f"{rows} ended their process {_ATTEMPTS} times. If it ran out of memory, use a smaller "
                    "`batch_size` or fewer actors (`concurrency`). The same call resumes from the complete files."
                )
            yield
        finally:
            path.unlink(missing_ok=True)

    def write(self, part: Part) -> Path:
        """Write the file of a part, unless it is complete, and return its folder, which identifies the run."""
        from pyarrow import parquet

        if self.embedder is None:
            with suppress(OSError):  # relative paths start at the driver's working directory
                os.chdir(self.directory)
            self.embedder = self.load()
        table = _read_rows(part)
        texts = table[self.embedder.text_column]
        if texts.null_count:
            row = part.start + texts.is_null().to_pylist().index(True)
            raise OptionError(
                f"`source` must have a text in each row, but {part.file} has none in row {row}: remove it."
            )
        metadata = self.embedder.describe(texts.to_pylist())
        folder = self.folder / vectors_digest(metadata)
        metadata["first"] = part.first
        if not _is_complete(folder / part.name, metadata):
            table = self.embedder(table).replace_schema_metadata({"midlayer": json.dumps(metadata)})
            with atomic_write(folder / part.name) as temporary:
                parquet.write_table(table, temporary, use_dictionary=False)
        return folder


def _is_complete(path: Path, metadata: Mapping[str, Any]) -> bool:
    """Return True if an earlier attempt wrote this file."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        footer = parquet.read_metadata(path)
    except (OSError, pa.ArrowInvalid):
        return False
    return bool(json.loads((footer.metadata or {}).get(b"midlayer", b"{}")) == metadata)


def _pickled(error: Exception) -> bytes:
    """Return an error for the driver, with the worker's traceback as a note unless it is one of this package."""
    if not isinstance(error, MidlayerError):
        error.add_note("".join(traceback.format_exception(error)))
    try:
        content = pickle.dumps(error)
        pickle.loads(content)
    except Exception:  # some constructors take other arguments than they pass on
        return pickle.dumps(RuntimeError(error_summary(error)))
    return content


@contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """Collect the warnings that this package logs, which Ray leaves in a file of the worker."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collector(logging.WARNING)
    logger = logging.getLogger("midlayer_encoders")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def check_columns(names: Sequence[str], text_column: str, new_columns: Sequence[str], place: str) -> None:
    """Raise an :class:`OptionError` unless a table has the texts, and none of the columns to add."""
    if text_column not in names:
        raise OptionError(
            f"`text_column` must be a column of {place}, but got {text_column!r}; it has {', '.join(map(repr, names))}."
            f"{did_you_mean(text_column, names)}"
        )
    if repeated := [name for name in new_columns if name in names]:
        raise OptionError(
            f"`layers` must not add the column {repeated[0]!r}, which {place} has already: rename it, or embed other "
            "layers."
        )
