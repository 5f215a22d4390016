"""Saved sweeps with given scores and costs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from midlayer_encoders.sweeping import SweepResult
from midlayer_encoders.sweeping.best_layer import Notes
from tests.report.made_frames import rows_frame

Scores = dict[str, Sequence[float]]


def score_rows(scores: Scores, model: str = "m", revision: str = "default") -> list[tuple[Any, ...]]:
    """Return the rows of a tidy frame: each task by layer."""
    return [
        (model, revision, layer, layer / max(len(values) - 1, 1), "score", task, "accuracy", value)
        for task, values in scores.items()
        for layer, value in enumerate(values)
    ]


def make_sweep(
    folder: Path, scores: Scores, *, model: str = "m", revision: str = "default", **notes: Any
) -> SweepResult:
    """Save a sweep in a folder; by default each layer adds 10 parameters and a millisecond; texts have 9.5 tokens."""
    layers = range(max(map(len, scores.values()), default=0))
    defaults = {
        "parameters": {k: 100 + 10 * k for k in layers},
        "seconds": {k: 0.016 * (k + 1) for k in layers},
        "timing": {"texts": 16, "tokens": 9, "device": "cpu, 1 thread"},
        "dimensions": 8,
        "tokens": dict.fromkeys(scores, 9.5),
        "how": {"weights": model, "dtype": "float32"},
    }
    result = SweepResult(
        rows_frame(score_rows(scores, model, revision)),
        folder,
        Notes(f"Every layer of {model}", model, **defaults | notes),
    )
    result.save()
    return result
