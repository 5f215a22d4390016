import math
from pathlib import Path

import polars as pl
import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.curves import curves
from midlayer_encoders.frame.schema import (
    FRAME_SCHEMA,
    NamedSubject,
    check_frame,
    check_one_model,
    metric_series,
    number_of_layers,
    parquet_bytes,
    read_frame,
    tidy_frame,
    tidy_rows,
)
from tests.report.made_frames import full_frame, metrics_frame, rows_frame, scores_frame

ROW = ("m", "main", 1, 0.5, "score", "STS", "cosine_spearman", 0.5)


def test_a_frame_is_returned_in_order_and_of_its_types() -> None:
    frame = full_frame()
    shuffled = frame.select(reversed(frame.columns)).with_columns(
        pl.lit(1).alias("more"), pl.col("layer").cast(pl.Int8)
    )
    assert check_frame(shuffled).equals(frame)
    assert check_frame(shuffled).schema == FRAME_SCHEMA


def test_words_may_be_categories_and_values_whole_numbers() -> None:
    frame = rows_frame([ROW]).with_columns(pl.col("kind").cast(pl.Categorical), pl.lit(1).alias("value"))
    assert check_frame(frame)["value"].to_list() == [1.0]


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (rows_frame([ROW]).drop("depth", "value"), r"must have the columns .* but lacks depth, value\.$"),
        (rows_frame([ROW]).rename({"dataset": "datasets"}), r"but lacks dataset\. Did you mean 'datasets'\?"),
        (rows_frame([ROW]).with_columns(pl.col("layer").cast(pl.String)), "'layer' must be Int64, but got String"),
        (rows_frame([ROW]).with_columns(pl.lit(None).alias("revision")), "no empty cells; .*revision None"),
        (
            rows_frame([(*ROW[:4], "scores", *ROW[5:])]),
            r"no kinds other than score, metric, confirmed; 1 row like this: .*kind 'scores'",
        ),
        (rows_frame([(*ROW[:3], 1.5, *ROW[4:])]), "no layers below 0, or depths .* outside .*: .*layer 1, depth 1.5"),
        (rows_frame([ROW, (*ROW[:7], 0.6)]), "no several values for one .*; drop the repeated rows; 2 rows"),
    ],
)
def test_what_is_wrong_is_named(frame: pl.DataFrame, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        check_frame(frame)


def test_one_model_at_one_revision() -> None:
    assert check_one_model(rows_frame([ROW])) == ("m", "main")
    two = rows_frame([ROW, ("m", "step1", *ROW[2:])])
    with pytest.raises(OptionError, match="but got 2: m at main, m at step1; filter it first"):
        check_one_model(two)
    with pytest.raises(OptionError, match="at least one row"):
        check_one_model(two.clear())


@pytest.mark.parametrize("num_layers", [1, 6, 12, 24, 30, 48, 126])
def test_number_of_layers_comes_back_from_any_layer(num_layers: int) -> None:
    for layer in range(1, num_layers + 1):
        assert number_of_layers(scores_frame(num_layers, tasks=1, layers=[layer])) == num_layers
    assert number_of_layers(scores_frame(num_layers, tasks=1, layers=[0])) == 0


def test_series_are_told_apart_by_what_differs_only() -> None:
    separate = metric_series(metrics_frame(names=["curvature", "lidar"]))
    assert {name: [item.label for item in many] for name, many in separate.items()} == {
        "curvature": [""],
        "lidar": [""],
    }
    texts = metric_series(metrics_frame(names=["curvature"], datasets=["a", "b"]))
    assert [item.label for item in texts["curvature"]] == ["a", "b"]
    models = pl.concat([metrics_frame(names=["lidar"], model="x"), metrics_frame(names=["lidar"], model="y")])
    assert [item.label for item in metric_series(models)["lidar"]] == ["x", "y"]
    other = models.with_columns(revision=pl.lit("step1"))
    mixed = pl.concat([models.filter(model="x"), other.filter(model="y")])
    assert [item.label for item in metric_series(mixed)["lidar"]] == ["x", "y"]
    both = pl.concat([models.filter(model="x"), other])
    assert [item.label for item in metric_series(both)["lidar"]] == ["x, main", "x, step1", "y, step1"]


def test_series_are_in_order_of_layers_and_keep_what_is_not_finite() -> None:
    rows = [
        ("m", "r", layer, layer / 2, "metric", "t", "lidar", value)
        for layer, value in ((2, 1.0), (0, math.nan), (1, 3.0))
    ]
    (series,) = metric_series(rows_frame(rows))["lidar"]
    assert series.layers == (0, 1, 2)
    assert series.depths == (0.0, 0.5, 1.0)
    assert math.isnan(series.values[0])
    assert series.values[1:] == (3.0, 1.0)


def test_depths_are_of_the_whole_model_whichever_layers_were_measured() -> None:
    rows = tidy_rows({3: 0.5, 1: 0.25}, NamedSubject("m", None, 12), kind="metric", dataset="t", name="lidar")
    assert [(row["layer"], row["depth"], row["value"]) for row in rows] == [(3, 0.25, 0.5), (1, 1 / 12, 0.25)]
    assert number_of_layers(tidy_frame(rows)) == 12


def test_frames_of_several_recipes_or_many_models_are_refused_with_their_names() -> None:
    several = pl.concat([rows_frame([ROW]).with_columns(recipe=pl.lit(name)) for name in ("plain", "one-word")])
    with pytest.raises(
        OptionError, match=r"but has plain, one-word\. Filter it first: frame\.filter\(recipe='plain'\)"
    ):
        check_frame(several)
    for count, names in ((4, "a at main, b at main, c at main, d at main; filter"), (5, "d at main, …; filter")):
        with pytest.raises(OptionError, match=f"but got {count}: .*{names} it first"):
            check_one_model(rows_frame([(model, *ROW[1:]) for model in "abcde"[:count]]))


@pytest.mark.parametrize("name", ["frame.csv", "FRAME.CSV", "frame.parquet", "frame"])
def test_frame_is_read_from_csv_or_parquet(name: str, tmp_path: Path) -> None:
    frame = scores_frame(2, tasks=1)
    path = tmp_path / name
    path.write_bytes(frame.write_csv().encode() if path.suffix.lower() == ".csv" else parquet_bytes(frame))
    assert read_frame(path).equals(frame)
    path.write_bytes(b"model,revision" if path.suffix.lower() == ".csv" else b"PAR1 half PAR1")
    with pytest.raises(OptionError, match=r"must be a frame of results, but cannot be read|must have the columns"):
        read_frame(path)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_curves_of_too_few_blocks_or_several_depths_are_refused(num_layers: int) -> None:
    frame = scores_frame(num_layers, tasks=1, model="m")
    with pytest.raises(OptionError, match=f"must have 3 blocks or more to select a layer, but m has {num_layers}: "):
        curves(frame)
    assert curves(scores_frame(3, tasks=1)).num_layers == 3
    mixed = pl.concat(
        [scores_frame(6, tasks=1, layers=[2], model="m"), scores_frame(12, tasks=1, layers=[1], model="m")]
    )
    with pytest.raises(OptionError, match="one model at one depth, but m has 6 and 12 blocks in it"):
        curves(mixed)
    with pytest.raises(OptionError, match="must have 3 blocks or more to select a layer, but m has 0"):
        curves(frame.filter(layer=0))
