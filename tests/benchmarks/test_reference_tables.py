"""The paper's tables row by row, compared with the raw files and with small tables."""

import csv
import io
import lzma
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from benchmarks.selection.reference import reference_metrics, reference_scores

SCORES = ("family", "size", "revision", "layer", "num_layers", "task", "split", "subset", "main_score")
METRICS = ("family", "size", "revision", "num_layers", "dataset", "split", "metric", "normalization", "layer", "value")


def written(folder: Path, name: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    text = "\n".join(",".join(map(str, row)) for row in (columns, *rows))
    (folder / f"{name}.csv.xz").write_bytes(lzma.compress(text.encode()))


def raw(folder: Path, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(lzma.decompress((folder / f"{name}.csv.xz").read_bytes()).decode())))


@pytest.fixture(params=["small", "paper"])
def tables(request: pytest.FixtureRequest, made: Path) -> Path:
    """Return small tables, then those of the paper."""
    if request.param == "small":
        return made
    folder: Path = request.getfixturevalue("shared_data").parent / "reference"
    if not folder.is_dir():
        pytest.skip(f"no reference tables at {folder}")
    return folder


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Return small tables: English and other subsets, a layer without a task, a split other than test."""
    start = ("Pythia", "410m", "main")
    scores = [
        (*start, 1, 4, "STS17", "test", "ko-ko", 0.1), (*start, 1, 4, "STS17", "test", "en-en", 0.5),
        (*start, 1, 4, "Emotion", "test", "default", 0.25), (*start, 1, 4, "Emotion", "validation", "default", 0.9),
        (*start, 1, 4, "Massive", "test", "en", 0.5), (*start, 1, 4, "Massive", "test", "en-ext", 0.75),
        (*start, 3, 4, "STS17", "test", "en-en", 0.625), (*start, 3, 4, "Emotion", "test", "default", 0.125),
        (*start, 3, 4, "Massive", "test", "en", ""),
        ("Pythia", "410m", "step1", 3, 4, "STS17", "test", "en-en", 0.375),
    ]  # fmt: skip
    metrics = [
        (*start, 4, "wikitext", "train", "entropy_sentence", "maxEntropy", 2, 0.5),
        (*start, 4, "wikitext", "train", "entropy_sentence", "raw", 2, 3.5),
        (*start, 4, "mteb/emotion", "train", "dime", "maxEntropy", 2, 0.25),
        (*start, 4, "mteb/emotion", "test", "dime", "maxEntropy", 2, 0.75),
        (*start, 4, "mteb/emotion", "test", "infonce", "raw", 1, 7.5),
        (*start, 4, "mteb/emotion", "test", "infonce", "maxEntropy", 1, 8.5),
        (*start, 4, "mteb/emotion", "test", "curvature", "raw", 1, "nan"),
        *(("mamba", "370m", "main", 4, "wikitext", "train", "lidar", "maxEntropy", k, k + 0.5) for k in range(5)),
    ]
    written(tmp_path, "mteb_layer_scores", SCORES, scores)
    written(tmp_path, "layer_metrics", METRICS, metrics)
    return tmp_path


def test_scores_of_a_small_table(made: Path) -> None:
    keys = ("revision", "layer", "depth", "dataset", "value")
    assert reference_scores(made).select(keys).rows() == [
        ("main", 1, 0.25, "Emotion", 0.25),
        ("main", 1, 0.25, "Massive", 0.625),
        ("main", 1, 0.25, "STS17", 0.5),
        ("step1", 3, 0.75, "STS17", 0.375),
    ], "English subsets on average; layer 3 of the last revision lacks a task"


def test_metrics_of_a_small_table(made: Path) -> None:
    actual = reference_metrics(made)
    assert actual.filter(model="Pythia-410m").select("dataset", "name", "layer", "depth", "value").rows() == [
        ("EmotionClassification", "dime", 2, 0.5, 0.75),
        ("EmotionClassification", "infonce", 1, 0.25, 7.5),
        ("wikitext", "prompt_entropy", 2, 0.5, 0.5),
    ]
    mamba = actual.filter(model="mamba-370m").select("layer", "depth", "value").rows()
    assert mamba == [(1, 0.25, 0.5), (2, 0.5, 1.5), (3, 0.75, 2.5), (4, 1.0, 4.5)], "no entry for its embeddings"


@pytest.mark.long
def test_layer_and_depth_of_every_score_match_the_raw_file(tables: Path) -> None:
    known_values: dict[Any, list[float]] = defaultdict(list)
    depths: dict[Any, float] = {}
    for row in raw(tables, "mteb_layer_scores"):
        if row["split"] == "test" and row["main_score"] and row["subset"] in ("default", "en", "en-ext", "en-en"):
            key = (f"{row['family']}-{row['size']}", row["revision"], int(row["layer"]), row["task"])
            known_values[key].append(float(row["main_score"]))
            depths[key] = int(row["layer"]) / int(row["num_layers"])
    actual = reference_scores(tables)
    assert len(actual) >= 3
    for model, revision, layer, depth, task, value in actual.drop("kind", "name").iter_rows():
        scores = known_values[model, revision, layer, task]
        assert (depth, value) == (depths[model, revision, layer, task], pytest.approx(math.fsum(scores) / len(scores)))


@pytest.mark.long
def test_layer_and_depth_of_every_metric_match_the_raw_file(tables: Path) -> None:
    """The values of a model's layers are in the order of the file; Mamba's are one layer higher."""
    names = {"entropy_sentence": "prompt_entropy", "lidar": "lidar"}
    known_values: dict[Any, dict[int, float]] = defaultdict(dict)
    blocks: dict[str, int] = {}
    for row in raw(tables, "layer_metrics"):
        model = f"{row['family']}-{row['size']}"
        blocks[model] = int(row["num_layers"])
        plain = row["dataset"] == "wikitext" and row["normalization"] == "maxEntropy"
        if plain and row["metric"] in names and row["value"] and math.isfinite(float(row["value"])):
            key = (model, row["revision"], names[row["metric"]], row["split"])
            known_values[key][int(row["layer"])] = float(row["value"])
    actual = reference_metrics(tables).filter(pl.col("dataset") == "wikitext", pl.col("name").is_in(names.values()))
    recorded = 0
    for (model, revision, name), part in actual.group_by("model", "revision", "name"):
        split = "test" if (model, revision, name, "test") in known_values else "train"
        expected = known_values[model, revision, name, split]
        last = blocks[str(model)]
        if str(model).startswith("mamba"):
            expected = {k + 1 if k < last else k: v for k, v in expected.items() if k != last - 1}
        assert dict(part.select("layer", "value").iter_rows()) == expected
        assert all(depth == layer / last for layer, depth in part.select("layer", "depth").iter_rows())
        recorded += 1
    assert recorded >= 2
