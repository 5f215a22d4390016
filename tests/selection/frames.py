"""Frames with simple curves for tests."""

from collections.abc import Mapping, Sequence

import polars as pl

from midlayer_encoders.frame.schema import FRAME_SCHEMA

VALLEY = [3.0, 2.0, 1.0, 1.5, 2.0, 2.5, 2.6, 2.7, 2.8]
"""Eight blocks, with the minimum at layer 2."""


def frame(
    metrics: Mapping[str, Sequence[float]] | None = None,
    scores: Mapping[str, Sequence[float]] | None = None,
    *,
    model: str = "m",
    num_layers: int = 8,
) -> pl.DataFrame:
    """Return a tidy frame of curves from layer 0 up."""
    rows = []
    for kind, curves in (("metric", metrics or {}), ("score", scores or {})):
        for name, values in curves.items():
            dataset, measure = ("texts", name) if kind == "metric" else (name, "accuracy")
            rows += [
                (model, "main", layer, layer / num_layers, kind, dataset, measure, float(value))
                for layer, value in enumerate(values)
            ]
    return pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row")
