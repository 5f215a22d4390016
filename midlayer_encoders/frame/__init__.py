"""The tidy frame of results: schema, rows, curves by layer, summaries, training steps and Pareto fronts."""

from __future__ import annotations

from midlayer_encoders.frame.schema import FRAME_SCHEMA, read_frame
from midlayer_encoders.frame.steps import settled
from midlayer_encoders.frame.summaries import Summary, summary

__all__ = ["FRAME_SCHEMA", "Summary", "read_frame", "settled", "summary"]
