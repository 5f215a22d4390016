"""Figures and self-contained HTML pages of results."""

from midlayer_encoders.report.drawing import write_figure
from midlayer_encoders.report.layer_charts import plot_metrics, plot_recipes, plot_scores
from midlayer_encoders.report.sweep_page import report_html
from midlayer_encoders.report.training_page import plot_steps_curves

__all__ = ["plot_metrics", "plot_recipes", "plot_scores", "plot_steps_curves", "report_html", "write_figure"]
