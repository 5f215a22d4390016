"""word-echo compared with a slow computation of its definition: tokens, spans, batches, truncation, sweep, export."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    MambaModel,
    OPTConfig,
    OPTModel,
)

from midlayer_encoders import LayerEncoder, _types, select_layer, sweep
from midlayer_encoders.encoder.saving import _SAMPLE, STOCK_TEMPLATE
from midlayer_encoders.encoder.spec import mteb_line
from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.extras.export import export_for
from midlayer_encoders.extras.training import TuneSettings, tune
from midlayer_encoders.reading import pooled_spans
from midlayer_encoders.reading.pooled_spans import PooledSpans, join_spans, split_spans
from midlayer_encoders.recipes import RECIPES, Recipe, check_template
from midlayer_encoders.sweeping.best_layer import export_lines
from tests.cli.calls import run
from tests.recipes.test_template import TOKENIZERS
from tests.support.tiny_folders import save_joint

TEXTS = ["a cat sat on the mat", "the cat", "a", "this sentence means the cat sat on a mat in one word"]
SECOND_HALF = '". The rewritten sentence: "'


@pytest.fixture(scope="module", params=["byte level", "Metaspace, one token before"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_causal(request.param, tmp_path_factory.mktemp("causal"))


@pytest.fixture(scope="module")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_causal("byte level", tmp_path_factory.mktemp("byte-level"))


def save_causal(name: str, path: Path, model: Any = None) -> str:
    """Save a causal model of five blocks with room for the text twice, and return its folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    tokenizer = TOKENIZERS[name]()
    tokenizer.model_max_length = 256
    (model or LlamaModel(config)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def _reference(folder: str, layer: int, texts: list[str]) -> np.ndarray:
    """Return the vectors of a layer by the definition."""
    return np.asarray(_every_reference(folder, texts)[layer])


@torch.no_grad()
def _every_reference(folder: str, texts: list[str]) -> np.ndarray:
    """Return the vectors of every layer, one text at a time, from the hidden states of the uncut model."""
    model = AutoModel.from_pretrained(folder).eval()
    plain = LayerEncoder(folder, -1).tokenizer
    one_word = LayerEncoder(folder, -1, recipe="one-word").tokenizer
    rows = []
    for text in texts:
        first_half = one_word(text)["input_ids"]
        copy = plain(text, add_special_tokens=False)["input_ids"]
        second_half = plain(SECOND_HALF, add_special_tokens=False)["input_ids"] + copy
        ids = torch.tensor([first_half + second_half])
        *states, last = model(ids, output_hidden_states=True).hidden_states
        normed = torch.cat([*map(model.norm, states), last])
        start = next(at for at in range(len(ids[0])) if ids[0, at : at + len(copy)].tolist() == copy)
        spans = (
            min(len(copy) / 128, 1) * _unit(normed[:, start : start + len(copy)].mean(dim=1).numpy()),
            _unit(normed[:, len(first_half) - 1].numpy()),
            _unit(normed[:, ids.shape[1] - len(copy) :].mean(dim=1).numpy()),
        )
        rows.append(np.sqrt(normed.shape[2]) * sum(spans))
    return np.stack(rows, axis=1)


def _unit(vectors: Any) -> Any:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_vectors_equal_the_definition_alone_and_in_a_batch(folder: str) -> None:
    encoder = LayerEncoder(folder, 0.8, recipe="word-echo")
    expected = _reference(folder, 4, TEXTS)
    for batch_size in (1, len(TEXTS)):
        vectors = encoder.encode(TEXTS, batch_size=batch_size)
        assert np.abs(_unit(vectors) - _unit(expected)).max() < 1e-5
        assert np.abs(vectors - expected).max() < 1e-5  # not rescaled


def test_every_layer_of_one_pass_equals_the_definition(folder: str) -> None:
    vectors = LayerEncoder(folder, -1, recipe="word-echo").encode_layers(TEXTS)
    assert len(vectors) == 6
    assert np.abs(vectors - _every_reference(folder, TEXTS)).max() < 1e-5


@pytest.mark.parametrize("recipe", ["word-echo", "echo"])
def test_a_pair_of_texts_is_repeated_as_one_text(folder: str, recipe: str) -> None:
    encoder = LayerEncoder(folder, 3, recipe=recipe)
    plain = LayerEncoder(folder, -1).tokenizer
    copy = [token for text in TEXTS[:2] for token in plain(text, add_special_tokens=False)["input_ids"]]
    ids = encoder.preprocess([tuple(TEXTS[:2])])["input_ids"][0].tolist()
    back = encoder.counting.placed.back
    assert ids[len(ids) - back - len(copy) : len(ids) - back] == copy
    assert len(ids) == encoder.counting.placed.added + 2 * len(copy)
    pair, lonely = encoder.encode([tuple(TEXTS[:2]), ("", TEXTS[0])])
    assert np.abs(lonely - encoder.encode(TEXTS[0])).max() < 1e-5
    assert np.linalg.norm(pair) > 0.1


def test_the_word_span_is_the_vector_of_one_word(folder: str) -> None:
    one_word = LayerEncoder(folder, 3, recipe="one-word").encode(TEXTS)
    assert np.abs(LayerEncoder(folder, 3, recipe="word-echo/word").encode(TEXTS) - one_word).max() < 1e-5


def test_the_code_of_a_folder_knows_the_same_joins() -> None:
    assert pooled_spans.JOINS == _types.JOINS


def test_a_joint_model_refuses_a_mark(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="pools in its own way"):
        LayerEncoder(save_joint("CLIP", tmp_path), -1, template='"{text}":{read}"{text}')


def test_join_spans_by_hand() -> None:
    spans = torch.tensor([[[5.0, 0.0], [3.0, 4.0], [0.0, 2.0]], [[0.0, 0.0], [0.0, 1.0], [0.0, 0.0]]])
    share = torch.tensor([[0.5], [0.0]])
    assert (join_spans(spans, share) / 2**0.5).flatten().tolist() == pytest.approx([1.1, 1.8, 0.0, 1.0])
    assert join_spans(spans, share, "word").tolist() == [[3.0, 4.0], [0.0, 1.0]]
    side_by_side = join_spans(spans, share, "none")
    assert side_by_side[0].tolist() == [5.0, 0.0, 3.0, 4.0, 0.0, 2.0, 0.5]
    assert all(map(torch.equal, split_spans(side_by_side), (spans, share)))


def test_join_spans_with_offsets_leaves_out_empty_and_constant_spans() -> None:
    spans = torch.tensor([[[0.0, 0.0], [3.0, 4.0], [2.0, 3.0]]])
    offsets = torch.tensor([[9.0, 9.0], [-3.0, 1.0], [-2.00001, -3.0]])
    joined = join_spans(spans, torch.ones(1, 1), offsets=offsets)
    assert (joined / 2**0.5).tolist() == [[0.0, 1.0]]


def test_center_subtracts_the_mean_of_each_span(byte_level_folder: str) -> None:
    texts = [f"{text} {n}" for n, text in enumerate(TEXTS * 5)]
    encoder = LayerEncoder(byte_level_folder, 3, recipe="word-echo+center", center=texts)
    apart = LayerEncoder(byte_level_folder, 3, recipe=RECIPES["word-echo"].apart()).encode(texts)
    spans, share = split_spans(torch.from_numpy(apart).double())
    text, word, echo = torch.nn.functional.normalize(spans - spans.mean(dim=0), dim=-1).unbind(dim=1)
    expected = (share * text + word + echo) * spans.shape[-1] ** 0.5
    np.testing.assert_allclose(encoder.encode(texts), expected, atol=1e-4)
    assert LayerEncoder(byte_level_folder, 3, recipe="word-echo").spec.digest != encoder.spec.digest


def test_centered_folder_gives_the_same_vectors_elsewhere(byte_level_folder: str, tmp_path: Path) -> None:
    texts = [f"{text} {n}" for n, text in enumerate(TEXTS * 5)]
    encoder = LayerEncoder(byte_level_folder, 3, recipe="word-echo+center", center=texts, device="cpu")
    encoder.save_pretrained(str(tmp_path))
    plain = SentenceTransformer(str(tmp_path), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(plain.encode(TEXTS), encoder.encode(TEXTS), atol=1e-5)
    again = LayerEncoder(str(tmp_path), -1, trust_remote_code=True)
    np.testing.assert_allclose(again.encode(TEXTS), encoder.encode(TEXTS), atol=1e-5)
    with pytest.raises(OptionError, match="`recipe` does not apply to a folder that contains its template already"):
        LayerEncoder(str(tmp_path), -1, recipe="word-echo", trust_remote_code=True)
    with pytest.raises(OptionError, match="centered for it"):
        LayerEncoder(str(tmp_path), 2, trust_remote_code=True)
    with pytest.raises(
        OptionError, match=r"offset of its spans\. Create it from the original model with recipe='word-echo'"
    ):
        again.encode_layers(TEXTS)


def test_places_are_the_same_under_both_padding_sides() -> None:
    spans = PooledSpans(4, front=2, question=3, between=1, back=1)
    right = torch.tensor([[1] * 13, [1] * 9 + [0] * 4, [1] * 7 + [0] * 6])
    left = right.flip(1)
    for mask in (right, left):
        for row, copy in zip(range(3), (3, 1, 0), strict=True):
            text, word, echo = (found[row][mask[row].bool()].int().tolist() for found in spans.masks(mask))
            length = 7 + 2 * copy
            assert text == [int(2 <= n < 2 + copy) for n in range(length)]
            assert word == [int(n == 2 + copy + 2) for n in range(length)]
            assert echo == [int(6 + copy <= n < 6 + 2 * copy) for n in range(length)]
    assert not spans.masks(right)[1][1, 9:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_long_text_does_not_overflow_in_half_precision(dtype: torch.dtype) -> None:
    spans = PooledSpans(2, front=1, question=1, between=1, join="echo")
    features = {"token_embeddings": torch.full((1, 4003, 2), 96.0, dtype=dtype), "attention_mask": torch.ones(1, 4003)}
    vector = spans(features)["sentence_embedding"]
    assert vector.dtype == dtype
    assert vector.tolist() == [[96.0, 96.0]], "the sum of 2,000 tokens is beyond 65,504"


def test_truncation_shortens_both_copies_alike(byte_level_folder: str) -> None:
    long = "cat sat on the mat " * 200
    encoder = LayerEncoder(byte_level_folder, 2, recipe="word-echo")
    plain = LayerEncoder(byte_level_folder, 2).tokenizer
    spans = encoder.spans
    assert spans is not None
    ids = encoder.preprocess([long])["input_ids"][0].tolist()
    added = encoder.counting.placed.added
    copy = (256 - added) // 2
    assert len(ids) == added + 2 * copy
    text = plain(long, add_special_tokens=False, verbose=False)["input_ids"][:copy]
    assert ids[spans.front : spans.front + copy] == text == ids[len(ids) - copy :]
    short = LayerEncoder(byte_level_folder, 2, recipe="word-echo").encode([plain.decode(text)])
    assert np.abs(encoder.encode([long]) - short).max() < 1e-5


@pytest.mark.parametrize("recipe", ["one-word", "echo", "word-echo"])
def test_max_length_counts_the_text_without_the_template(byte_level_folder: str, recipe: str) -> None:
    long = "cat sat on the mat " * 200
    plain = LayerEncoder(byte_level_folder, 2, max_length=12)
    special = plain.tokenizer.num_special_tokens_to_add()
    kept = plain.tokenizer(long, add_special_tokens=False)["input_ids"][: 12 - special]
    assert plain.preprocess([long])["input_ids"].shape[1] == 12
    encoder = LayerEncoder(byte_level_folder, 2, recipe=recipe, max_length=12)
    ids = encoder.preprocess([long])["input_ids"][0].tolist()
    placed = encoder.counting.placed
    assert ids[placed.front : placed.front + len(kept)] == kept
    assert (
        len(ids) == placed.added + placed.copies * len(kept) == encoder.max_seq_length + (placed.copies - 1) * len(kept)
    )


def test_max_length_beyond_the_model_shortens_each_copy_alike(byte_level_folder: str) -> None:
    longest = LayerEncoder(byte_level_folder, 2, recipe="word-echo")
    limited = LayerEncoder(byte_level_folder, 2, recipe="word-echo", max_length=256)
    assert limited.max_seq_length == longest.max_seq_length


def test_a_tokenizer_without_a_limit_reads_all_layers(tmp_path: Path) -> None:
    folder = save_causal(
        "byte level", tmp_path, MambaModel(MambaConfig(vocab_size=512, hidden_size=32, num_hidden_layers=3))
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 10**30
    tokenizer.save_pretrained(folder)
    for recipe in ("plain", "word-echo"):
        encoder = LayerEncoder(folder, -1, recipe=recipe)
        np.testing.assert_allclose(encoder.encode_layers(TEXTS)[-1], encoder.encode(TEXTS), atol=1e-4)
    assert select_layer(folder, TEXTS).tokens["plain"] > 1


def test_an_empty_text_has_its_word_span_and_warns_once(
    byte_level_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = LayerEncoder(byte_level_folder, 3, recipe="word-echo")
    vectors = encoder.encode(["", "a cat"])
    encoder.encode([""])
    word = LayerEncoder(byte_level_folder, 3, recipe="one-word").encode([""])
    assert np.abs(_unit(vectors[:1]) - _unit(word)).max() < 1e-5
    assert sum("has no copies" in record.message for record in caplog.records) == 1


def test_models_whose_tokens_see_later_ones_are_refused(byte_level_folder: str, tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256,
    )  # fmt: skip
    bert = save_causal("byte level", tmp_path, BertModel(config))
    for model, options in ((bert, {}), (byte_level_folder, {"bidirectional": True})):
        with pytest.raises(OptionError, match="need a causal model"):
            LayerEncoder(model, -1, recipe="word-echo", **options)
    with pytest.raises(OptionError, match="need a causal model"):
        LayerEncoder(bert, -1).with_recipe("word-echo")


@pytest.mark.parametrize(
    "template",
    [
        '"{text}" means:"{read}',
        '{read}"{text}" "{text}"',
        '"{text}{read}" "{text}"',
        '"{text}" a {read} b {read} "{text}',
    ],
)
def test_a_mark_in_the_wrong_place_is_refused(template: str) -> None:
    with pytest.raises(OptionError, match="at most once, between two copies"):
        check_template("template", template)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"template": '"{text}" means:"', "join": "sum"}, "`join` applies only to a template"),
        ({"template": '"{text}" means:"{read} "{text}', "pooling": "max"}, "`pooling` must be 'mean'"),
        ({"template": '"{text}" means:"{read} "{text}', "skip_first": 1}, "`skip_first` must be 0"),
        ({"template": '"{text}" means:"{read} "{text}', "join": "product"}, "`join` must be"),
    ],
)
def test_options_that_do_not_match_marked_templates_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Recipe(name="mine", **fields)


def test_unknown_spans_are_refused(byte_level_folder: str) -> None:
    for name in ("word-echo/3", "one-word/word"):
        with pytest.raises(OptionError, match=r"'word-echo/text', 'word-echo/word', 'word-echo/echo'"):
            LayerEncoder(byte_level_folder, 1, recipe=name)


@pytest.mark.long
def test_a_sweep_of_spans_makes_one_pass(byte_level_folder: str, tmp_path: Path) -> None:
    rows = [f"{text} {n},{n % 2}" for n, text in enumerate(TEXTS * 4)]
    data = tmp_path / "data.csv"
    data.write_text("\n".join(["text,label", *rows]))
    embedded: dict[str, int] = {}

    def progress(stage: str, _: int, total: int) -> None:
        embedded[stage] = total

    names = ["word-echo", "one-word", "word-echo+center", "word-echo/word", "word-echo/echo"]
    options: Any = {"layers": [0, 2, 4], "baselines": False, "progress": progress}
    result = sweep(byte_level_folder, data, recipes=names, out=tmp_path / "out", **options)
    assert embedded["embedding"] == 2 * len(rows)  # one pass for word-echo and its spans, one for one-word
    frame = result.frame.filter(kind="score")
    found = frame["recipe"].unique().to_list()
    assert set(found) == set(names)
    scores = {name: frame.filter(recipe=name).sort("layer")["value"].to_list() for name in found}
    assert scores["word-echo/word"] == pytest.approx(scores["one-word"], abs=1e-6)
    assert result.parts
    for name in ("word-echo", "word-echo/echo"):
        line = export_lines(result.parts[name].notes, 4)["Python"]
        assert line.startswith(f"LayerEncoder({byte_level_folder!r}, layer=4, recipe={name!r})")


@pytest.mark.long
def test_sweep_of_a_normalized_encoder_joins_before_it_scales(byte_level_folder: str, tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_text("\n".join(["text,label", *(f"{text} {n},{n % 2}" for n, text in enumerate(TEXTS * 6))]))
    encoder = LayerEncoder(byte_level_folder, -1, normalize=True)
    apart = encoder.with_recipe(RECIPES["word-echo"].apart())
    assert np.linalg.norm(apart.encode("a cat")) > 1.01, "spans side by side are not scaled"
    results = [
        sweep(model, data, recipes=recipes, layers=[3], baselines=False, out=tmp_path / out).frame.filter(kind="score")
        for model, recipes, out in (
            (encoder, ["word-echo", "word-echo+center"], "own"),
            (byte_level_folder, ["word-echo+normalize", "word-echo+center+normalize"], "suffix"),
        )
    ]
    own, by_suffix = (frame["value"].to_list() for frame in results)
    assert own == pytest.approx(by_suffix, abs=1e-6)


def test_the_folder_loads_and_is_saved_again_without_this_package(
    byte_level_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = LayerEncoder(byte_level_folder, 3, recipe="word-echo", normalize=True)
    folder = tmp_path / "exported"
    encoder.save_pretrained(str(folder))
    expected = encoder.encode(TEXTS)
    monkeypatch.setitem(sys.modules, "midlayer_encoders", None)
    copied = folder
    for name in ("again", "and again"):
        SentenceTransformer(str(copied), device="cpu", trust_remote_code=True).save_pretrained(str(tmp_path / name))
        copied = tmp_path / name
    plain = SentenceTransformer(str(copied), device="cpu", trust_remote_code=True)
    assert type(plain[-2]).__module__.startswith("transformers_modules")
    assert np.abs(plain.encode(TEXTS) - expected).max() < 1e-5
    assert "trust_remote_code=True)" in (folder / "README.md").read_text()


@pytest.mark.long
def test_the_layers_of_a_folder_can_be_read_and_selected(byte_level_folder: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "exported")
    LayerEncoder(byte_level_folder, 4, recipe="word-echo").save_pretrained(folder)
    reloaded = LayerEncoder(folder, -1, trust_remote_code=True)
    layers = LayerEncoder(byte_level_folder, 4, recipe="word-echo").encode_layers(TEXTS)
    np.testing.assert_allclose(reloaded.encode_layers(TEXTS), layers, atol=1e-6)
    np.testing.assert_allclose(LayerEncoder(folder, 2, trust_remote_code=True).encode(TEXTS), layers[2], atol=1e-6)
    reloaded.save_pretrained(str(tmp_path / "again"))
    again = SentenceTransformer(str(tmp_path / "again"), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(again.encode(TEXTS), layers[4], atol=1e-6)
    selection = select_layer(folder, TEXTS, trust_remote_code=True)
    assert selection.keywords == {"layer": 4}
    assert selection.kind is not None
    assert selection.kind.evidence == "its folder has modules of sentence-transformers"
    wrong: list[dict[str, Any]] = [{"pooling": "last"}, {"skip_first": 1}, {"skip_special": True}]
    for options in wrong:
        with pytest.raises(OptionError, match=r"does not apply to .*, whose folder pools spans"):
            LayerEncoder(folder, -1, trust_remote_code=True, **options)


@pytest.mark.long
def test_tuning_continues_from_its_folder(byte_level_folder: str, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.csv"
    pairs.write_text(
        "\n".join(["anchor,positive", *(f"{text} {n},{text} again {n}" for n, text in enumerate(TEXTS * 4))])
    )
    arguments: dict[str, Any] = {
        "pairs": pairs, "recipe": "word-echo", "out": tmp_path / "tuned", "tasks": (),
        "settings": TuneSettings(epochs=1, batch_size=4),
    }  # fmt: skip
    first = tune(byte_level_folder, 2, **arguments).encoder.encode(TEXTS)
    again = tune(byte_level_folder, 2, **arguments).encoder.encode(TEXTS)
    assert np.abs(first - LayerEncoder(byte_level_folder, 2, recipe="word-echo").encode(TEXTS)).max() > 1e-4
    assert np.abs(first - again).max() < 1e-6


@pytest.mark.long
def test_stock_folder_needs_no_code_and_adds_both_spans(
    byte_level_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = LayerEncoder(byte_level_folder, 4, recipe="word-echo+normalize", device="cpu")
    encoder.save_pretrained(str(tmp_path / "stock"), stock=True)
    assert "The folder contains no code" in caplog.text
    assert not list((tmp_path / "stock").glob("**/*.py"))
    card = (tmp_path / "stock" / "README.md").read_text(encoding="utf8")
    assert mteb_line(encoder.spec, stock=True) in card
    assert f"{encoder.model_card_data.base_model_revision}-stock'" in card, "mteb must not mix up both folders"
    assert "similar but not equal" in card
    assert "| pooling | `weightedmean+last`, added by a Dense |" in card
    assert f"| template | `{STOCK_TEMPLATE}` |" in card
    assert "trust_remote_code" not in card
    loaded = SentenceTransformer(str(tmp_path / "stock"), device="cpu")
    vectors = loaded.encode(TEXTS)
    assert vectors.shape == (4, 32)
    parts = [
        LayerEncoder(byte_level_folder, 4, template=STOCK_TEMPLATE, pooling=pooling, device="cpu")
        for pooling in ("weightedmean", "last")
    ]
    lengths = [np.linalg.norm(part.encode(list(_SAMPLE)), axis=1).mean() for part in parts]
    expected = sum(part.encode(TEXTS) / length for part, length in zip(parts, lengths, strict=True))
    np.testing.assert_allclose(vectors, _unit(expected), atol=1e-6)
    np.testing.assert_allclose(loaded.encode(TEXTS, batch_size=1), vectors, atol=1e-6)
    sample = [f"{text} {number}" for number in range(4) for text in TEXTS]
    centered = LayerEncoder(byte_level_folder, 4, recipe="word-echo+center", center=sample, device="cpu")
    centered.save_pretrained(str(tmp_path / "centered"), stock=True)
    vectors = SentenceTransformer(str(tmp_path / "centered"), device="cpu").encode(TEXTS)
    means = [part.encode(sample).mean(axis=0) for part in parts]
    lengths = [
        np.linalg.norm(part.encode(sample) - mean, axis=1).mean() for part, mean in zip(parts, means, strict=True)
    ]
    expected = sum(
        (part.encode(TEXTS) - mean) / length for part, mean, length in zip(parts, means, lengths, strict=True)
    )
    np.testing.assert_allclose(vectors, 32**0.5 * expected, atol=1e-4)
    assert loaded.tokenizer("a" * 999, truncation=True)["input_ids"][-4:] == loaded.tokenizer("a")["input_ids"][-4:]


@pytest.mark.parametrize("stock", [False, True])
def test_folders_of_a_model_that_projects_its_states(stock: bool, tmp_path: Path) -> None:
    """OPT-350m projects its states to half of ``hidden_size``, which sentence-transformers takes for the dimension."""
    config = OPTConfig(
        vocab_size=512, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, word_embed_proj_dim=16, do_layer_norm_before=False,
    )  # fmt: skip
    folder = save_causal("byte level", tmp_path / "model", OPTModel(config))
    LayerEncoder(folder, 1, recipe="word-echo").save_pretrained(str(tmp_path / "out"), stock=stock)
    loaded = SentenceTransformer(str(tmp_path / "out"), device="cpu", trust_remote_code=not stock)
    assert loaded.encode(TEXTS).shape == (len(TEXTS), loaded.get_embedding_dimension()) == (4, 16)


def test_stock_folder_is_for_word_echo_alone(
    byte_level_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one_word = LayerEncoder(byte_level_folder, 2, recipe="one-word", device="cpu")
    with pytest.raises(OptionError, match="`stock` must be False except for an encoder with recipe='word-echo'"):
        one_word.save_pretrained(str(tmp_path / "no"), stock=True)
    centered = LayerEncoder(
        byte_level_folder, 2, recipe="word-echo+center", center=tuple("abcdefghijklmnop"), device="cpu"
    )
    centered.save_pretrained(str(tmp_path / "centered"))
    centered = LayerEncoder(str(tmp_path / "centered"), -1, trust_remote_code=True, device="cpu")
    with pytest.raises(OptionError, match="Create the stock folder from the original model"):
        centered.save_pretrained(str(tmp_path / "no"), stock=True)
    caplog.clear()
    with pytest.raises(OptionError, match="`stock` cannot be combined with target='onnx'"):
        export_for(one_word, "onnx", tmp_path / "no", stock=True)
    assert not (tmp_path / "no").exists()
    centered.save_pretrained(str(tmp_path / "yes"))
    assert "trust_remote_code=True." in caplog.text
    assert "stock=True" not in caplog.text, "the advice must work"
    LayerEncoder(byte_level_folder, 2, recipe="word-echo").save_pretrained(str(tmp_path / "yes"))
    assert "A folder without code, at the cost of points: save_pretrained(path, stock=True)" in caplog.text


def test_command_says_that_the_stock_folder_is_another_encoder(byte_level_folder: str, tmp_path: Path) -> None:
    line = ["export", byte_level_folder, "--layer", "2", "--recipe", "word-echo", "--device", "cpu"]
    stock = run(*line, "--stock", "--out", str(tmp_path / "stock"))
    assert "another encoder than this one" in " ".join(stock.split())
    assert f'SentenceTransformer("{tmp_path / "stock"}")' in stock
    exact = run(*line, "--out", str(tmp_path / "exact"))
    assert "another encoder" not in exact
    assert f'SentenceTransformer("{tmp_path / "exact"}", trust_remote_code=True)' in exact


@pytest.mark.parametrize("target", ["vllm", "gguf"])
def test_engines_that_read_one_place_are_refused(byte_level_folder: str, tmp_path: Path, target: Any) -> None:
    encoder = LayerEncoder(byte_level_folder, 2, recipe="word-echo", device="cpu")
    with pytest.raises(MidlayerError, match="pools one span of a sequence, and this encoder three: export it for sent"):
        export_for(encoder, target, tmp_path / "no")


def test_echo_with_a_weighted_mean_needs_no_code(byte_level_folder: str, tmp_path: Path) -> None:
    encoder = LayerEncoder(byte_level_folder, 3, recipe="echo+weightedmean", device="cpu")
    whole = LayerEncoder(byte_level_folder, 3, template=RECIPES["echo"].template, pooling="weightedmean", device="cpu")
    np.testing.assert_array_equal(encoder.encode(TEXTS), whole.encode(TEXTS))
    encoder.save_pretrained(str(tmp_path))
    np.testing.assert_array_equal(SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS), whole.encode(TEXTS))
