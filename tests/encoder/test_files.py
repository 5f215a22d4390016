"""Where a model comes from: a revision on the hub or a module in memory; and encoders that are pickled."""

import json
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants as hub
import numpy as np
import pytest
import torch
from torch import nn

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import ModelNotFoundError, NotFiniteError, OptionError
from tests.support.families import tiny
from tests.support.made_media import IMAGES
from tests.support.tiny_folders import TEXTS, Folder, processor, save_tiny, tokenizer

# --- revisions -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cached_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str | None, str]:
    """Return the folders of two revisions of org/tiny in the hub's cache. All their files differ."""
    root = tmp_path / "hub" / "models--org--tiny"
    folders: dict[str | None, str] = {}
    for seed, (name, commit) in enumerate({"main": "a" * 40, "step1000": "b" * 40}.items()):
        folder = root / "snapshots" / commit
        save_tiny("Llama", folder, seed=seed)
        fast_tokenizer = tokenizer()
        if seed:
            fast_tokenizer.model_max_length = 16
            fast_tokenizer.save_pretrained(folder)
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / name).write_text(commit)
        folders[name] = str(shutil.copytree(folder, tmp_path / name))
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folders[None] = folders["main"]
    return folders


@pytest.mark.parametrize("revision", [None, "main", "step1000"])
def test_config_weights_and_tokenizer_come_from_the_revision(
    revision: str | None, cached_folders: dict[str | None, str]
) -> None:
    encoder = LayerEncoder("org/tiny", 2, revision=revision, device="cpu")
    expected = LayerEncoder(cached_folders[revision], 2, device="cpu")
    np.testing.assert_array_equal(encoder.encode(TEXTS), expected.encode(TEXTS))
    assert encoder.max_seq_length == (16 if revision == "step1000" else 64)
    assert (encoder.spec.model, encoder.spec.revision) == ("org/tiny", revision)
    assert encoder.model_card_data.base_model_revision.startswith(revision or "default")
    with pytest.raises(ModelNotFoundError, match="'org/tiny' at revision 'step2' is not cached on this machine"):
        LayerEncoder("org/tiny", 2, revision="step2", device="cpu")


# --- a module in memory ----------------------------------------------------------------------------------------------


class Residual(nn.Linear):
    """A block that adds to its input."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + super().forward(states).tanh()


class Stack(nn.Module):
    """Two lists of blocks and two norms: the caller says which ones to use."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.patches = nn.Conv2d(3, 16, 8, 8)
            self.first = nn.ModuleList(Residual(16, 16) for _ in range(2))
            self.second = nn.ModuleList(Residual(16, 16) for _ in range(3))
            self.norm, self.other = nn.LayerNorm(16), nn.LayerNorm(16)
            for values in (self.norm.weight, self.norm.bias, self.other.weight, self.other.bias):
                nn.init.normal_(values)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        states = self.patches(pixels).flatten(2).transpose(1, 2)
        for block in [*self.first, *self.second]:
            states = block(states)
        return self.other(self.norm(states))


def rgb(images: list[Any]) -> torch.Tensor:
    arrays = [np.asarray(image.resize((16, 16)), dtype=np.float32) / 255 for image in images]
    return torch.tensor(np.stack(arrays)).movedim(3, 1)


def bgr(images: list[Any]) -> torch.Tensor:
    return rgb(images).flip(1)


@pytest.mark.long
def test_options_of_a_module_in_memory_change_the_vectors_and_the_spec() -> None:
    module = Stack()
    base: dict[str, Any] = {"processor": rgb, "blocks": "second", "final": ("norm",), "device": "cpu"}
    changes: list[dict[str, Any]] = [
        {}, {"blocks": "first"}, {"final": ("other",)}, {"final": ("norm", "other")}, {"final": ("other", "norm")},
        {"final": ()}, {"norm": "none", "final": ("norm",), "layer": 1}, {"layer": 1}, {"processor": bgr}, {"pooling": "max"},
    ]  # fmt: skip
    encoders = [LayerEncoder.from_module(module, **{"layer": 2} | base | change) for change in changes]
    vectors = [encoder.encode(IMAGES) for encoder in encoders]
    for position, (encoder, rows) in enumerate(zip(encoders, vectors, strict=True)):
        for earlier, earlier_rows in zip(encoders[:position], vectors[:position], strict=True):
            assert np.abs(rows - earlier_rows).max() > 1e-3, (position, changes[position])
            assert encoder.spec.digest != earlier.spec.digest, (position, changes[position])
    recreated = LayerEncoder.from_module(Stack(), 2, **base)
    assert recreated.spec == encoders[0].spec
    np.testing.assert_array_equal(recreated.encode(IMAGES), vectors[0])


def test_processor_settings_change_the_spec_and_its_use_does_not() -> None:
    def make_encoder(**settings: Any) -> LayerEncoder:
        import transformers as tf

        prepare = tf.ViTImageProcessorPil(**{"size": {"height": 16, "width": 16}} | settings)
        return LayerEncoder.from_module(tiny("ViT"), 2, processor=prepare, device="cpu")

    plain, dark = make_encoder(), make_encoder(image_mean=[0.1, 0.5, 0.9])
    assert np.abs(plain.encode(IMAGES) - dark.encode(IMAGES)).max() > 1e-3
    assert plain.spec.digest != dark.spec.digest
    assert make_encoder().spec == plain.spec
    short_tokenizer = tokenizer()
    short_tokenizer.model_max_length = 8
    text_encoders = [
        LayerEncoder.from_module(tiny("Llama"), 2, processor=text_tokenizer, medium="text", device="cpu")
        for text_tokenizer in (tokenizer(), short_tokenizer)
    ]
    digests = [encoder.spec.digest for encoder in text_encoders]
    assert np.abs(text_encoders[0].encode(TEXTS) - text_encoders[1].encode(TEXTS)).max() > 1e-3
    assert digests[0] != digests[1]
    used = LayerEncoder.from_module(tiny("Llama"), 2, processor=text_encoders[0].processor, medium="text", device="cpu")
    assert [used.spec.digest, *(encoder.spec.digest for encoder in text_encoders)] == [digests[0], *digests]


def test_prompts_precede_the_texts_of_a_module_in_memory() -> None:
    encoder = LayerEncoder.from_module(
        tiny("Llama"), 2, processor=tokenizer(), medium="text", prompts={"ask": "q: "}, default_prompt_name="ask",
        device="cpu",
    )  # fmt: skip
    plain = LayerEncoder.from_module(tiny("Llama"), 2, processor=tokenizer(), medium="text", device="cpu")
    expected = plain.encode(["q: " + text for text in TEXTS])
    np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=1e-5)


@pytest.mark.parametrize(
    "option",
    [
        {"max_length": 8}, {"dtype": "bfloat16"}, {"adapters": ["one"]}, {"chat_template": True}, {"tower": "text"},
        {"gguf_file": "a.gguf"}, {"revision": "main"}, {"device_map": "cpu", "device": None},
    ],
)  # fmt: skip
def test_file_options_are_refused_for_a_module_in_memory(option: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"`{next(iter(option))}` does not apply to a module in memory"):
        LayerEncoder.from_module(
            tiny("Llama"), 2, processor=processor("Llama"), medium="text", **{"device": "cpu"} | option
        )


# --- warnings and errors ---------------------------------------------------------------------------------------------


def test_truncation_warning_counts_the_prompt_and_is_logged_once_per_encoder(
    tiny_folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        encoder = LayerEncoder(tiny_folder("Llama"), 2, max_length=8, prompts={"ask": "q: "}, device="cpu")
        with caplog.at_level(logging.WARNING):
            encoder.encode(["exactly8", "ab"])
            encoder.encode(["with5"], prompt_name="ask")
            assert not caplog.records
            encoder.encode(["ab", "without", "c"], prompt_name="ask")
            encoder.encode(["ab", "without", "c"], prompt_name="ask")
            encoder.encode(["a text that is far too long"])
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "A text of 10 tokens is truncated to 8 ('without'" in caplog.text
        caplog.clear()


def test_truncation_warning_names_the_long_text_at_any_position(
    tiny_folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, max_length=8, device="cpu")
    encoder.preprocess(["ab", "a text too long", "c"])
    assert "A text of 15 tokens is truncated to 8 ('a text too long'" in caplog.text


@pytest.mark.parametrize("pooling", ["mean", "last", "cls", "max", "weightedmean"])
def test_empty_text_is_zero_and_with_a_prompt_is_the_prompt(pooling: Any, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, pooling=pooling, prompts={"ask": "q: "}, device="cpu")
    for texts in ([""], ["", ""], ["", "a longer text", ""], ["a", ""]):
        vectors = encoder.encode(texts)
        assert [not row.any() for row in vectors] == [not text for text in texts]
    np.testing.assert_allclose(encoder.encode([""], prompt_name="ask"), encoder.encode(["q: "]), atol=1e-5)
    assert encoder.encode([" "]).any()  # a space is a token here


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("layer", [1, 3])
def test_nonfinite_state_names_its_layer_and_text(layer: int, value: float, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), layer, norm="none", device="cpu")
    with torch.no_grad():
        encoder[0].model.embed_tokens.weight[tokenizer().convert_tokens_to_ids("W")] = value
    for texts in (TEXTS, TEXTS[3], [TEXTS[3]], TEXTS[::-1]):
        with pytest.raises(NotFiniteError, match=f"Layer {layer} of .* for 'shares dropped on Wall Street' in"):
            encoder.encode(texts, batch_size=2)
    assert np.isfinite(encoder.encode([text for text in TEXTS if "W" not in text])).all()


def test_infinity_without_nan_is_refused(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, pooling="cls", device="cpu")
    with torch.no_grad():
        encoder[0].model.norm.weight[3] = float("inf")
    with pytest.raises(NotFiniteError, match=f"Layer 2 of .* for '{TEXTS[0]}'"):
        encoder.encode(TEXTS)


# --- other processes -------------------------------------------------------------------------------------------------


def test_pickled_encoder_is_the_same(tiny_folder: Folder) -> None:
    for norm in ("none", "final"):
        encoder = LayerEncoder(
            tiny_folder("Llama"), 2, norm=norm, pooling="last", truncate_dim=7, max_length=9,  # type: ignore[arg-type]
            prompts={"ask": "q: "}, default_prompt_name="ask", device="cpu",
        )  # fmt: skip
        expected = encoder.encode(TEXTS)
        unpickled = pickle.loads(pickle.dumps(encoder))
        np.testing.assert_array_equal(unpickled.encode(TEXTS), expected)
        assert unpickled.spec == encoder.spec
        np.testing.assert_array_equal(encoder.encode(TEXTS), expected)
