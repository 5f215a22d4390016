"""The paper's own per-layer results, as tables from its public repository, read into tidy frames."""

from __future__ import annotations

import lzma
import os
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import FRAME_SCHEMA, check_frame
from midlayer_encoders.validation import check_choice

Recipe: TypeAlias = Literal["like-for-like", "paper"]
"""English subsets, averaged, of layers that have every task; or the first listed subset of whatever tasks there are."""

_ENGLISH = ("default", "en", "en-ext", "en-en")

_METRICS = {
    "entropy_sentence": "prompt_entropy",
    "entropy_dataset": "dataset_entropy",
    "curvature": "curvature",
    "infonce": "infonce",
    "lidar": "lidar",
    "dime": "dime",
}
"""The tables' names of metrics, and ours."""

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
"""The datasets that metrics were measured on, and the tasks that are scored on them."""


def data_folder() -> Path | None:
    """Return the folder of corpora and tasks that the variable ``MIDLAYER_DATA`` names; ``None`` where it is not set.

    The paper's tables lie in ``reference`` beside it. A folder that is not there is an error: without it
    fewer things would run, and nobody would know why.
    """
    named = os.environ.get("MIDLAYER_DATA")
    if not named:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise OptionError(f"`MIDLAYER_DATA` must name a folder, but there is no {folder}. Correct it, or unset it.")
    return folder


def reference_scores(folder: Path | str, *, recipe: Recipe = "like-for-like") -> pl.DataFrame:
    """Return the tidy frame of the scores in the reference tables, of every model and revision.

    A model is called by family and size, as ``Pythia-410m``. Scores are of the test split.

    Args:
        folder: where ``mteb_layer_scores.csv.xz`` lies.
        recipe: ``"like-for-like"`` averages the English subsets of a task, and keeps only layers on which every task of
            the model was scored. ``"paper"`` takes the first listed subset of each task and every layer, as the paper's
            Table 2 did: its averages of different layers may be over different tasks.
    """
    check_choice("recipe", recipe, get_args(Recipe))
    table = _read(folder, "mteb_layer_scores").filter(pl.col("split") == "test").drop_nulls("main_score")
    if recipe == "like-for-like":
        table = table.filter(pl.col("subset").is_in(_ENGLISH))
    keys = ["family", "size", "revision", "num_layers", "layer", "task"]
    subsets = table.group_by(keys, maintain_order=True)
    one = pl.col("main_score").mean() if recipe == "like-for-like" else pl.col("main_score").first()
    scores = subsets.agg(one.alias("value"))
    if recipe == "like-for-like":
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
    kept = table.filter(
        pl.when(plain).then(pl.col("normalization") == "raw").otherwise(pl.col("normalization") == normalization),
        pl.col("value").is_finite(),
    )
    tested = (pl.col("split") == "test").any().over("family", "size", "revision", "dataset", "metric")
    kept = kept.filter((pl.col("split") == "test") | ~tested)
    mamba, last = pl.col("family") == "mamba", pl.col("layer") == pl.col("num_layers")
    kept = kept.filter(~(mamba & (pl.col("layer") == pl.col("num_layers") - 1))).with_columns(
        layer=pl.when(mamba & ~last).then(pl.col("layer") + 1).otherwise(pl.col("layer")),
        name=pl.col("metric").replace_strict(_METRICS),
        dataset=pl.col("dataset").str.strip_prefix("mteb/").replace(_TASKS),
    )
    return _tidy(kept, kind="metric")


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
    """Return the rows of layers that have as many tasks as the model has in all."""
    model = ["family", "size", "revision"]
    every = pl.col("task").n_unique().over(model)
    return scores.filter(pl.col("task").n_unique().over([*model, "layer"]) == every)


def _tidy(table: pl.DataFrame, *, kind: str) -> pl.DataFrame:
    tidy = table.with_columns(
        model=pl.col("family") + "-" + pl.col("size"),
        depth=pl.col("layer") / pl.col("num_layers"),
        kind=pl.lit(kind),
    )
    return check_frame(tidy.select(list(FRAME_SCHEMA)).sort("model", "revision", "dataset", "name", "layer"))
