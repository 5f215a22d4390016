"""Figures and the self-contained HTML page of a frame of results; knows frames, not models."""

from __future__ import annotations

from midlayer_encoders.report.matplotlib_figures import write_figure
from midlayer_encoders.report.metrics import plot_metrics, write_metrics_figure
from midlayer_encoders.report.recipes import plot_recipes
from midlayer_encoders.report.scores import plot_heatmap, plot_scores
from midlayer_encoders.report.steps import plot_steps_change, plot_steps_curves, plot_steps_heat
from midlayer_encoders.report.sweep_page import report_html, write_report

__all__ = [
    "plot_heatmap",
    "plot_metrics",
    "plot_recipes",
    "plot_scores",
    "plot_steps_change",
    "plot_steps_curves",
    "plot_steps_heat",
    "report_html",
    "write_figure",
    "write_metrics_figure",
    "write_report",
]
