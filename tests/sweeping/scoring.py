"""Data for sweeps and reference scores."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import polars as pl

import midlayer_encoders
from midlayer_encoders import LayerEncoder
from midlayer_encoders._isolation import isolated_random
from midlayer_encoders.sweeping import SweepResult, SweepSettings
from midlayer_encoders.tasks.sources import task_sources
from tests.tasks.rows import ROWS, write


def sweep(model: Any, tasks: Any = (), **keywords: Any) -> SweepResult:
    """Run a sweep whose settings are passed as keywords."""
    names = {field.name for field in fields(SweepSettings)}
    settings = SweepSettings(**{name: keywords.pop(name) for name in names & keywords.keys()})
    return midlayer_encoders.sweep(model, tasks, settings=settings, **keywords)


QUICK: dict[str, Any] = {"workers": 1, "baselines": False, "device": "cpu"}
"""Options of a quick sweep in this process."""


def write_sts_task(root: Path) -> Path:
    """Write an STS task and return its path."""
    return write(root / "near.jsonl", ROWS["STS"])


def write_reranking_task(root: Path) -> Path:
    """Write a reranking task in which some texts are both query and passage, and return its path."""
    return write(root / "ranks.jsonl", ROWS["Reranking"])


def mteb_score(encoder: LayerEncoder, path: Path) -> float:
    """Return the main score of an encoder from mteb itself."""
    import mteb

    with isolated_random():
        result = mteb.evaluate(encoder, task_sources(path)[0].make(), cache=None, show_progress_bar=False)
    return float(result[0].get_score())


def layer_scores_of(result: SweepResult, path: Path) -> dict[int, float]:
    """Return a sweep's score of each layer on the task in ``path``."""
    rows = result.frame.filter((pl.col("kind") == "score") & pl.col("dataset").str.starts_with(path.stem))
    return dict(rows.select("layer", "value").iter_rows())
