"""The tidy frame of results: schema, rows, curves by layer, summaries, training steps and Pareto fronts."""

from midlayer_encoders.frame.curves import Curves, curves
from midlayer_encoders.frame.schema import FRAME_SCHEMA, KINDS, check_frame, read_frame, tidy_frame, tidy_rows
from midlayer_encoders.frame.steps import layer_changes, settled, step_of
from midlayer_encoders.frame.summaries import Curve, Summary, summary

__all__ = [
    "FRAME_SCHEMA",
    "KINDS",
    "Curve",
    "Curves",
    "Summary",
    "check_frame",
    "curves",
    "layer_changes",
    "read_frame",
    "settled",
    "step_of",
    "summary",
    "tidy_frame",
    "tidy_rows",
]
