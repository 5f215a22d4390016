"""The replay of the paper's own tables; skipped if they are absent."""

import lzma
from pathlib import Path

import polars as pl
import pytest

from benchmarks.selection.reference import reference_metrics, reference_scores
from midlayer_encoders.comparing.correlation import correlate
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.schema import check_frame
from midlayer_encoders.frame.summaries import summary

UNSUPERVISED = "LLM2Vec-mntp-unsup-simcse-8B"


@pytest.fixture(scope="module")
def tables(shared_data: Path) -> Path:
    folder = shared_data.parent / "reference"
    if not folder.is_dir():
        pytest.skip(f"no reference tables at {folder}")
    return folder


@pytest.fixture(scope="module")
def scores(tables: Path) -> pl.DataFrame:
    return reference_scores(tables)


@pytest.fixture(scope="module")
def metrics(tables: Path) -> pl.DataFrame:
    return reference_metrics(tables)


def of(frame: pl.DataFrame, model: str, revision: str = "main") -> pl.DataFrame:
    return frame.filter(pl.col("model") == model, pl.col("revision") == revision)


@pytest.mark.parametrize(
    ("model", "best", "layer", "last", "tasks"),
    [
        ("Pythia-410m", 51.92, 17, 46.82, 32),
        (UNSUPERVISED, 65.93, 27, 64.19, 32),
        ("Pythia-160m", 47.07, 8, 43.53, 32),
        ("mamba-370m", 48.90, 12, 33.54, 32),
    ],
)
def test_like_for_like_averages(
    scores: pl.DataFrame, model: str, best: float, layer: int, last: float, tasks: int
) -> None:
    actual = summary(of(scores, model))
    assert actual.average is not None
    assert (round(actual.average.best, 2), actual.average.best_layer) == (best, layer)
    assert round(actual.average.last, 2) == last
    assert len(actual.tasks) == tasks


@pytest.mark.parametrize(("model", "best", "last"), [("Pythia-410m", 51.96, 45.48), (UNSUPERVISED, 66.33, 63.93)])
def test_recipe_of_the_paper_gives_its_table(tables: Path, model: str, best: float, last: float) -> None:
    table = pl.read_csv(lzma.decompress((tables / "mteb_layer_scores.csv.xz").read_bytes()), infer_schema_length=None)
    rows = table.filter(pl.col("family") + "-" + pl.col("size") == model, split="test", revision="main")
    first = (
        rows.drop_nulls("main_score").group_by("layer", "task", maintain_order=True).agg(pl.col("main_score").first())
    )
    points = first.group_by("layer").agg(pl.col("main_score").mean() * 100).sort("layer")["main_score"]
    assert (round(points.max(), 2), round(points[-1], 2)) == (best, last)


def test_last_layer_peaks_in_training_while_the_best_rises(scores: pl.DataFrame) -> None:
    curves = {step: summary(of(scores, "Pythia-410m", step)).average for step in ("step16000", "step64000", "main")}
    assert round(curves["step16000"].last, 1) == 48.2
    assert round(curves["main"].last, 1) == 46.8
    assert round(curves["step64000"].best, 1) == 52.4


@pytest.mark.long
def test_correlations_of_pythia(scores: pl.DataFrame, metrics: pl.DataFrame) -> None:
    own_values = metrics.filter(pl.col("dataset") != "wikitext")
    sizes = [of(frame, f"Pythia-{size}") for size in ("14m", "70m", "410m") for frame in (scores, own_values)]
    actual = correlate(pl.concat(sizes)).filter(task="average")
    values = {
        (model, metric, name): value
        for model, metric, name, value in actual.select("model", "metric", "statistic", "value").iter_rows()
    }
    expected = {
        "dime": (-0.72, 0.88),
        "infonce": (0.60, 0.82),
        "dataset_entropy": (-0.56, 0.86),
        "prompt_entropy": (-0.61, 0.85),
        "lidar": (-0.41, 0.87),
    }
    for metric, (spearman, distance) in expected.items():
        assert values["Pythia-410m", metric, "spearman"] == pytest.approx(spearman, abs=0.01)
        assert values["Pythia-410m", metric, "dcor"] == pytest.approx(distance, abs=0.01)
        assert abs(values["Pythia-70m", metric, "spearman"]) < 0.3
        assert values["Pythia-14m", metric, "spearman"] > 0


def test_metrics_have_our_names_and_mamba_layers_are_corrected(metrics: pl.DataFrame) -> None:
    assert set(metrics["name"]) == {"prompt_entropy", "dataset_entropy", "curvature", "infonce", "lidar", "dime"}
    check_frame(metrics)
    mamba = of(metrics, "mamba-370m").filter(pl.col("name") == "prompt_entropy")
    assert mamba["layer"].to_list() == list(range(1, 49))
    valley = of(metrics, "Pythia-410m").filter(pl.col("name") == "prompt_entropy", pl.col("dataset") == "wikitext")
    assert round(valley["value"].min(), 3) == 0.327


def test_invalid_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no mteb_layer_scores\.csv\.xz in"):
        reference_scores(tmp_path)
