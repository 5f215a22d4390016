"""The per-layer tables in the paper's public repository, as tidy frames."""

from __future__ import annotations

import lzma
from pathlib import Path

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.schema import FRAME_SCHEMA, check_frame
from midlayer_encoders.tasks.sources import REFERENCE_DATASETS

_ENGLISH = ("default", "en", "en-ext", "en-en")

_METRICS = {
    "entropy_sentence": "prompt_entropy",
    "entropy_dataset": "dataset_entropy",
    "curvature": "curvature",
    "infonce": "infonce",
    "lidar": "lidar",
    "dime": "dime",
}
"""Our names of the metrics in the tables."""

_TASKS = {dataset: name for name, dataset in REFERENCE_DATASETS.items() if dataset is not None}
"""The mteb tasks of the datasets in the tables."""


def reference_scores(folder: Path | str) -> pl.DataFrame:
    """Return the tidy frame of the scores in the reference tables, of every model and revision.

    A model is called by family and size, as ``Pythia-410m``. Scores are of the test split, averaged over the English
    subsets of a task, for layers that have scores for all tasks of the model.

    Args:
        folder: folder of ``mteb_layer_scores.csv.xz``.
    """
    table = _read(folder, "mteb_layer_scores").filter(pl.col("subset").is_in(_ENGLISH), split="test")
    model = ["family", "size", "revision"]
    subsets = table.drop_nulls("main_score").group_by([*model, "num_layers", "layer", "task"], maintain_order=True)
    num_tasks = pl.col("task").n_unique()
    scores = subsets.agg(value=pl.col("main_score").mean())
    scores = scores.filter(num_tasks.over([*model, "layer"]) == num_tasks.over(model))
    return _tidy(scores.with_columns(dataset=pl.col("task"), name=pl.lit("main_score")), kind="score")


def reference_metrics(folder: Path | str) -> pl.DataFrame:
    """Return the tidy frame of the metrics in the reference tables: of test splits, or train where there is no test.

    Where the texts are a task's, ``dataset`` is the task's name, so that :func:`correlate` pairs them. A value that the
    reference code could not compute (most of its curvature) is left out. Entropies, LiDAR and DiME are shares of their
    largest value (``maxEntropy``). Mamba's layers are put right: transformers
    keeps no entry for its embeddings, so the tables' index 0 is layer 1.

    Args:
        folder: where ``layer_metrics.csv.xz`` lies. ``docs/replication.md`` says which of its values to doubt.
    """
    table = _read(folder, "layer_metrics").with_columns(pl.col("value").cast(pl.Float64, strict=False))
    form = pl.when(pl.col("metric").is_in(["infonce", "curvature"])).then(pl.lit("raw")).otherwise(pl.lit("maxEntropy"))
    rows = table.filter(pl.col("normalization") == form, pl.col("value").is_finite())
    tested = (pl.col("split") == "test").any().over("family", "size", "revision", "dataset", "metric")
    rows = rows.filter((pl.col("split") == "test") | ~tested)
    mamba, last = pl.col("family") == "mamba", pl.col("layer") == pl.col("num_layers")
    rows = rows.filter(~(mamba & (pl.col("layer") == pl.col("num_layers") - 1))).with_columns(
        layer=pl.when(mamba & ~last).then(pl.col("layer") + 1).otherwise(pl.col("layer")),
        name=pl.col("metric").replace_strict(_METRICS),
        dataset=pl.col("dataset").str.strip_prefix("mteb/").replace(_TASKS),
    )
    return _tidy(rows, kind="metric")


def _read(folder: Path | str, name: str) -> pl.DataFrame:
    path = Path(folder).expanduser() / f"{name}.csv.xz"
    if not path.is_file():
        raise OptionError(f"`folder` must hold the reference tables, but there is no {path.name} in {folder}.")
    try:
        return pl.read_csv(lzma.decompress(path.read_bytes()), infer_schema_length=None)
    except (lzma.LZMAError, EOFError, OSError, pl.exceptions.PolarsError) as reason:
        raise OptionError(
            f"{path} must be a table of the paper's, but cannot be read: {reason}. Fetch it again."
        ) from reason


def _tidy(table: pl.DataFrame, *, kind: str) -> pl.DataFrame:
    tidy = table.with_columns(
        model=pl.col("family") + "-" + pl.col("size"), depth=pl.col("layer") / pl.col("num_layers"), kind=pl.lit(kind)
    )
    return check_frame(tidy.select(list(FRAME_SCHEMA)).sort("model", "revision", "dataset", "name", "layer"))
