import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy.stats import kendalltau, spearmanr

import midlayer_encoders
from benchmarks.paper.charts import plot_correlations
from midlayer_encoders.comparing.correlation import CORRELATION_SCHEMA, STATISTICS, correlate, distance_correlation
from midlayer_encoders.errors import OptionError
from tests.selection.frames import frame

RANDOM = np.random.default_rng(0)
METRIC, SCORE, OTHER = (RANDOM.normal(size=9).round(2).tolist() for _ in range(3))


def value(actual: pl.DataFrame, task: str, statistic: str) -> float:
    return actual.filter(task=task, statistic=statistic)["value"].item()


def test_statistics_match_the_libraries() -> None:
    tied = [0.1, 0.1, 0.3, 0.2, 0.3, 0.5, 0.5, 0.5, 0.4]
    for scores in (SCORE, tied):
        actual = correlate(frame({"dime": METRIC}, {"A": scores}))
        assert actual.schema == CORRELATION_SCHEMA
        assert value(actual, "A", "spearman") == pytest.approx(spearmanr(METRIC, scores).statistic)
        assert value(actual, "A", "kendall") == pytest.approx(kendalltau(METRIC, scores).statistic)
        distance = by_definition(np.array(METRIC), np.array(scores))
        assert value(actual, "A", "dcor") == pytest.approx(distance)
        sign = np.sign(spearmanr(METRIC, scores).statistic)
        assert value(actual, "A", "signed_dcor") == pytest.approx(sign * distance)


def by_definition(x: np.ndarray, y: np.ndarray) -> float:
    """Return the distance correlation as Székely and others define it."""

    def centered(values: np.ndarray) -> np.ndarray:
        apart = np.abs(values[:, None] - values)
        return apart - apart.mean(axis=0) - apart.mean(axis=1)[:, None] + apart.mean()

    a, b = centered(x), centered(y)
    combined = np.sqrt((a * a).mean() * (b * b).mean())
    return float(np.sqrt((a * b).mean() / combined)) if combined else 0.0


@pytest.mark.parametrize(
    ("oracle", "count"),
    [
        *(("by definition", count) for count in (4, 9, 33)),
        *(pytest.param("dcor", count, marks=pytest.mark.slow) for count in (4, 9, 33)),  # compiles for seconds
    ],
)
def test_distance_correlation_matches_dcor(oracle: str, count: int) -> None:
    if oracle == "dcor":
        import dcor
    expected = by_definition if oracle != "dcor" else partial(dcor.distance_correlation, method="naive")
    for draw in range(20):
        x, y = np.random.default_rng(draw).normal(size=(2, count)) * [[1e-6], [1e6]]
        for item, other_item in ((x, y), (x.round(6), y), (x, x**2), (y, -3 * y + 1)):
            assert distance_correlation(item, other_item) == pytest.approx(
                float(expected(item, other_item)), abs=1e-12, rel=1e-12
            )
    assert distance_correlation(np.ones(count), y) == float(expected(np.ones(count), y)) == 0.0


def test_correlating_does_not_import_dcor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles for seconds when it is imported, and a user may not have it."""
    for name in ("dcor", "numba"):
        monkeypatch.setitem(sys.modules, name, None)  # an import fails
    found = correlate(frame({"dime": METRIC}, {"A": SCORE}))
    assert found["value"].null_count() == 0
    for path in Path(midlayer_encoders.__file__).parent.rglob("*.py"):
        assert not re.search(r"^\s*(import|from) (dcor|numba|skdim)\b", path.read_text("utf8"), re.MULTILINE), path


def test_average_is_over_curves_not_correlations() -> None:
    actual = correlate(frame({"dime": METRIC}, {"A": SCORE, "B": OTHER}))
    mean = (np.array(SCORE) + np.array(OTHER)) / 2
    assert value(actual, "average", "spearman") == pytest.approx(spearmanr(METRIC, mean).statistic)
    assert actual["task"].unique(maintain_order=True).to_list() == ["average", "A", "B"]


def test_task_is_paired_with_the_metric_on_its_own_texts() -> None:
    own_values = frame({"dime": OTHER}).with_columns(dataset=pl.lit("A"))
    actual = correlate([frame({"dime": METRIC}, {"A": SCORE, "B": SCORE}), own_values])
    assert value(actual, "A", "spearman") == pytest.approx(spearmanr(OTHER, SCORE).statistic)
    assert value(actual, "average", "spearman") == pytest.approx(spearmanr(OTHER, SCORE).statistic), "of A alone"
    combined = (np.array(METRIC) + np.array(OTHER)) / 2
    assert value(actual, "B", "spearman") == pytest.approx(spearmanr(combined, SCORE).statistic), "all texts there are"


def test_undefined_correlation_has_a_reason() -> None:
    actual = correlate(frame({"dime": [1.0] * 9, "infonce": METRIC}, {"A": SCORE, "B": [0.5] * 9}))
    constant = actual.filter(metric="dime")
    assert constant["value"].is_null().all()
    assert set(constant["note"]) == {"undefined: dime is the same at every layer"}
    assert set(actual.filter(metric="infonce", task="B")["note"]) == {"undefined: B is the same at every layer"}
    short = frame({"dime": METRIC[:3]}, {"A": SCORE})
    assert set(correlate(short)["note"]) == {"undefined: both exist at 3 layers, at least 4 are needed"}
    assert set(correlate(frame({"dime": METRIC[:4]}, {"A": SCORE}))["note"]) == {""}


def test_layers_of_only_one_model_are_left_out() -> None:
    actual = correlate(frame({"dime": METRIC[:6]}, {"A": SCORE}))
    assert set(actual["layers"]) == {6}
    assert value(actual, "A", "spearman") == pytest.approx(spearmanr(METRIC[:6], SCORE[:6]).statistic)


def test_figure_has_a_panel_per_statistic_and_marks_undefined_values() -> None:
    result = [frame({"dime": [1.0] * 9, "infonce": METRIC}, {"A": SCORE}, model=model) for model in ("m", "n")]
    figure = plot_correlations(correlate(result), statistics=STATISTICS)
    assert [axes.get_title(loc="left") for axes in figure.axes][:2] == ["Spearman's ρ", "Kendall's τ"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["undefined", "undefined"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["m", "n"]
    with pytest.raises(OptionError, match="Did you mean 'dcor'"):
        plot_correlations(correlate(result), statistics=["dcorr"])
    with pytest.raises(OptionError, match="but got none"):
        plot_correlations(pl.DataFrame(schema=CORRELATION_SCHEMA))


def test_invalid_input_is_refused() -> None:
    with pytest.raises(OptionError, match="has no scores"):
        correlate(frame({"dime": METRIC}))
    with pytest.raises(OptionError, match="has no metrics"):
        correlate(frame(scores={"A": SCORE}))


def test_average_compares_the_tasks_that_have_both() -> None:
    """A task without the metric does not count in the mean score."""
    scores = frame({}, {"A": SCORE, "B": OTHER})
    metrics = frame({"dime": METRIC}, {}).with_columns(dataset=pl.lit("A"))
    actual = correlate([scores, metrics])
    assert value(actual, "average", "spearman") == pytest.approx(spearmanr(METRIC, SCORE).statistic)
    assert value(actual, "B", "spearman") == pytest.approx(spearmanr(METRIC, OTHER).statistic)
