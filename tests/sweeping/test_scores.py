"""Under every option a sweep's score of a layer is mteb's own score of the encoder that is cut there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import OptionError
from tests.families import DEPTH
from tests.others_warnings import MTEB
from tests.sweeping.scoring import QUICK, mteb_score, near, ranks, scores, sweep

Folder = Callable[[str], str]
pytestmark = MTEB

LAYERS = [0, 1, DEPTH]


@pytest.mark.slow
def test_each_option_scores_as_the_cut_encoder_with_it_in_one_folder(tiny_folder: Folder, tmp_path: Path) -> None:
    model, task = tiny_folder("Llama"), near(tmp_path)
    seen: dict[str, dict[int, float]] = {}
    for options in (
        {"pooling": "mean"},
        {"pooling": "last"},
        {"norm": "none"},
        {"truncate_dim": 8, "bidirectional": True},
    ):
        result = sweep(model, task, layers=LAYERS, out=tmp_path / "out", **options, **QUICK)
        found = seen[str(options)] = scores(result, task)
        expected = {layer: mteb_score(LayerEncoder(model, layer, device="cpu", **options), task) for layer in LAYERS}
        assert found == pytest.approx(expected, abs=1e-3), options
        how = result.notes.how
        assert (how["norm"], how["pooling"]) == (options.get("norm", "final"), options.get("pooling", "mean"))
    for layer in LAYERS[1:]:  # no two options look alike, so that none could have been scored for another
        assert len({round(values[layer], 3) for values in seen.values()}) == len(seen)


def test_a_projection_after_the_last_block_changes_the_width_of_the_vectors(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    model, task = tiny_folder("OPT-350m"), ranks(tmp_path)
    result = sweep(model, task, layers=[0, 2], out=tmp_path / "out", pooling="cls", **QUICK)
    assert not result.failures
    expected = {k: mteb_score(LayerEncoder(model, k, pooling="cls", device="cpu"), task) for k in (0, 2)}
    assert scores(result, task) == pytest.approx(expected, abs=1e-3)


def test_an_encoder_in_memory_is_scored_by_the_sweep_s_options_and_with_its_weights_as_they_are(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    model, task = tiny_folder("Llama"), near(tmp_path)

    def trained(layer: int, **options: Any) -> LayerEncoder:
        encoder = LayerEncoder(model, layer, device="cpu", **options)
        with torch.no_grad():
            encoder[0].model.layers[0].mlp.down_proj.weight.mul_(3)
        return encoder

    own: dict[str, Any] = {"norm": "none", "pooling": "last"}
    whole = trained(-1, **own)
    options = {key: value for key, value in QUICK.items() if key != "device"}
    found = scores(sweep(whole, task, layers=[1, -1], out=tmp_path / "out", **options), task)
    for layer in (1, DEPTH):
        assert found[layer] == pytest.approx(mteb_score(trained(layer, **own), task), abs=1e-3)
        assert found[layer] != pytest.approx(mteb_score(LayerEncoder(model, layer, **own), task), abs=1e-3)
    for given in ({"norm": "final"}, {"pooling": "max"}, {"max_length": 9}):
        with pytest.raises(OptionError, match=f"`{next(iter(given))}` must be the encoder's"):
            sweep(whole, task, out=tmp_path / "out", **given)  # type: ignore[arg-type]


def test_vectors_are_compared_as_the_encoder_does_and_stored_once(tiny_folder: Folder, tmp_path: Path) -> None:
    task = ranks(tmp_path)
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    options: dict[str, Any] = {"layers": [-1], "workers": 1, "baselines": False, "out": tmp_path / "out"}
    seen, stored = set(), set()
    for similarity in ("cosine", "dot"):
        encoder.similarity_fn_name = similarity  # type: ignore[assignment]
        (found,) = scores(sweep(encoder, task, **options), task).values()
        assert found == pytest.approx(mteb_score(encoder, task), abs=1e-5)
        seen.add(round(found, 3))
        stored.add(tuple(sorted((tmp_path / "out").rglob("*.safetensors"))))
    assert len(seen) == 2
    assert len(stored) == 1


def test_half_precision_in_the_store_moves_no_score_by_much(tiny_folder: Folder, tmp_path: Path) -> None:
    model, task = tiny_folder("Llama"), near(tmp_path)
    found = [
        scores(
            sweep(model, task, layers=[2], out=tmp_path / dtype, store=tmp_path / "s", store_dtype=dtype, **QUICK),
            task,
        )
        for dtype in ("float32", "float16")
    ]
    assert found[1] == pytest.approx(found[0], abs=0.01)
    stores = {path.parent.name: path.stat().st_size for path in (tmp_path / "s").rglob("*.safetensors")}
    assert len(stores) == 2
    assert min(stores.values()) < 0.75 * max(stores.values())
