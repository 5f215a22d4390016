"""The committed frames of the training record."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from midlayer_encoders.frame.steps import History, histories
from midlayer_encoders.recipes import PLAIN

__all__ = ["RESULTS", "SEEDS", "TOKENS", "TUNED", "Run", "known", "read_run", "seeds"]

RESULTS = Path(__file__).parent / "results"
SEEDS = ("base", "base-seed1", "base-seed2")
TUNED = ("long-simcse", "long-supervised")
TOKENS = 65_536  # of a step
_TASKS = 6


@dataclass(frozen=True)
class Run:
    """One model's training.

    Attributes:
        name: of its variant.
        frame: tidy, all that was measured.
        told: seconds, losses and what else ``run.py`` wrote beside the frame.
    """

    name: str
    frame: pl.DataFrame
    told: dict[str, Any]

    def metric(self, name: str, texts: str = "probe") -> History:
        """Return a metric's values by step and layer; ``texts`` is one of ``watching.KINDS``."""
        (found,) = histories(self.frame.filter(kind="metric", name=name, dataset=texts))
        return found

    def scores(self, recipe: str = PLAIN) -> History:
        """Return the mean x 100 over the tasks by stage and layer, NaN where a layer has no score of some task."""
        asked = (
            pl.col("dataset").str.ends_with(f" {recipe}") if recipe != PLAIN else ~pl.col("dataset").str.contains(" ")
        )
        every = histories(self.frame.filter(asked, kind="score"))
        if len(every) != _TASKS:
            raise LookupError(f"{self.name} was scored on {len(every)} tasks, not on {_TASKS}.")
        mean = 100 * np.mean([one.values for one in every], axis=0)
        return History("score", recipe, "mean score", every[0].steps, every[0].layers, mean)

    def task_scores(self, step: int, layer: int) -> list[float]:
        """Return the score x 100 of a layer on each task at a stage."""
        rows = self.frame.filter(~pl.col("dataset").str.contains(" "), kind="score", revision=f"step{step}")
        return [100 * value for value in rows.filter(layer=layer).sort("dataset")["value"]]

    @property
    def steps(self) -> int:
        return int(self.told["steps"])

    @property
    def held_out(self) -> float:
        """The held-out loss at the end."""
        losses: dict[str, float] = self.told["held_out"]
        return losses[str(self.steps)]


@cache
def read_run(name: str) -> Run:
    """Return a run of the record."""
    return Run(name, pl.read_parquet(RESULTS / f"{name}.parquet"), _told()[name])


def known(*names: str) -> list[Run]:
    """Return those of the named runs that the record has."""
    return [read_run(name) for name in names if (RESULTS / f"{name}.parquet").is_file()]


def seeds() -> list[Run]:
    """Return the base from each of its first weights."""
    return known(*SEEDS)


def _told() -> dict[str, dict[str, Any]]:
    told: dict[str, dict[str, Any]] = json.loads((RESULTS / "runs.json").read_text())
    return told
