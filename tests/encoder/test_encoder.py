import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from midlayer_encoders import LayerEncoder
from midlayer_encoders._types import NORMS, POOLINGS, Norm
from midlayer_encoders.errors import (
    AnatomyError,
    CutError,
    LayerIndexError,
    ModelNotFoundError,
    NotFiniteError,
    OptionError,
)
from midlayer_encoders.models.anatomy import find_anatomy
from tests.support.families import DEPTH, FAMILIES, tiny
from tests.support.pooled import pooled
from tests.support.tiny_folders import TEXTS, Folder, save_tiny, tokenizer

TEXT_FAMILIES = [name for name, family in FAMILIES.items() if family.modality == "text"]


def pooled_by_hand(name: str, encoder: LayerEncoder, texts: list[str]) -> np.ndarray:
    """Return each text's vector from hooks on the uncut model, one text at a time, pooled as requested."""
    model = tiny(name)
    anatomy = find_anatomy(model)
    layer, norm, pooling = encoder.layer, encoder.norm, encoder.pooling
    rows = []
    for text in texts:
        captured: list[torch.Tensor] = []
        first_block = anatomy.block(model, 1)
        handles = [
            first_block.register_forward_pre_hook(lambda _m, a, k: captured.append(a[0] if a else k["hidden_states"]), with_kwargs=True)
        ] if layer == 0 else [
            block.register_forward_hook(lambda _m, _a, out: captured.append(out[0] if isinstance(out, tuple) else out))
            for block in {id(b): b for b in (anatomy.block(model, k) for k in range(1, DEPTH + 1))}.values()
        ]  # fmt: skip
        with torch.no_grad():
            model(input_ids=encoder.tokenizer(text, return_tensors="pt")["input_ids"])
            states = captured[max(layer - 1, 0)]
            for path in anatomy.final if norm == "final" else ():
                states = model.get_submodule(path)(states)
        for handle in handles:
            handle.remove()
        rows.append(pooled(states[0], pooling))
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", [name for name in TEXT_FAMILIES if name not in ("CLIPText", "DeBERTaV2-conv")])
def test_encode_gives_the_pooled_states_of_the_layer(name: str, norm: Norm, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder(name), 2, norm=norm, device="cpu")
    assert isinstance(encoder, SentenceTransformer)
    assert (encoder.layer, encoder.num_layers) == (2, DEPTH)
    np.testing.assert_allclose(
        encoder.encode(TEXTS, batch_size=4), pooled_by_hand(name, encoder, TEXTS), atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(("layer", "norm"), [(0, "final"), (3, "none"), (4, "none"), (4, "final")])
def test_every_pooling_ignores_padding(pooling: str, layer: int, norm: Norm, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), layer, norm=norm, pooling=pooling, device="cpu")  # type: ignore[arg-type]
    expected = pooled_by_hand("Llama", encoder, TEXTS)
    np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("layer", "expected"), [(-1, 4), (0.5, 2), (1.0, 4), (-4, 1)])
def test_layer_forms(layer: float, expected: int, tiny_folder: Folder) -> None:
    assert LayerEncoder(tiny_folder("BERT"), layer, device="cpu").layer == expected


def test_only_the_blocks_up_to_the_layer_exist(tiny_folder: Folder) -> None:
    count = lambda k: sum(p.numel() for p in LayerEncoder(tiny_folder("Llama"), k, device="cpu").parameters())  # noqa: E731
    sizes = [count(k) for k in range(DEPTH + 1)]
    assert len({later - earlier for earlier, later in zip(sizes, sizes[1:], strict=False)}) == 1
    assert sizes[0] < sizes[1]


# --- the plain folder ----------------------------------------------------------------------------------------------

_PLAIN = """
import sys, json
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("midlayer_encoders", "callbacks"):
            raise ImportError("midlayer_encoders is not installed here")
sys.meta_path.insert(0, Refuse())
import numpy as np
from PIL import Image
from sentence_transformers import SentenceTransformer
for folder in sys.argv[2:]:
    inputs = json.load(open(sys.argv[1])) if "ViT" not in folder else [Image.new("RGB", (20, 20), c) for c in ("red", "navy")]
    np.save(folder + "/plain.npy", SentenceTransformer(folder, device="cpu").encode(inputs))
assert not any(name.startswith("midlayer") for name in sys.modules)
"""


@pytest.mark.slow
def test_exported_folders_load_where_this_package_is_not_installed(tiny_folder: Folder, tmp_path: Path) -> None:
    import json

    from PIL import Image

    (tmp_path / "texts.json").write_text(json.dumps(TEXTS))
    images = [Image.new("RGB", (20, 20), color) for color in ("red", "navy")]
    expected = {}
    for name in ("Llama", "GPTNeoX", "GPT2", "BERT", "Mamba", "ViT"):
        for norm in NORMS:
            for layer in (0, 2, 4):
                folder = tmp_path / f"{name}-{norm}-{layer}"
                encoder = LayerEncoder(tiny_folder(name), layer, norm=norm, device="cpu")
                encoder.save_pretrained(str(folder))
                expected[folder] = encoder.encode(images if name == "ViT" else TEXTS)
                types = [module["type"] for module in json.loads((folder / "modules.json").read_text())]
                assert all(kind.startswith("sentence_transformers.") for kind in types)
                card = (folder / "README.md").read_text()
                assert f"# Layer {layer} of {encoder.name}\n\nThis folder is {encoder.name} without" in card
    subprocess.run(
        [sys.executable, "-c", _PLAIN, str(tmp_path / "texts.json"), *map(str, expected)], check=True, cwd=tmp_path
    )
    for folder, vectors in expected.items():
        # Not bitwise: another process may lay out its weights differently, and ARM kernels then sum in another order.
        np.testing.assert_allclose(np.load(folder / "plain.npy"), vectors, rtol=1e-5, atol=1e-5, err_msg=folder.name)


def test_a_cut_folder_can_be_cut_again(tiny_folder: Folder, tmp_path: Path) -> None:
    LayerEncoder(tiny_folder("Llama"), 3, device="cpu").save_pretrained(str(tmp_path / "three"))
    recut = LayerEncoder(str(tmp_path / "three"), 2, device="cpu")
    assert recut.num_layers == 3
    np.testing.assert_allclose(
        recut.encode(TEXTS), LayerEncoder(tiny_folder("Llama"), 2, device="cpu").encode(TEXTS), atol=1e-6
    )


# --- options that change the model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama", "GPTNeoX", "GPT2", "Mistral", "Qwen3"])
def test_bidirectional_lets_the_first_token_see_the_last_and_survives_export(
    name: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    encoder = LayerEncoder(tiny_folder(name), 2, pooling="cls", bidirectional=True, device="cpu")
    causal = LayerEncoder(tiny_folder(name), 2, pooling="cls", device="cpu")
    pair = ["abc", "abd"]
    assert np.abs(np.diff(causal.encode(pair), axis=0)).max() < 1e-6
    assert np.abs(np.diff(encoder.encode(pair), axis=0)).max() > 1e-4
    assert encoder.spec.digest != causal.spec.digest
    encoder.save_pretrained(str(tmp_path))
    plain = SentenceTransformer(str(tmp_path), device="cpu")
    np.testing.assert_allclose(plain.encode(TEXTS), encoder.encode(TEXTS), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [("Mamba", 2, "whatever its config says"), ("BERT", 2, "no causal mask"), ("ViT", 2, "")],
)
def test_bidirectional_is_refused_where_it_would_do_nothing(
    name: str, layer: int | list[int], reason: str, tiny_folder: Folder
) -> None:
    with pytest.raises(OptionError, match=f"`bidirectional` must be False.*{reason}"):
        LayerEncoder(tiny_folder(name), layer, bidirectional=True, device="cpu")


def test_adapters_are_merged_in_order_before_the_cut(tiny_folder: Folder, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    merged = tiny("Llama")
    for seed in (0, 1):
        torch.manual_seed(seed)
        lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        adapted = get_peft_model(merged, lora)
        adapted.save_pretrained(tmp_path / str(seed))
        merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")  # type: ignore[operator]
    tokenizer().save_pretrained(tmp_path / "merged")
    adapters = [str(tmp_path / "0"), str(tmp_path / "1")]
    encoder = LayerEncoder(tiny_folder("Llama"), 2, adapters=adapters, device="cpu")
    expected = LayerEncoder(str(tmp_path / "merged"), 2, device="cpu").encode(TEXTS)
    np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=1e-5)
    assert np.abs(expected - LayerEncoder(tiny_folder("Llama"), 2, device="cpu").encode(TEXTS)).max() > 1e-2
    assert len(encoder[0].model.layers) == 2
    assert encoder.spec.adapters == ("local/0", "local/1")


def test_half_precision_and_prompts(tiny_folder: Folder) -> None:
    folder = tiny_folder("GPTNeoX")
    encoder = LayerEncoder(folder, 2, dtype="bfloat16", prompts={"query": "q: "}, max_length=32, device="cpu")
    assert encoder.dtype is torch.bfloat16
    assert encoder.max_seq_length == 32
    exact = LayerEncoder(folder, 2, device="cpu").encode(["q: " + text for text in TEXTS])
    close = encoder.encode(TEXTS, prompt_name="query")
    assert np.corrcoef(exact.ravel(), close.ravel().astype(np.float32))[0, 1] > 0.999


def test_device_map_places_the_model(tiny_folder: Folder) -> None:
    placed = LayerEncoder(tiny_folder("Llama"), 2, device_map="auto")
    expected = LayerEncoder(tiny_folder("Llama"), 2, device="cpu").encode(TEXTS)
    np.testing.assert_allclose(placed.encode(TEXTS), expected, atol=1e-5)
    with pytest.raises(OptionError, match="`device` must be None when `device_map`"):
        LayerEncoder(tiny_folder("Llama"), 2, device_map="auto", device="cpu")


def test_chat_template_is_used_only_on_request(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = save_tiny("Llama", tmp_path)
    chat_tokenizer = tokenizer()
    chat_tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    chat_tokenizer.save_pretrained(folder)
    raw = LayerEncoder(folder, 2, device="cpu")
    np.testing.assert_allclose(
        raw.encode(TEXTS), LayerEncoder(tiny_folder("Llama"), 2, device="cpu").encode(TEXTS), atol=1e-6
    )
    wrapped = LayerEncoder(folder, 2, chat_template=True, device="cpu")
    np.testing.assert_allclose(wrapped.encode(["hi"]), raw.encode(["<user>hi"]), atol=1e-5)
    with pytest.raises(OptionError, match="no chat template"):
        LayerEncoder(tiny_folder("Llama"), 2, chat_template=True, device="cpu")


# --- training and process pools ------------------------------------------------------------------------------------


@pytest.mark.long
def test_one_epoch_lowers_the_loss_and_the_best_model_is_loaded(tiny_folder: Folder, tmp_path: Path) -> None:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import CoSENTLoss

    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    rows = {
        "sentence1": TEXTS * 8,
        "sentence2": (TEXTS[1:] + TEXTS[:1]) * 8,
        "score": [1.0, 0.0, 1.0, 0.0, 0.0, 0.0] * 8,
    }
    data = Dataset.from_dict(rows)
    loss = CoSENTLoss(encoder)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=1, per_device_train_batch_size=16, learning_rate=5e-3, use_cpu=True,
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, report_to="none", seed=0,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(
        model=encoder, args=arguments, train_dataset=data, eval_dataset=data, loss=loss
    )
    before, digest = trainer.evaluate()["eval_loss"], encoder.spec.digest
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    assert encoder.spec.digest != digest
    best = SentenceTransformer(str(trainer.state.best_model_checkpoint), device="cpu")
    np.testing.assert_allclose(best.encode(TEXTS), encoder.encode(TEXTS), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["none", "final"])
def test_process_pool_gives_the_same_vectors_as_one_process(norm: Norm, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, norm=norm, device="cpu")
    expected = encoder.encode(TEXTS)  # after this, transformers' hooks are on the model
    pool = encoder.start_multi_process_pool(["cpu", "cpu"])
    try:
        vectors = encoder.encode(TEXTS, pool=pool, chunk_size=2)
    finally:
        encoder.stop_multi_process_pool(pool)
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    np.testing.assert_array_equal(encoder.encode(TEXTS), expected)


# --- user errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layer": 5}, LayerIndexError, r"in \[0, 4\].*but got 5"),
        ({"layer": 1.5}, LayerIndexError, r"fraction of the depth in \(0, 1\], but got 1.5"),
        ({"layer": "atuo"}, OptionError, "Did you mean 'auto'"),
        ({"pooling": "maen"}, OptionError, "Did you mean 'mean'"),
        ({"norm": "finale"}, OptionError, "Did you mean 'final'"),
        ({"dtype": "bfloat"}, OptionError, "Did you mean 'bfloat16'"),
        ({"max_length": 0}, OptionError, "`max_length` must be a positive"),
        ({"max_length": 65}, OptionError, "`max_length` must be at most 64"),
        ({"adapters": "folder"}, OptionError, r"Write \['folder'\]"),
        ({"revision": "step1"}, ModelNotFoundError, "`revision` must be None for a folder"),
        ({"gguf_file": "none.gguf"}, ModelNotFoundError, r"There is no file '.*none\.gguf'"),
    ],
)
def test_invalid_options_name_the_fix(
    options: dict[str, object], error: type, message: str, tiny_folder: Folder
) -> None:
    with pytest.raises(error, match=message):
        LayerEncoder(tiny_folder("Llama"), **({"layer": 2, "device": "cpu"} | options))  # type: ignore[arg-type]


def test_missing_layer_and_layer_of_encode_name_the_fix(tiny_folder: Folder) -> None:
    with pytest.raises(OptionError, match=r"`layer` must be a number, or 'auto'.* -1 is the last layer; 'auto' "):
        LayerEncoder(tiny_folder("Llama"), device="cpu")
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    for encode in (encoder.encode, encoder.encode_query):
        with pytest.raises(ValueError, match=r"does not use: \['layer'\]"):
            encode(TEXTS, layer=1)


def test_a_wrong_layer_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = Path(save_tiny("Llama", tmp_path))
    (folder / "model.safetensors").unlink()
    with pytest.raises(LayerIndexError):
        LayerEncoder(str(folder), 9)


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/folder", "a/b/c"])
def test_missing_folder_is_refused(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no "):
        LayerEncoder(model, 2)


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="must hold a config"):
        LayerEncoder(str(tmp_path), 2)


def test_a_model_without_blocks_is_refused(tmp_path: Path) -> None:
    import transformers as tf

    tf.ResNetConfig(depths=[1, 1], hidden_sizes=[8, 16], embedding_size=8).save_pretrained(tmp_path / "resnet")
    with pytest.raises((AnatomyError, CutError), match="blocks"):
        LayerEncoder(str(tmp_path / "resnet"), 1)


def test_a_family_whose_blocks_depend_on_depth_is_refused(tmp_path: Path) -> None:
    import transformers as tf

    config = tf.AlbertConfig(
        hidden_size=16,
        embedding_size=8,
        num_hidden_layers=4,
        num_hidden_groups=2,
        num_attention_heads=2,
        intermediate_size=16,
    )
    tf.AlbertModel(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(CutError, match="shares 2 groups over its layers"):
        LayerEncoder(str(tmp_path), 2)


def test_missing_pad_token_is_replaced_or_refused(tmp_path: Path, tiny_folder: Folder) -> None:
    folder = save_tiny("Llama", tmp_path, pad=False)
    expected = LayerEncoder(tiny_folder("Llama"), 2, device="cpu").encode(TEXTS)
    np.testing.assert_allclose(LayerEncoder(folder, 2, device="cpu").encode(TEXTS), expected, atol=1e-6)
    for name in ("unk_token", "bos_token"):
        only = tokenizer(pad=False)
        only.eos_token = only.bos_token = only.unk_token = None
        setattr(only, name, "?")
        only.save_pretrained(folder)
        assert LayerEncoder(folder, 2, device="cpu").tokenizer.pad_token == "?"
    bare = tokenizer(pad=False)
    bare.eos_token = bare.bos_token = bare.unk_token = None
    bare.save_pretrained(folder)
    with pytest.raises(OptionError, match="has no pad token"):
        LayerEncoder(folder, 2, device="cpu")


@pytest.mark.parametrize("pooling", POOLINGS)
def test_empty_text_is_a_zero_vector_alone_and_in_a_batch(pooling: str, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("GPT2"), 2, pooling=pooling, device="cpu")  # type: ignore[arg-type]
    np.testing.assert_array_equal(encoder.encode([""]), 0)
    assert encoder.encode("").shape == (32,)
    mixed = encoder.encode(["", *TEXTS])
    np.testing.assert_array_equal(mixed[0], 0)
    np.testing.assert_allclose(mixed[1:], encoder.encode(TEXTS), atol=1e-5)


def test_long_text_is_truncated_with_one_warning(tiny_folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, max_length=8, device="cpu")
    with caplog.at_level(logging.WARNING, logger="midlayer_encoders.encoder.encoding"):
        assert not caplog.records
        encoder.encode(["exactly8"])
        assert not caplog.records
        vectors = encoder.encode(["exactly8 and more", "another long one"])
        encoder.encode(["exactly8 and more"])
    assert len(caplog.records) == 1
    assert "truncated to 8" in caplog.text
    np.testing.assert_allclose(vectors[0], encoder.encode("exactly8"), atol=1e-6)


def test_nan_in_the_states_names_the_layer_and_the_text(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    with torch.no_grad():
        encoder[0].model.embed_tokens.weight[tokenizer().convert_tokens_to_ids("?")] = float("nan")
    np.testing.assert_equal(np.isfinite(encoder.encode(TEXTS[0])).all(), True)
    for convert in ({}, {"convert_to_tensor": True}, {"convert_to_numpy": False}):
        with pytest.raises(NotFiniteError, match=r"Layer 2 of .*'how do I reset my card pin\?'"):
            encoder.encode(TEXTS, **convert)
