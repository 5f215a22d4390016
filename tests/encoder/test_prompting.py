"""Encoders with a recipe: vectors computed by hand from the same tokens, all layers at once, and plain folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import CutError, OptionError
from midlayer_encoders.reading.batches import batches_of
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.recipes import Recipe, middle_directions
from tests.families import DEPTH, tiny
from tests.tiny_folders import TEXTS, tokenizer

Folder = Callable[[str], str]
ASK = 'say "{text}" in one word:"'
TWICE = 'say "{text}" again: "{text}"'
SAMPLE = [f"{text} {number}" for number in range(4) for text in TEXTS]


def states(text: str, layer: int = 2) -> torch.Tensor:
    """Return the states of a text alone after some blocks and the final norm, shape ``(T, D)``."""
    model = tiny("Llama")
    del model.layers[layer:]
    ids = torch.tensor([tokenizer().convert_tokens_to_ids(list(text))])
    with torch.no_grad():
        return model(input_ids=ids).last_hidden_state[0]  # type: ignore[no-any-return]


def last(texts: Sequence[str], template: str, layer: int = 2) -> np.ndarray:
    return torch.stack([states(template.replace("{text}", text), layer)[-1] for text in texts]).numpy()


def means(texts: Sequence[str], template: str, own: bool, skip: int = 0) -> np.ndarray:
    rows = []
    for whole in texts:
        text = whole[: (64 - len(template.replace("{text}", ""))) // template.count("{text}")]  # what fits
        found, end = states(template.replace("{text}", text)), template.rpartition("{text}")[2]
        stop = len(found) - len(end) if own else len(found)
        rows.append(found[max(stop - len(text), skip) if own else skip : stop].mean(0))
    return torch.stack(rows).numpy()


CASES: dict[str, tuple[dict[str, Any], Callable[[], np.ndarray]]] = {
    "the last token after a question": ({"template": ASK, "pooling": "last"}, lambda: last(TEXTS, ASK)),
    "the mean of all": ({"template": ASK}, lambda: means(TEXTS, ASK, own=False)),
    "the mean of the text": ({"template": ASK, "template_tokens": False}, lambda: means(TEXTS, ASK, own=True)),
    "the second copy": ({"template": TWICE, "template_tokens": False}, lambda: means(TEXTS, TWICE, own=True)),
    "without the first tokens": ({"skip_first": 2}, lambda: means(TEXTS, "{text}", own=False, skip=2)),
    "a recipe": ({"recipe": Recipe(name="r", template=ASK, pooling="last")}, lambda: last(TEXTS, ASK)),
    "a recipe and another pooling": (
        {"recipe": Recipe(name="r", template=ASK, pooling="last"), "pooling": "mean"},
        lambda: means(TEXTS, ASK, own=False),
    ),
    "normalized": (
        {"template": ASK, "pooling": "last", "normalize": True},
        lambda: (found := last(TEXTS, ASK)) / np.linalg.norm(found, axis=1, keepdims=True),
    ),
    "centered": (
        {"template": ASK, "pooling": "last", "center": SAMPLE},
        lambda: last(TEXTS, ASK) - last(SAMPLE, ASK).mean(axis=0),
    ),
    "filtered": (
        {"embed_filter": True},
        lambda: (
            means(TEXTS, "{text}", own=False) @ middle_directions(tiny("Llama").embed_tokens.weight.detach()).numpy().T
        ),
    ),
}
EXACT = {"atol": 2e-5, "rtol": 1e-4}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a tiny Llama whose output embeddings are its input embeddings."""
    folder = tmp_path_factory.mktemp("tied")
    model: Any = tiny("Llama")
    model.config.tie_word_embeddings = True
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_computed_by_hand_alone_in_batches_and_after_export(
    name: str, tied: str, tmp_path: Path
) -> None:
    options, expected = CASES[name]
    encoder = LayerEncoder(tied, 2, device="cpu", **options)
    wanted = expected()
    for batch_size in (1, 4):
        np.testing.assert_allclose(encoder.encode(TEXTS, batch_size=batch_size), wanted, **EXACT)
    if encoder.counting.all:
        encoder.save_pretrained(str(tmp_path / "plain"))
        plain = SentenceTransformer(str(tmp_path / "plain"), device="cpu")
        np.testing.assert_allclose(plain.encode(TEXTS, batch_size=3), wanted, **EXACT)
    else:
        with pytest.raises(CutError, match="A plain folder pools every token"):
            encoder.save_pretrained(str(tmp_path / "plain"))


@pytest.mark.parametrize(
    "name", [name for name, (options, _) in CASES.items() if not {"center", "normalize", "embed_filter"} & set(options)]
)
def test_all_layers_from_one_pass_are_those_of_encoders_cut_there(name: str, tied: str) -> None:
    options, _ = CASES[name]
    whole = LayerEncoder(tied, -1, device="cpu", **options)
    found = layer_reader(whole).vectors(TEXTS, batches_of(whole, TEXTS, token_budget=128))
    for layer in (1, DEPTH):
        cut = LayerEncoder(tied, layer, device="cpu", **options)
        np.testing.assert_allclose(found[layer], cut.encode(TEXTS), **EXACT)


def test_queries_and_documents_are_asked_in_their_own_way(tied: str, tmp_path: Path) -> None:
    template = {"query": 'ask "{text}" now:', "document": 'read "{text}" now:', "text": '"{text}" now:'}
    encoder = LayerEncoder(tied, 2, device="cpu", template=template, pooling="last")
    encoder.save_pretrained(str(tmp_path))
    for one in (encoder, SentenceTransformer(str(tmp_path), device="cpu")):
        np.testing.assert_allclose(one.encode_query(TEXTS), last(TEXTS, template["query"]), **EXACT)
        np.testing.assert_allclose(one.encode_document(TEXTS), last(TEXTS, template["document"]), **EXACT)
        np.testing.assert_allclose(one.encode(TEXTS), last(TEXTS, template["text"]), **EXACT)


def test_an_empty_text_is_its_template_and_without_template_tokens_nothing(tied: str) -> None:
    asked = LayerEncoder(tied, 2, device="cpu", template=ASK, pooling="last")
    np.testing.assert_allclose(asked.encode(["", "short"]), last(["", "short"], ASK), **EXACT)
    own = LayerEncoder(tied, 2, device="cpu", template=ASK, template_tokens=False)
    assert not own.encode(["", "short"])[0].any()


def test_lines_that_recreate_an_encoder_name_the_recipe_or_its_fields(tied: str) -> None:
    from midlayer_encoders.encoder.options import python_line, shell_line

    named = LayerEncoder(tied, 2, device="cpu", recipe="one-word", max_length=60).options
    assert python_line("m", 2, named) == "LayerEncoder('m', layer=2, max_length=60, recipe='one-word')"
    own = LayerEncoder(tied, 2, device="cpu", recipe=Recipe(name="r", template=ASK, template_tokens=False)).options
    assert python_line("m", 2, own) == f"LayerEncoder('m', layer=2, template={ASK!r}, template_tokens=False)"
    line = shell_line("m", 2, own, out="o")
    assert line == f"midlayer export m --layer 2 --template '{ASK}' --no-template-tokens --out o"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recipe": "one-wrd"},
            "`recipe` must be a Recipe or one of 'plain', .* but got 'one-wrd'. Did you mean 'one-word'",
        ),
        ({"recipe": 3}, "`recipe` must be a Recipe or one of"),
        ({"template": "no"}, r"`template` must hold \{text\}"),
        ({"template": ASK, "max_length": 9}, r"adds 20 tokens, and .* takes 9"),
        ({"skip_first": -1}, "`skip_first` must be a whole number, 0 or more, but got -1"),
        ({"whiten": True}, "`whiten` must be False without `center`"),
        ({"center": TEXTS}, "`center` must hold 16 texts or more, but got 6"),
        (
            {"template": {"query": "q {text}", "text": "{text}"}, "template_tokens": False},
            "`template_tokens` must not be False if queries and documents have different prefixes",
        ),
        (
            {"template": {"query": "q {text}", "text": "{text}"}, "prompts": {"a": "b"}},
            "`prompts` must be None if the template differs for queries and documents",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused(options: dict[str, Any], message: str, tied: str) -> None:
    with pytest.raises(OptionError, match=message):
        LayerEncoder(tied, 2, device="cpu", **options)


def test_a_recipe_for_another_medium_is_refused(tiny_folder: Folder) -> None:
    with pytest.raises(OptionError, match=r"`recipe` must be left out for .*, which takes no text"):
        LayerEncoder(tiny_folder("ViT"), 2, device="cpu", recipe="one-word")


def test_output_embeddings_of_their_own_are_read_from_the_files(tmp_path: Path) -> None:
    import transformers as tf

    base: Any = tiny("Llama")
    whole = tf.LlamaForCausalLM(base.config)
    whole.model.load_state_dict(base.state_dict())
    whole.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    found = LayerEncoder(str(tmp_path), 2, device="cpu", embed_filter=True).encode(TEXTS)
    wanted = means(TEXTS, "{text}", own=False) @ middle_directions(whole.lm_head.weight.detach()).numpy().T
    np.testing.assert_allclose(found, wanted, **EXACT)


def test_a_model_without_output_embeddings_cannot_be_filtered(tiny_folder: Folder) -> None:
    with pytest.raises(OptionError, match=r"`embed_filter` must be False for .*: its output embeddings are not in"):
        LayerEncoder(tiny_folder("Llama"), 2, device="cpu", embed_filter=True)


def test_encoders_that_share_a_model_each_ask_in_their_own_way(tied: str) -> None:
    whole = LayerEncoder(tied, -1, device="cpu")
    made = {name: whole.with_recipe(name) for name in ("plain", "one-word", "echo", "instruction")}
    for name, encoder in made.items():
        alone = LayerEncoder(tied, -1, device="cpu", recipe=name)
        assert encoder.transformer is whole.transformer
        np.testing.assert_array_equal(encoder.encode(TEXTS), alone.encode(TEXTS))
        np.testing.assert_array_equal(encoder.encode_query(TEXTS), alone.encode_query(TEXTS))
        assert encoder.spec == alone.spec
        assert encoder.model_card_data.base_model_revision == alone.model_card_data.base_model_revision
    np.testing.assert_array_equal(whole.encode(TEXTS), LayerEncoder(tied, -1, device="cpu").encode(TEXTS))
    with pytest.raises(OptionError, match="`recipe` must be for an encoder of files"):
        made["echo"].with_recipe("one-word")


def test_several_layers_are_asked_and_mapped_as_one(tied: str) -> None:
    both = LayerEncoder(tied, [1, 3], device="cpu", template=ASK, pooling="last", center=SAMPLE)
    wanted = (last(TEXTS, ASK, 1) + last(TEXTS, ASK, 3)) / 2 - (last(SAMPLE, ASK, 1) + last(SAMPLE, ASK, 3)).mean(
        axis=0
    ) / 2
    np.testing.assert_allclose(both.encode(TEXTS), wanted, **EXACT)
    wide = LayerEncoder(tied, [1, 3], device="cpu", template=ASK, pooling="last", combine="concat", normalize=True)
    beside = np.concatenate([last(TEXTS, ASK, 1), last(TEXTS, ASK, 3)], axis=1)
    np.testing.assert_allclose(wide.encode(TEXTS), beside / np.linalg.norm(beside, axis=1, keepdims=True), **EXACT)
    with pytest.raises(OptionError, match="`embed_filter` must be False with combine='concat'"):
        LayerEncoder(tied, [1, 3], device="cpu", combine="concat", embed_filter=True)
    with pytest.raises(OptionError, match="`recipe` must be for an encoder of files"):
        both.with_recipe("one-word")


def test_a_recipe_that_centers_wants_texts_and_one_with_a_layer_names_it(tied: str) -> None:
    for recipe in ("one-word+center", Recipe(name="r", template=ASK, center=True)):
        with pytest.raises(OptionError, match="`center` must hold sample texts with the recipe"):
            LayerEncoder(tied, 2, device="cpu", recipe=recipe)
    encoder = LayerEncoder(tied, device="cpu", recipe=Recipe(name="r", template=ASK, pooling="last", layer=3))
    np.testing.assert_allclose(encoder.encode(TEXTS), last(TEXTS, ASK, 3), **EXACT)
    both = LayerEncoder(tied, device="cpu", recipe=Recipe(name="r", layer=(1, 3)))
    assert both.mixture == LayerEncoder(tied, [1, 3], device="cpu").mixture
    chosen = LayerEncoder(tied, "last", device="cpu", recipe="one-word+center", center=SAMPLE)
    np.testing.assert_allclose(chosen.encode(SAMPLE).mean(axis=0), 0, atol=1e-4)
    with pytest.raises(OptionError, match="`layer` must be a number, or several, unless a Recipe names one"):
        LayerEncoder(tied, device="cpu", recipe="one-word")
