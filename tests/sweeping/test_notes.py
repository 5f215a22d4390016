"""Notes beside the scores: depth, parameters of each cut model, and the folder loaded again."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig

from midlayer_encoders import LayerEncoder
from midlayer_encoders.sweeping import SweepResult
from midlayer_encoders.tasks import resolve_tasks, tfidf_scores
from tests.others_warnings import MTEB
from tests.sweeping.scoring import QUICK, layer_scores_of, sweep, write_reranking_task, write_sts_task

Folder = Callable[[str], str]
pytestmark = MTEB

IN_MEMORY = {key: value for key, value in QUICK.items() if key != "device"}  # for an encoder in memory


def test_depth_is_relative_to_the_models_own_blocks(tiny_folder: Folder, tmp_path: Path) -> None:
    model, task = tiny_folder("Llama"), write_sts_task(tmp_path)
    blocks = AutoConfig.from_pretrained(model).num_hidden_layers
    cut = LayerEncoder(model, 3, device="cpu")
    for number, (encoder, layers, expected) in enumerate(
        (
            (model, [3, 0.25], [1, 3]),
            (cut, [0, -1], [0, 3]),  # the last layer of a cut encoder is not the last of its model
        )
    ):
        options = QUICK if encoder is model else IN_MEMORY
        result = sweep(
            encoder,
            task,
            layers=layers,
            metrics=["prompt_entropy"],
            metric_texts=4,
            out=tmp_path / str(number),
            **options,
        )
        for kind in ("score", "metric"):
            rows = result.frame.filter(pl.col("kind") == kind)
            assert rows["layer"].to_list() == expected
            assert rows["depth"].to_list() == [layer / blocks for layer in expected]


@pytest.mark.parametrize(
    ("family", "norm"),
    [
        ("Llama", "final"),
        ("T5", "none"),  # has one extra block, and the first is larger than the others
        pytest.param("ModernBERT", "final", marks=pytest.mark.slow),  # has a block even at layer 0
        ("ALBERT", "final"),  # one block for all layers
    ],
)
def test_parameters_match_real_cut_encoders(family: str, norm: Any, tiny_folder: Folder, tmp_path: Path) -> None:
    model = tiny_folder(family)
    parameters = sweep(model, out=tmp_path, norm=norm, device="cpu").notes.parameters
    encoders = [LayerEncoder(model, layer, norm=norm, device="cpu") for layer in parameters]
    assert parameters == {
        encoder.layer: sum(weights.numel() for weights in encoder.parameters()) for encoder in encoders
    }
    assert len(encoders) == 5
    partial_sweep = sweep(LayerEncoder(model, 3, norm=norm, device="cpu"), out=tmp_path, norm=norm, layers=[1, 3])
    assert partial_sweep.notes.parameters == {layer: parameters[layer] for layer in (1, 3)}


def test_printed_code_uses_absolute_model_paths(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(tiny_folder("Llama"))
    monkeypatch.chdir(model.parent)
    notes = sweep(f"./{model.name}", out=tmp_path / "out", device="cpu").notes
    assert notes.model == str(model)


def test_folder_holds_the_result_of_the_sweep(tiny_folder: Folder, tmp_path: Path) -> None:
    model, tasks = tiny_folder("Llama"), [write_sts_task(tmp_path), write_reranking_task(tmp_path)]
    result = sweep(
        model, tasks, layers=[1, 3, 4], metrics=["prompt_entropy"], metric_texts=4, norm="none", pooling="last",
        max_length=20, out=tmp_path / "out", workers=1, device="cpu",
    )  # fmt: skip
    loaded = SweepResult.load(tmp_path / "out")
    assert loaded.frame.equals(result.frame)
    assert loaded.notes == result.notes
    assert pl.read_csv(tmp_path / "out/frame.csv").equals(result.frame, null_equal=True)
    # The best layer is that of the highest mean.
    means = {layer: sum(layer_scores_of(result, task)[layer] for task in tasks) for layer in (1, 3, 4)}
    best = max(means, key=lambda layer: means[layer])
    assert loaded.best() == best
    seconds = result.notes.seconds
    assert 0 < seconds[1] < seconds[3] < seconds[4]  # of one pass through all layers
    assert loaded.notes.milliseconds == {layer: 1e3 * time / 16 for layer, time in seconds.items()}
    assert result.notes.dimensions == LayerEncoder(model, 1, device="cpu").get_embedding_dimension()
    assert result.notes.timing["texts"] == 16
    assert f"16 texts of {result.notes.timing['tokens']} tokens at once on cpu" in result.notes.how["time per text"]
    assert result.notes.baselines["TF-IDF"] == {
        task.metadata.name: pytest.approx(tfidf_scores(task), abs=1e-6) for task in resolve_tasks(tasks)
    }
    # mteb's own file for each layer and task holds the score.
    files = [json.loads(path.read_text()) for path in (tmp_path / "out/mteb").rglob("near-*.json")]
    saved_scores = sorted(file["scores"]["test"][0]["main_score"] for file in files)
    assert saved_scores == pytest.approx(sorted(layer_scores_of(result, tasks[0]).values()), abs=1e-6)
    how = result.notes.how
    assert how["longest text"] == "20 tokens"
    assert how["tasks"] == "near, ranks"
    assert how["weights"] == LayerEncoder(model, -1, norm="none", device="cpu").spec.weights_digest


def test_export_code_on_the_page_recreates_the_scored_encoder(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = tiny_folder("Llama"), {"norm": "none", "pooling": "last"}
    result = sweep(model, write_sts_task(tmp_path), layers=[1, 2], out=tmp_path / "out", **options, **QUICK)
    page = html.unescape(re.sub(r"<[^>]*>", "", result.to_html().read_text()))
    command = next(line for line in page.splitlines() if "save_pretrained" in line)
    code = re.search(r"LayerEncoder\(.*?\)\.save_pretrained\(.*?\)", command)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    exec(code[0], {"LayerEncoder": LayerEncoder})
    (folder,) = tmp_path.glob("layer-*")
    expected = LayerEncoder(model, result.best(), device="cpu", **options)
    texts = ["the old stone bridge", "a paper boat"]
    assert SentenceTransformer(str(folder), device="cpu").encode(texts) == pytest.approx(
        expected.encode(texts), abs=1e-5
    )
    assert f"--layer {result.best()} --norm none --pooling last --out layer-{result.best()}" in page
