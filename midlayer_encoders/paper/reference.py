"""Read the per-layer results in the paper's public repository as tidy frames."""

from __future__ import annotations

import lzma
import os
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import FRAME_SCHEMA, check_frame
from midlayer_encoders.validation import check_choice

Averaging: TypeAlias = Literal["like-for-like", "paper"]
"""Average English subsets over layers with all tasks, or take the first subset of the available tasks."""

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

_TASKS = {
    "amazon_counterfactual": "AmazonCounterfactualClassification",
    "amazon_massive_intent": "MassiveIntentClassification",
    "amazon_massive_scenario": "MassiveScenarioClassification",
    "amazon_reviews_multi": "AmazonReviewsClassification",
    "arxiv-clustering-s2s": "ArxivClusteringS2S",
    "askubuntudupquestions-reranking": "AskUbuntuDupQuestions",
    "banking77": "Banking77Classification",
    "biorxiv-clustering-s2s": "BiorxivClusteringS2S",
    "biosses-sts": "BIOSSES",
    "emotion": "EmotionClassification",
    "medrxiv-clustering-s2s": "MedrxivClusteringS2S",
    "mind_small": "MindSmallReranking",
    "mtop_domain": "MTOPDomainClassification",
    "mtop_intent": "MTOPIntentClassification",
    "reddit-clustering": "RedditClustering",
    "scidocs-reranking": "SciDocsRR",
    "sickr-sts": "SICK-R",
    "stackexchange-clustering": "StackExchangeClustering",
    "stackoverflowdupquestions-reranking": "StackOverflowDupQuestions",
    "sts12-sts": "STS12",
    "sts13-sts": "STS13",
    "sts14-sts": "STS14",
    "sts15-sts": "STS15",
    "sts16-sts": "STS16",
    "sts17-crosslingual-sts": "STS17",
    "stsbenchmark-sts": "STSBenchmark",
    "toxic_conversations_50k": "ToxicConversationsClassification",
    "tweet_sentiment_extraction": "TweetSentimentExtractionClassification",
    "twentynewsgroups-clustering": "TwentyNewsgroupsClustering",
}
"""The mteb tasks of the datasets in the tables."""


def data_folder() -> Path | None:
    """Return the folder of corpora and tasks in the variable ``MIDLAYER_DATA``, or ``None`` if it is not set.

    The paper's tables are in the sibling folder ``reference``. A folder that does not exist is an error.
    """
    variable = os.environ.get("MIDLAYER_DATA")
    if not variable:
        return None
    folder = Path(variable).expanduser()
    if not folder.is_dir():
        raise OptionError(f"`MIDLAYER_DATA` must name a folder, but there is no {folder}. Correct it, or unset it.")
    return folder


def reference_scores(folder: Path | str, *, averaging: Averaging = "like-for-like") -> pl.DataFrame:
    """Return the tidy frame of the scores in the reference tables, of every model and revision.

    A model is called by family and size, as ``Pythia-410m``. Scores are of the test split.

    Args:
        folder: folder of ``mteb_layer_scores.csv.xz``.
        averaging: ``"like-for-like"`` averages the English subsets of a task and drops layers without scores for all
            tasks of the model. ``"paper"`` takes the first subset of each task and all layers, like Table 2;
            the means of two layers may then cover different tasks.
    """
    check_choice("averaging", averaging, get_args(Averaging))
    table = _read(folder, "mteb_layer_scores").filter(pl.col("split") == "test").drop_nulls("main_score")
    if averaging == "like-for-like":
        table = table.filter(pl.col("subset").is_in(_ENGLISH))
    keys = ["family", "size", "revision", "num_layers", "layer", "task"]
    subsets = table.group_by(keys, maintain_order=True)
    score = pl.col("main_score").mean() if averaging == "like-for-like" else pl.col("main_score").first()
    scores = subsets.agg(score.alias("value"))
    if averaging == "like-for-like":
        scores = _complete(scores)
    return _tidy(scores.with_columns(dataset=pl.col("task"), name=pl.lit("main_score")), kind="score")


def reference_metrics(folder: Path | str, *, normalization: str = "maxEntropy") -> pl.DataFrame:
    """Return the tidy frame of the metrics in the reference tables: of test splits, or train where there is no test.

    Where the texts are a task's, ``dataset`` is the task's name, so that :func:`correlate` pairs them. A value that the
    reference code could not compute (most of its curvature) is left out. Mamba's layers are put right: transformers
    keeps no entry for its embeddings, so the tables' index 0 is layer 1.

    Args:
        folder: where ``layer_metrics.csv.xz`` lies. ``docs/replication.md`` says which of its values to doubt.
        normalization: of the entropies, LiDAR and DiME: ``"maxEntropy"``, ``"raw"``, ``"logN"``, ``"logD"`` or
            ``"logNlogD"``; metrics that have no such form are given raw.
    """
    table = _read(folder, "layer_metrics").with_columns(pl.col("value").cast(pl.Float64, strict=False))
    check_choice("normalization", normalization, table["normalization"].unique().sort().to_list())
    plain = pl.col("metric").is_in(["infonce", "curvature"])
    rows = table.filter(
        pl.when(plain).then(pl.col("normalization") == "raw").otherwise(pl.col("normalization") == normalization),
        pl.col("value").is_finite(),
    )
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


def _complete(scores: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of layers that have all tasks of their model."""
    model = ["family", "size", "revision"]
    num_tasks = pl.col("task").n_unique().over(model)
    return scores.filter(pl.col("task").n_unique().over([*model, "layer"]) == num_tasks)


def _tidy(table: pl.DataFrame, *, kind: str) -> pl.DataFrame:
    tidy = table.with_columns(
        model=pl.col("family") + "-" + pl.col("size"),
        depth=pl.col("layer") / pl.col("num_layers"),
        kind=pl.lit(kind),
    )
    return check_frame(tidy.select(list(FRAME_SCHEMA)).sort("model", "revision", "dataset", "name", "layer"))
