"""With every option, a sweep's score of a layer is mteb's own score of the encoder cut there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import OptionError
from tests.support.families import DEPTH
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder
from tests.sweeping.scoring import QUICK, layer_scores_of, mteb_score, sweep, write_reranking_task, write_sts_task
from tests.tasks.rows import ROWS, write

pytestmark = MTEB

LAYERS = [0, 1, DEPTH]


@pytest.mark.slow
def test_each_option_scores_like_the_cut_encoder(tiny_folder: Folder, tmp_path: Path) -> None:
    model, task = tiny_folder("Llama"), write_sts_task(tmp_path)
    scores_by_option: dict[str, dict[int, float]] = {}
    for options in (
        {"pooling": "mean"},
        {"pooling": "last"},
        {"norm": "none"},
        {"truncate_dim": 8, "bidirectional": True},
    ):
        result = sweep(model, task, layers=LAYERS, out=tmp_path / "out", **options, **QUICK)
        layer_scores = scores_by_option[str(options)] = layer_scores_of(result, task)
        expected = {layer: mteb_score(LayerEncoder(model, layer, device="cpu", **options), task) for layer in LAYERS}
        assert layer_scores == pytest.approx(expected, abs=1e-3), options
        how = result.notes.how
        assert (how["norm"], how["pooling"]) == (options.get("norm", "final"), options.get("pooling", "mean"))
    for layer in LAYERS[1:]:  # all options differ, so none could be mistaken for another
        assert len({round(values[layer], 3) for values in scores_by_option.values()}) == len(scores_by_option)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "target"), [("STS", "score"), ("PairClassification", "labels")])
def test_sweep_tied_pairs_score_like_mteb_on_one_vector_a_text(
    kind: str, target: str, tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mteb embeds equal texts in several batches, whose rounding may break the ties; a sweep embeds a text once."""
    ties = [{**ROWS[kind][0], target: n % 2} for n in range(20)]
    task = write(tmp_path / "tied.jsonl", ties + ROWS[kind])
    encoder = LayerEncoder(tiny_folder("BERT"), 2, device="cpu")
    vectors: dict[str, Any] = {}

    def encode_once(texts: list[str], **options: Any) -> Any:
        return np.stack([vectors.setdefault(*row) for row in zip(texts, encode(texts, **options), strict=True)])

    encode = encoder.encode
    result = sweep(tiny_folder("BERT"), task, layers=[2], out=tmp_path / "out", **QUICK)
    monkeypatch.setattr(encoder, "encode", encode_once)
    assert layer_scores_of(result, task)[2] == pytest.approx(mteb_score(encoder, task), abs=1e-6)


def test_projection_after_the_last_block_changes_the_width(tiny_folder: Folder, tmp_path: Path) -> None:
    model, task = tiny_folder("OPT-350m"), write_reranking_task(tmp_path)
    result = sweep(model, task, layers=[0, 2], out=tmp_path / "out", pooling="cls", **QUICK)
    assert not result.failures
    expected = {k: mteb_score(LayerEncoder(model, k, pooling="cls", device="cpu"), task) for k in (0, 2)}
    assert layer_scores_of(result, task) == pytest.approx(expected, abs=1e-3)


@pytest.mark.long
def test_encoder_in_memory_is_scored_with_its_own_options_and_weights(tiny_folder: Folder, tmp_path: Path) -> None:
    model, task = tiny_folder("Llama"), write_sts_task(tmp_path)

    def trained(layer: int, **options: Any) -> LayerEncoder:
        encoder = LayerEncoder(model, layer, device="cpu", **options)
        with torch.no_grad():
            encoder[0].model.layers[0].mlp.down_proj.weight.mul_(3)
        return encoder

    own_options: dict[str, Any] = {"norm": "none", "pooling": "last"}
    encoder_in_memory = trained(-1, **own_options)
    options = {key: value for key, value in QUICK.items() if key != "device"}
    layer_scores = layer_scores_of(
        sweep(encoder_in_memory, task, layers=[1, -1], out=tmp_path / "out", **options), task
    )
    for layer in (1, DEPTH):
        assert layer_scores[layer] == pytest.approx(mteb_score(trained(layer, **own_options), task), abs=1e-3)
        assert layer_scores[layer] != pytest.approx(
            mteb_score(LayerEncoder(model, layer, **own_options), task), abs=1e-3
        )
    for option in ({"norm": "final"}, {"pooling": "max"}, {"max_length": 9}):
        with pytest.raises(OptionError, match=f"`{next(iter(option))}` must be the encoder's"):
            sweep(encoder_in_memory, task, out=tmp_path / "out", **option)  # type: ignore[arg-type]


@pytest.mark.long
def test_similarity_changes_scores_but_not_stored_vectors(tiny_folder: Folder, tmp_path: Path) -> None:
    task = write_reranking_task(tmp_path)
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    options: dict[str, Any] = {"layers": [-1], "workers": 1, "baselines": False, "out": tmp_path / "out"}
    distinct_scores, stored = set(), set()
    for similarity in ("cosine", "dot"):
        encoder.similarity_fn_name = similarity  # type: ignore[assignment]
        (score,) = layer_scores_of(sweep(encoder, task, **options), task).values()
        assert score == pytest.approx(mteb_score(encoder, task), abs=1e-5)
        distinct_scores.add(round(score, 3))
        stored.add(tuple(sorted((tmp_path / "out").rglob("*.safetensors"))))
    assert len(distinct_scores) == 2
    assert len(stored) == 1


def test_half_precision_store_changes_scores_little(tiny_folder: Folder, tmp_path: Path) -> None:
    model, task = tiny_folder("Llama"), write_sts_task(tmp_path)
    scores_by_dtype = [
        layer_scores_of(
            sweep(model, task, layers=[2], out=tmp_path / dtype, store=tmp_path / "s", store_dtype=dtype, **QUICK), task
        )
        for dtype in ("float32", "float16")
    ]
    assert scores_by_dtype[1] == pytest.approx(scores_by_dtype[0], abs=0.01)
    stores = {path.parent.name: path.stat().st_size for path in (tmp_path / "s").rglob("*.safetensors")}
    assert len(stores) == 2
    assert min(stores.values()) < 0.75 * max(stores.values())
