"""Define, build and validate the tidy frame of results, and extract the series of its metrics."""

import io
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import polars as pl

from midlayer_encoders._types import EncoderSpec, content_digest
from midlayer_encoders.errors import MidlayerError, OptionError, did_you_mean, pluralize
from midlayer_encoders.files import check_regular_file, read_text_file

_polars_runs_in: int | None = None  # the process that made or read the first frame, with threads of polars

#: The columns of results and their types; ``depth`` is ``layer / num_layers``, a score's ``value`` a fraction.
FRAME_SCHEMA = pl.Schema(
    {
        "model": pl.String(),
        "revision": pl.String(),
        "layer": pl.Int64(),
        "depth": pl.Float64(),
        "kind": pl.String(),
        "dataset": pl.String(),
        "name": pl.String(),
        "value": pl.Float64(),
    }
)

#: A ``confirmed`` row is mteb's score of a layer whose ``score`` row comes from scoring all layers together.
KINDS = ("score", "metric", "confirmed")

_SEAL = rb"midlayer-[0-9a-f]{32}"
_NO_SEAL = b"midlayer-" + b"0" * 32  # what a checksum replaces
_IDENTITY = ["model", "revision", "layer", "kind", "dataset", "name"]


@dataclass(frozen=True)
class NamedSubject:
    """The model of a row, without its encoder.

    Attributes:
        model: name of the model.
        revision: branch, tag, commit or training step; ``None`` for the default.
        num_layers: number of blocks of the whole model.
    """

    model: str
    revision: str | None
    num_layers: int


def tidy_rows(
    values: Mapping[int, float],
    subject: EncoderSpec | NamedSubject,
    *,
    kind: Literal["score", "metric", "confirmed"],
    dataset: str,
    name: str,
    extra: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of one curve, without layers whose value is NaN.

    Args:
        values: the value of each layer.
        subject: the model.
        kind: kind of the values.
        dataset: name of the dataset on which they were measured.
        name: name of the score or metric.
        extra: cells of additional columns, the same in every row.

    Example:
        >>> rows = tidy_rows({0: 0.5, 6: 0.75}, NamedSubject("m", None, 12), kind="metric", dataset="t", name="dime")
        >>> tidy_frame(rows).select("revision", "layer", "depth", "value").rows()
        [('default', 0, 0.0, 0.5), ('default', 6, 0.5, 0.75)]
    """
    shared = {"model": subject.model, "revision": subject.revision or "default"}
    shared |= {"kind": kind, "dataset": dataset, "name": name, **(extra or {})}
    return [
        {**shared, "layer": layer, "depth": layer / max(subject.num_layers, 1), "value": value}
        for layer, value in values.items()
        if not math.isnan(value)
    ]


def check_fork() -> None:
    """Raise in a fork of a process that has made frames: polars would wait forever for threads of the parent."""
    global _polars_runs_in
    _polars_runs_in = _polars_runs_in or os.getpid()
    if _polars_runs_in != os.getpid():
        raise MidlayerError(
            "Results cannot be computed in a forked process whose parent has computed some: polars would wait for "
            "threads that exist only in the parent. Start the process with multiprocessing.get_context('spawn')."
        )


def tidy_frame(rows: Iterable[Mapping[str, Any]], *, extra: Mapping[str, Any] | None = None) -> pl.DataFrame:
    """Return rows as a frame with the columns of :data:`FRAME_SCHEMA`, then of ``extra`` (name and type)."""
    check_fork()
    return pl.DataFrame(list(rows), schema={**FRAME_SCHEMA, **(extra or {})})


@dataclass(frozen=True)
class Series:
    """One metric of one model on one dataset, by layer.

    Attributes:
        label: distinguishes it from other series of the metric; empty if there are none.
        layers: the layers, in ascending order.
        depths: ``layer / num_layers`` of each layer.
        values: value of each layer; may be NaN or infinite.
    """

    label: str
    layers: tuple[int, ...]
    depths: tuple[float, ...]
    values: tuple[float, ...]


def check_frame(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the eight columns of a valid frame of results, in order and cast to their types.

    Example:
        >>> check_frame(pl.DataFrame({"model": ["m"], "layer": [1], "values": [0.5]}))
        Traceback (most recent call last):
        ...
        midlayer_encoders.errors.OptionError: `frame` must have the columns model, revision, layer, depth, kind, \
dataset, name, value, but lacks revision, depth, kind, dataset, name, value. Did you mean 'values'?
    """
    if missing := [column for column in FRAME_SCHEMA if column not in frame.columns]:
        unexpected = [column for column in frame.columns if column not in FRAME_SCHEMA]
        hint = next(filter(None, (did_you_mean(column, unexpected) for column in missing)), "")
        raise OptionError(
            f"`frame` must have the columns {', '.join(FRAME_SCHEMA)}, but lacks {', '.join(missing)}.{hint}"
        )
    for column, dtype in FRAME_SCHEMA.items():
        actual = frame.schema[column]
        compatible = (
            actual.is_numeric() if dtype.is_float() else actual.is_integer() if dtype.is_integer() else actual == dtype
        )
        if not (compatible or actual == pl.Null or isinstance(actual, pl.Categorical | pl.Enum)):
            raise OptionError(f"`frame`'s column {column!r} must be {dtype}, but got {actual}; cast it first.")
    for column, noun in {"recipe": "recipe", "dims": "number of dims", "precision": "precision"}.items():
        values = frame[column].unique(maintain_order=True).to_list() if column in frame.columns else []
        if len(values) > 1:
            raise OptionError(
                f"`frame` must hold one {noun} here, but has {', '.join(map(str, values))}. Filter it first: "
                f"frame.filter({column}={values[0]!r})."
            )
    checked = frame.select(list(FRAME_SCHEMA)).cast(FRAME_SCHEMA)
    _check_rows(checked)
    return checked


def _check_rows(frame: pl.DataFrame) -> None:
    mistakes = {
        "empty cells; use NaN for missing values": pl.any_horizontal(pl.all().is_null()),
        f"kinds other than {', '.join(KINDS)}": ~pl.col("kind").is_in(KINDS),
        "layers below 0, or depths (layer / num_layers) outside [0, 1]": (pl.col("layer") < 0)
        | ~pl.col("depth").is_between(0, 1),
        f"several values for one {', '.join(_IDENTITY)}; drop the repeated rows": pl.struct(_IDENTITY).is_duplicated(),
    }
    for mistake, is_wrong in mistakes.items():
        if len(rows := frame.filter(is_wrong)):
            cells = ", ".join(f"{name} {cell!r}" for name, cell in rows.row(0, named=True).items())
            raise OptionError(f"`frame` must have no {mistake}; {pluralize(len(rows), 'row')} like this: {cells}.")


def parquet_bytes(frame: pl.DataFrame, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a parquet file with metadata and a checksum of the whole file, for :func:`read_parquet`."""
    content = io.BytesIO()
    frame.write_parquet(content, metadata={**(metadata or {}), "checksum": _NO_SEAL.decode()})
    return content.getvalue().replace(_NO_SEAL, _seal(content.getvalue()))


def read_parquet(path: Path) -> tuple[pl.DataFrame, dict[str, str]]:
    """Return a parquet file's frame and metadata, or raise a ``ValueError`` if it does not match its checksum.

    The checksum is verified first, because a damaged file can end the process inside polars. Files that other programs
    wrote have none.
    """
    content = path.read_bytes()
    seal = re.search(_SEAL, content)
    if seal is not None and seal[0] != _seal(content.replace(seal[0], _NO_SEAL)):
        raise ValueError("its content does not match its checksum")
    try:
        return pl.read_parquet(io.BytesIO(content)), pl.read_parquet_metadata(io.BytesIO(content))
    except pl.exceptions.PanicException as reason:  # not an `Exception`
        raise ValueError(f"polars cannot read it: {reason}") from reason


def _seal(content: bytes) -> bytes:
    return b"midlayer-" + content_digest(content, 16).encode()


def read_frame(path: Path) -> pl.DataFrame:
    """Return the valid frame of results in a parquet or CSV file; errors name the file."""
    check_fork()
    check_regular_file(path, OptionError)
    try:
        if path.suffix.lower() == ".csv":
            frame = pl.read_csv(io.BytesIO(read_text_file(path, OptionError).encode()))
        else:
            frame, _ = read_parquet(path)
    except (pl.exceptions.PolarsError, ValueError, OSError) as reason:
        if isinstance(reason, OptionError):
            raise
        raise OptionError(
            f"{path} must be a frame of results, but cannot be read: {str(reason).partition(chr(10))[0]}."
        ) from reason
    return check_frame(frame)


def check_one_model(frame: pl.DataFrame) -> tuple[str, str]:
    """Return the model and revision of a frame that must hold exactly one."""
    models = frame.select("model", "revision").unique(maintain_order=True).rows()
    if not models:
        raise OptionError("`frame` must have at least one row, but got none: nothing was measured.")
    if len(models) > 1:
        raise OptionError(
            f"`frame` must hold one model at one revision here, but got {len(models)}: "
            f"{', '.join(f'{model} at {revision}' for model, revision in models[:4])}"
            f"{', …' if len(models) > 4 else ''}; filter it first."
        )
    return models[0]


def number_of_layers(frame: pl.DataFrame) -> int:
    """Return the number of blocks of the deepest model in a frame, from its layers and depths.

    A frame with only layer 0 does not determine it; the result is then 0.

    Example:
        >>> number_of_layers(pl.DataFrame({"layer": [0, 6], "depth": [0.0, 0.25]}))
        24
    """
    return max(block_counts(frame), default=0)


def block_counts(frame: pl.DataFrame) -> list[int]:
    """Return the numbers of blocks that the layers and depths of a frame imply, in ascending order.

    Example:
        >>> block_counts(pl.DataFrame({"layer": [0, 6, 6], "depth": [0.0, 0.25, 0.5]}))
        [12, 24]
    """
    layers = frame.filter(pl.col("depth") > 0).select("layer", "depth").unique()
    return sorted({round(layer / depth) for layer, depth in layers.iter_rows()})


def metric_series(frame: pl.DataFrame) -> dict[str, list[Series]]:
    """Return the series of each metric: one for each model, revision and dataset.

    A label has the model, the revision and the dataset where several could be meant.
    """
    metrics = frame.filter(pl.col("kind") == "metric")
    keys = [column for column in ("model", "dataset") if metrics[column].n_unique() > 1]
    if metrics.select("model", "revision").n_unique() > metrics["model"].n_unique():
        keys.insert(keys.count("model"), "revision")
    series: dict[str, list[Series]] = {name: [] for name in metrics["name"].unique(maintain_order=True)}
    for (name, *_), unsorted in metrics.group_by("name", "model", "revision", "dataset", maintain_order=True):
        rows = unsorted.sort("layer")
        label = ", ".join(rows[key][0] for key in keys)
        series[str(name)].append(Series(label, tuple(rows["layer"]), tuple(rows["depth"]), tuple(rows["value"])))
    return series
