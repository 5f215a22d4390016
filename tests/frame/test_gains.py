"""The interval of a gain: the central 95 % of the paired differences, averaged over tasks."""

import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.summaries import RESAMPLES_SCHEMA, Curve, Gain, Summary, paired_gain, read_resamples
from midlayer_encoders.frame.tidy_result import write_frame
from midlayer_encoders.report.labels import interval_words, with_interval

SAMPLES = np.random.default_rng(0).normal(0.5, 0.1, (2, 3, 40)).astype(np.float32)  # of tasks and layers
TASKS = ("A", "B")


def scored(samples: np.ndarray = SAMPLES, tasks: tuple[str, ...] = TASKS) -> tuple[Summary, pl.DataFrame]:
    means = 100 * samples.mean(axis=2, dtype=np.float64)
    curves = tuple(Curve(task, "f1", dict(enumerate(row))) for task, row in zip(tasks, means.tolist(), strict=True))
    average = Curve("average", "f1", dict(enumerate(means.mean(axis=0).tolist())))
    rows = [(task, layer, samples[t, layer].tolist()) for t, task in enumerate(tasks) for layer in range(3)]
    return Summary("m", "main", 2, curves, average, (), ()), pl.DataFrame(rows, RESAMPLES_SCHEMA, orient="row")


def quantiles(first: np.ndarray, second: np.ndarray) -> list[float]:
    differences = 100 * (first.astype(np.float64) - second).mean(axis=0)
    return [float(np.quantile(differences, q)) for q in (0.025, 0.975)]


def test_interval_is_that_of_paired_differences() -> None:
    scores, resamples = scored()
    for layer in range(3):
        gain = paired_gain(scores, resamples, layer=layer, over=0)
        assert gain.points == pytest.approx(scores.average.points[layer] - scores.average.points[0])  # type: ignore[union-attr]
        assert gain.interval == pytest.approx(quantiles(SAMPLES[:, layer], SAMPLES[:, 0]))
        assert gain.separable == (gain.low > 0 or gain.high < 0)
    best = scores.average.best_layer  # type: ignore[union-attr]
    assert paired_gain(scores, resamples) == paired_gain(scores, resamples, layer=best, over=2)


def test_interval_between_two_results_uses_the_resamples_of_each() -> None:
    other = scored(SAMPLES[:, ::-1] - np.float32(0.3))
    gain = paired_gain(*scored(), layer=1, over=0, other=other)
    assert gain.interval == pytest.approx(quantiles(SAMPLES[:, 1], SAMPLES[:, 2] - 0.3), abs=1e-5)
    assert gain.separable


def test_equal_layers_have_an_interval_of_zero() -> None:
    gain = paired_gain(*scored(np.repeat(SAMPLES[:, :1], 3, axis=1)), layer=1)
    assert (gain.points, gain.interval, gain.separable) == (0, (0, 0), False)


def test_task_without_resamples_is_named() -> None:
    scores, resamples = scored()
    assert paired_gain(scores, resamples.filter(dataset="A")).without == ("B",)
    assert paired_gain(scores, resamples.clear()).without == TASKS
    only_first = scored(SAMPLES[:1], ("A",))
    assert paired_gain(scores, resamples, other=only_first).without == ("B",)
    assert paired_gain(*only_first, other=(scores, resamples)).without == ("B",)
    gain = paired_gain(scores, resamples.clear())
    assert gain.interval is None
    assert math.isnan(gain.low)
    assert not gain.separable


def test_undefined_resamples_are_left_out_and_shorter_lists_are_paired_from_the_start() -> None:
    samples = SAMPLES.copy()
    samples[0, 1, :30] = np.nan
    assert paired_gain(*scored(samples), layer=1).interval == pytest.approx(
        quantiles(SAMPLES[:, 1, 30:], SAMPLES[:, 2, 30:]), abs=1e-5
    )
    samples[0, 1] = np.nan
    assert paired_gain(*scored(samples), layer=1, over=0).without == TASKS
    gain = paired_gain(*scored(), layer=1, over=0, other=scored(SAMPLES[:, :, :25]))
    assert gain.interval == pytest.approx(quantiles(SAMPLES[:, 1, :25], SAMPLES[:, 0, :25]), abs=1e-5)


def test_layer_without_a_score_is_refused() -> None:
    with pytest.raises(
        OptionError, match=r"`over` must be a layer that was scored on every task \(0, 1, 2\), but got 7"
    ):
        paired_gain(*scored(), over=7)


def test_frame_of_resamples_is_read_back(tmp_path: Path) -> None:
    _, resamples = scored()
    write_frame(resamples, tmp_path / "resamples.parquet")
    assert read_resamples(tmp_path / "resamples.parquet").equals(resamples)
    write_frame(resamples.rename({"values": "others"}), tmp_path / "resamples.parquet")
    with pytest.raises(pl.exceptions.ColumnNotFoundError):
        read_resamples(tmp_path / "resamples.parquet")


@pytest.mark.parametrize(
    ("gain", "words", "cell"),
    [
        (Gain(3.2, 0.9, 5.5), "95 % interval +0.9 to +5.5", "+3.2 (+0.9 to +5.5)"),
        (Gain(-3.2, -5.5, -0.9), "95 % interval −5.5 to −0.9", "−3.2 (−5.5 to −0.9)"),
        (Gain(0, 0, 0), "95 % interval 0.0 to 0.0: the two are not separable", "0.0 (0.0 to 0.0)"),
        (Gain(8.3, 0.0, 9.0), "95 % interval 0.0 to +9.0: the two are not separable", "+8.3 (0.0 to +9.0)"),
        (Gain(8.3, without=("A",)), "no interval: A was not resampled", "+8.3 (no interval)"),
        (Gain(8.3, without=("A", "B", "C", "D")), "no interval: A, B, C, … were not resampled", "+8.3 (no interval)"),
    ],
)
def test_words(gain: Gain, words: str, cell: str) -> None:
    assert interval_words(gain) == words
    assert with_interval(gain.points, gain) == cell
