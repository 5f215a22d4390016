"""The tidy frame of results: schema, rows, curves by layer, summaries, training steps and Pareto fronts."""

from __future__ import annotations

from midlayer_encoders.frame.curves import ByLayer, Curves, check_blocks, curves, curves_by_dataset, mean_curve
from midlayer_encoders.frame.schema import (
    FRAME_SCHEMA,
    KINDS,
    NamedSubject,
    Series,
    Subject,
    check_frame,
    check_one_model,
    metric_series,
    number_of_layers,
    read_frame,
    tidy_frame,
    tidy_rows,
)
from midlayer_encoders.frame.steps import histories, layer_changes, settled, step_of
from midlayer_encoders.frame.summaries import Baselines, Curve, Summary, average_baseline, spans, summary

__all__ = [
    "FRAME_SCHEMA",
    "KINDS",
    "Baselines",
    "ByLayer",
    "Curve",
    "Curves",
    "NamedSubject",
    "Series",
    "Subject",
    "Summary",
    "average_baseline",
    "check_blocks",
    "check_frame",
    "check_one_model",
    "curves",
    "curves_by_dataset",
    "histories",
    "layer_changes",
    "mean_curve",
    "metric_series",
    "number_of_layers",
    "read_frame",
    "settled",
    "spans",
    "step_of",
    "summary",
    "tidy_frame",
    "tidy_rows",
]
