"""``LayerEncoder(model, "auto", texts=…)`` and ``center=``: the selected layer and the mean are saved in a plain folder."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from midlayer_encoders import LayerEncoder
from midlayer_encoders.encoder.whole_model import measure, select_layer
from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import dataset_entropy
from tests.recipes.test_word_echo import save_causal
from tests.selection.test_select import KINDS, TEXTS
from tests.support.tiny_folders import Folder


def test_rule_selects_the_layer_and_the_selection_is_kept(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = tiny_folder("Llama")
    encoder = LayerEncoder(folder, "min-dataset-entropy", texts=TEXTS, labels=KINDS, device="cpu")
    expected = select_layer(folder, TEXTS, KINDS, rule="min-dataset-entropy", device="cpu")
    assert encoder.selection is not None
    assert encoder.selection.choices == expected.choices
    assert encoder.layer == expected.layer
    plain = LayerEncoder(folder, expected.layer, device="cpu")
    np.testing.assert_array_equal(encoder.encode(TEXTS), plain.encode(TEXTS))
    assert encoder.spec == plain.spec
    assert plain.selection is None
    encoder.save_pretrained(str(tmp_path))
    np.testing.assert_array_equal(SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS), plain.encode(TEXTS))


def test_auto_without_texts_uses_the_fixed_depth(tiny_folder: Folder) -> None:
    assert LayerEncoder(tiny_folder("Llama"), "auto", device="cpu").layer == 3


@pytest.mark.long
def test_recipe_and_layer_are_chosen_together(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = save_causal("byte level", tmp_path / "model")
    encoder = LayerEncoder(folder, "auto", recipe="auto", texts=TEXTS, device="cpu")
    expected = select_layer(folder, TEXTS, device="cpu")
    assert expected.parts
    assert encoder.selection is not None
    assert encoder.options.recipe == expected.recipe == "word-echo+center", "the default of a causal language model"
    by_hand = LayerEncoder(folder, expected.layer, recipe="word-echo", center=TEXTS, device="cpu")
    np.testing.assert_array_equal(encoder.encode(TEXTS), by_hand.encode(TEXTS))
    encoder.save_pretrained(str(tmp_path / "saved"))
    loaded = SentenceTransformer(str(tmp_path / "saved"), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(loaded.encode(TEXTS), by_hand.encode(TEXTS), atol=1e-6)
    assert LayerEncoder(tiny_folder("BERT"), "auto", recipe="auto", device="cpu").options.recipe is None
    for layer in (2, "last"):
        with pytest.raises(OptionError, match="`layer` must be 'auto' with recipe='auto', which selects both"):
            LayerEncoder(folder, layer, recipe="auto", device="cpu")


@pytest.mark.long
def test_selection_takes_the_place_of_the_layer(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = save_causal("byte level", tmp_path / "model")
    selection = select_layer(folder, TEXTS, max_length=60, device="cpu")
    assert selection.parts
    expected = LayerEncoder(folder, max_length=60, device="cpu", **selection.keywords)
    for encoder in (LayerEncoder(folder, selection, device="cpu"), selection.encoder(device="cpu")):
        assert encoder.spec == expected.spec
        assert encoder.selection is selection
    by_name = LayerEncoder(folder, "auto", texts=TEXTS, max_length=60, device="cpu").selection
    assert by_name is not None
    assert by_name.encoder(device="cpu").spec == expected.spec
    assert LayerEncoder(folder, selection, recipe="word-echo+center", device="cpu").spec == expected.spec
    contradictions: list[dict[str, Any]] = [
        {"recipe": "echo"},
        {"bidirectional": True},
        {"norm": "none"},
        {"revision": "v2"},
    ]
    for options in contradictions:
        with pytest.raises(OptionError, match=f"`{next(iter(options))}` must be .* for which the layer was chosen"):
            LayerEncoder(folder, selection, device="cpu", **options)
    with pytest.raises(OptionError, match="`texts` and `labels` must be None unless `layer` names a rule"):
        LayerEncoder(folder, selection, texts=TEXTS)


def test_selection_of_another_model_is_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    selection = select_layer(tiny_folder("Llama"), device="cpu")
    with pytest.raises(OptionError, match=r"`layer` must be chosen for BERT\d+, but it was chosen for Llama"):
        LayerEncoder(tiny_folder("BERT"), selection, device="cpu")
    copied = tmp_path / Path(tiny_folder("Llama")).name.upper()
    shutil.copytree(tiny_folder("Llama"), copied)
    assert LayerEncoder(str(copied), selection, device="cpu").layer == selection.layer
    shallow = replace(selection, num_layers=7)
    with pytest.raises(OptionError, match="which has 4 blocks, but it was chosen for a model of 7"):
        LayerEncoder(str(copied), shallow, device="cpu")


def test_selection_from_a_frame_needs_the_model_and_takes_its_options(tiny_folder: Folder) -> None:
    folder = tiny_folder("Llama")
    selection = select_layer(
        measure(folder, TEXTS, metrics="dataset_entropy", device="cpu"), rule="min-dataset-entropy"
    )
    encoder = LayerEncoder(folder, selection, norm="none", pooling="last", device="cpu")
    assert encoder.spec == LayerEncoder(folder, selection.layer, norm="none", pooling="last", device="cpu").spec
    with pytest.raises(OptionError, match=r"it is of a frame of results .*LayerEncoder\(model, selection\)"):
        selection.encoder()
    assert selection.to_pandas()["value"].tolist() == selection.frame["value"].to_list()
    assert selection.scores.is_empty()


def test_mean_of_texts_is_subtracted_and_saved(tiny_folder: Folder, tmp_path: Path) -> None:
    plain = LayerEncoder(tiny_folder("GPTNeoX"), 2, device="cpu", truncate_dim=8)
    centered = LayerEncoder(tiny_folder("GPTNeoX"), 2, device="cpu", truncate_dim=8, center=TEXTS)
    vectors = plain.encode(TEXTS)
    np.testing.assert_allclose(centered.encode(TEXTS), vectors - vectors.mean(axis=0), atol=1e-6)
    assert not centered.encode([""]).any(), "an empty text is still zero"
    assert centered.spec.digest != plain.spec.digest
    centered.save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu", truncate_dim=8)
    np.testing.assert_array_equal(loaded.encode(TEXTS), centered.encode(TEXTS))
    with pytest.raises(OptionError, match="Create it without `center`"):
        measure(centered, TEXTS, metrics="curvature")


def test_invalid_input_is_refused(tiny_folder: Folder) -> None:
    folder = tiny_folder("Llama")
    with pytest.raises(OptionError, match=r"`layer` must be one of .* Did you mean 'auto'"):
        LayerEncoder(folder, "atuo", device="cpu")
    with pytest.raises(OptionError, match="must be None unless `layer` names a rule, but it is 2"):
        LayerEncoder(folder, 2, texts=TEXTS, device="cpu")
    with pytest.raises(OptionError, match="`center` must hold 16 different texts or more, but got 3"):
        LayerEncoder(folder, 2, center=TEXTS[:3], device="cpu")
    with pytest.raises(OptionError, match="but got one: 'a text'"):
        LayerEncoder(folder, 2, center="a text", device="cpu")


@pytest.mark.long
def test_rule_measures_the_vectors_that_the_options_give(tiny_folder: Folder) -> None:
    make_encoder = partial(LayerEncoder, tiny_folder("Llama"), device="cpu")
    options: dict[str, Any] = {"pooling": "last", "max_length": 12, "bidirectional": True}
    options |= {"prompts": {"ask": "find: "}, "default_prompt_name": "ask"}

    def by_hand(layer: int, *left_out: str) -> float:
        kwargs = {name: value for name, value in options.items() if name not in left_out}
        return float(
            dataset_entropy(torch.from_numpy(make_encoder(layer, norm="none", **kwargs).encode(TEXTS)).double())
        )

    encoder = make_encoder("min-dataset-entropy", texts=TEXTS, center=TEXTS, **options)
    assert encoder.selection is not None
    entropies = dict(encoder.selection.frame.filter(name="dataset_entropy").select("layer", "value").iter_rows())
    assert (entropies[1], entropies[3]) == pytest.approx((by_hand(1), by_hand(3)), rel=1e-4)
    assert encoder.layer == min(entropies, key=entropies.__getitem__)
    for left_out in (["pooling"], ["max_length"], ["bidirectional"], ["prompts", "default_prompt_name"]):
        assert abs(by_hand(3, *left_out) - entropies[3]) > 0.01, f"without {left_out} the curve would differ"
