"""Pooling without special tokens, compared with a slow computation for each text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import processors

from midlayer_encoders import LayerEncoder
from midlayer_encoders._types import POOLINGS
from midlayer_encoders.errors import CutError, OptionError
from midlayer_encoders.extras.export import export_for
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.recipes import Recipe, special_ids
from tests.support.families import DEPTH, tiny
from tests.support.others_warnings import MTEB
from tests.support.pooled import pooled
from tests.support.tiny_folders import TEXTS, tokenizer
from tests.sweeping.scoring import QUICK, layer_scores_of, mteb_score, sweep, write_sts_task

pytestmark = MTEB
AROUND = {"BERT": ("[BOS] $A [EOS]", "[BOS] $A [EOS] $B [EOS]"), "Llama": ("[BOS] $A", "[BOS] $A [BOS] $B")}
SPECIAL = {2, 3}  # [EOS] and [BOS]
EXACT = {"atol": 2e-5, "rtol": 1e-4}


def save(name: str, folder: Path) -> str:
    """Write a tiny model whose tokenizer adds special tokens around a text, and return the path."""
    single, pair = AROUND[name]
    characters = tokenizer()
    characters.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("[BOS]", 3), ("[EOS]", 2)]
    )
    if name == "BERT":
        characters.add_special_tokens({"cls_token": "[BOS]", "sep_token": "[EOS]"})
        characters.bos_token = characters.eos_token = None
    tiny(name).save_pretrained(folder)  # type: ignore[operator]
    characters.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=["BERT", "Llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(request.param, tmp_path_factory.mktemp(request.param))


@torch.no_grad()
def by_hand(encoder: LayerEncoder, features: dict[str, Any], pooling: str) -> list[np.ndarray]:
    """Return the vectors of every layer of an uncut encoder, text by text and token by token."""
    model: Any = encoder.transformer
    output = model(**features, output_hidden_states=True)
    states = [*output.hidden_states[:-1], output.last_hidden_state]
    if hasattr(model, "norm"):
        states = [*map(model.norm, states[:-1]), states[-1]]
    vectors = []
    for layer_states in states:
        rows = []
        for tokens, ids, mask in zip(layer_states, features["input_ids"], features["attention_mask"], strict=True):
            kept = [place for place in range(len(ids)) if mask[place] and int(ids[place]) not in SPECIAL]
            rows.append(pooled(tokens[kept], pooling) if kept else torch.zeros(tokens.shape[1]))
        vectors.append(torch.stack(rows).numpy())
    return vectors


@pytest.mark.long
@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_match_a_loop_over_texts_at_every_layer_in_batches(folder: str, pooling: Any) -> None:
    options: Any = {"pooling": f"{pooling}+skip-special", "device": "cpu"}
    encoder = LayerEncoder(folder, -1, **options)
    texts = [*TEXTS, "", "a[BOS]b", "[EOS]"]
    expected = [by_hand(encoder, encoder.host_inputs([text]), pooling) for text in texts]
    layers = np.stack([np.concatenate(rows) for rows in zip(*expected, strict=True)])
    assert not layers[:, [6, 8]].any(), "a text of only special tokens has the zero vector"
    for token_budget in (32, 4096):
        np.testing.assert_allclose(encoder.encode_layers(texts, token_budget=token_budget), layers, **EXACT)
    for layer in (0, 2, DEPTH):
        cut = LayerEncoder(folder, layer, **options)
        for batch_size in (1, 4):
            vectors = cut.encode(texts, batch_size=batch_size)
            np.testing.assert_allclose(vectors, layers[layer], **EXACT)
    plain = LayerEncoder(folder, -1, pooling=pooling, device="cpu").encode(TEXTS)
    assert (pooling == "last" and "Llama" in folder) or not np.allclose(plain, layers[-1][:6], atol=1e-3)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_padding_on_either_side_is_exact(folder: str, pooling: Any) -> None:
    encoder = LayerEncoder(folder, -1, pooling=pooling, skip_special=True, device="cpu")
    for side in ("left", "right"):
        encoder.tokenizer.padding_side = side
        features = dict(encoder.tokenizer(["", *TEXTS], padding=True, return_tensors="pt"))
        expected = by_hand(encoder, features, pooling)
        with torch.no_grad():
            read = layer_reader(encoder).read(features, list(range(7)))
            np.testing.assert_allclose(encoder(dict(features))["sentence_embedding"], expected[-1], **EXACT)
        for vectors, rows in zip(read, expected, strict=True):
            np.testing.assert_allclose(vectors, rows, **EXACT)


def test_pairs_leave_out_the_separator_between_them(folder: str) -> None:
    encoder = LayerEncoder(folder, 2, pooling="weightedmean+skip-special", device="cpu")
    whole = LayerEncoder(folder, -1, pooling="mean+skip-special", device="cpu")
    features = dict(whole.tokenizer([("a text", "another")], return_tensors="pt"))
    expected = by_hand(whole, features, "weightedmean")[2]
    np.testing.assert_allclose(encoder.encode([("a text", "another")]), expected, **EXACT)


@pytest.mark.long
def test_sweep_scores_equal_those_of_cut_encoders(folder: str, tmp_path: Path) -> None:
    path = write_sts_task(tmp_path)
    result = sweep(folder, path, layers=[1, 3], out=tmp_path / "out", pooling="mean+skip-special", **QUICK)
    by_recipe = sweep(folder, path, layers=[1, 3], recipes=["plain+skip-special"], out=tmp_path / "recipes", **QUICK)
    plain = sweep(folder, path, layers=[1, 3], out=tmp_path / "out", **QUICK)
    expected = {
        layer: mteb_score(LayerEncoder(folder, layer, pooling="mean+skip-special", device="cpu"), path)
        for layer in (1, 3)
    }
    assert layer_scores_of(result, path) == pytest.approx(expected, abs=1e-6)
    assert layer_scores_of(by_recipe, path) == pytest.approx(expected, abs=1e-6)
    assert layer_scores_of(plain, path) != pytest.approx(expected, abs=1e-4), "the store kept both apart"


@pytest.mark.parametrize("layer", [0, 2, DEPTH])
def test_states_of_tokens_include_special_ones_and_the_others_pool_to_the_vectors(folder: str, layer: int) -> None:
    encoder = LayerEncoder(folder, layer, pooling="mean+skip-special", device="cpu")
    states = encoder.encode(TEXTS, output_value="token_embeddings")
    pooled_tokens = slice(1, -1 if "BERT" in folder else None)
    assert [len(tokens[pooled_tokens]) for tokens in states] == [len(text) for text in TEXTS]  # a token per character
    means = torch.stack([tokens[pooled_tokens].mean(dim=0) for tokens in states])
    np.testing.assert_allclose(means, encoder.encode(TEXTS), **EXACT)


@pytest.mark.extras
def test_graphs_leave_out_special_tokens(folder: str, tmp_path: Path) -> None:
    for name in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(name, reason="pip install 'midlayer-encoders[onnx]'")
    for pooling in POOLINGS:
        encoder = LayerEncoder(folder, 2, pooling=pooling, skip_special=True, device="cpu")
        assert export_for(encoder, "onnx", tmp_path / pooling).error < 1e-5  # type: ignore[operator]


def test_plain_folders_are_refused(folder: str, tmp_path: Path) -> None:
    encoder = LayerEncoder(folder, 2, pooling="mean+skip-special", device="cpu")
    with pytest.raises(CutError, match=r"a plain folder pools every token.*leave out `skip_first`, `skip_special`"):
        encoder.save_pretrained(str(tmp_path / "plain"))


def test_option_is_part_of_the_spec_and_suffix_equals_flag(folder: str) -> None:
    options: list[Any] = [{}, {"skip_special": True}, {"pooling": "max"}, {"pooling": "max", "skip_special": True}]
    encoders = [LayerEncoder(folder, 1, device="cpu", **each) for each in options]
    assert len({encoder.spec.digest for encoder in encoders}) == len(options)
    suffixed = LayerEncoder(folder, 1, device="cpu", pooling="mean+skip-special")
    assert suffixed.spec == encoders[1].spec
    assert suffixed.spec == LayerEncoder(folder, 1, device="cpu", recipe="plain+skip-special").spec
    assert special_ids(suffixed.tokenizer) == tuple(sorted(SPECIAL))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "maen+skip-special"}, "`pooling` must be one of 'mean'.*Did you mean 'mean'"),
        ({"pooling": "mean+skip"}, "`pooling` must be one of 'mean'"),
        ({"skip_special": 1}, "`skip_special` must be True or False"),
        ({"recipe": "word-echo", "skip_special": True}, "`skip_special` must be False for a template with {read}"),
        ({"recipe": "word-echo+skip-special"}, "`skip_special` must be False for a template with {read}"),
    ],
)
def test_wrong_options_are_refused(folder: str, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LayerEncoder(folder, 1, device="cpu", **options)


def test_module_without_a_tokenizer_is_refused() -> None:
    def to_ids(texts: list[str]) -> dict[str, torch.Tensor]:
        return dict.fromkeys(("input_ids", "attention_mask"), torch.ones(len(texts), 4, dtype=torch.long))

    with pytest.raises(OptionError, match=r"`skip_special` must be False for .*, which has no tokenizer"):
        LayerEncoder.from_module(tiny("Llama"), 2, processor=to_ids, medium="text", skip_special=True)
    assert Recipe(name="own", skip_special=True).non_defaults() == {"skip_special": True}
