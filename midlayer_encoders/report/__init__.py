"""Figures and the self-contained HTML page of a frame of results; knows frames, not models."""

from __future__ import annotations

from midlayer_encoders.frame import FRAME_SCHEMA, check_frame
from midlayer_encoders.frame.steps import histories, layer_changes, settled, step_of
from midlayer_encoders.frame.summaries import Curve, Summary, summary
from midlayer_encoders.report.figures import plot_heatmap, plot_metrics, plot_scores, write_metrics_figure
from midlayer_encoders.report.page import report_html, write_report
from midlayer_encoders.report.steps import plot_steps_change, plot_steps_curves, plot_steps_heat

__all__ = [
    "FRAME_SCHEMA",
    "Curve",
    "Summary",
    "check_frame",
    "histories",
    "layer_changes",
    "plot_heatmap",
    "plot_metrics",
    "plot_scores",
    "plot_steps_change",
    "plot_steps_curves",
    "plot_steps_heat",
    "report_html",
    "settled",
    "step_of",
    "summary",
    "write_metrics_figure",
    "write_report",
]
