"""Which kind of model is it: its files and its attention decide."""

import json
from itertools import cycle, islice, product
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SparseEncoder
from transformers import (
    BartConfig,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    T5Config,
)

from midlayer_encoders import LayerEncoder, select_layer
from midlayer_encoders.extras.export import export_for
from midlayer_encoders.selection import select
from midlayer_encoders.selection.kind import detect_kind
from tests.export.tiny_bpe import save_bpe
from tests.recipes.test_word_echo import TOKENIZERS, save_causal
from tests.support.tiny_folders import Folder, tokenizer

SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
PARTS = {
    "sentences": ("A man|Two dogs|The old train|My aunt", "plays|crosses|finds|leaves", "a field|the river|her song"),
    "reviews": ("Great|Awful|Decent", "phone case|blender|novel", "broke in a week|works as said|five stars from me"),
    "subject lines": ("Re: |Fwd: |", "modem speed|gun laws|space probe|used car", " question| FAQ| for sale| help"),
    "questions": ("How do I|Why can't I|When will you", "cancel|verify|top up|freeze", "my card?|the app?|a transfer?"),
    "docstrings": ("Return the|Raise if a|Yield each", "row|key|shape|mean", "of a table.|from a file.|in order."),
}


def collection(name: str, count: int) -> list[str]:
    """Return different texts of a kind, each after a made-up name."""
    phrases = cycle(" ".join(words) for words in product(*(part.split("|") for part in PARTS[name])))
    letters = Random(0)
    return [f"{''.join(letters.choices(ascii_lowercase, k=24))} {phrase}" for phrase in islice(phrases, count)]


def mixing_last(kind: type[Any]) -> Any:
    """Return a causal model whose last block alone mixes tokens, so that half match is by far highest at its end."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    model = kind(config)
    with torch.no_grad():
        for number, block in enumerate(getattr(model, "model", model).layers):
            block.self_attn.o_proj.weight.mul_(60 if number == 5 else 0)
            block.self_attn.q_proj.weight.zero_()  # attends to all tokens alike
    return model.eval()


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> LayerEncoder:
    folder = save_causal("byte level", tmp_path_factory.mktemp("head"), mixing_last(LlamaForCausalLM))
    return LayerEncoder(folder, -1, device="cpu")


@pytest.fixture(scope="module")
def without_head(tmp_path_factory: pytest.TempPathFactory) -> LayerEncoder:
    folder = save_causal("byte level", tmp_path_factory.mktemp("bare"), mixing_last(LlamaModel))
    return LayerEncoder(folder, -1, device="cpu")


@pytest.mark.parametrize("count", [16, 50, 200])
@pytest.mark.parametrize("name", list(PARTS))
def test_select_of_a_saved_head_ignores_half_match(with_head: LayerEncoder, name: str, count: int) -> None:
    selection = select(with_head, collection(name, count), recipes="plain")
    assert selection.layer == 5, "0.8 of 6 blocks"
    assert selection.frame.is_empty()
    assert selection.kind is not None
    assert selection.kind.evidence.startswith("it was saved as LlamaForCausalLM, and it has no modules")
    assert str(selection.kind) in str(selection)


def test_detect_kind_of_a_causal_model_without_a_head_is_no_embedding_model(without_head: LayerEncoder) -> None:
    kind = detect_kind(without_head)
    assert (kind.name, kind.evidence) == ("causal", "its files do not show that it was tuned")


@pytest.mark.long
def test_layer_auto_follows_the_kind(with_head: LayerEncoder, without_head: LayerEncoder) -> None:
    texts = collection("sentences", 36)
    auto = LayerEncoder(with_head.source, "auto", recipe="auto", texts=texts, device="cpu")
    assert (auto.layer, auto.options.recipe) == (6, "word-echo+center"), "0.95 of 6 blocks"
    auto = LayerEncoder(without_head.source, "auto", texts=texts, device="cpu")
    assert (auto.layer, auto.options.recipe) == (6, "word-echo+center")
    plain = LayerEncoder(with_head.source, "auto", recipe="plain", texts=texts, device="cpu")
    assert (plain.layer, plain.selection and plain.selection.recipe) == (5, "plain"), "0.8 of 6 blocks"


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM", "BertForMaskedLM", "ElectraForPreTraining", "GPT2LMHeadModel", "GPT2DoubleHeadsModel",
        "T5ForConditionalGeneration", "BertForSequenceClassification",
    ],
)  # fmt: skip
def test_detect_kind_of_any_head_is_no_embedding_model(tiny_folder: Folder, tmp_path: Path, name: str) -> None:
    for family, expected in (("BERT", "bidirectional"), ("Llama", "causal")):
        encoder = LayerEncoder(tiny_folder(family), -1, device="cpu")
        encoder.transformer.config.architectures = [name]
        assert detect_kind(encoder).name == expected


@pytest.mark.parametrize(
    "saved_as", ["LlamaForCausalLM", [None, "LlamaForCausalLM"], ["LlamaModel", "LlamaForCausalLM"]]
)
def test_detect_kind_reads_odd_architectures(with_head: LayerEncoder, saved_as: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(with_head.transformer.config, "architectures", saved_as)
    assert detect_kind(with_head).evidence.startswith("it was saved as LlamaForCausalLM")


@pytest.mark.parametrize("saved_as", [None, [], [3]])
def test_detect_kind_without_architectures_reads_weight_names(tmp_path: Path, saved_as: Any) -> None:
    folder = save_causal("byte level", tmp_path, mixing_last(LlamaForCausalLM))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": saved_as}))
    kind = detect_kind(LayerEncoder(folder, -1, device="cpu"))
    assert kind.name == "causal"
    assert kind.evidence.startswith("the names of its weights show a head")


@pytest.mark.parametrize("name", ["BartModel", "T5Model"])
def test_detect_kind_of_a_saved_decoder_is_no_embedding_model(tmp_path: Path, name: str) -> None:
    sizes = {"vocab_size": 99, "d_model": 32, "pad_token_id": 0}
    bart = {f"{part}_{key}": size for part in ("encoder", "decoder") for key, size in SIZES.items()}
    config = BartConfig(**sizes, **bart) if name == "BartModel" else T5Config(**sizes, d_kv=8, d_ff=64, num_layers=2)
    getattr(transformers, name)(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    kind = detect_kind(LayerEncoder(str(tmp_path), -1, device="cpu"))
    assert kind.name == "bidirectional"
    assert kind.evidence.startswith("it was saved with the decoder of its pretraining")


def test_detect_kind_of_a_subclass_in_memory_reads_its_parents() -> None:
    named = type("Ours", (LlamaForCausalLM,), {})
    encoder = LayerEncoder.from_module(mixing_last(named), -1, processor=TOKENIZERS["byte level"](), medium="text")
    kind = detect_kind(encoder)
    assert (kind.name, "its class is LlamaForCausalLM" in kind.evidence) == ("causal", True)


@pytest.mark.parametrize(
    ("family", "saved_as", "expected"),
    [("ViT", None, "media"), ("BERT", ["BertModel"], "tuned"), ("BERT", None, "bidirectional")]
    + [(family, None, "causal") for family in ("Llama", "GPT2", "GPTNeoX")]
    + [pytest.param("Mamba", None, "causal", marks=pytest.mark.long)],
)
def test_detect_kind_of_families(tiny_folder: Folder, family: str, saved_as: Any, expected: str) -> None:
    encoder = LayerEncoder(tiny_folder(family), -1, device="cpu")
    encoder.transformer.config.architectures = saved_as
    assert detect_kind(encoder).name == expected, "untrained"


def test_detect_kind_of_a_folder_with_modules_wins_over_a_head(with_head: LayerEncoder, tmp_path: Path) -> None:
    LayerEncoder(with_head.source, 6, device="cpu").save_pretrained(str(tmp_path / "saved"))
    config = tmp_path / "saved" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["LlamaForCausalLM"]}))
    selection = select_layer(str(tmp_path / "saved"), device="cpu")
    assert (selection.layer, selection.recipe) == (6, "plain")
    assert selection.kind is not None
    assert selection.kind.evidence == "its folder has modules of sentence-transformers"


@pytest.mark.long
def test_detect_kind_of_a_gguf_file_reads_its_pooling(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    export_for(LayerEncoder(save_bpe(tmp_path / "model"), 3, device="cpu"), "gguf", tmp_path / "out")
    pooled = (tmp_path / "out/model.gguf").read_bytes()
    name = b"llama.pooling_type"
    value = pooled.index(name) + len(name) + 4  # after its type
    files = {
        "tuned": pooled,
        "causal": pooled[:value] + bytes(4) + pooled[value + 4 :],  # llama.cpp's number of no pooling
        "reranker": pooled[:value] + bytes([4, 0, 0, 0]) + pooled[value + 4 :],
    }
    evidence = {
        "tuned": "its folder has modules of sentence-transformers",
        "causal": "it was saved as LlamaForCausalLM, and it has no modules of sentence-transformers",
        "reranker": "its folder is a CrossEncoder of sentence-transformers, which scores pairs of texts",
    }
    for expected, content in files.items():
        (tmp_path / expected).mkdir()
        (tmp_path / expected / "model.gguf").write_bytes(content)
        encoder = LayerEncoder(str(tmp_path / expected), -1, gguf_file="model.gguf", device="cpu")
        kind = detect_kind(encoder)
        assert kind.name == ("causal" if expected == "reranker" else expected)
        assert kind.evidence == evidence[expected]


@pytest.mark.parametrize(
    ("kind", "saved_class", "evidence"),
    [
        (
            BertForSequenceClassification, None,
            "it was saved as BertForSequenceClassification, and it has no modules of sentence-transformers",
        ),
        (
            BertForSequenceClassification, CrossEncoder,
            "its folder is a CrossEncoder of sentence-transformers, which scores pairs of texts",
        ),
        (
            BertForMaskedLM, SparseEncoder,
            "it was saved as BertForMaskedLM, and its folder is a SparseEncoder of sentence-transformers",
        ),
    ],
)  # fmt: skip
def test_detect_kind_says_what_the_folder_is(kind: Any, saved_class: Any, evidence: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    kind(BertConfig(vocab_size=99, num_labels=1, **sizes)).save_pretrained(tmp_path / "plain")
    tokenizer().save_pretrained(tmp_path / "plain")
    folder = tmp_path / "plain"
    if saved_class is not None:
        folder = tmp_path / "saved"
        saved_class(str(tmp_path / "plain"), device="cpu").save_pretrained(str(folder))
    encoder = LayerEncoder(str(folder), -1, device="cpu")
    detected = detect_kind(encoder)
    assert (detected.name, detected.evidence) == ("bidirectional", evidence)
    encoder.transformer.config.architectures = None
    if saved_class is None:
        assert detect_kind(encoder).evidence.startswith("the names of its weights show a head, and it has no")


@pytest.mark.long
def test_selection_recipe_is_always_there(tiny_folder: Folder, with_head: LayerEncoder) -> None:
    assert select_layer(tiny_folder("BERT"), device="cpu").recipe == "plain"
    assert select_layer(tiny_folder("ViT"), rule="last", device="cpu").recipe == "plain"
    assert select_layer(with_head.source, recipe="one-word", device="cpu").recipe == "one-word"
    assert select_layer(with_head.source, template='a "{text}" is:', device="cpu").recipe == "own"
    assert select_layer(with_head.source, device="cpu").recipe == "word-echo"
