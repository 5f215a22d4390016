"""Figures and the self-contained HTML page of a frame of results; knows frames, not models."""

from __future__ import annotations

from midlayer_encoders.report.figures import plot_heatmap, plot_metrics, plot_scores, write_metrics_figure
from midlayer_encoders.report.frames import FRAME_SCHEMA, check_frame
from midlayer_encoders.report.page import report_html, write_report
from midlayer_encoders.report.summaries import Curve, Summary, summary

__all__ = [
    "FRAME_SCHEMA",
    "Curve",
    "Summary",
    "check_frame",
    "plot_heatmap",
    "plot_metrics",
    "plot_scores",
    "report_html",
    "summary",
    "write_metrics_figure",
    "write_report",
]
