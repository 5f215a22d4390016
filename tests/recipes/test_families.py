"""Every family with every named recipe: the vectors of the uncut model, or the package's own refusal."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from midlayer_encoders import LayerEncoder, select_layer
from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.recipes import RECIPES
from tests.support import tiny_types
from tests.support.uncut import NoStackError, find_stack

TEXTS = ["a cat sat on a mat", "ox", "seven wizards", "ox!"]
FIRST_HALF = 'This sentence : "{text}" means in one word:"'
SEQUENCES = {
    "plain": "{text}",
    "one-word": FIRST_HALF,
    "echo": 'Rewrite the sentence "{text}". The rewritten sentence: "{text}"',
    "word-echo": FIRST_HALF + '". The rewritten sentence: "{text}',
}
"""The text of each recipe, in which a character is a token."""

# Their padded rows differ, so they run without a mask in batches of one length.
SENSITIVE = ["convbert", "mobilebert", "nystromformer", "yoso", "fnet"]
OTHERS = ["llama", "gpt2", "mamba", "bert", "xlnet", "opt", "gemma2", "rwkv"]


def vector(recipe: str, text: str, states: Tensor) -> Tensor:
    """Return the vector of a text from the states of its sequence ``(T, D)``, by the recipe's definition."""
    if recipe == "plain":
        return states.mean(dim=0)
    if recipe == "one-word":
        return states[-1]
    if recipe == "echo":
        return states[-1 - len(text) : -1].mean(dim=0)
    word = states[len(FIRST_HALF.format(text=text)) - 1]
    start = FIRST_HALF.index("{")
    first, echo = states[start : start + len(text)].mean(dim=0), states[-len(text) :].mean(dim=0)
    units = [span / span.norm() for span in (first, word, echo)]
    return len(word) ** 0.5 * (len(text) / 128 * units[0] + units[1] + units[2])


def recipe_errors(folder: Path, model: Any, processor: Any) -> dict[str, float | str]:
    """Return each recipe's largest error, alone, in a batch and in one pass over all layers, or its refusal."""
    tower = "text" if tiny_types.joint(model) else None
    part = tiny_types.uncut_of(model, tower)
    errors: dict[str, float | str] = {}
    for recipe in RECIPES:
        try:
            encoder = LayerEncoder(str(folder), 2, recipe=recipe, tower=tower, device="cpu")
            together = encoder.encode_layers(TEXTS, [2])[0]
        except MidlayerError as reason:
            errors[recipe] = str(reason)
            continue
        expected = []
        for text in TEXTS:
            inputs = tiny_types.prepared(processor, "text", SEQUENCES[recipe].format(text=text))
            (states,) = find_stack(part, inputs).layers(inputs)["final"][2]
            expected.append(vector(recipe, text, states))
        alone = np.stack([encoder.encode(text) for text in TEXTS])
        vectors = (alone, encoder.encode(TEXTS), together)
        errors[recipe] = max(tiny_types.error(rows, torch.stack(expected)) for rows in vectors)
    return errors


@pytest.mark.long
@pytest.mark.parametrize("model_type", [*SENSITIVE, *OTHERS])
def test_recipe_of_a_family_is_exact_or_refused(model_type: str, tmp_path: Path) -> None:
    model, _, processor = tiny_types.build(model_type, tmp_path)
    errors = recipe_errors(tmp_path, model, processor)
    assert not [error for error in errors.values() if isinstance(error, float) and error > tiny_types.TOLERANCE]
    if model_type in SENSITIVE:
        assert "need a causal model" in str(errors.pop("word-echo"))
        assert all(isinstance(error, float) for error in errors.values())


@pytest.mark.long
def test_recipe_with_positions_that_depend_on_the_length_is_exact(tmp_path: Path) -> None:
    """Phi 3's longrope: one batch holds sequences on both sides of the original window."""
    _, _, processor = tiny_types.build("phi3", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 100}
    settings["rope_parameters"] = rope | {"short_factor": [1.0] * 4, "long_factor": [1.0, 9.0, 9.0, 9.0]}
    settings["original_max_position_embeddings"] = 100
    (tmp_path / "config.json").write_text(json.dumps(settings))
    lengths = [len(SEQUENCES["word-echo"].format(text=text)) for text in TEXTS]
    assert min(lengths) < 100 < max(lengths)
    errors = recipe_errors(tmp_path, AutoModel.from_pretrained(tmp_path).eval(), processor)
    assert all(isinstance(error, float) and error < tiny_types.TOLERANCE for error in errors.values()), errors
    assert select_layer(str(tmp_path), TEXTS * 5, device="cpu").recipe == "word-echo"


@pytest.mark.parametrize("model_type", ["fnet", "bert"])
def test_encode_text_without_tokens_is_zero_alone_and_in_a_batch(model_type: str, tmp_path: Path) -> None:
    tiny_types.build(model_type, tmp_path)
    encoder = LayerEncoder(str(tmp_path), 2, device="cpu")
    texts = ["ox", "", "seven wizards"]
    for vectors in (encoder.encode(texts), encoder.encode_layers(texts, [2])[0]):
        assert vectors.any(axis=1).tolist() == [True, False, True]
    assert not encoder.encode("").any()


@pytest.mark.slow
def test_recipes_of_every_family_are_exact_or_refused(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {}
    for model_type in tiny_types.registered():
        try:
            model, medium, processor = tiny_types.build(model_type, tmp_path / model_type)
            if medium != "text" or model.config.model_type in tiny_types.PADDED:
                continue
            part = tiny_types.uncut_of(model, "text" if tiny_types.joint(model) else None)
            inputs = tiny_types.prepared(processor, "text", TEXTS[0])
            if inputs["input_ids"].shape[1] != len(TEXTS[0]):
                continue  # transformers' own tokenizer of the type, which removes spaces
            find_stack(part, inputs)
        except (tiny_types.NotBuiltError, NoStackError):
            continue
        except Exception:
            continue  # the uncut model does not run on texts alone
        for recipe, error in recipe_errors(tmp_path / model_type, model, processor).items():
            if isinstance(error, float) and error > tiny_types.TOLERANCE:
                wrong[f"{model_type} {recipe}"] = error
    assert not wrong
