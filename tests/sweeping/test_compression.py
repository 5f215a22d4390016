"""Truncated and quantized vectors: scores of mteb's own wrapper, identities, resumed sweeps, boards and errors."""

from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import mteb
import numpy as np
import polars as pl
import pytest
from mteb.models import CompressionWrapper
from mteb.types import OutputDType
from sentence_transformers.util import quantize_embeddings

from midlayer_encoders import LayerEncoder, board
from midlayer_encoders._isolation import isolated_random
from midlayer_encoders.errors import OptionError
from midlayer_encoders.extras.boards.sweep_board import Point
from midlayer_encoders.reading.reader import LayerReader
from midlayer_encoders.sweeping import SweepResult
from midlayer_encoders.sweeping.compression import Compression, make_compressions, vector_bytes
from midlayer_encoders.tasks.sources import task_sources
from tests.recipes.test_word_echo import save_causal
from tests.support.families import WIDTH
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder
from tests.sweeping.scoring import QUICK, sweep
from tests.tasks.rows import ROWS, write

pytestmark = [*MTEB, pytest.mark.filterwarnings("ignore:Estimating quantization parameters")]
TYPES = ("STS", "PairClassification", "Retrieval", "Classification", "Clustering")
DIMS, PRECISIONS, LAYERS = [20], ["int8", "binary"], [1, 3]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tasks")
    return {name: write(root / f"{name.lower()}.jsonl", ROWS[name]) for name in TYPES}


@pytest.fixture(scope="module")
def compressed(tiny_folder: Folder, tasks: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    out = tmp_path_factory.mktemp("compressed") / "out"
    recipes = ["plain", "plain+normalize"]
    arguments: dict[str, Any] = {"dims": DIMS, "precisions": PRECISIONS, "recipes": recipes, "layers": LAYERS}
    result = sweep(tiny_folder("Llama"), list(tasks.values()), out=out, **arguments, **QUICK)
    assert result.parts
    assert not result.failures
    return result


def mteb_score(encoder: LayerEncoder, path: Path, precision: str) -> float:
    """Return the main score that mteb computes for an encoder and its own compression."""
    model: Any = encoder.for_mteb()
    if precision != "float32":
        model = CompressionWrapper(model, OutputDType(precision))
    with isolated_random():
        result = mteb.evaluate(model, task_sources(path)[0].make(), cache=None, show_progress_bar=False)
    return float(result[0].get_score())


@pytest.mark.long
@pytest.mark.parametrize("kind", TYPES)
def test_scores_are_those_of_mteb_with_the_truncated_and_quantized_encoder(
    kind: str, compressed: SweepResult, tasks: dict[str, Path], tiny_folder: Folder
) -> None:
    path = tasks[kind]
    cases = product((WIDTH, *DIMS), ("float32", *PRECISIONS))
    for number, (dims, precision) in enumerate(cases, start=TYPES.index(kind)):
        layer = LAYERS[number % 2]  # each size and precision on either layer, of one type of task or another
        encoder = LayerEncoder(tiny_folder("Llama"), layer, device="cpu", truncate_dim=dims)
        rows = compressed.scores.filter(
            pl.col("dataset").str.starts_with(path.stem),
            recipe="plain", layer=layer, dims=dims, precision=precision,
        )  # fmt: skip
        expected = mteb_score(encoder, path, precision)
        assert rows["value"].item() == pytest.approx(expected, abs=1e-4), (dims, layer, precision)


@pytest.mark.long
def test_a_normalized_encoder_truncates_unit_vectors_as_sentence_transformers_does(
    compressed: SweepResult, tasks: dict[str, Path], tiny_folder: Folder
) -> None:
    """Scores of pairs include dot products and distances, which change if vectors are scaled again."""
    for dims, precision in ((20, "float32"), (20, "int8")):
        encoder = LayerEncoder(tiny_folder("Llama"), 3, device="cpu", truncate_dim=dims, normalize=True)
        for kind in ("PairClassification", "Classification"):
            rows = compressed.scores.filter(
                pl.col("dataset").str.starts_with(tasks[kind].stem),
                recipe="plain+normalize", layer=3, dims=dims, precision=precision,
            )  # fmt: skip
            assert rows["value"].item() == pytest.approx(mteb_score(encoder, tasks[kind], precision), abs=1e-4)


@pytest.mark.long
def test_plain_scores_do_not_change(
    compressed: SweepResult, tasks: dict[str, Path], tiny_folder: Folder, tmp_path: Path
) -> None:
    plain = sweep(tiny_folder("Llama"), list(tasks.values()), layers=LAYERS, out=tmp_path / "out", **QUICK)
    assert not plain.parts
    assert plain.frame.columns == compressed.parts["plain"].frame.columns
    columns = ["dataset", "layer", "kind", "value"]
    whole = compressed.frame.filter(recipe="plain", dims=WIDTH, precision="float32")
    assert plain.frame.select(columns).equals(whole.select(columns))
    assert (plain.best().dims, plain.best().precision, plain.notes.compression) == (None, "float32", {})


def test_rows_parts_and_saved_scores_have_dims_and_precision(compressed: SweepResult) -> None:
    scores = compressed.scores
    assert scores.schema["dims"] == pl.Int64
    assert set(scores["dims"]) == {WIDTH, *DIMS}
    assert set(scores["precision"]) == {"float32", *PRECISIONS}
    assert len(scores) == 2 * 6 * len(LAYERS) * len(TYPES)
    assert scores.select("recipe", "dims", "precision", "layer", "dataset").is_unique().all()
    revisions = {path.parent.name for path in compressed.folder.rglob("mteb/**/*.json")}
    assert {revision.rsplit("-", 1)[-1] for revision in revisions} >= {"int8", "binary"}
    loaded = SweepResult.load(compressed.folder)
    assert loaded.frame.equals(compressed.frame)
    with pytest.raises(OptionError, match=r"must hold one number of dims here, but has 32, 20. .*filter\(dims=32\)"):
        SweepResult(scores.filter(recipe="plain").drop("recipe"), compressed.folder, compressed.notes).summary()


def test_confirmed_scores_are_close(compressed: SweepResult) -> None:
    assert not [remark for part in compressed.parts.values() for remark in part.notes.remarks]
    confirmed = compressed.frame.filter(kind="confirmed")
    assert set(confirmed["precision"]) == {"float32", *PRECISIONS}


@pytest.mark.long
def test_more_dims_need_no_pass_and_a_resumed_sweep_no_score(
    tiny_folder: Folder, tasks: dict[str, Path], tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"layers": LAYERS, "out": tmp_path / "out", **QUICK}
    model, task = tiny_folder("Llama"), tasks["Retrieval"]
    sweep(model, task, **arguments)
    with mock.patch.object(LayerReader, "passes", side_effect=AssertionError("another pass")):
        first = sweep(model, task, dims=[9], **arguments)
        both = sweep(model, task, dims=[9], precisions=["int8"], **arguments)
        with mock.patch(
            "midlayer_encoders.sweeping.task_scoring.resampled_scores", side_effect=AssertionError("scored")
        ):
            again = sweep(model, task, dims=[9], precisions=["int8"], **arguments)
    assert again.frame.equals(both.frame)
    columns = ["layer", "dims", "kind", "value"]
    assert both.frame.filter(precision="float32").select(columns).equals(first.frame.select(columns))
    values = {row["precision"]: row["value"] for row in both.scores.filter(layer=3, dims=9).iter_rows(named=True)}
    assert values["int8"] != values["float32"]  # the same file of saved scores holds both
    assert both.scores.filter(layer=3, precision="float32")["value"].n_unique() == 2


def test_int8_steps_are_those_of_sentence_transformers_for_each_layer_alone() -> None:
    random = np.random.default_rng(0)
    vectors = random.normal(size=(200, 12)).astype(np.float32)
    for precision in ("int8", "binary"):
        compression = make_compressions([7], [precision])[-1]
        expected = quantize_embeddings(vectors[:, :7], precision)  # type: ignore[arg-type]
        if precision == "binary":
            bits = np.unpackbits((expected.astype(np.int16) + 128).astype(np.uint8), axis=1)
            expected = bits[:, :7]
        assert np.array_equal(compression.apply(vectors), expected)
        scaled = vectors * np.float32(64)  # a deeper layer has longer vectors, and steps of its own
        assert np.array_equal(compression.apply(scaled), compression.apply(vectors))
    vectors[:, 3] = 0.5  # mteb turns a constant dimension into NaN
    assert set(Compression(precision="int8").apply(vectors)[:, 3]) == {-128}


@pytest.mark.long
def test_best_layer_its_encoder_and_card_have_the_choice(compressed: SweepResult, tmp_path: Path) -> None:
    part = compressed.parts["plain, 20 dims, int8"]
    best = part.best()
    assert (best.recipe, best.dims, best.precision) == ("plain", 20, "int8")
    assert best.cells()[0] == "plain, 20 dims, int8"
    encoder = part.encoder(device="cpu")
    assert encoder.encode(["a", "b"]).shape == (2, 20)
    encoder.save_pretrained(str(tmp_path / "saved"))
    card = (tmp_path / "saved/README.md").read_text()
    assert 'model.encode(texts, precision="int8")' in card
    assert "| dimensions | the first 20 |" in card
    page = compressed.html()
    assert "plain, 20 dims, int8" in page


def test_board_has_bytes_of_each_choice(compressed: SweepResult) -> None:
    result = board(compressed.folder, max_bytes=20)
    assert len(result.runs) == 12
    best = {row["run"].partition(" with ")[2]: row for row in result.to_frame().filter("best").to_dicts()}
    costs = {name: row["bytes"] for name, row in best.items()}
    assert costs["20 dims, int8"] == 20
    assert costs["20 dims, binary"] == 3
    assert costs["plain+normalize, binary"] == 4
    assert result.best().notes.compression["dims"] in (WIDTH, *DIMS)
    chosen = result.chosen()
    assert chosen.costs["bytes"] <= 20
    small = best["20 dims, int8"]
    lines = result.lines(Point(small["run"], small["layer"], small["score"], {}))
    assert "truncate_dim=20" in lines["Python"]
    assert lines["Python"].endswith('# then encode(texts, precision="int8")')
    assert lines["shell"].endswith("--precision int8")
    assert "Score by bytes per vector" in result.html()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dims": [0]}, "`dims` must be a positive number of dimensions, but got 0"),
        ({"dims": [-3]}, "`dims` must be a positive number of dimensions, but got -3"),
        ({"dims": [1.5]}, "`dims` must be a positive number of dimensions, but got 1.5"),
        ({"dims": 64}, "`dims` must be a list of numbers, but got 64"),
        ({"dims": "64"}, r"`dims` must be a list of numbers, but got one: '64'. Write \['64'\]"),
        ({"precisions": "int8"}, r"`precisions` must be a list of names, but got one: 'int8'. Write \['int8'\]"),
        ({"precisions": ["int4"]}, "must be one of 'float32', 'int8', 'binary', but got 'int4'. Did you mean 'int8'"),
    ],
)
def test_arguments_are_refused_before_the_model_is_loaded(
    arguments: dict[str, Any], message: str, tasks: dict[str, Path]
) -> None:
    with pytest.raises(OptionError, match=message):
        sweep("no/such-model", tasks["STS"], **arguments)


def test_dims_of_the_whole_width_are_the_whole_vectors(tiny_folder: Folder, tmp_path: Path) -> None:
    task = write(tmp_path / "near.jsonl", ROWS["STS"])
    result = sweep(tiny_folder("Llama"), task, dims=[8, 32], out=tmp_path / "out", **QUICK)
    assert list(result.parts) == ["plain", "plain, 8 dims"]
    rows = result.frame.filter(kind="score").select("layer", "dims")
    assert sorted(rows["dims"].unique()) == [8, 32]
    assert rows.is_unique().all()


def test_dims_above_the_width_and_texts_without_labels_are_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    task = write(tmp_path / "near.jsonl", ROWS["STS"])
    with pytest.raises(OptionError, match=r"`dims` must be at most 32, the dimensions of .*, but got 33"):
        sweep(tiny_folder("Llama"), task, dims=[8, 33], out=tmp_path / "out", **QUICK)
    folder = save_causal("byte level", tmp_path / "causal")
    with pytest.raises(OptionError, match=r"`dims` must be at most 32, the dimensions of .*, but got 33"):
        sweep(folder, task, recipes=["word-echo"], dims=[33], out=tmp_path / "spans", **QUICK)
    texts = write(tmp_path / "texts.jsonl", [{"text": "a"}, {"text": "b"}])
    with pytest.raises(OptionError, match="`dims` and `precisions` do not apply to texts without labels"):
        sweep("no/such-model", texts, dims=[8], metrics=["curvature"])
    with pytest.raises(OptionError, match="must not include 'int8' for this task, which embeds one text at a time"):
        Compression(precision="int8").apply(np.ones((1, 4), np.float32))
    assert (vector_bytes(384), vector_bytes(384, "int8"), vector_bytes(384, "binary")) == (1536, 384, 48)
