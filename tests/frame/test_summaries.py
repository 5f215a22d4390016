import math

import polars as pl
import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.summaries import Curve, average_baseline, summary
from tests.report.made_frames import metrics_frame, rows_frame, scores_frame


def made(**tasks: list[float | None]) -> pl.DataFrame:
    """Return scores by layer of a model of two blocks, ``None`` where a layer was not scored."""
    return rows_frame(
        [
            ("m", "main", layer, layer / 2, "score", task, "accuracy", value)
            for task, values in tasks.items()
            for layer, value in enumerate(values)
            if value is not None
        ]
    )


def test_values_worked_out_by_hand() -> None:
    actual = summary(made(A=[0.40, 0.60, 0.50], B=[0.20, 0.10, 0.18]))
    assert actual.average is not None
    assert actual.average.points == pytest.approx({0: 30.0, 1: 35.0, 2: 34.0})
    assert (actual.average.best_layer, actual.average.last_layer) == (1, 2)
    assert actual.average.gain == pytest.approx(1.0)
    assert [(task.name, task.best_layer, round(task.gain, 6)) for task in actual.tasks] == [
        ("A", 1, 10.0),
        ("B", 0, 2.0),
    ]
    assert (actual.model, actual.revision, actual.num_layers, actual.remarks) == ("m", "main", 2, ())


def test_the_average_is_the_definition_by_definition() -> None:
    frame = scores_frame(12)
    actual = summary(frame.sample(fraction=1.0, shuffle=True, seed=3))
    assert actual.average is not None
    for layer in range(13):
        values = [row["value"] for row in frame.iter_rows(named=True) if row["layer"] == layer]
        assert actual.average.points[layer] == pytest.approx(100 * sum(values) / len(values))


def test_layers_scored_on_some_tasks_only_are_left_out_and_named() -> None:
    actual = summary(made(A=[0.4, 0.9, 0.5], B=[0.2, None, 0.3]))
    assert actual.average is not None
    assert actual.average.points == pytest.approx({0: 30.0, 2: 40.0})
    assert actual.incomplete == (1,)
    assert actual.remarks == ("Layers that were scored on some tasks only are left out of the average: 1.",)
    assert actual.tasks[0].best_layer == 1


def test_several_layers_scored_on_some_tasks_only_are_named() -> None:
    actual = summary(
        made(A=[0.4, None, 0.5, 0.1, None], B=[0.2, 0.3, None, None, 0.3]).with_columns(depth=0.25 * pl.col("layer"))
    )
    assert actual.incomplete == (1, 2, 3, 4)
    assert actual.remarks == ("Layers that were scored on some tasks only are left out of the average: 1, 2, 3, 4.",)


def test_no_layer_on_every_task_gives_no_average() -> None:
    actual = summary(made(A=[0.4, None, None], B=[None, 0.3, 0.2]))
    assert actual.average is None
    assert actual.remarks == ("No layer was scored on every task, so there is no average.",)


def test_a_score_that_is_not_finite_is_a_missing_one() -> None:
    actual = summary(made(A=[0.4, math.nan, 0.5], B=[math.nan, math.inf, math.nan]))
    assert [task.name for task in actual.tasks] == ["A"]
    assert actual.tasks[0].points == pytest.approx({0: 40.0, 2: 50.0})
    assert actual.remarks == ("No layer has a finite score on B, which is left out.",)


def test_a_sweep_that_stops_early_says_so() -> None:
    actual = summary(scores_frame(24, layers=[0, 6, 12]))
    assert actual.num_layers == 24
    assert actual.remarks == ("The last layer of the average is 12; the model's own last is 24.",)


def test_of_equal_layers_the_lowest_is_best_and_the_last_can_be() -> None:
    assert Curve("t", "m", {0: 1.0, 1: 2.0, 2: 2.0}).best_layer == 1
    rising = Curve("t", "m", {0: 1.0, 1: 2.0})
    assert (rising.best_layer, rising.last_layer, rising.gain) == (1, 1, 0.0)


def test_metrics_alone_have_no_tasks() -> None:
    actual = summary(metrics_frame(6))
    assert (actual.tasks, actual.average, actual.incomplete, actual.num_layers) == ((), None, (), 6)


def test_two_scores_of_a_task_are_refused() -> None:
    rows = [("m", "r", 0, 0.0, "score", "A", name, 0.5) for name in ("accuracy", "f1")]
    with pytest.raises(OptionError, match="its main one, but got accuracy, f1 for 'A'; filter the others out"):
        summary(rows_frame(rows))


def test_the_average_of_a_baseline_needs_every_task() -> None:
    actual = summary(made(A=[0.4, 0.5, 0.6], B=[0.4, 0.5, 0.6]))
    assert average_baseline(actual, {"A": 0.3, "B": 0.5}) == pytest.approx(40.0)
    assert average_baseline(actual, {"A": 0.3}) is None
    assert average_baseline(summary(metrics_frame(2)), {}) is None
