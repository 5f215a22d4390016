from __future__ import annotations

import polars as pl
import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.extras.probing.probe_result import plot_probes


def table(accuracy: list[float], validation: list[float]) -> pl.DataFrame:
    columns = {"layer": [0, 1, 2], "accuracy": accuracy, "validation": validation}
    return pl.DataFrame(columns).with_columns(low=pl.col("accuracy") - 0.1, high=pl.col("accuracy") + 0.1)


def test_curves_are_in_percent_and_mark_the_layer_selected_on_validation() -> None:
    first, second = table([0.3, 0.5, 0.4], [0.2, 0.4, 0.6]), table([0.6, 0.7, 0.8], [0.9, 0.1, 0.1])
    figure = plot_probes({"a": first, "b": second}, num_layers=2, chance=0.25, title="t")
    axes = figure.axes[0]
    curves = {line.get_label(): line for line in axes.lines}
    assert curves["a"].get_ydata().tolist() == pytest.approx([30, 50, 40])
    assert curves["guessing (25%)"].get_ydata()[0] == pytest.approx(25)
    marks = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if len(line.get_xdata()) == 1]
    assert marks == [(2, pytest.approx(40)), (0, pytest.approx(60))]
    assert axes.get_xticks().tolist() == [0, 1, 2]
    assert axes.get_ylabel() == "accuracy, %"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "guessing (25%)"]


def test_empty_plot_is_refused() -> None:
    with pytest.raises(OptionError, match="at least one table"):
        plot_probes({}, num_layers=2)
