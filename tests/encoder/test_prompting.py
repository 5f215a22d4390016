"""Encoders with a recipe: vectors computed by hand from the same tokens, all layers at once, and plain folders."""

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
from midlayer_encoders.recipes import Recipe
from tests.support.families import DEPTH, tiny
from tests.support.tiny_folders import TEXTS, Folder, tokenizer

ASK = 'say "{text}" in one word:"'
TWICE = 'say "{text}" again: "{text}"'
SAMPLE = [f"{text} {number}" for number in range(4) for text in TEXTS]


def states_by_hand(text: str, layer: int = 2) -> torch.Tensor:
    """Return the states of a text alone after `layer` blocks and the final norm, shape ``(T, D)``."""
    model = tiny("Llama")
    del model.layers[layer:]
    ids = torch.tensor([tokenizer().convert_tokens_to_ids(list(text))])
    with torch.no_grad():
        return model(input_ids=ids).last_hidden_state[0]  # type: ignore[no-any-return]


def last_states(texts: Sequence[str], template: str, layer: int = 2) -> np.ndarray:
    return torch.stack([states_by_hand(template.replace("{text}", text), layer)[-1] for text in texts]).numpy()


def mean_states(texts: Sequence[str], template: str, text_only: bool, skip: int = 0) -> np.ndarray:
    rows = []
    for full_text in texts:
        text = full_text[: (64 - len(template.replace("{text}", ""))) // template.count("{text}")]  # what fits
        states, end = states_by_hand(template.replace("{text}", text)), template.rpartition("{text}")[2]
        stop = len(states) - len(end) if text_only else len(states)
        rows.append(states[max(stop - len(text), skip) if text_only else skip : stop].mean(0))
    return torch.stack(rows).numpy()


CASES: dict[str, tuple[dict[str, Any], Callable[[], np.ndarray]]] = {
    "the last token after a template": ({"template": ASK, "pooling": "last"}, lambda: last_states(TEXTS, ASK)),
    "the mean of all": ({"template": ASK}, lambda: mean_states(TEXTS, ASK, text_only=False)),
    "the mean of the text": (
        {"template": ASK, "template_tokens": False},
        lambda: mean_states(TEXTS, ASK, text_only=True),
    ),
    "the second copy": (
        {"template": TWICE, "template_tokens": False},
        lambda: mean_states(TEXTS, TWICE, text_only=True),
    ),
    "without the first tokens": ({"skip_first": 2}, lambda: mean_states(TEXTS, "{text}", text_only=False, skip=2)),
    "a recipe": ({"recipe": Recipe(name="r", template=ASK, pooling="last")}, lambda: last_states(TEXTS, ASK)),
    "a recipe and another pooling": (
        {"recipe": Recipe(name="r", template=ASK, pooling="last"), "pooling": "mean"},
        lambda: mean_states(TEXTS, ASK, text_only=False),
    ),
    "normalized": (
        {"template": ASK, "pooling": "last", "normalize": True},
        lambda: (vectors := last_states(TEXTS, ASK)) / np.linalg.norm(vectors, axis=1, keepdims=True),
    ),
    "centered": (
        {"template": ASK, "pooling": "last", "center": SAMPLE},
        lambda: last_states(TEXTS, ASK) - last_states(SAMPLE, ASK).mean(axis=0),
    ),
}
EXACT = {"atol": 2e-5, "rtol": 1e-4}


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a tiny Llama whose output embeddings are its input embeddings."""
    folder = tmp_path_factory.mktemp("tied")
    model: Any = tiny("Llama")
    model.config.tie_word_embeddings = True
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", CASES)
def test_vectors_match_those_computed_by_hand_in_batches_and_after_export(
    name: str, tied_folder: str, tmp_path: Path
) -> None:
    options, compute_expected = CASES[name]
    encoder = LayerEncoder(tied_folder, 2, device="cpu", **options)
    expected = compute_expected()
    for batch_size in (1, 4):
        np.testing.assert_allclose(encoder.encode(TEXTS, batch_size=batch_size), expected, **EXACT)
    if encoder.counting.all:
        encoder.save_pretrained(str(tmp_path / "plain"))
        plain = SentenceTransformer(str(tmp_path / "plain"), device="cpu")
        np.testing.assert_allclose(plain.encode(TEXTS, batch_size=3), expected, **EXACT)
    else:
        with pytest.raises(CutError, match="a plain folder pools every token"):
            encoder.save_pretrained(str(tmp_path / "plain"))


@pytest.mark.parametrize(
    "name", [name for name, (options, _) in CASES.items() if not {"center", "normalize"} & set(options)]
)
def test_all_layers_from_one_pass_match_cut_encoders(name: str, tied_folder: str) -> None:
    options, _ = CASES[name]
    encoder = LayerEncoder(tied_folder, -1, device="cpu", **options)
    vectors = layer_reader(encoder).vectors(TEXTS, batches_of(encoder, TEXTS, token_budget=128))
    for layer in (1, DEPTH):
        cut = LayerEncoder(tied_folder, layer, device="cpu", **options)
        np.testing.assert_allclose(vectors[layer], cut.encode(TEXTS), **EXACT)


@pytest.mark.long
def test_queries_and_documents_have_their_own_templates(tied_folder: str, tmp_path: Path) -> None:
    template = {"query": 'ask "{text}" now:', "document": 'read "{text}" now:', "text": '"{text}" now:'}
    encoder = LayerEncoder(tied_folder, 2, device="cpu", template=template, pooling="last")
    encoder.save_pretrained(str(tmp_path))
    for model in (encoder, SentenceTransformer(str(tmp_path), device="cpu")):
        np.testing.assert_allclose(model.encode_query(TEXTS), last_states(TEXTS, template["query"]), **EXACT)
        np.testing.assert_allclose(model.encode_document(TEXTS), last_states(TEXTS, template["document"]), **EXACT)
        np.testing.assert_allclose(model.encode(TEXTS), last_states(TEXTS, template["text"]), **EXACT)


def test_empty_text_is_its_template_or_zero_without_template_tokens(tied_folder: str) -> None:
    with_template = LayerEncoder(tied_folder, 2, device="cpu", template=ASK, pooling="last")
    np.testing.assert_allclose(with_template.encode(["", "short"]), last_states(["", "short"], ASK), **EXACT)
    text_only = LayerEncoder(tied_folder, 2, device="cpu", template=ASK, template_tokens=False)
    assert not text_only.encode(["", "short"])[0].any()


def test_printed_code_names_the_recipe_or_its_fields(tied_folder: str) -> None:
    from midlayer_encoders.encoder.options import python_line, shell_line

    named_options = LayerEncoder(tied_folder, 2, device="cpu", recipe="one-word", max_length=60).options
    assert python_line("m", 2, named_options) == "LayerEncoder('m', layer=2, max_length=60, recipe='one-word')"
    custom_options = LayerEncoder(
        tied_folder, 2, device="cpu", recipe=Recipe(name="r", template=ASK, template_tokens=False)
    ).options
    assert python_line("m", 2, custom_options) == f"LayerEncoder('m', layer=2, template={ASK!r}, template_tokens=False)"
    line = shell_line("m", 2, custom_options, out="o")
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
        ({"template": "very " * 999 + ASK}, r"adds \d{4} tokens, and .* takes \d+\. Write a shorter template"),
        ({"skip_first": -1}, "`skip_first` must be a whole number, 0 or more, but got -1"),
        ({"center": TEXTS}, "`center` must hold 16 different texts or more, but got 6"),
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
def test_invalid_recipes_are_refused(options: dict[str, Any], message: str, tied_folder: str) -> None:
    with pytest.raises(OptionError, match=message):
        LayerEncoder(tied_folder, 2, device="cpu", **options)


def test_recipe_for_another_medium_is_refused(tiny_folder: Folder) -> None:
    with pytest.raises(OptionError, match=r"`recipe` does not apply to .*, which takes no text"):
        LayerEncoder(tiny_folder("ViT"), 2, device="cpu", recipe="one-word")


def test_output_embeddings_are_tied_or_read_from_the_files(
    tied_folder: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    import transformers as tf

    causal_model = tf.LlamaForCausalLM(tiny("Llama").config)
    causal_model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    untied = LayerEncoder(str(tmp_path), 2, device="cpu").output_embeddings()
    assert torch.equal(untied, causal_model.lm_head.weight)
    tied = LayerEncoder(tied_folder, 2, device="cpu")
    assert torch.equal(tied.output_embeddings(), tied.transformer.embed_tokens.weight)  # type: ignore[union-attr, arg-type]
    with pytest.raises(OptionError, match=r"`objective` must be 'pairs' for .*: its output embeddings are not in"):
        LayerEncoder(tiny_folder("Llama"), 2, device="cpu").output_embeddings()


def test_encoders_that_share_a_model_keep_their_own_recipes(tied_folder: str) -> None:
    base_encoder = LayerEncoder(tied_folder, -1, device="cpu")
    queries = Recipe(name="queries", template={"query": "ask {text}", "text": "{text}"}, pooling="last")
    encoders = {recipe: base_encoder.with_recipe(recipe) for recipe in ("plain", "one-word", "echo", queries)}
    for recipe, encoder in encoders.items():
        separate = LayerEncoder(tied_folder, -1, device="cpu", recipe=recipe)
        assert encoder.transformer is base_encoder.transformer
        np.testing.assert_array_equal(encoder.encode(TEXTS), separate.encode(TEXTS))
        np.testing.assert_array_equal(encoder.encode_query(TEXTS), separate.encode_query(TEXTS))
        assert encoder.spec == separate.spec
        assert encoder.model_card_data.base_model_revision == separate.model_card_data.base_model_revision
    np.testing.assert_array_equal(base_encoder.encode(TEXTS), LayerEncoder(tied_folder, -1, device="cpu").encode(TEXTS))
    with pytest.raises(OptionError, match="`recipe` must be for files with layer=-1"):
        encoders["echo"].with_recipe("one-word")


def test_with_recipe_change_in_memory_before_still_shows(tied_folder: str) -> None:
    encoder = LayerEncoder(tied_folder, -1, device="cpu")
    unchanged = encoder.with_recipe("one-word").spec
    hook = encoder[0].model.layers[0].register_forward_hook(lambda _, __, states: states)
    assert encoder.with_recipe("one-word").spec != unchanged
    hook.remove()
    assert encoder.with_recipe("one-word").spec == unchanged


def test_centering_recipe_needs_texts_and_recipe_layer_is_used(tied_folder: str) -> None:
    for recipe in ("one-word+center", Recipe(name="r", template=ASK, center=True)):
        with pytest.raises(OptionError, match="`center` must hold sample texts with the recipe"):
            LayerEncoder(tied_folder, 2, device="cpu", recipe=recipe)
    with pytest.raises(OptionError, match=r"Pass them \(center=texts, or --center FILE\)"):
        LayerEncoder(tied_folder, "auto", device="cpu", recipe="one-word+center", texts=SAMPLE)
    chosen = LayerEncoder(tied_folder, "auto", device="cpu", recipe="one-word+center", texts=SAMPLE, center=SAMPLE)
    np.testing.assert_allclose(chosen.encode(SAMPLE).mean(axis=0), 0, atol=1e-4)
    encoder = LayerEncoder(tied_folder, device="cpu", recipe=Recipe(name="r", template=ASK, pooling="last", layer=3))
    np.testing.assert_allclose(encoder.encode(TEXTS), last_states(TEXTS, ASK, 3), **EXACT)
    centered = LayerEncoder(tied_folder, "last", device="cpu", recipe="one-word+center", center=SAMPLE)
    np.testing.assert_allclose(centered.encode(SAMPLE).mean(axis=0), 0, atol=1e-4)
    with pytest.raises(OptionError, match="`layer` must be a number, or 'auto', unless a Recipe names one"):
        LayerEncoder(tied_folder, device="cpu", recipe="one-word")


def test_number_of_skipped_tokens_is_part_of_the_spec(tiny_folder: Folder) -> None:
    template = {"template": "say {text}"}
    options: list[Any] = [{}, {"skip_first": 1}, {"skip_first": 2}, template, {**template, "skip_first": 1}]
    digests = {LayerEncoder(tiny_folder("Llama"), 1, device="cpu", **each).spec.digest for each in options}
    assert len(digests) == len(options), "the second sweep would read the vectors of the first"
